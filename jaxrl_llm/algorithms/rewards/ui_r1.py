from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, Given, RunSetting, beside, method, run_settings
from jaxrl_llm.core.annotations import Code, NonNegative, Number, Ours
from jaxrl_llm.core.buckets import bucket_best, bucket_sums
from jaxrl_llm.core.parts import Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy, sequence_mean
from jaxrl_llm.rewards.transforms import rescore


def rewards_up_to(name: str, *rewards: str, why: str) -> RunSetting:
    """Rewards whose weights add up to the hyper-parameter `name` at least, where each is at most 1."""

    def fits(config: Any, given: Given) -> bool:
        return any(":" in spec for spec in config.rewards) or sum(map(_weight, config.rewards)) >= given[name] - 1e-9

    return RunSetting("rewards", lambda given: rewards, fits, why)


def _weight(spec: str) -> float:
    try:
        return max(float(spec.rpartition("*")[2]), 0.0) if "*" in spec and not spec.endswith(")") else 1.0
    except ValueError:  # the reward's own check says so
        return 1.0


def length_beside_mates(
    length: jax.Array, right: jax.Array, known: jax.Array, group: jax.Array, slope: Number = -0.5, offset: Number = 0.5
) -> jax.Array:
    """What a completion's length adds to its reward, f32[N], measured by a length that suits its prompt.

    With p the share of right rows bool[N] among the known ones of a prompt, the suitable length is p (mean length of
    the right ones) + (1 - p) (longest), and x the relative excess over it: max(slope x + offset, 0.1) for right rows,
    min(0.9 x - 0.1, -0.1) for wrong ones. 0 for rows that are not known.

    >>> right, length = jnp.array([True, True, False, False]), jnp.array([100.0, 200, 150, 400])
    >>> found = length_beside_mates(length, right, length > 0, jnp.zeros(4, jnp.int32))
    >>> print([f"{x:.3f}" for x in found])
    ['0.818', '0.636', '-0.509', '-0.100']
    """
    right = right & known
    longest = bucket_best(group, jnp.where(known, length, jnp.nan))
    count, good, tokens = bucket_sums(group, known * 1.0, right * 1.0, jnp.where(right, length, 0.0))
    p = good / jnp.maximum(count, 1)
    suitable = p * tokens / jnp.maximum(good, 1) + (1 - p) * longest
    x = (length - suitable) / jnp.maximum(suitable, 1e-6)
    added = jnp.where(right, jnp.maximum(slope * x + offset, 0.1), jnp.minimum(0.9 * x - 0.1, -0.1))
    return jnp.where(known, added, 0.0)


@batch_part
def with_length_beside_mates(batch: Trajectories, right: float, slope: float, offset: float) -> jax.Array:
    """A function `batch -> f32[N]`: the scores plus `length_beside_mates`; rows are right from the score `right` on."""
    known, score = ~jnp.isnan(batch.scores), batch.scores
    return score + length_beside_mates(batch.lengths, score >= right, known, batch.group, slope, offset)


@method(paper="arXiv 2503.21620", test="test_reward_composed.py::test_ui_r1_is_its_worked_example_and_loop")
@beside("vision", "screens or images as they are; a prompt describes them", "a policy that sees")
@run_settings(
    rewards_up_to(
        "right", "answer_tags", "gui_kind", "gui_click", why="rewards that add up to `right` in a right answer"
    )
)
def ui_r1(
    right: Code[float] = 3.0,
    slope: Code[float] = -0.5,
    offset: Code[float] = 0.5,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
) -> Algorithm:
    """UI-R1 with its length reward (Enhancing Action Prediction of GUI Agents by RL).

    GRPO, with a term for the length that depends on how hard the prompt is. With p the share of right samples of a
    prompt (score at least `right`), the suitable length is B = p (mean length of the right ones) + (1 - p) (longest),
    and with x = (length - B)/B

        R = r + max(slope x + offset, 0.1) if right,   R = r + min(0.9 x - 0.1, -0.1) if wrong

    so that easy prompts get short answers. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3 penalty
    kl_coefficient. The rewards r themselves are the run's: the paper's are `--rewards answer_tags gui_kind gui_click`
    (tags, the kind of the action, a click inside the box) of 0 or 1 each, and right is their sum, 3. A run takes
    the sum of the weights of its rewards for `right`, so that the length term suits any task. Screenshots are out of
    scope: a prompt describes the screen.
    """
    objective = clipped_policy(clip_low, clip_high, sequence_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(chain(rescore(with_length_beside_mates(right, slope, offset)), group_relative()), objective)
