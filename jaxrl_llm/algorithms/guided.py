"""Methods that mix in guided completions: from other models, or from the policy with examples in its prompt.

info["guided"], bool[N] or bool[N, L], marks their tokens; without it no token is guided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.difficulty import solved_without
from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scale
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain, counted
from jaxrl_llm.objectives import clip, entropy, kl, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.averaging.row_averages import by_rows
from jaxrl_llm.objectives.guidance import guided, guided_rows, scaled_sum
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.rollouts.guidance.prompted import in_context, taught
from jaxrl_llm.rollouts.guidance.repair import reaches, succeeds
from jaxrl_llm.selection.rows import ranks_within
from jaxrl_llm.utils.errors import require_choice

__all__ = ["ampo_multi_guidance", "icpo_in_context"]


@part
def unchosen_guidance(kept: int) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: guided rows but the `kept` of each group that favour the reference answer most.

    By the mean probability, before the update, of the actions in info["reference_span"]; without it all are kept.
    """

    def unchosen(b: Trajectories) -> Array:
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

    return unchosen


@part
def unsuccessful_guidance(threshold: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: guided rows with a score below the threshold."""

    def rejected(b: Trajectories) -> Array:
        return guided_rows(b) & ~(b.scores >= threshold)

    return rejected


@part
def with_fading_bonus(
    threshold: float, bonus: float, total_steps: int | None
) -> Callable[[jax.Array, Trajectories], Trajectories]:
    """A function `(step, batch) -> batch`: the bonus of `icpo_in_context` on the scores of guided rows."""

    def raised(step: jax.Array, b: Trajectories) -> Trajectories:
        left = jnp.maximum(1 - step / (400 if total_steps is None else total_steps), 0.0)
        return b.replace(reward=b.scores + jnp.where(guided_rows(b) & (b.scores >= threshold), bonus * left, 0.0))

    return raised


def icpo_in_context(
    threshold: float = 1.0,
    reject: bool = True,
    bonus: float = 1.0,
    shape: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    kl_coefficient: float = 0.001,
    epsilon: float = 1e-6,
    guided_samples: int = 1,
    column: str = "examples",
    total_steps: int | None = None,
) -> Algorithm:
    """In-Context Steered Policy Optimization (Think Outside the Policy, arXiv 2510.26519, 2025).

    guided_samples of a group (one of eight) are drawn with a worked example in the prompt, and trained on under the
    plain prompt. The examples are those of a column of the data set, a text or a list of which each such sample gets a
    random one (paper: one of another data set's); prompts without one are sampled as in GRPO. To the reward of those
    with at least `threshold` the method adds bonus (1 - step/total_steps) (total_steps None: the paper's 400); the
    other guided samples are replaced by plain ones (reject False, as in the released code, keeps them without a bonus).
    A = (r - mean_g)/(std_g + epsilon) over both kinds, and the loss is one token mean of

        -A p/(p + shape) on guided tokens, p = pi(a) under the plain prompt, without ratio and clip
        PPO's clipped surrogate on the others (clip_low, clip_high, dual_clip)

    plus kl_coefficient times k3. The paper writes r > threshold, but with rewards of 0 and 1 and its threshold of 1
    this must mean r >= threshold.

    Defaults. Paper: threshold, reject, bonus, shape, guided_samples. Code: clip_low, clip_high, dual_clip,
    kl_coefficient, epsilon. Ours: column. Run: total_steps.
    """

    filters = [leave_out(unsuccessful_guidance(threshold))] if reject else []
    surrogate = guided(clip(clip_low, clip_high, dual_clip), shape)
    objective = policy_gradient(token_ratio(), surrogate, token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3")
    return Algorithm(
        chain(
            *filters,
            counted(with_fading_bonus(threshold, bonus, total_steps), {"guided"}),
            group_relative(epsilon=epsilon),
        ),
        objective,
        rollout=in_context(column, guided_samples, reaches(threshold) if reject else None),
    )


@part
def superfluous_guidance(success: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: guided rows of groups that the policy solves without them."""

    def superfluous(b: Trajectories) -> Array:
        helped = guided_rows(b)
        return helped & solved_without(b.scores, helped, b.group, success)

    return superfluous


def with_right_guidance(b: Trajectories) -> Array:
    """f32[N]: the scores, at least 1 for guided rows."""
    return jnp.where(guided_rows(b), jnp.maximum(b.scores, 1.0), b.scores)


@presets(
    paper={"scale": "std", "over": "kinds", "dual_clip": None, "entropy_coefficient": 0.0},
    code={"scale": "none", "over": "batch", "dual_clip": 10.0, "entropy_coefficient": 0.001},
)
def ampo_multi_guidance(
    success: float = 0.6,
    shape: float = 0.1,
    scale: Scale = "std",
    over: Literal["kinds", "batch"] = "kinds",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    entropy_coefficient: float = 0.0,
    teachers: int = 4,
    replaced: int = 2,
    column: str = "teachers",
    max_length: float | None = None,
) -> Algorithm:
    """Adaptive Multi-Guidance Policy Optimization (More Than One Teacher, arXiv 2510.02227, 2025).

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

    Defaults. Paper: shape, scale, over, dual_clip, entropy_coefficient, teachers, replaced. Code: success, clip_low,
    clip_high. Ours: column. Run: max_length.
    """
    require_choice("over", over, ("kinds", "batch"))

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
