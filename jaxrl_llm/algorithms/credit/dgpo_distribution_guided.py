import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, revised
from jaxrl_llm.algorithms.classic.reinforce import averaged_gradient
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AboveOne, AverageName, Code, NonNegative, Number, Ours, Paper, Positive
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clip


@batch_part
def guided_by_reference(
    batch: Trajectories, tau: float, kappa: float, vocabulary_size: float | None, squared: bool
) -> Array:
    """A function `batch -> f32[N, L]`: the advantages of `dgpo_distribution_guided`."""
    mask = batch.action_mask
    scale = 1.0 if vocabulary_size is None else jnp.log(vocabulary_size)
    h = jnp.where(mask, jnp.maximum(batch.need("entropy"), 1e-12), 1.0) / scale
    s = hellinger(batch.need("reference_affinity"), squared) * h**kappa
    return batch.need("advantages") * softmax_shares(s, mask, tau)


@method(paper="arXiv 2605.03327", test="test_token_credit.py::test_dgpo_against_a_loop")
def dgpo_distribution_guided(
    tau: Paper[Positive] = 0.5,
    kappa: Paper[NonNegative] = 1.0,
    vocabulary_size: Ours[AboveOne | None] = 49152,
    squared: Code[bool] = True,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    average: Ours[AverageName] = "sequence",
) -> Algorithm:
    """Distribution Guided Policy Optimization (DGPO).

    Uses the distance to the reference policy q as a credit signal instead of a penalty: tokens where the policy p
    deviates from q and is uncertain get more of the row's advantage. No KL term.

        d = 1 - sum_a sqrt(p_a q_a);  h = H(p) / log |V|;  s = d h^kappa
        A_t = A_grpo T softmax(s / tau) over the T tokens of the row

    p is the behaviour policy. The loss is PPO's clip (clip_low, clip_high); average as in `grpo` (the sources available
    to us do not print it). squared False uses the Hellinger distance itself, sqrt(d), as the paper names it; the
    re-implementations use its square. vocabulary_size: |V|, in a run that of its model; None: h = H.
    """
    guided = revised(guided_by_reference(tau, kappa, vocabulary_size, squared), {"reference_affinity"})
    return Algorithm(chain(group_relative(), guided), averaged_gradient(clip(clip_low, clip_high), average))


def softmax_shares(scores: Array, mask: Array, temperature: Number) -> Array:
    """T softmax(scores / temperature) over the T masked tokens of a row: weights of mean 1, f32[N, L]; 0 elsewhere."""
    logits = jnp.where(mask, scores / temperature, -jnp.inf)
    top = jnp.max(logits, axis=1, keepdims=True, initial=-1e30)
    exponentials = jnp.where(mask, jnp.exp(logits - top), 0.0)
    total = jnp.maximum(jnp.sum(exponentials, axis=1, keepdims=True), 1e-30)
    return jnp.sum(mask, axis=1, keepdims=True) * exponentials / total


def hellinger(affinity: Array, squared: bool = True) -> Array:
    """Distance in [0, 1] of distributions with the affinity sum sqrt(p q): 1 - affinity, or its square root."""
    distance = jnp.clip(1.0 - affinity, 0.0, 1.0)
    return distance if squared else jnp.sqrt(distance)
