"""GRPO with no trainer: the same training as `jaxrl train`, from library functions only. Copy it and change it."""

import jax
import numpy as np

from jaxrl_llm import algorithms, load_policy, sample
from jaxrl_llm.data import PromptStream, encode_prompt, load_prompts, without
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.steps import plan_steps
from jaxrl_llm.learner.update import init_state, prepare, update
from jaxrl_llm.rewards import get_reward
from jaxrl_llm.rewards.scoring import score_batch
from jaxrl_llm.runs.evaluate import evaluate_policy


def main(model="smollm2-135m", steps=16, prompts_per_step=8, group_size=16, eval_size=256, seed=0):
    policy, params, tokenizer = load_policy(model)
    rewards = [get_reward("number_match")]
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    held_out = without(load_prompts("reasoning-gym:chain_sum", limit=2 * eval_size, seed=1, task_options=task), [])
    held_out = held_out[:eval_size]
    rows = without(load_prompts("reasoning-gym:chain_sum", limit=4096, seed=seed, task_options=task), held_out)
    test = PromptSet(held_out, [encode_prompt(tokenizer, row["prompt"]) for row in held_out])

    algorithm = algorithms.get("grpo", kl_coefficient=0.0)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=2e-5, warmup_steps=2), 2 * steps)
    state, memory = init_state(params, optimizer), algorithm.transform.init()
    stream = PromptStream(rows, batch_size=prompts_per_step, seed=seed)
    key = jax.random.key(seed)

    def accuracy(params):
        return evaluate_policy(policy, params, test, rewards, max_new_tokens=16, slots=128).figures["accuracy"]

    accuracies = [accuracy(state.params)]
    for step in range(steps):
        questions, ids = next(stream)
        step_key = jax.random.fold_in(key, step)
        prompts = [row["prompt"] for row in questions]
        batch = sample(
            policy, state.params, prompts, step_key, prompt_ids=ids,
            group_size=group_size, max_new_tokens=16, temperature=0.7, policy_step=step,
        )  # fmt: skip
        batch = score_batch(rewards, tokenizer, questions, batch).batch
        memory, batch = prepare(algorithm.transform, memory, batch)
        steps_of_batch = plan_steps(batch, minibatches=2, seed=(seed, step))
        state, metrics = update(policy, algorithm.objective, optimizer, state, batch, steps=steps_of_batch)
        reward, entropy = float(np.mean(batch.reward)), float(metrics["entropy"])
        print(f"step {step + 1}: reward {reward:.3f}, entropy {entropy:.2f}", flush=True)
    accuracies.append(accuracy(state.params))
    print(f"held-out accuracy: {accuracies[0]:.1%} before, {accuracies[1]:.1%} after")
    return state, accuracies


if __name__ == "__main__":
    main()
