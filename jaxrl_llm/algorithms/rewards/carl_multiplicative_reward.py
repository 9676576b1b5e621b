from dataclasses import replace

import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.rewards.transforms import component_of, other_components, rescore


@method(paper="arXiv 2504.17838", test="test_reward_composed.py::test_carl_is_ppo_of_the_product")
def carl_multiplicative_reward(
    component: Ours[str | None] = None,
    terminal: Ours[str | None] = None,
    penalty: Ours[NonNegative] = 1.0,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    gamma: Ours[float] = 1.0,
    lam: Ours[float] = 0.95,
    kl_coefficient: Ours[NonNegative] = 0.05,
) -> Algorithm:
    """CaRL's multiplicative reward (Learning Scalable Planning Policies with Simple Rewards).

    One term of progress, which soft infractions multiply and a hard one replaces, trained with PPO:

        R = progress prod_i p_i,   R = -penalty after a hard infraction

    progress: the reward `component`. p_i: the other components, clipped to [0, 1]; 1 is no infraction. None: all
    components are such factors, and a single one is the reward. terminal: the component that is above 0.5 for a hard
    infraction (None: there is none), which in the paper also ends the episode; then the reward is -penalty. Style alone
    earns nothing, and cannot be traded against progress. The weights of the rewards have no effect. PPO with clip_low,
    clip_high, gamma, lam, and kl_coefficient in the reward as in `ppo`. The paper drives cars, with rewards of each
    time step; here an episode is a completion, scored at its end.
    """
    base = ppo(clip_low, clip_high, gamma=gamma, lam=lam, kl_coefficient=kl_coefficient)
    return replace(base, transform=chain(rescore(product_of_factors(component, terminal, penalty)), base.transform))


@batch_part
def product_of_factors(batch: Trajectories, progress: str | None, terminal: str | None, penalty: float) -> Array:
    """A function `batch -> f32[N]`: the component `progress` times all others, clipped to [0, 1], or -penalty.

    progress: None is the product of all components, clipped to [0, 1], and the reward itself where there is but one.
    -penalty is the reward where the component `terminal` is above 0.5; None: nowhere. A component that did not score a
    row is the factor 1.
    """
    factors = other_components(batch, *(() if progress is None else (progress,)), terminal or "")
    if progress is not None:
        out = component_of(batch, progress)
    elif len(factors) < 2:
        out, factors = (factors[0] if factors else batch.scores), []
    else:
        out = jnp.ones(batch.group.shape)
    for factor in factors:
        out = out * jnp.where(jnp.isnan(factor), 1.0, jnp.clip(factor, 0.0, 1.0))
    return out if terminal is None else jnp.where(component_of(batch, terminal) > 0.5, -penalty, out)
