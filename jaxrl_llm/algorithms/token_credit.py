"""Methods that distribute a row's advantage over its tokens by statistics of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.multipliers import capped_bonus, hellinger, revised, softmax_shares
from jaxrl_llm.advantages.rank import rank_bonus
from jaxrl_llm.advantages.schedules import SHAPES, fade, progress
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.score_function import averaged_gradient
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import chain, control, counted
from jaxrl_llm.objectives import Ratio, clip, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.selection.noise import token_noise
from jaxrl_llm.selection.rows import keep_weighted
from jaxrl_llm.selection.tokens import late_tokens, top_tokens
from jaxrl_llm.utils.errors import require_choice

__all__ = ["bupo", "dgpo_distribution_guided", "rlvr_temporal_schedule", "verl_velocity_rank"]


@part
def guided_by_reference(
    tau: float, kappa: float, vocabulary_size: float | None, squared: bool
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages of `dgpo_distribution_guided`."""
    scale = 1.0 if vocabulary_size is None else jnp.log(vocabulary_size)

    def guided(batch: Trajectories) -> jax.Array:
        mask = batch.action_mask
        h = jnp.where(mask, jnp.maximum(batch.need("entropy"), 1e-12), 1.0) / scale
        s = hellinger(batch.need("reference_affinity"), squared) * h**kappa
        return batch.need("advantages") * softmax_shares(s, mask, tau)

    return guided


def dgpo_distribution_guided(
    tau: float = 0.5,
    kappa: float = 1.0,
    vocabulary_size: float | None = 49152,
    squared: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    average: AverageName = "sequence",
) -> Algorithm:
    """Distribution Guided Policy Optimization (DGPO, arXiv 2605.03327, 2026).

    Uses the distance to the reference policy q as a credit signal instead of a penalty: tokens where the policy p
    deviates from q and is uncertain get more of the row's advantage. No KL term.

        d = 1 - sum_a sqrt(p_a q_a);  h = H(p) / log |V|;  s = d h^kappa
        A_t = A_grpo T softmax(s / tau) over the T tokens of the row

    p is the behaviour policy. The loss is PPO's clip (clip_low, clip_high); average as in `grpo` (the sources available
    to us do not print it). squared False uses the Hellinger distance itself, sqrt(d), as the paper names it; the
    re-implementations use its square. vocabulary_size: |V|, in a run that of its model; None: h = H.

    Defaults. Paper: tau, kappa, clip_low, clip_high. Code: squared. Ours: vocabulary_size, average.
    """
    check_number("tau", tau, above=0)
    check_number("vocabulary_size", vocabulary_size, above=1, or_none=True)

    return Algorithm(
        transform=chain(
            group_relative(), revised(guided_by_reference(tau, kappa, vocabulary_size, squared), {"reference_affinity"})
        ),
        objective=averaged_gradient(clip(clip_low, clip_high), average),
    )


def rlvr_temporal_schedule(
    rule: Literal["percentile", "forking", "bonus"] = "percentile",
    magnitude: float = 0.99,
    shape: Literal["linear", "power", "sigmoid"] = "linear",
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

    A rule that selects or weights tokens fades during training: its strength x falls from M = magnitude to 0 between
    the shares `start` and `end` of total_steps (100 where None). With p the progress between the two, shape is
    "linear", M (1 - p); "power", (M (1 - p))^power; or "sigmoid". With T the number of tokens of a row and H their
    entropies, rule is one of

        "percentile"  drop the first min(floor(T x), T - 1) tokens: training proceeds from the end backwards
        "forking"     keep the ceil(T (1 - x)) tokens of highest entropy of each row
        "bonus"       A_t <- A_t + x min(alpha H, |A_t| / kappa)

    on GRPO's advantages. The loss is PPO's clip (clip_low, clip_high), averaged over the remaining tokens. The released
    code moves the dropped tokens into the prompt instead of masking them; its fourth rule, a prefix of a given solution
    as context, requires a special rollout. alpha and kappa are those of its scripts (its library has 1 and 1).

    Defaults. Paper: rule. Code: magnitude, shape, start, end, power, alpha, kappa, clip_low, clip_high.
    Run: total_steps.
    """
    require_choice("rule", rule, ("percentile", "forking", "bonus"))
    require_choice("shape", shape, SHAPES)
    check_number("magnitude", magnitude, least=0, most=1)
    steps = 100 if total_steps is None else total_steps

    x = fading(steps, start, end, magnitude, shape, power)
    chosen = counted(entropy_bonus(x, alpha, kappa)) if rule == "bonus" else keep_weighted(chosen_tokens(x, rule))
    return Algorithm(
        transform=chain(group_relative(), chosen),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


Schedule = Callable[[jax.Array], jax.Array]  # step int32[] -> f32[]


@part
def fading(
    steps: float, start: float, end: float, magnitude: float, shape: Literal["linear", "power", "sigmoid"], power: float
) -> Schedule:
    """A function `step -> f32[]`: `fade` of the progress between two shares of the steps."""
    return lambda step: fade(progress(step, steps, start, end), magnitude, shape, power)


@part
def chosen_tokens(strength: Schedule, rule: str) -> Callable[[jax.Array, Trajectories], jax.Array]:
    """A function `(step, batch) -> bool[N, L]`: the tokens of rule "percentile" or "forking"."""

    def chosen(step: jax.Array, batch: Trajectories) -> jax.Array:
        x = strength(step)
        if rule == "percentile":
            return late_tokens(batch.action_index, batch.lengths, x)
        return top_tokens(batch.need("entropy"), batch.action_mask, 1 - x, token_noise(batch, step), "row")

    return chosen


@part
def entropy_bonus(strength: Schedule, alpha: float, kappa: float) -> Callable[[jax.Array, Trajectories], Trajectories]:
    """A function `(step, batch) -> batch` with the advantages of rule "bonus"."""

    def with_bonus(step: jax.Array, batch: Trajectories) -> Trajectories:
        A, H = batch.need("advantages"), jnp.where(batch.action_mask, batch.need("entropy"), 0.0)
        return batch.replace(advantages=A + strength(step) * (capped_bonus(A, alpha * H, 1 / kappa) - A))

    return with_bonus


def verl_velocity_rank(
    gain: float = 2.0,
    coefficient: float = 1.0,
    rate: float = 0.3,
    kappa: float = 2.0,
    place: Literal["all", "last"] = "all",
    start: Literal["first", "zero"] = "zero",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    entropy_coefficient: float = 0.001,
    average: AverageName = "token",
) -> Algorithm:
    """Velocity-Exploiting Rank-Learning (VERL, arXiv 2509.23808, 2025).

    Adds a bonus computed from a response's hidden states: their effective rank ER, its growth along the response (ERV),
    and the growth of that growth (ERA). With mu the running means over batches (mu <- (1 - rate) mu + rate batch mean),
    d = clip((x - mu) / (|mu| + 1e-8), -5, 5) and phi = tanh(d),

        b = sigmoid(gain d_ERA);  Phi = coefficient (b phi_ER + (1 - b) phi_ERV)
        A' = A_grpo + min(relu(Phi), |A_grpo| / kappa)

    without a bonus at the first step. place: on "all" tokens, as in the formula, or the "last", as in the released
    code. start: running means start at "zero", as in the code, which makes the first d large, or at the "first"
    batch's. The rest is GRPO with clip_low, clip_high, kl_coefficient (k3), entropy_coefficient and average (the code
    has a token mean). Measures: `effective_rank.rank_measures`.

    Defaults. Paper: place. Code: gain, coefficient, rate, kappa, start, clip_low, clip_high, kl_coefficient,
    entropy_coefficient, average.
    """
    objective = grpo(
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coefficient=kl_coefficient,
        entropy_coefficient=entropy_coefficient,
        average=average,
    ).objective
    return Algorithm(chain(group_relative(), rank_bonus(gain, coefficient, rate, kappa, place, start)), objective)


@part
def internal_phase(internal_steps: float) -> Callable[[jax.Array, Trajectories], Trajectories]:
    """A function `(step, batch) -> batch`: the control "internal" is 1 in the first steps, then 0."""

    def phase(step: jax.Array, batch: Trajectories) -> Trajectories:
        return batch.with_controls(internal=(step < internal_steps).astype(jnp.float32))

    return phase


@part
def internal_ratio(layer: int) -> Ratio:
    """The ratio of the policy of a layer where the control "internal" is above 0, else `token_ratio()`."""

    def ratio(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        inner = log_ratio((outputs.extras or {})["internal_logp"], batch.need("internal_logp"), batch.loss_weights != 0)
        return jnp.where(control(batch, "internal") > 0, jnp.exp(inner), token_ratio()(outputs, batch))

    return Ratio(ratio, frozenset({f"internal_logp:{layer}"}))


@presets(paper={"average": "sequence", "dual_clip": None}, code={"average": "token", "dual_clip": 10.0})
def bupo(
    layer: int = 6,
    internal_steps: float = 30,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    average: Literal["sequence", "token"] = "sequence",
) -> Algorithm:
    """Bottom-up Policy Optimization (BuPO, arXiv 2512.19673, 2025).

    For the first internal_steps steps the clipped GRPO loss is applied to the policy that unembeds the hidden state
    after `layer` (counted from 1, no final norm), pi^l = softmax(H^l E_u^T), later to the model's output:

        rho = pi^l(a) / pi^l_old(a) while step <= internal_steps, else pi(a) / pi_old(a)
        loss = -mean min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A = (r - mean_g) / std_g

    Rollouts are sampled from the full model; rho^l only limits the step. The paper averages per sequence (eq. 9); its
    script (preset "code") has average "token" and dual_clip 10, which bounds the loss of bad actions by 10 |A|. The
    paper's internal_steps is 30 of 300, its layer 6 for Qwen3-4B and 8B: the last one whose feed-forward block raises
    the entropy of the unembedded distribution.

    Defaults. Paper: layer, internal_steps, dual_clip, average. Code: clip_low, clip_high.
    """
    check_number("layer", layer, least=1)
    require_choice("average", average, ("sequence", "token"))

    mean = sequence_mean() if average == "sequence" else token_mean()
    objective = policy_gradient(internal_ratio(layer), clip(clip_low, clip_high, dual_clip), mean)
    return Algorithm(chain(group_relative(), counted(internal_phase(internal_steps))), objective)
