import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, revised
from jaxrl_llm.advantages.multipliers import last_entropy
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.algorithms.score_function.otr import static_number
from jaxrl_llm.core.annotations import AboveOne, Code, NonNegative, Number, Positive
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy


@batch_part
def mixed_with_tempered(
    batch: Trajectories, target_entropy: float, gap_cap: float, success: float, hot_name: str, cold_name: str
) -> Array:
    """A function `batch -> f32[N, L]`: the advantages of `dcpo_distribution_centric`."""
    gap = target_entropy - last_entropy(batch)
    tempered = jnp.where(gap >= 0, batch.need(hot_name), batch.need(cold_name))
    w = jnp.exp(log_ratio(tempered, batch.behaviour_logp, batch.action_mask))
    correct = batch.scores > success
    scored = jnp.maximum(jnp.sum(~jnp.isnan(batch.scores)), 1)
    alpha = mixture_share(gap, gap_cap, jnp.sum(correct) / scored)
    return (1 - alpha) * batch.need("advantages") + alpha * correct[:, None] * w


@method(paper="arXiv 2601.12730", test="test_entropy_credit.py::test_dcpo_against_a_loop")
def dcpo_distribution_centric(
    target_entropy: Code[NonNegative] = 0.25,
    hot: Code[Positive] = 1.2,
    cold: Code[Positive] = 0.8,
    gap_cap: Code[NonNegative] = 0.1,
    success: Code[float] = 0.05,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    dual_clip: Code[AboveOne] = 3.0,
) -> Algorithm:
    """Distribution-Centric Policy Optimization (DCPO).

    Steers the entropy H of the last update (0 before the first) to H0 = target_entropy: on correct samples it mixes in
    a REINFORCE term weighted towards a tempered copy of the policy, hotter when H is too low, cooler when too high.

        T = hot if H <= H0 else cold;  w = exp(logp_T - logp);  c = 1 where the score exceeds success
        alpha = min(|H0 - H|, gap_cap) / mean(c);  alpha <- alpha / (1 + alpha)
        A_t = (1 - alpha) A_grpo + alpha c w_t

    then PPO's clip (clip_low, clip_high; dual_clip where A < 0) and a token mean. Without a correct sample, and at H =
    H0, this is GRPO. hot and cold must be static numbers, because they are part of the names of needs: the loop
    provides log-probabilities at these temperatures as "tempered_logp:1.2" and "tempered_logp:0.8". H is the update's
    mean token entropy; the released code estimates it by the mean of -logp. The released script has target_entropy 0.5;
    its README reports the best average at 0.25.
    """
    hot_name, cold_name = (f"tempered_logp:{static_number(name, T):g}" for name, T in (("hot", hot), ("cold", cold)))
    mixed = mixed_with_tempered(target_entropy, gap_cap, success, hot_name, cold_name)
    return Algorithm(
        transform=chain(group_relative(), revised(mixed, needs={hot_name, cold_name, "feedback"})),
        objective=clipped_policy(clip_low, clip_high, dual=dual_clip),
    )


def mixture_share(gap: Array, cap: Number, fraction: Array) -> Array:
    """alpha / (1 + alpha) with alpha = min(|gap|, cap) / fraction, f32[]; 0 where the fraction is 0 (DCPO, 2601.12730).

    >>> print(round(float(mixture_share(jnp.array(0.1), 0.1, jnp.array(0.5))), 4))
    0.1667
    """
    alpha = jnp.minimum(jnp.abs(gap), cap) / jnp.where(fraction > 0, fraction, 1.0)
    return jnp.where(fraction > 0, alpha / (1.0 + alpha), 0.0)
