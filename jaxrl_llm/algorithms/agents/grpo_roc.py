import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, NonNegative, NonNegativeInt, Share
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rewards.transforms import leave_out
from jaxrl_llm.selection.rows import ranks_within, row_noise
from jaxrl_llm.utils.errors import InputError

FORM = "one_answer"  # the reward that says how nearly a completion has one answer


def entry_or_zeros(batch: Trajectories, name: str) -> Array | None:
    """An entry of the batch's info f32[N], 0 where a row has none; None without it."""
    value = (batch.info or {}).get(name)
    return None if value is None else jnp.nan_to_num(value)


@batch_part
def cleanest_right_rows_out(
    batch: Trajectories, keep: float, least_right: int, least_wrong: int, component: str | None
) -> Array:
    """A function `batch -> bool[N]`: the rows of each group that are not kept, see `grpo_roc`."""
    scored = ~jnp.isnan(batch.scores)
    right = scored & (batch.scores > 0)
    rows, rights = bucket_sums(batch.group, scored.astype(jnp.float32), right.astype(jnp.float32))
    wrongs, number = rows - rights, jnp.round(keep * rows)
    zero, one = jnp.round(wrongs * keep), jnp.round(rights * keep)
    whole = (zero < least_wrong) & (one < least_right)
    few = jnp.minimum(least_wrong, wrongs)
    zero, one = jnp.where(zero <= few, few, zero), jnp.where(zero <= few, number - few, one)
    few = jnp.minimum(least_right, rights)
    zero, one = jnp.where(one <= few, number - few, zero), jnp.where(one <= few, few, one)
    calls, failed = (entry_or_zeros(batch, name) for name in ("calls", "failed_calls"))
    penalty = jnp.full(batch.group.shape, 0.5)
    if calls is not None and failed is not None:
        penalty = jnp.where(calls > 0, failed / jnp.maximum(calls, 1.0), 0.5)
    form = (batch.rewards or {}).get(component or "")
    if form is not None:
        penalty = penalty + 1.0 - jnp.nan_to_num(form)
    elif component not in (None, FORM):
        raise InputError(f"grpo_roc: the reward has no component {component!r}, which says if the form is right")
    rank = ranks_within(2 * batch.group + right, jnp.where(right, -penalty, 0.0), row_noise(batch, 0), scored)
    return scored & ~whole & (rank >= jnp.where(right, one, zero))


@method(paper="arXiv 2508.20722", test="test_turn_shaped.py::test_grpo_roc_worked_example")
@run_needs(
    calls="calls of tools",
    failed_calls="calls that gave an error",
    one_answer="the form of the answer, half of the penalty, with the weight 0: 'one_answer*0'",
)
def grpo_roc(
    keep: Code[Share] = 0.5,
    least_right: Code[NonNegativeInt] = 2,
    least_wrong: Code[NonNegativeInt] = 2,
    component: Code[str | None] = "one_answer",
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
) -> Algorithm:
    """GRPO with Resampling on Correct (GRPO-RoC of rStar2-Agent).

    Of each group's samples a share `keep` is trained on: right and wrong ones (score above 0 or not) in proportion, but
    at least least_right and least_wrong of them where there are so many. The wrong ones are drawn at random, the right
    ones are those of the least penalty

        p = failed calls / calls of tools (1/2 without any) + 1 - r_form

    r_form: a component of the reward for the form, from 0 to 1, named by `component`; None: without it. That of the
    code is `one_answer`, with the weight 0: `--rewards number_match 'one_answer*0'`, 0 where the answer's tags are
    missing or unbalanced, else 1 - min((blocks - 1)/turns, 1). So the group
    size of the run is the paper's oversampled one, twice what is trained on. Groups of equal rewards are left out. Then
    GRPO's advantages over the rows that are kept (epsilon), and PPO's clip (clip_low, clip_high) averaged over their
    tokens. This is the released code, which rounds half to even and keeps the right ones of least penalty; the paper
    draws them with a probability that falls with it.
    """
    chosen = cleanest_right_rows_out(keep, least_right, least_wrong, component)
    needs = {"calls", "failed_calls", *([FORM] if component == FORM else [])}
    return Algorithm(
        chain(leave_out(chosen, needs), drop_uniform_groups(), group_relative(epsilon=epsilon)),
        clipped_policy(clip_low, clip_high),
    )
