from collections.abc import Callable, Iterable

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import drop_rows, uniform_groups
from jaxrl_llm.advantages.normalisation import apart
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, Count, NonNegative, OfRun, Ours, Rewrite
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.objectives import Average, average_by_name, clipped_policy, kl
from jaxrl_llm.rollouts.guidance.repair import rewritten, succeeds


@part
def times(average: Average, weight: Callable[[Trajectories], Array], needs: Iterable[str] = ()) -> Average:
    """An average of values that are multiplied by `weight(batch)` f32[N] first, which is computed from `needs`."""

    def mean(values: Array, batch: Trajectories) -> Array:
        return average(values * weight(batch)[:, None], batch)

    return Average(mean, average.needs | frozenset(needs), average.refresh)


@method(paper="arXiv 2509.25004", test="test_hinted.py::test_clpo_against_a_loop")
def clpo(
    hard: Code[float] = 0.3,
    medium: Code[float] = 0.7,
    rewrite: Code[Rewrite] = "both",
    hard_weight: Code[float] = 0.5,
    limit: Code[int] = 400,
    column: Ours[str] = "answer",
    success: Code[float] = 0.0,
    accuracy: Ours[str | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.001,
    epsilon: Code[NonNegative] = 1e-6,
    average: Ours[AverageName] = "token",
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Curriculum-guided Learning for Policy Optimization (CLPO).

    Acc(q) is the share of a prompt's G samples that succeed (reward > success; accuracy: this component of it). The
    policy rewrites a problem with Acc <= hard in a simpler way, and one with Acc <= medium in other words, in at most
    `limit` tokens and without the answer, which is in a column of the data set and must stay the same. rewrite
    "hard_only" or "medium_only" leaves the others as they are. G samples of the new problem, q', are a group of their
    own. Groups in which all or no samples succeed are left out, unless there are no others. With
    A_i = (r_i - mean_g)/(std_g + epsilon) in each group

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient mean_t s k3

    with s = hard_weight for samples of hard problems, rewritten or not, else 1. This is the first version, and the
    released code: rewriting has no gradient (the second trains it by Acc(q') - Acc(q), in a form that is not known).
    The code cuts the batch to a multiple of the devices; here it is filled up with rows that count nowhere. average:
    see grpo ("constant" divides by max_length).
    """
    mean = average_by_name(average, max_length)
    objective = clipped_policy(clip_low, clip_high, mean)
    objective += kl_coefficient * kl(average=times(mean, lower_where("hard", hard_weight), {"hard"}))
    credit = chain(drop_rows(uniform_among_others), group_relative(epsilon=epsilon))
    return Algorithm(
        apart(kind_of("rewritten"), credit, {"rewritten"}), objective,
        rollout=rewritten(succeeds(success, accuracy), hard, medium, rewrite, column, limit),
    )  # fmt: skip


@batch_part
def kind_of(batch: Trajectories, name: str) -> Array | None:
    """A function of the batch: info[name] f32[N], 0 for rows without the entry (NaN); None for a batch without it."""
    kind = (batch.info or {}).get(name)
    return None if kind is None else jnp.nan_to_num(kind)


def uniform_among_others(batch: Trajectories) -> Array:
    """bool[N]: rows of groups whose rewards are all equal; none of them if there is no other group."""
    uniform = uniform_groups(batch)
    return uniform & jnp.any(~uniform & ~jnp.isnan(batch.scores))


@batch_part
def lower_where(batch: Trajectories, name: str, factor: float) -> Array:
    """A function `batch -> f32[N]`: the factor where info[name] is 1, else 1."""
    return jnp.where(batch.entry(name, 0) == 1, factor, 1.0)
