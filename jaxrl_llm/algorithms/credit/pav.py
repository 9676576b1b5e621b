import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.advantages.trees.credit import gains, state_values, tree_credit
from jaxrl_llm.algorithms.credit.spo_segment import STATES
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Paper, Recalled
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.core.reference import another
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.trees import valued


@batch_part
def outcome_and_progress(batch: Trajectories, k: int, strength: float) -> Array:
    """A function `batch -> f32[N, L]`: the advantages of `pav`."""
    progress = gains(*state_values(batch, lambda value: best_of(value, k)))
    return above_baseline(batch.scores, batch.group)[:, None] + strength * progress


@method(paper="arXiv 2410.08146", test="test_trees.py::test_pav_worked_example")
@beside("verifier", "a verifier that learns the estimates; they are made anew", "a model of values")
def pav(
    k: Paper[Count] = 4,
    strength: Recalled[NonNegative] = 3.0,
    continuations: Ours[int] = 8,
    interval: Ours[int] = 1,
    prover: Ours[str | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
) -> Algorithm:
    """Process Advantage Verifiers (Rewarding Progress).

    To the outcome of a completion each step, a line, adds how much it changes the chance that a prover mu finishes
    right: the best of k attempts of the initial policy, or of the model `prover`, a name or folder with weights of the
    same shapes. It stays as it is during the run. With V the mean reward, in [0, 1], of `continuations` fresh
    completions of that policy from a state

        Q_mu = 1 - (1 - V)^k;    A_step = r - mean_g r + strength (Q_mu after the step - Q_mu before it)

    and Q_mu after the last step is the reward itself. Progress is credited to its own step, and not summed into the
    returns of earlier ones, where it would telescope. The loss is REINFORCE with PPO's clip (clip_low, clip_high) and a
    token mean. interval: lines in a step. Values are estimated from the attempts of each step anew; the paper first
    fits a verifier to such estimates, and reads its values. Rollout: `rollouts.trees.valued`, with an engine for the
    prover beside the policy's.

    The strength is from memory of the paper.
    """
    return Algorithm(
        tree_credit(outcome_and_progress(k, strength), STATES),
        clipped_policy(clip_low, clip_high),
        rollout=valued(continuations, "lines", interval, of="reference"),
        reference=None if prover is None else another(prover),
    )


def best_of(values: Array, k: int) -> Array:
    """The chance that one of k independent attempts is right, 1 - (1 - V)^k, V in [0, 1] that of each; elementwise.

    >>> print(best_of(jnp.array([0.2, 0.35]), 4).round(6))
    [0.5904   0.821494]
    """
    return 1 - (1 - jnp.clip(values, 0.0, 1.0)) ** k
