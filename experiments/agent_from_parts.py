"""An agent with no trainer: the same training as `jaxrl agent-demo`, from library functions. Copy it and change it."""

import jax
import numpy as np

from jaxrl_llm import OptimizerConfig, algorithms, init_state, load_policy, prepare, update
from jaxrl_llm.cli.agent_demo import Calculator, questions  # or an environment and data of one's own
from jaxrl_llm.data.prompt_set import encode_rows
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.objectives import entropy
from jaxrl_llm.rewards import get_rewards
from jaxrl_llm.rollouts.agents import agent
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.sampler import SamplingConfig

EVALUATION = 2**31 - 1  # a step that no training has, so that its environments have seeds of their own


def main(model="smollm2-135m", steps=8, prompts_per_step=8, group_size=8, eval_size=96, seed=0):
    policy, params, tokenizer = load_policy(model)
    rows = questions(seed)
    held_out, rows = rows[:eval_size], rows[eval_size:]

    def episodes(rows, prompts, samples, greedy=False):
        encoded = encode_rows(tokenizer, rows, max_tokens=512, long_prompts="error", system_prompt=None)
        setup = Experience(
            policy, encoded, get_rewards(["environment"]), shuffled_epochs(encoded.rows, seed),
            SamplingConfig(max_new_tokens=20, slots=64), agent(Calculator, turns=2, greedy=greedy),
            prompts_per_step=prompts, group_size=samples,
        )  # fmt: skip
        return experience(setup)

    training, test = episodes(rows, prompts_per_step, group_size), episodes(held_out, eval_size, 1, greedy=True)
    algorithm = algorithms.get("dapo", rounds=1)
    objective = algorithm.objective - 0.01 * entropy()
    optimizer = make_optimizer(OptimizerConfig(learning_rate=3e-5, warmup_steps=4), 2 * steps)
    state, memory, position = init_state(params, optimizer), None, training.init()
    key = jax.random.key(seed)

    def accuracy(params):
        found, _ = test.next(test.init(), params, key, EVALUATION)
        return float(np.mean(found.scored.batch.reward == 1))

    accuracies = [accuracy(state.params)]
    for step in range(steps):
        found, position = training.next(position, state.params, jax.random.fold_in(key, step), step)
        batch = found.scored.batch
        memory, batch = prepare(algorithm, memory, batch, policy, state.params)
        state, metrics = update(policy, objective, optimizer, state, batch, minibatches=2, seed=(seed, step))
        reward, turns = float(np.mean(batch.reward)), found.metrics.get("rollout/turns", 1.0)
        print(f"step {step + 1}: reward {reward:.3f}, {turns:.2f} turns, entropy {float(metrics['entropy']):.2f}")
    accuracies.append(accuracy(state.params))
    print(f"held-out accuracy: {accuracies[0]:.1%} before, {accuracies[1]:.1%} after")
    return state, accuracies


if __name__ == "__main__":
    main()
