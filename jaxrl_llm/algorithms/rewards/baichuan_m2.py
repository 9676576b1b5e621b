"""Baichuan-M2 (Scaling Medical Capability with Large Verifier System)."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import OURS, PAPER, RUN
from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative
from jaxrl_llm.core.buckets import bucket_quantile
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import constant
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.agents.conversation import Conversation
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, failed, observed
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, converse
from jaxrl_llm.rollouts.agents.program import graded, with_episodes
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError


@method(
    paper="arXiv 2509.02208",
    year=2025,
    test="test_group_relative.py::test_baichuan_m2_is_the_loop",
    beside={"rubrics": ("a model that writes and judges rubrics", "the run's environment and reward")},
)
def baichuan_m2(
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.28,
    length_bonus: Annotated[NonNegative, PAPER] = 4.0,
    quantile: Annotated[Fraction, PAPER] = 0.2,
    threshold: Annotated[float, OURS] = 0.5,
    max_length: Annotated[Count | None, RUN] = None,
    slices: Annotated[bool, OURS] = False,
) -> Algorithm:
    """Baichuan-M2 (Scaling Medical Capability with Large Verifier System).

    GRPO without KL and standard deviation, summed over tokens and divided by a constant as in Dr. GRPO, with separate
    clip bounds, and a bonus for short answers once a group is good. With q the `quantile` of the group's rewards,

        R_i = r_i + [q > threshold and r_i >= q] length_bonus / sqrt(|o_i|),    A_i = R_i - mean_g R
        loss = -1/N sum_i 1/max_length sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    The paper prints length_bonus 4 and quantile 0.2 (interpolated linearly), but neither threshold nor clip_low,
    clip_high and max_length (None: the longest row of the batch). Lengths are in tokens.

    Its last stage, slices with --environment, trains on single replies within dialogues with a simulated patient: the
    policy has a dialogue with it, which is cut off before a random turn, and all samples of the group are replies to
    that, scored by the environment, whose rubric is of that moment. `environments.patient.Patient` is such a patient.
    The generator of rubrics, the judge that reads them, and the filter of noisy slices are the environment's.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), constant(max_length))

    credit = chain(rescore(with_length_bonus(length_bonus, quantile, threshold)), group_relative("none"))
    return Algorithm(credit, objective, rollout=sliced() if slices else None)


@part
def with_length_bonus(size: float, quantile: float, threshold: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the scores plus their `gated_length_bonus`."""
    return lambda b: b.scores + gated_length_bonus(b.scores, b.lengths, b.group, size, quantile, threshold)


def gated_length_bonus(
    reward: jax.Array,
    lengths: jax.Array,
    group: jax.Array,
    size: float | jax.Array,
    quantile: float | jax.Array,
    threshold: float | jax.Array,
) -> jax.Array:
    """size / sqrt(length) for the samples at or above the group's quantile q where q > threshold, else 0; f32[N]."""
    q = bucket_quantile(group, reward, quantile)
    return jnp.where((q > threshold) & (reward >= q), size / jnp.sqrt(jnp.maximum(lengths, 1.0)), 0.0)


@part
def sliced() -> Rollout:
    """Episodes of the run's agents of one reply each, to a dialogue that is cut off before a random turn.

    The policy first has a whole dialogue with the environment, which is not trained on. A turn of it is drawn, all
    equally likely, and the dialogue before it, with its replies and observations, is the prompt of the whole group.
    Each sample is one reply, which a copy of the environment as it was then hears. Its reward is that of this turn and
    the final one that the environment gives thereafter.

    It goes around the run's agents, and leaves other rollouts as they are. Raises InputError for agents that compact
    their context.
    """

    def around(inner: Rollout) -> Rollout:
        if inner.agent is None:
            return inner
        if inner.agent.limits.compact is not None:
            raise InputError("dialogues that are cut into slices are not compacted: leave out compact")

        async def play(tools: Tools, task: Task, settings: AgentSettings) -> Sequence[Episode]:
            whole = await converse(tools, task, task.samples, settings)
            if not whole.past:  # the environment cannot begin, which each sample then says
                return await inner.program(tools, task)
            turn = int(tools.random("slice").integers(len(whole.past)))
            found = await gather(*(_reply(whole, turn, number) for number in range(task.samples)))
            return [row for of_one in await graded(tools, found, settings.turn_rewards) for row in of_one]

        return with_episodes(inner, play, "dialogues of agents are cut into slices", "sliced", max_episodes=None)

    return replace(group(), wrap=around)


async def _reply(whole: Path, turn: int, number: int) -> Conversation:
    """One reply in the place of that of a turn; not scored where its environment cannot be copied."""
    path, task = whole.before(turn, number), whole.task
    context = Episode(path.one.rows[-1].tokens, task.prompt_id, number)
    path.seats = [Conversation([context], task.samples, path.one.messages, path.one.asked, said=path.one.said)]
    try:
        await path.copy_world()
    except EnvironmentFailed as error:
        failed(path.one, task, number, "to be copied, so that its reply is not scored", error)
        path.one.scored = False
        return path.one
    assert path.world is not None
    await path.draw()
    try:
        path.one.note(await observed(path.tools, path.world.step, path.reply, name=f"{number}/{turn}"))
    except (EnvironmentFailed, InputError) as error:
        failed(path.one, task, number, "in step, where its episode ends", error)
    await path.close()
    return path.one
