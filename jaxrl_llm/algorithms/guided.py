"""Methods that mix in completions made with help: by other models, or by the policy with examples in its prompt.

Such tokens are marked by info "guided", bool[N] or bool[N, L]; a batch without it is all the policy's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.difficulty import solved_without
from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import require_choice
from jaxrl_llm.objectives import clip, constant, entropy, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.guidance import guided, guided_rows, summed
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.trajectory import Array, Trajectories
from jaxrl_llm.transform import chain, counted

__all__ = ["ampo_multi_guidance", "icpo_in_context"]


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
    total_steps: int | None = None,
) -> Algorithm:
    """In-Context Steered Policy Optimization (Think Outside the Policy, arXiv 2510.26519, 2025).

    Some samples of a group (one of eight) were drawn with worked examples in the prompt, and are learnt from under the
    plain prompt. Their reward is raised by bonus (1 - step/total_steps) (total_steps None: the paper's 400) where it is
    at least `threshold`; the others of them are left out (reject False, as the released code, keeps them unraised).
    A = (r - mean_g)/(std_g + epsilon) over both kinds, and the loss is one token mean of

        -A p/(p + shape) on guided tokens, p = pi(a) under the plain prompt, neither ratio nor clip
        PPO's clipped surrogate on the others (clip_low, clip_high, dual_clip)

    plus kl_coefficient times k3. The paper writes r > threshold, which for rewards of 0 and 1 and its threshold of 1
    must mean at least. Rollout: samples from prompts with examples, their prompt then replaced by the plain one.
    """

    def rejected(b: Trajectories) -> Array:
        return guided_rows(b) & ~(b.scores >= threshold)

    def raised(step: jax.Array, b: Trajectories) -> Trajectories:
        left = jnp.maximum(1 - step / (400 if total_steps is None else total_steps), 0.0)
        return b.replace(reward=b.scores + jnp.where(guided_rows(b) & (b.scores >= threshold), bonus * left, 0.0))

    parts = [leave_out(rejected)] if reject else []
    surrogate = guided(clip(clip_low, clip_high, dual_clip), shape)
    objective = policy_gradient(token_ratio(), surrogate, token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3")
    return Algorithm(chain(*parts, counted(raised), group_relative(epsilon=epsilon)), objective)


def ampo_multi_guidance(
    success: float = 0.6,
    shape: float = 0.1,
    scale: str = "none",
    over: str = "sequences",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 10.0,
    entropy_coefficient: float = 0.001,
    max_length: float | None = None,
) -> Algorithm:
    """Adaptive Multi-Guidance Policy Optimization (More Than One Teacher, arXiv 2510.02227, 2025).

    Where no sample of the policy's own succeeds (reward > success), some are replaced by right answers of several
    teachers; elsewhere teachers' answers, should the batch have any, are left out. A teacher's answer has a reward of
    at least 1, A = r - mean_g (scale "std" divides by the deviation), and the loss, for each sequence the sum over its
    tokens / max_length (None: the paper's 8192), and then the mean over sequences, is of

        -A p/(p + shape) on guided tokens, p = pi(a), neither ratio nor clip
        PPO's clipped surrogate on the others (clip_low, clip_high, dual_clip)

    minus entropy_coefficient times the mean entropy. over "batch" is the sum over sequences, as the released code.
    Rollout: it takes those answers after whose reasoning the policy finds the reference answer most probable.
    """
    require_choice("over", over, ("sequences", "batch"))
    longest = 8192.0 if max_length is None else max_length

    def superfluous(b: Trajectories) -> Array:
        helped = guided_rows(b)
        return helped & solved_without(b.scores, helped, b.group, success)

    verified = rescore(lambda b: jnp.where(guided_rows(b), jnp.maximum(b.scores, 1.0), b.scores))
    average = {"sequences": constant, "batch": summed}[over](longest)
    objective = policy_gradient(token_ratio(), guided(clip(clip_low, clip_high, dual_clip), shape), average)
    objective -= entropy_coefficient * entropy()
    return Algorithm(chain(leave_out(superfluous), verified, group_relative(scale)), objective)
