import math
from asyncio import gather
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import compared, drop_rows, turn_advantages, turn_returns
from jaxrl_llm.advantages.turns import group_keys, on_tokens, rewards_of_turns, turn_count
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Fraction, NonNegative, Ours, Paper
from jaxrl_llm.core.buckets import joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, counted_part, part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.objectives.off_policy import importance_correction, mismatch
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, converse
from jaxrl_llm.rollouts.agents.program import agents_part, graded
from jaxrl_llm.rollouts.programs import Episode, Task, Tools
from jaxrl_llm.selection.rows import row_noise
from jaxrl_llm.utils.errors import is_off


@part
def has_unlikely_token(least: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: rows with a token whose ratio pi_old / pi_behaviour is below `least`."""
    return lambda batch: jnp.min(mismatch(batch), axis=1) < jnp.log(least)


@method(paper="arXiv 2602.05885", test="test_turn_credit.py::test_trloo_worked_example")
@run_needs(turn_rewards="rewards of each turn", turns="episodes of several turns")
def trloo(
    gamma: Paper[float] = 1.0,
    tolerance: Ours[float | None] = None,
    unlikely: Paper[float] = 1e-4,
    profile: Ours[str | None] = None,
    least_profile: Paper[Fraction] = 0.3,
    softness: Paper[NonNegative] = 0.1,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
) -> Algorithm:
    """Turn-level REINFORCE leave-one-out (TRLOO of Dr. Kernel).

    Each turn has a reward of its own, and its return is compared with the others' at the same turn of the group:

        A_t = G_t - mean_{j != i} G_{j,t},    G_t = sum_{u >= t} gamma^(u - t) r_u

    over the episodes that have a turn t, which is unbiased however many these are; the only one gets G_t, as in the
    released code. The advantage is on all tokens of the turn, in PPO's clip (clip_low, clip_high) averaged over tokens,
    without a penalty.

    With a tolerance (paper: 0.001) episodes are left out of the loss, but not of the means, where the geometric mean of
    the ratios of trainer to sampler is not within 1 +- tolerance, or where a token's is below `unlikely`. It is off by
    default, since samplers that agree with the trainer need none.

    profile: the name of a number PR in the info of the environment's observations, between 0 and 1, such as the share
    of the time of a program that its generated kernels take. A turn with a reward above 0 whose PR is known stays in
    the loss with the probability clip((PR - least_profile) / softness, 0, 1), where PR >= least_profile if softness is
    0; it counts in the means and returns all the same. None: all turns stay. The rewards of kernels, in the paper
    correct (1 + speed-up of at most 3 + PR), are those of the environment.
    """
    means = compared(turn_returns(gamma), same_turn(), baseline="leave_one_out", alone="value")
    credit = turn_advantages(means, needs={"turn_rewards"})
    if tolerance is not None:
        near = importance_correction("geometric", "reject", 1 - tolerance, 1 + tolerance, leave_count=True)
        credit = chain(credit, drop_rows(has_unlikely_token(unlikely)), near)
    objective = clipped_policy(clip_low, clip_high)
    if profile is None:
        return Algorithm(credit, objective)
    return Algorithm(chain(credit, reject_idle(least_profile, softness)), objective, rollout=profiled(profile))


@batch_part
def same_turn(batch: Trajectories) -> Array:
    """Keys: turns of a group with the same index."""
    turns = turn_count(batch)
    group = group_keys(batch, turns)
    return joint_key(group, jnp.broadcast_to(jnp.arange(turns), group.shape))


@counted_part({"profile"})
def reject_idle(step: Array, batch: Trajectories, least: Fraction, softness: NonNegative) -> Trajectories:
    """Turns with a reward above 0 stay with the probability clip((profile - least) / softness, 0, 1); see `trloo`.

    The weights of others become 0. info["profile"] f32[N, L] is NaN where it is not known.
    """
    turns = turn_count(batch)
    salts = step.astype(jnp.uint32) * jnp.uint32(turns) + jnp.arange(turns, dtype=jnp.uint32)
    noise = on_tokens(jax.vmap(lambda salt: row_noise(batch, salt))(salts).T, batch)
    right = on_tokens(rewards_of_turns(batch), batch) > 0
    profile = batch.need("profile")
    chance = jnp.where(profile >= least, 1.0, 0.0)
    if not is_off(softness):
        chance = jnp.clip((profile - least) / softness, 0.0, 1.0)
    idle = right & ~jnp.isnan(profile) & (noise >= chance)
    return batch.replace(weights=jnp.where(idle, 0.0, batch.loss_weights))


@agents_part(
    "turns of agents have a profile", "profiled({name})", provides={"profile"},
    whole="turns with a profile are not compacted: leave out compact and context_tokens",
)  # fmt: skip
async def profiled(tools: Tools, task: Task, settings: AgentSettings, name: str) -> list[Episode]:
    """The episodes of the run's agents, where the environment's observations say a number `name` of the turn before.

    It is info["profile"] of the turn's tokens, NaN where an observation has none. Provides profile. It goes around the
    run's agents; InputError around another rollout, and for conversations that are compacted.
    """

    def of_row(path: Path, row: Episode) -> list[float]:
        seen = [*(before.seen for before in path.past[1:]), path.seen]
        said = [float(one.info.get(name, math.nan)) for one in seen]
        begin: Any = row.info["first_turn"]
        first = int(begin)
        return [said[first + turn] if turn >= 0 else math.nan for turn in row.turns.tolist()]

    paths = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
    rows = await graded(tools, [path.one for path in paths], settings.turn_rewards)
    return [
        row.with_info(profile=of_row(path, row)) for path, of_one in zip(paths, rows, strict=True) for row in of_one
    ]
