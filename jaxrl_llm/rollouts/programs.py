"""Rollout programs: async functions of (tools, task) that sample one group of episodes.

And rollouts that are drawn otherwise: through a hook of the sampler, with soft tokens, or by members of a population.
"""

import math
from asyncio import gather
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

import jax
import numpy as np

from jaxrl_llm.core.arguments.ranges import AtLeastTwo, Count
from jaxrl_llm.core.hooks import Hook, first_state
from jaxrl_llm.core.parts import settings_first
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Program, Rollout, Task, drawn
from jaxrl_llm.core.soft_thinking import SoftThinking
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, Segment
from jaxrl_llm.sampling import filters
from jaxrl_llm.selection.rows import max_variance_subset
from jaxrl_llm.utils.errors import InputError, shown

_max_variance_subset = jax.jit(max_variance_subset)
Settings = ParamSpec("Settings")


def program_part(
    name: str,
    provides: Iterable[str] = (),
    columns: Iterable[str] = (),
    demands: Demands | Callable[..., Demands] | None = None,
) -> Callable[
    [Callable[Concatenate[Tools, Task, Settings], Awaitable[Sequence[Episode]]]], Callable[Settings, Rollout]
]:
    """Decorate an async function of tools, a task and settings: given the settings, it is the `Rollout` of a program.

    name, columns: may hold settings in braces; a column that is a setting is none where that is None, or what stands
    after it, "{column}|completion|answer": rows have one of these. demands: or a function of the settings, which are
    its keyword arguments.
    """

    def read_by(given: Mapping[str, Any]) -> Iterator[str]:
        for one in columns:
            setting, _, otherwise = one.partition("|")
            yield otherwise if given.get(setting.strip("{}"), setting) is None else setting.format(**given)

    def made(program: Any) -> Rollout:
        given = program.settings
        read = tuple(filter(None, read_by(given)))
        wanted = demands(**given) if callable(demands) else demands or Demands()
        return Rollout(program, name.format(**given), frozenset(provides), read, wanted)

    return lambda function: settings_first(function, 2, made, Rollout)


async def samples(tools: Tools, prompt: Sequence[int], numbers: Iterable[int]) -> list[Episode]:
    """A sample of a prompt's token ids with each of these sample numbers."""
    return list(await gather(*(tools.sample(prompt, number=number) for number in numbers)))


async def scored_samples(tools: Tools, prompt: Sequence[int], numbers: Iterable[int]) -> list[Episode]:
    """`samples`, which are scored together."""
    found = await samples(tools, prompt, numbers)
    return await tools.score(found) if found else []


async def scored_where(tools: Tools, episodes: Sequence[Episode], known: Sequence[bool]) -> list[Episode]:
    """Episodes scored by the run's reward functions; those that are not known have the score NaN."""
    asked = [one for one, here in zip(episodes, known, strict=True) if here]
    scores = iter(await tools.score(asked) if asked else [])
    return [next(scores) if here else one.scored(math.nan) for one, here in zip(episodes, known, strict=True)]


async def scored_whole(tools: Tools, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with the rewards of all their tokens after the prompt, given ones too."""
    # Reward functions see what is marked as sampled.
    whole = [replace(episode, segments=(Segment(episode.own, True, episode.experts),)) for episode in episodes]
    found = await tools.score(whole)
    return [replace(e, reward=one.reward, rewards=one.rewards) for e, one in zip(episodes, found, strict=True)]


@program_part("group", demands=Demands(at_once=True))
async def group(tools: Tools, task: Task) -> list[Episode]:
    """`task.samples` independent samples of the prompt, as in GRPO."""
    return await samples(tools, task.prompt, range(task.samples))


def altered(
    rollout: Rollout,
    program: Program,
    name: str,
    provides: Iterable[str] = (),
    columns: Iterable[str] = (),
    wrap: Callable[[Rollout], Rollout] | None = None,
    **demands: Any,
) -> Rollout:
    """A rollout whose program is made of another one's.

    name: appended to that of the rollout. provides, columns: beside its own. wrap: None: its own. demands: the fields
    of its `Demands` that differ.
    """
    return replace(
        rollout,
        program=program,
        name=f"{rollout.name}, {name}",
        provides=rollout.provides | {*provides},
        columns=(*rollout.columns, *columns),
        demands=replace(rollout.demands, **demands),
        wrap=wrap or rollout.wrap,
    )


@part
def marked(rollout: Rollout, **info: float) -> Rollout:
    """A rollout whose episodes have these numbers in `info`; it provides them."""

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return [episode.with_info(**info) for episode in await rollout.program(tools, task)]

    return replace(rollout, program=program, provides=rollout.provides | {*info})


@part
def with_greedy_baseline(rollout: Rollout) -> Rollout:
    """A rollout that also samples the greedy completion of the prompt, whose reward is a baseline (ReMax).

    Provides info["greedy_reward"]. The greedy completion itself is not trained on.
    """

    async def greedy_reward(tools: Tools, task: Task) -> float:
        (best,) = await tools.score([await tools.sample(task.prompt, number=0, greedy=True)])
        assert best.reward is not None
        return best.reward

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes, baseline = await gather(rollout.program(tools, task), greedy_reward(tools, task))
        return [episode.with_info(greedy_reward=baseline) for episode in episodes]

    return altered(rollout, program, "greedy", {"greedy_reward"})


@program_part("down_sampled({times})", demands=Demands(at_once=True))
async def down_sampled(tools: Tools, task: Task, times: AtLeastTwo = 2) -> list[Episode]:
    """Sample `times` as many completions as a group has, and train on those whose rewards have the largest variance.

    Sampling is cheaper than training, and among more samples there are more often both right and wrong ones (PODS:
    max-variance down-sampling, Not All Rollouts are Useful, arXiv 2504.13818).
    """
    episodes = await scored_samples(tools, task.prompt, range(times * task.samples))
    return [episodes[i] for i in most_varied([episode.reward for episode in episodes], task.samples)]


def most_varied(rewards: Sequence[float | None], keep: int) -> list[int]:
    """Ascending indices of the `keep` rewards with the largest variance, which are the smallest and the largest ones.

    See `selection.rows.max_variance_subset`, also for ties. None and NaN are taken only if there are too few others.

    >>> most_varied([0.1, 0.2, 0.9, 0.4, 0.5, 1.0], 4)
    [0, 1, 2, 5]
    """
    values = np.array(rewards, np.float32)  # of None: NaN
    known, places = ~np.isnan(values), np.arange(len(rewards), dtype=np.float32)
    chosen = np.flatnonzero(_max_variance_subset(np.where(known, values, 0), known, np.float32(keep), places))
    return sorted([*chosen.tolist(), *np.flatnonzero(~known)[: keep - len(chosen)].tolist()])


@part
def forked(*places: int) -> Rollout:
    """Samples that fork: every episode splits in two at each of the places, ascending numbers of completion tokens.

    A trunk has 2 ** len(places) leaves, and there are as many trunks as `task.samples` needs. Both branches of a fork
    contain the tokens before it as actions. A completion that ends before a fork replaces all leaves that it would have
    had. Raises InputError unless places are ascending and at least 1.
    """
    if not places or list(places) != sorted(set(places)) or places[0] < 1:
        raise InputError(f"forks are at {shown(places)}, but must be at ascending numbers of tokens, at least 1")

    async def grow(
        tools: Tools, task: Task, episode: Episode, number: int, left: Sequence[int], n: int
    ) -> list[Episode]:
        """`n` leaves of an episode, with sample numbers from `number` on. They are equal if it ends before it forks."""
        limit = task.limit - episode.size
        if not left or n == 1:
            return [await tools.sample(episode, number=number, limit=limit)]
        reached = await tools.sample(episode, number=number, limit=limit, pause_at=left[0] - episode.size)
        if reached.ended or reached.truncated:
            return [reached] * n
        half = n // 2
        kept = grow(tools, task, reached, number, left[1:], n - half)
        other = grow(tools, task, reached, number + n - half, left[1:], half)
        return [leaf for leaves in await gather(kept, other) for leaf in leaves]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        leaves = 2 ** len(places)
        trunks = []
        for start in range(0, task.samples, leaves):
            trunk = Episode(task.prompt, task.prompt_id, start)
            trunks.append(grow(tools, task, trunk, start, places, min(leaves, task.samples - start)))
        return [leaf for part in await gather(*trunks) for leaf in part]

    return Rollout(program, f"forked({', '.join(map(str, places))})", demands=Demands(forks=places))


@program_part("conversation", {"turns"}, demands=lambda turns, **_: Demands(turns=turns))
async def conversation(
    tools: Tools, task: Task, environment: Callable[[dict[str, Any]], Any], turns: Count = 2
) -> list[Episode]:
    """Episodes of at most `turns` turns with an environment.

    environment: builds the environment for a row of the data set. Its `step(text)` takes the policy's text and returns
    (observation, done). The observation is given to the policy before its next turn. The run's reward functions score
    the whole conversation. Provides turns.
    """

    async def one(tools: Tools, task: Task, number: int) -> Episode:
        place = f"environment {number}"
        if (world := tools.held(place)) is None:
            world = tools.hold(place, environment(dict(task.row)))
        again = tools.reruns(world)
        episode = await tools.sample(task.prompt, number=number)
        for turn in range(1, turns):
            text = tools.decode(episode.last)
            observation, done = await tools.call(world.step, text, name=f"{number}/{turn}", again=again)
            if done or episode.truncated:
                break
            episode = await tools.sample(episode + tools.given(str(observation)))
        return episode

    return list(await gather(*(one(tools, task, number) for number in range(task.samples))))


@part
def hooked(rollout: Rollout, hook: Hook, provides: Iterable[str] = ()) -> Rollout:
    """A rollout whose tokens are drawn through a hook (`jaxrl_llm.core.hooks`), through which the update goes as well.

    The hook's numbers are those in the controls of the last update; each episode has them in info. Samples at a
    temperature of their own, and greedy ones, do not go through it. provides: names of `jaxrl_llm.core.needs` among
    these numbers. Raises InputError for a rollout that is drawn otherwise already.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers = first_state(hook, tools.controls)
        episodes = await rollout.program(tools, task)
        return [episode.with_info(**numbers) for episode in episodes] if numbers else list(episodes)

    return replace(drawn(rollout, hook, hook.name, provides), program=program)


@part
def top_nsigma(n: float = 1.0) -> Rollout:
    """Independent samples, drawn among the tokens of `sampling.filters.top_nsigma`."""
    return replace(hooked(group(), filters.top_nsigma(n)), name=f"top_nsigma({n:g})")


@part
def softly(rollout: Rollout, thinking: SoftThinking) -> Rollout:
    """A rollout whose samples think softly, see `core.soft_thinking`, until they write the token that ends thoughts.

    All that is drawn from the policy that learns does so: at a temperature of its own too, and without noise where it
    is greedy. The update sees the same mixtures (`Trajectories.thoughts`). Raises InputError for a rollout that goes on
    after observations, draws from other policies, or is drawn otherwise already.
    """
    return drawn(rollout, thinking, "softly")


@part
def soft_thoughts(thinking: SoftThinking) -> Rollout:
    """The run's own rollout, `softly`; else a group of samples."""
    return replace(softly(group(), thinking), wrap=lambda rollout: softly(rollout, thinking))


MEMBERS = frozenset({"member", "member_seed"})


@part
def evolved(rollout: Rollout, population: Population) -> Rollout:
    """A rollout in which sample i of the j-th prompt of a step, of g samples each, is that of member j g + i, greedy.

    All randomness is in the weights, see `core.population`. Two members that share their noise answer the same prompt
    where g is even. Samples at a temperature of their own, greedy ones, those of evaluations and of a reference policy
    are the policy's. It provides info["member"], the member's number, and info["member_seed"], the seed of the noise.
    Raises InputError for a rollout that is drawn otherwise already.
    """
    return drawn(rollout, population, "evolved", MEMBERS)


@part
def members(population: Population) -> Rollout:
    """The run's own rollout, such as the agents of an environment, `evolved`; else a group of samples."""
    own = evolved(group(), population)
    return replace(own, wrap=lambda rollout: evolved(rollout, population))
