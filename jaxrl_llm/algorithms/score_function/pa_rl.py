import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import at_last_action, sequence_values
from jaxrl_llm.algorithms.method import Algorithm, RunSetting, method, run_settings
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.buckets import bucket_best, bucket_sums
from jaxrl_llm.core.parts import Trajectories, chain, counted, step_part
from jaxrl_llm.objectives import log_probability, policy_gradient, sequence_sum, token_ratio, value_loss
from jaxrl_llm.objectives.values import last_action_mean
from jaxrl_llm.selection.rows import ranks_within, row_noise


@step_part
def chosen_by_critic(step: jax.Array, batch: Trajectories, keep: float, temperature: float) -> Trajectories:
    """A function `(step, batch) -> batch` that writes the weights of `pa_rl` into the advantages."""
    Q = at_last_action(batch.need("values"), batch)
    valid = jnp.any(batch.action_mask, axis=1) & ~jnp.isnan(batch.scores)
    best = valid & (ranks_within(batch.group, Q, row_noise(batch, step), valid) < keep)
    largest = bucket_best(batch.group, jnp.where(best, Q, jnp.nan))
    share = jnp.where(best, jnp.exp((jnp.where(best, Q - largest, 0.0)) / temperature), 0.0)
    total, rows = bucket_sums(batch.group, share, jnp.any(batch.action_mask, axis=1).astype(jnp.float32))
    weight = share / jnp.maximum(total, 1e-30) * rows
    return batch.replace(advantages=jnp.where(batch.action_mask, weight[:, None], 0.0))


@method(paper="arXiv 2412.06685", test="test_supervised.py::test_pa_rl_is_its_loop")
@run_settings(
    RunSetting(
        "group_size", lambda given: 1 << int(given["keep"]).bit_length(),
        lambda config, given: config.group_size > given["keep"],
        "more samples of a prompt than the best ones that it keeps",
    )
)  # fmt: skip
def pa_rl(
    keep: Paper[Count] = 10, temperature: Paper[Positive] = 1.0, value_coefficient: Ours[NonNegative] = 1.0
) -> Algorithm:
    """Policy-Agnostic RL (PA-RL), its form for language.

    Policy improvement is supervised learning on better actions: draw m answers to a prompt (the run's group_size), keep
    the best `keep` by a critic Q, and imitate one that is drawn from them by Q:

        w = softmax over the best of Q / temperature;    loss = -mean over prompts of sum_i w_i log pi(y_i)

    plus value_coefficient times the critic's loss. The draw is replaced by its expectation, the weights w. Q of an
    answer is the critic's value at its last action before the update, fitted to the rewards of all answers, (V - r)^2/2
    there; a whole answer is one action, so nothing is left to bootstrap. log pi is the sum over the answer's tokens.

    The paper is about continuous actions, which it also improves by T steps of gradient ascent on Q: tokens have no
    such gradient, and its language form has only the choice. It has m 32 and, for its critics, targets by calibrated
    Q-learning on offline data. Train the critic alone first (the run's critic_steps).
    """
    transform = chain(sequence_values(), counted(chosen_by_critic(keep, temperature)))
    objective = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    return Algorithm(transform, objective + value_coefficient * value_loss(None, last_action_mean()))
