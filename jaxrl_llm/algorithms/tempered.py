"""Methods that use log-probabilities or samples at another temperature."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import (
    group_advantage,
    group_relative,
)
from jaxrl_llm.advantages.multipliers import (
    last_entropy,
    mixture_share,
    revised,
)
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain, controller, counted
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.tempered import with_tempered
from jaxrl_llm.selection.noise import row_noise
from jaxrl_llm.selection.rows import ranks_within
from jaxrl_llm.utils.errors import InputError

__all__ = ["aepo_arbitrary_entropy", "dcpo_distribution_centric"]


@part
def mixed_with_tempered(
    target_entropy: float, gap_cap: float, success: float, hot_name: str, cold_name: str
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages of `dcpo_distribution_centric`."""

    def mixed(batch: Trajectories) -> jax.Array:
        gap = target_entropy - last_entropy(batch)
        tempered = jnp.where(gap >= 0, batch.need(hot_name), batch.need(cold_name))
        w = jnp.exp(log_ratio(tempered, batch.behaviour_logp, batch.action_mask))
        correct = batch.scores > success
        scored = jnp.maximum(jnp.sum(~jnp.isnan(batch.scores)), 1)
        alpha = mixture_share(gap, gap_cap, jnp.sum(correct) / scored)
        return (1 - alpha) * batch.need("advantages") + alpha * correct[:, None] * w

    return mixed


def dcpo_distribution_centric(
    target_entropy: float = 0.25,
    hot: float = 1.2,
    cold: float = 0.8,
    gap_cap: float = 0.1,
    success: float = 0.05,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Algorithm:
    """Distribution-Centric Policy Optimization (DCPO, arXiv 2601.12730, 2026).

    Steers the entropy H of the last update (0 before the first) to H0 = target_entropy: on correct samples it mixes in
    a REINFORCE term weighted towards a tempered copy of the policy, hotter when H is too low, cooler when too high.

        T = hot if H <= H0 else cold;  w = exp(logp_T - logp);  c = 1 where the score exceeds success
        alpha = min(|H0 - H|, gap_cap) / mean(c);  alpha <- alpha / (1 + alpha)
        A_t = (1 - alpha) A_grpo + alpha c w_t

    then PPO's clip (clip_low, clip_high; dual_clip where A < 0) and a token mean. Without a correct sample, and at
    H = H0, this is GRPO. hot and cold must be static numbers, because they are part of the names of needs: the loop
    provides log-probabilities at these temperatures as "tempered_logp:1.2" and "tempered_logp:0.8". H is the update's
    mean token entropy;
    the released code estimates it by the mean of -logp. The released script has target_entropy 0.5; its README reports
    the best average at 0.25.

    Defaults. Code: target_entropy, hot, cold, gap_cap, success, clip_low, clip_high, dual_clip.
    """
    check_number("gap_cap", gap_cap, least=0)
    hot_name, cold_name = (f"tempered_logp:{static_number(name, T):g}" for name, T in (("hot", hot), ("cold", cold)))

    return Algorithm(
        transform=chain(
            group_relative(),
            revised(
                mixed_with_tempered(target_entropy, gap_cap, success, hot_name, cold_name),
                needs={hot_name, cold_name, "feedback"},
            ),
        ),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean()),
    )


def static_number(name: str, value: float) -> float:
    """The number itself; InputError for a traced one."""
    if not isinstance(value, int | float):
        raise InputError(f"{name} must be a plain number, because it is part of the name of a need")
    check_number(name, value, above=0)
    return value


@part
def temperature_by_entropy(
    target_entropy: float, hot: float, cold: float
) -> Callable[[jax.Array, dict[str, jax.Array]], jax.Array]:
    """A function `(value, feedback) -> f32[]`: hot where the last entropy is at most the target, else cold."""

    def temperature(value: jax.Array, feedback: dict[str, jax.Array]) -> jax.Array:
        return jnp.where(feedback["entropy"] <= target_entropy, hot, cold)

    return temperature


@part
def exchanged_for_tempered(
    target_entropy: float, most: float, least_advantage: float
) -> Callable[[jax.Array, Trajectories], Trajectories]:
    """A function `(step, batch) -> batch` that exchanges rows as in `aepo_arbitrary_entropy`."""

    def replaced(step: jax.Array, batch: Trajectories) -> Trajectories:
        scored = ~jnp.isnan(batch.scores)
        none = jnp.zeros(scored.shape, bool)
        tempered = (batch.info or {}).get("tempered", none) == 1  # NaN where a group failed
        _, index = jnp.unique(batch.group, return_inverse=True, size=scored.shape[0])
        A = group_advantage(batch.scores, 2 * index + tempered)
        noise, everywhere = row_noise(batch, step), jnp.zeros(scored.shape, jnp.int32)
        good = tempered & scored & (least_advantage < A)
        K = jnp.minimum(jnp.sum(good), most)
        K = jnp.where(last_entropy(batch) <= target_entropy, K, K // 2)
        taken = good & (ranks_within(everywhere, noise, noise, good) < K)
        normal = scored & ~tempered
        stay = normal & (ranks_within(everywhere, noise, noise, normal) >= K)
        weights = batch.loss_weights * (taken | stay | ~scored & ~tempered)[:, None]
        A = jnp.where(taken, 1.0, jnp.where(tempered, 0.0, A))
        # They were sampled from another distribution than the policy's, whose log-probabilities old_logp are.
        behaviour = jnp.where(tempered[:, None], batch.need("old_logp"), batch.behaviour_logp)
        return batch.replace(advantages=A[:, None] * batch.action_mask, weights=weights, behaviour_logp=behaviour)

    return replaced


def aepo_arbitrary_entropy(
    target_entropy: float = 0.5,
    hot: float = 1.2,
    cold: float = 0.8,
    most: float = 60,
    least_advantage: float = 0.05,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    tempered_share: float = 0.25,
) -> Algorithm:
    """Arbitrary Entropy Policy Optimization (AEPO, arXiv 2510.08141, 2025).

    Some rows of the batch are replaced by correct samples drawn at another temperature and trained on with advantage 1:
    J = J_GRPO + weight E over correct y from pi^T of the mean log pi(y_t), where the weight is the share of such rows.
    Samples at T = hot raise the entropy, samples at T = cold lower it; T = hot if the last update's entropy is at most
    target_entropy, else cold, is in controls["temperature"] for the loop.

    Tempered rows are those that info["tempered"] bool[N] marks; they form groups of their own. Those with
    A_grpo > least_advantage are kept, at most K = `most`, or half as many while entropy is above the target; K normal
    rows are dropped in exchange, so that the batch size is unchanged. Both are chosen at random (released code: the
    first). log pi_old is recomputed at temperature 1 (old_logp). PPO's clip with clip_low, clip_high and dual_clip
    (where A < 0), token mean, no KL.

    Rollout: prompts chosen at random, a quarter of them (`tempered_share`), are sampled a second time at that
    temperature (`rollouts.tempered`; released code: the first quarter of the batch), without top-p. Where no tempered
    row is right in a mixed group, the step is one of GRPO.

    Defaults. Code: target_entropy, hot, cold, most, least_advantage, clip_low, clip_high, dual_clip, tempered_share.
    """
    check_number("most", most, least=0)

    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(
        chain(
            controller("temperature", hot, temperature_by_entropy(target_entropy, hot, cold)),
            counted(exchanged_for_tempered(target_entropy, most, least_advantage), {"tempered", "old_logp"}),
        ),
        objective,
        rollout=with_tempered(hot, tempered_share),
    )
