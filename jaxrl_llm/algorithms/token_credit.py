"""Methods that place the credit of a row on its tokens by what the model itself says of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.multipliers import capped_bonus, hellinger, revised, softmax_shares
from jaxrl_llm.advantages.rank import rank_bonus
from jaxrl_llm.advantages.schedules import SHAPES, fade, progress
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import require_choice
from jaxrl_llm.log_ratios import log_ratio
from jaxrl_llm.objectives import Ratio, clip, entropy, kl, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.selection.noise import token_noise
from jaxrl_llm.selection.rows import keep_weighted
from jaxrl_llm.selection.tokens import late_tokens, top_tokens
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.transform import chain, control, counted

__all__ = ["bupo", "dgpo_distribution_guided", "rlvr_temporal_schedule", "verl_velocity_rank"]


def dgpo_distribution_guided(
    tau: float = 0.5,
    kappa: float = 1.0,
    vocabulary_size: float | None = 49152,
    squared: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Distribution Guided Policy Optimization (DGPO, arXiv 2605.03327, 2026).

    The distance to the reference policy q is no penalty but a signal: tokens where the policy p deviates and is unsure
    get more of the row's advantage. No KL term.

        d = 1 - sum_a sqrt(p_a q_a);  h = H(p) / log |V|;  s = d h^kappa
        A_t = A_grpo T softmax(s / tau) over the T tokens of the row

    then PPO's clip (clip_low, clip_high) and a mean over sequences of token means (not printed in the sources). p is
    the policy that drew the tokens. vocabulary_size: |V|, the number of tokens of your model; its logarithm is between
    10.4 and 12.5 for 32 to 256 thousand, so the default is near for most; None: h = H. squared=False: the Hellinger
    distance itself, sqrt(d).
    """
    check_number("tau", tau, above=0)
    check_number("vocabulary_size", vocabulary_size, above=1, or_none=True)
    scale = 1.0 if vocabulary_size is None else jnp.log(vocabulary_size)

    def guided(batch: Trajectories) -> jax.Array:
        mask = batch.action_mask
        h = jnp.where(mask, jnp.maximum(batch.need("entropy"), 1e-12), 1.0) / scale
        s = hellinger(batch.need("reference_affinity"), squared) * h**kappa
        return batch.need("advantages") * softmax_shares(s, mask, tau)

    return Algorithm(
        transform=chain(group_relative(), revised(guided, {"reference_affinity"})),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean()),
    )


def rlvr_temporal_schedule(
    rule: str = "percentile",
    magnitude: float = 0.99,
    shape: str = "linear",
    start: float = 0.0,
    end: float = 0.8,
    power: float = 2.0,
    alpha: float = 0.4,
    kappa: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    total_steps: float | None = None,
) -> Algorithm:
    """RLVR-Schedule (Not only where, But when: Temporal Scheduling for RLVR, arXiv 2605.25381, 2026).

    A rule that selects or weights tokens is strong at first and fades: x falls from `magnitude` to 0 between the shares
    `start` and `end` of total_steps (100 when None), with the shape "linear", "power" ((M (1 - p))^power, the paper's
    gamma) or "sigmoid". With T the tokens of a row and H their entropies, rule is one of

        "percentile"  the loss leaves out the first min(floor(T x), T - 1) tokens: from the end backwards
        "forking"     it has only the ceil(T (1 - x)) tokens of greatest entropy of each row
        "bonus"       A_t <- A_t + x min(alpha H, |A_t| / kappa)

    on GRPO advantages, with PPO's clip (clip_low, clip_high) and the mean over the tokens that are left. The released
    code moves the skipped tokens into the prompt. Its fourth rule puts part of a given solution before the answer.
    """
    require_choice("rule", rule, ("percentile", "forking", "bonus"))
    require_choice("shape", shape, SHAPES)
    check_number("magnitude", magnitude, least=0, most=1)
    steps = 100 if total_steps is None else total_steps

    def x(step: jax.Array) -> jax.Array:
        return fade(progress(step, steps, start, end), magnitude, shape, power)

    def chosen(step: jax.Array, batch: Trajectories) -> jax.Array:
        if rule == "percentile":
            return late_tokens(batch.action_index, batch.lengths, x(step))
        return top_tokens(batch.need("entropy"), batch.action_mask, 1 - x(step), token_noise(batch, step), "row")

    def with_bonus(step: jax.Array, batch: Trajectories) -> Trajectories:
        A, H = batch.need("advantages"), jnp.where(batch.action_mask, batch.need("entropy"), 0.0)
        return batch.replace(advantages=A + x(step) * (capped_bonus(A, alpha * H, 1 / kappa) - A))

    return Algorithm(
        transform=chain(group_relative(), counted(with_bonus) if rule == "bonus" else keep_weighted(chosen)),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


def verl_velocity_rank(
    gain: float = 2.0,
    coefficient: float = 1.0,
    rate: float = 0.3,
    kappa: float = 2.0,
    place: str = "all",
    start: str = "zero",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    entropy_coefficient: float = 0.001,
) -> Algorithm:
    """Velocity-Exploiting Rank-Learning (VERL, arXiv 2509.23808, 2025).

    A bonus from the hidden states of a response: their effective rank ER, how it grows along the response (ERV), and
    how that growth grows (ERA). With mu their running means over batches (mu <- (1 - rate) mu + rate batch mean) and
    d = clip((x - mu) / (|mu| + 1e-8), -5, 5), phi = tanh(d)

        b = sigmoid(gain d_ERA);  Phi = coefficient (b phi_ER + (1 - b) phi_ERV)
        A' = A_grpo + min(relu(Phi), |A_grpo| / kappa)

    There is no bonus at the first step. place: on "all" tokens (the formula), or the "last" (the released code). start:
    running means begin at "zero", where the next d are large, or at the "first" batch's. The rest is GRPO with
    clip_low, clip_high, kl_coefficient (k3) and entropy_coefficient. Measures: `advantages.rank.rank_measures`.
    """
    average = sequence_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=average)
    objective -= entropy_coefficient * entropy(average)
    return Algorithm(chain(group_relative(), rank_bonus(gain, coefficient, rate, kappa, place, start)), objective)


def bupo(
    layer: int = 6,
    internal_steps: float = 30,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    average: str = "sequence",
) -> Algorithm:
    """Bottom-up Policy Optimization (BuPO, arXiv 2512.19673, 2025).

    For the first internal_steps steps the clipped GRPO loss is applied to the policy that unembeds the hidden state
    after `layer` (counted from 1, no final norm), pi^l = softmax(H^l E_u^T), later to the model's output as usual:

        rho = pi^l(a) / pi^l_old(a) while step <= internal_steps, else pi(a) / pi_old(a)
        loss = -mean min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A = (r - mean_g) / std_g

    Rollouts are the full model's; rho^l only limits the step. The paper averages per sequence; its script takes
    average="token" and dual_clip=10. The paper's internal_steps is 30 of 300, its layer 6 for Qwen3-4B: the last one
    whose feed-forward block raises the entropy of what it unembeds to.
    """
    check_number("layer", layer, least=1)
    require_choice("average", average, ("sequence", "token"))

    def phase(step: jax.Array, batch: Trajectories) -> Trajectories:
        return batch.with_controls(internal=(step < internal_steps).astype(jnp.float32))

    def ratio(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        inner = log_ratio((outputs.extras or {})["internal_logp"], batch.need("internal_logp"), batch.loss_weights != 0)
        return jnp.where(control(batch, "internal") > 0, jnp.exp(inner), token_ratio()(outputs, batch))

    mean = sequence_mean() if average == "sequence" else token_mean()
    objective = policy_gradient(
        Ratio(ratio, frozenset({f"internal_logp:{layer}"})), clip(clip_low, clip_high, dual_clip), mean
    )
    return Algorithm(chain(group_relative(), counted(phase)), objective)
