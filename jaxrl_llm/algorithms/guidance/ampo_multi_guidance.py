from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AboveOne, AtLeastOne, Code, NonNegative, OfRun, Ours, Paper, Positive, Scale
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part, weighted
from jaxrl_llm.objectives import Average, clip, entropy, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.row_averages import by_rows
from jaxrl_llm.objectives.surrogates import guided, guided_rows
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.rollouts.guidance.prompted import taught
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.selection.rows import ranks_within


@batch_part
def unchosen_guidance(b: Trajectories, kept: int) -> Array:
    """A function `batch -> bool[N]`: guided rows but the `kept` of each group that favour the reference answer most.

    By the mean probability, before the update, of the actions in info["reference_span"]; without it all are kept.
    """
    span = (b.info or {}).get("reference_span")
    if span is None:
        return jnp.zeros(b.group.shape, bool)
    old = jnp.where(b.action_mask, b.need("old_logp"), 0.0)
    place = jnp.cumsum(b.action_mask, axis=1) - 1
    inside = b.action_mask & (place >= span[:, :1]) & (place < span[:, 1:])
    favour = jnp.sum(jnp.where(inside, jnp.exp(jnp.minimum(old, 0.0)), 0.0), axis=1)
    favour /= jnp.maximum(jnp.sum(inside, axis=1), 1)
    helped = guided_rows(b)
    return helped & (ranks_within(b.group, favour, jnp.sum(old, axis=1), helped) >= kept)


@batch_part
def superfluous_guidance(b: Trajectories, success: float) -> Array:
    """A function `batch -> bool[N]`: guided rows of groups that the policy solves without them."""
    helped = guided_rows(b)
    return helped & solved_without(b.scores, helped, b.group, success)


def with_right_guidance(b: Trajectories) -> Array:
    """f32[N]: the scores, at least 1 for guided rows."""
    return jnp.where(guided_rows(b), jnp.maximum(b.scores, 1.0), b.scores)


@method(paper="arXiv 2510.02227", test="test_guided.py::test_ampo_against_a_loop")
@presets(
    paper={"scale": "std", "over": "kinds", "dual_clip": None, "entropy_coefficient": 0.0},
    code={"scale": "none", "over": "batch", "dual_clip": 10.0, "entropy_coefficient": 0.001},
)
def ampo_multi_guidance(
    success: Code[float] = 0.6,
    shape: Paper[float] = 0.1,
    scale: Paper[Scale] = "std",
    over: Paper[Literal["kinds", "batch"]] = "kinds",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    dual_clip: Paper[AboveOne | None] = None,
    entropy_coefficient: Paper[NonNegative] = 0.0,
    teachers: Paper[int] = 4,
    replaced: Paper[int] = 2,
    column: Ours[str] = "teachers",
    max_length: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Adaptive Multi-Guidance Policy Optimization (More Than One Teacher).

    If none of the policy's own samples in a group succeeds (reward > success), some are replaced by right answers of
    several teachers; in other groups teachers' answers are left out. A teacher's answer has a reward of at least 1,
    A = (r - mean_g) / std_g (scale "none": not divided), and with f(p) = p/(p + shape), p = pi(a), the loss is (eq. 7)

        -1/N_off sum_{j guided} 1/|o_j| sum_t f(p) A
        -1/T_on sum_{i own} sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    for the N_off teachers' answers and the T_on other tokens of the batch. The paper's ratio to the teacher is p, with
    the teacher's probability set to 1, as in the released code; its clip of f never takes effect, because f < 1 and no
    teacher's A is negative. dual_clip bounds the loss of bad actions; entropy_coefficient: bonus.

    The released code (preset "code") has scale "none", over "batch", dual_clip 10 and entropy_coefficient 0.001: over
    "batch" sums the same two terms over all tokens of the batch and divides by max_length (None: 8192) only.

    column: of the data set, with right answers of teachers to each prompt, a list of texts or of {"text", "quality"};
    the `teachers` with the highest quality come into question. Of these the `replaced` are trained on in whose text the
    reference answer (the column "answer") has the highest mean probability pi(a*_t | prompt, what the text says before
    it). The paper cuts off what follows the reasoning and appends the reference answer; here its last occurrence in the
    text counts, and a text without it has the probability 0. The policy's samples in a group are exchangeable, so the
    first ones are replaced.
    """
    verified = rescore(with_right_guidance)
    by_kind = by_rows(guided=sequence_mean(), otherwise=token_mean())
    average = by_kind if over == "kinds" else scaled_sum(8192.0 if max_length is None else max_length)
    objective = policy_gradient(token_ratio(), guided(clip(clip_low, clip_high, dual_clip), shape), average)
    objective -= entropy_coefficient * entropy()
    chosen = leave_out(unchosen_guidance(replaced), {"guided", "reference_span", "old_logp"})
    return Algorithm(
        chain(leave_out(superfluous_guidance(success), {"guided"}), chosen, verified, group_relative(scale)),
        objective,
        rollout=taught(succeeds(success), column, teachers, replaced),
    )


def solved_without(reward: Array, helped: Array, group: Array, success: float | Array = 0.5) -> Array:
    """bool[N]: whether some sample of the row's group with helped[i] False has a reward above `success`."""
    (solved,) = bucket_sums(group, ((reward > success) & ~helped).astype(jnp.float32))
    return solved > 0


@part
def scaled_sum(length: Positive) -> Average:
    """Sum over all tokens of the batch / length: grows with the batch size. length > 0, else InputError."""
    return Average(lambda values, batch: jnp.sum(weighted(values, batch)) / length)
