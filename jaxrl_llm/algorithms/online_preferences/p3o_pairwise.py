from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, NonNegativeNumber, Number, Ours
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import Array, Objective, Trajectories, chain, part
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import log_ratio_sum, scored_rows, sequence_log_ratios
from jaxrl_llm.utils.errors import is_off

Clipping = Literal["separate", "joint", "none"]


@method(paper="arXiv 2310.00212", test="test_reward_composed.py::test_p3o_is_the_loop_over_pairs")
def p3o_pairwise(
    kl_coefficient: Ours[NonNegative] = 0.05, clip_range: Ours[float] = 0.2, clip: Ours[Clipping] = "separate"
) -> Algorithm:
    """Pairwise Proximal Policy Optimization (P3O).

    A policy gradient on the difference of the rewards of two responses to a prompt, which no shift of the rewards of a
    prompt changes. With R = r - kl_coefficient log(pi_old(y)/pi_ref(y)), D = R_1 - R_2, w = pi(y)/pi_old(y) of whole
    responses, and e = clip_range, the loss is minus the mean over the pairs of a prompt of

        "separate"  [min(w_1 a_1, clip(w_1, 1-e, 1+e) a_1) + min(w_2 a_2, clip(w_2, 1-e, 1+e) a_2)]/2,
                    a_1 = D sg(w_2), a_2 = -D sg(w_1)
        "joint"     min(c u, c clip(u, -e, e))/2,  u = log w_1 - log w_2,  c = D sg(w_1 w_2)
        "none"      D sg(w_1 w_2) u/2

    as clip says. On policy all have the gradient D grad(log pi(y_1) - log pi(y_2))/2. The paper has two responses to a
    prompt; here all pairs of a group count. The clipped forms are derived from the pairwise gradient, not read.
    """
    return Algorithm(chain(), pairwise_policy(clip_range, clip, kl_coefficient))


def pair_shares(
    log_ratio: Array, reward: Array, group: Array, clip_range: Number = 0.2, clip: Clipping = "separate"
) -> Array:
    """Each row's share f32[N] of the mean over pairs of a prompt of a loss on the difference D of their rewards.

    log_ratio f32[N]: l = log pi(y)/q(y), w = exp(l), sg: without gradient. reward f32[N]: NaN to leave a row out.

        none      -D w_1 w_2 (l_1 - l_2) / 2, w without gradient
        separate  -[min(w_1 a_1, clip(w_1) a_1) + min(w_2 a_2, clip(w_2) a_2)] / 2, a_1 = D sg(w_2), a_2 = -D sg(w_1)
        joint     -min(c u, c clip(u, -clip_range, clip_range)) / 2, u = l_1 - l_2, c = D sg(w_1 w_2)
    """
    known = ~jnp.isnan(reward)
    pairs = (group[:, None] == group) & known[:, None] & known & ~jnp.eye(group.shape[0], dtype=bool)
    r = jnp.where(known, reward, 0.0)
    difference = jnp.where(pairs, r[:, None] - r, 0.0)
    l = jnp.clip(jnp.where(known, log_ratio, 0.0), -LARGEST, LARGEST)
    w, fixed = jnp.exp(l), jax.lax.stop_gradient(jnp.exp(l))
    if clip == "separate":
        a, inside = difference * fixed, jnp.clip(w, 1 - clip_range, 1 + clip_range)
        gain = 0.5 * jnp.minimum(w[:, None] * a, inside[:, None] * a)  # of the first of each ordered pair
    else:
        # A pair is here in both orders, each of which gets half.
        u, c = l[:, None] - l, difference * fixed[:, None] * fixed
        held = jnp.minimum(c * u, c * jnp.clip(u, -clip_range, clip_range)) if clip == "joint" else c * u
        gain = 0.25 * held
    return -jnp.sum(jnp.where(pairs, gain, 0.0), axis=1) / jnp.maximum(0.5 * jnp.sum(pairs), 1.0)


@part
def pairwise_policy(
    clip_range: NonNegativeNumber = 0.2, clip: Clipping = "separate", kl_coefficient: NonNegativeNumber = 0.0
) -> Objective:
    """`pair_shares` of all pairs of a prompt's samples, with the rewards r - kl_coefficient log q(y)/p(y).

    q: the behaviour policy, p: the reference (not computed where kl_coefficient is 0), whole sequences.
    """
    penalised = not is_off(kl_coefficient)

    def shares(l: jax.Array, batch: Trajectories) -> jax.Array:
        reward = jnp.where(scored_rows(batch), batch.scores, jnp.nan)
        if penalised:
            reward = reward + kl_coefficient * sequence_log_ratios(batch.need("reference_logp"), batch)
        return pair_shares(l, reward, batch.group, clip_range, clip)

    needs = frozenset({"reference_logp"}) if penalised else frozenset[str]()
    return coupled(log_ratio_sum, shares, "pairwise", needs)
