import jax.numpy as jnp

from jaxrl_llm.advantages.turns import needs_turns, of_episode, turn_advantages
from jaxrl_llm.algorithms.credit.branchgrpo import numbers_in
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Divisor, NonNegative, Ours
from jaxrl_llm.core.parts import Trajectories, chain, stateless_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2508.10548", test="test_turn_shaped.py::test_g_ra_worked_example")
@run_needs(turn_rewards="rewards of turns", turns="episodes of several turns")
def g_ra(
    thresholds: Ours[str] = "0",
    order: Ours[str] = "",
    scale: Ours[Divisor] = "std",
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
) -> Algorithm:
    """Gated Reward Accumulation (G-RA).

    The rewards of turns, for form or progress, count only in episodes whose rewards of higher priority have all passed
    their thresholds, so that they cannot be collected in place of the outcome:

        R = sum_k gate_k R_k,    gate_k = 1 if R_j > threshold_j for all levels j above k, else 0

    The highest level has no gate, the rewards of turns are the lowest. order: names of the components of the reward
    that are levels, by commas, the highest first; "" for the score as the only one. thresholds: of each of these
    levels, by commas, one for all or one for each; the paper's were not in what we read. With an order R is the sum of
    the gated components, without the run's weights.

    The rest is GRPO on the episode's R, where scale "std" divides by its standard deviation + epsilon, with PPO's clip
    (clip_low, clip_high) averaged over tokens; the paper takes any policy gradient.
    """
    levels = tuple(name.strip() for name in order.split(",")) if order else ()
    gates = tuple(numbers_in("thresholds", thresholds))
    if len(gates) not in (1, len(levels)):
        raise InputError(f"thresholds are {len(gates)} numbers for {max(len(levels), 1)} levels: give one for each")
    gates = gates * max(len(levels), 1) if len(gates) == 1 else gates
    return Algorithm(
        chain(needs_turns(), gated_rewards(gates, levels), turn_advantages(of_episode(scale, epsilon=epsilon))),
        clipped_policy(clip_low, clip_high),
    )


@stateless_part({"turn_rewards"})
def gated_rewards(batch: Trajectories, thresholds: tuple[float, ...], levels: tuple[str, ...] = ()) -> Trajectories:
    """Count a reward only where all of higher priority are above their thresholds (G-RA).

    levels: components of the reward, the highest first, whose gated sum replaces the score; () for the score alone. The
    rewards of turns are below them all. InputError for a level that is no component.
    """
    if unknown := [name for name in levels if name not in (batch.rewards or {})]:
        raise InputError(f"the reward has no component {unknown[0]!r}: name those of the run's reward functions")
    parts = [(batch.rewards or {})[name] for name in levels] or [batch.scores]
    values = [jnp.nan_to_num(one) for one in parts]
    passed, total = jnp.ones(batch.scores.shape, bool), jnp.zeros(batch.scores.shape)
    for value, threshold in zip(values, thresholds, strict=True):
        total = total + jnp.where(passed, value, 0.0)
        passed = passed & (value > threshold)
    batch = batch.replace(reward=jnp.where(jnp.isnan(batch.scores), jnp.nan, total))
    if batch.turn_rewards is None:
        return batch
    return batch.replace(turn_rewards=jnp.where(passed[:, None], batch.turn_rewards, 0.0))
