"""GRPO with no trainer: the same training as `jaxrl train`, from library functions only. Copy it and change it."""

import jax
import numpy as np

from jaxrl_llm import OptimizerConfig, algorithms, evaluate, init_state, load_policy, prepare, sample, score, update
from jaxrl_llm.data import PromptStream, load_prompts, without
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.rewards import get_reward


def main(model="smollm2-135m", steps=16, prompts_per_step=8, group_size=16, eval_size=256, seed=0):
    policy, params, tokenizer = load_policy(model)
    verifier = get_reward("number_match")  # or a function of one's own
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    held_out = without(load_prompts("reasoning-gym:chain_sum", limit=2 * eval_size, seed=1, task_options=task), [])
    held_out = held_out[:eval_size]
    rows = without(load_prompts("reasoning-gym:chain_sum", limit=4096, seed=seed, task_options=task), held_out)

    algorithm = algorithms.get("grpo", kl_coefficient=0.0)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=2e-5, warmup_steps=2), 2 * steps)
    state, memory = init_state(params, optimizer), None
    stream = PromptStream(rows, batch_size=prompts_per_step, seed=seed)
    key = jax.random.key(seed)

    def accuracy(params):
        return evaluate(policy, params, held_out, verifier, max_new_tokens=16).accuracy

    accuracies = [accuracy(state.params)]
    for step in range(steps):
        questions, ids = next(stream)
        step_key = jax.random.fold_in(key, step)
        prompts = [row["prompt"] for row in questions]
        batch = sample(
            policy, state.params, prompts, step_key, prompt_ids=ids,
            group_size=group_size, max_new_tokens=16, temperature=0.7, policy_step=step,
        )  # fmt: skip
        batch = score(batch, verifier, questions, tokenizer)
        memory, batch = prepare(algorithm, memory, batch, policy, state.params)
        state, metrics = update(policy, algorithm, optimizer, state, batch, minibatches=2, seed=(seed, step))
        reward, entropy = float(np.mean(batch.reward)), float(metrics["entropy"])
        print(f"step {step + 1}: reward {reward:.3f}, entropy {entropy:.2f}", flush=True)
    accuracies.append(accuracy(state.params))
    print(f"held-out accuracy: {accuracies[0]:.1%} before, {accuracies[1]:.1%} after")
    return state, accuracies


if __name__ == "__main__":
    main()
