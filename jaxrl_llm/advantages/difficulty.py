"""Credit by prompt difficulty: weights from the rewards of a group, and subgroups with their own target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.core.choices import Rule
from jaxrl_llm.core.part_checks import require_function
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments, bucket_sums, joint_key
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.utils.errors import require_choice

EDGES = ("strict", "lenient")
RULES = ("length", "difficulty", "or", "and")


@part
def weigh_advantages(weight: Callable[[Trajectories], jax.Array]) -> Transform:
    """Multiply the advantages of each row by `weight(batch)` f32[N]."""
    require_function("the weight of advantages", weight)
    return stateless(lambda b: b.replace(advantages=b.need("advantages") * weight(b)[:, None]))


def easiness_weight(
    reward: jax.Array,
    group: jax.Array,
    *,
    start: float | jax.Array = 1.0,
    end: float | jax.Array = 2.0,
    least: float | jax.Array = 0.5,
) -> jax.Array:
    """f32[N]: 1 up to a mean group reward of `start`, then falling linearly to `least` at `end` (2508.04416).

    >>> easiness_weight(jnp.array([1.0, 2.0, 0.5]), jnp.array([0, 0, 1])).tolist()
    [0.75, 0.75, 1.0]
    """
    _, mean, _ = bucket_moments(group, reward)
    return least + (1 - least) * jnp.clip((end - mean) / (end - start), 0.0, 1.0)


def length_gain(
    correct: jax.Array,
    wrong: jax.Array,
    lengths: jax.Array,
    group: jax.Array,
    *,
    edges: Literal["strict", "lenient"] = "strict",
) -> jax.Array:
    """bool[N]: in the row's group the longest correct sample is longer than the mean of the wrong ones (2602.10019).

    correct, wrong bool[N] (a row may be neither), lengths f32[N]. edges, for groups without a correct or without a
    wrong sample: "strict" is false without a correct one, else true; "lenient" is true without a correct one, else
    false.
    """
    require_choice("edges", edges, EDGES)
    _, index = jnp.unique(group, return_inverse=True, size=group.shape[0])
    longest = jax.ops.segment_max(jnp.where(correct, lengths, -jnp.inf), index, num_segments=group.shape[0])[index]
    wrongs, mean, _ = bucket_moments(group, jnp.where(wrong, lengths, jnp.nan))
    some = longest > -jnp.inf
    if edges == "strict":
        return some & ((wrongs == 0) | (longest > mean))
    return ~some | ((wrongs > 0) & (longest > mean))


def promising(
    reward: jax.Array,
    lengths: jax.Array,
    cut_off: jax.Array,
    group: jax.Array,
    *,
    rule: Rule = "length",
    success: float | jax.Array = 0.5,
    hard: float | jax.Array = 0.5,
    edges: Literal["strict", "lenient"] = "strict",
) -> jax.Array:
    """bool[N]: whether a row's prompt gets a higher weight now (ADORA, 2602.10019).

    rule "length": `length_gain`, where a truncated sample (cut_off bool[N]) that is not correct does not count as
    wrong; "difficulty": the share of samples with reward > success is at most `hard`; "or", "and": both combined.
    """
    require_choice("rule", rule, RULES)
    correct, known = reward > success, ~jnp.isnan(reward)
    gain = length_gain(correct, known & ~correct & ~cut_off, lengths, group, edges=edges)
    _, rate, _ = bucket_moments(group, jnp.where(known, correct.astype(jnp.float32), jnp.nan))
    difficult = rate <= hard
    return {"length": gain, "difficulty": difficult, "or": gain | difficult, "and": gain & difficult}[rule]


def solved_without(
    reward: jax.Array, helped: jax.Array, group: jax.Array, success: float | jax.Array = 0.5
) -> jax.Array:
    """bool[N]: whether some sample of the row's group with helped[i] False has a reward above `success`."""
    (solved,) = bucket_sums(group, ((reward > success) & ~helped).astype(jnp.float32))
    return solved > 0


def subgroup_advantage(
    reward: jax.Array,
    target: jax.Array,
    group: jax.Array,
    subgroup: jax.Array,
    *,
    coefficient: float | jax.Array = 1.0,
    epsilon: float = 1e-6,
) -> jax.Array:
    """A_i = coefficient (mean of the subgroup - target_i) + (r_i - mean_g)/(std_g + epsilon), f32[N] (2507.15844).

    reward f32[N], NaN where not scored (ignored, advantage 0); target f32[N], the highest reward that the subgroup can
    reach; subgroup [N] partitions the groups. All samples of a subgroup with one target share the first term. A group
    of one has advantage 0.
    """
    count, _, _ = bucket_moments(group, reward)
    _, mean, _ = bucket_moments(joint_key(group, subgroup), reward)
    within = jnp.where(jnp.isnan(reward) | (count < 2), 0.0, mean - target)
    return coefficient * within + group_advantage(reward, group, epsilon=epsilon)
