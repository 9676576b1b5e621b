"""Rollouts whose completions are trees: forks on a schedule, by a budget, or at uncertain tokens; values of states.

Tokens before a fork are sampled once; the cache of the engine and the packed rows of the update hold them once, too.
An episode is the path to one leaf. Its info["node"] has, for each token after the prompt, the number of its node, which
is unique in the group and the same in all episodes that share the token.
"""

import re
from asyncio import gather
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, Range, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, checksum, known_scores, sampled_ids
from jaxrl_llm.rollouts.programs import scored_whole
from jaxrl_llm.sampling.requests import NO_TOKENS, Tokens
from jaxrl_llm.utils.errors import InputError, shown

BOXED = re.compile(r"\\boxed\{[^{}]*\}")
Path = tuple[Episode, int]  # a path of a tree, and its number of segments
Many = Annotated[int, Range(least=1, most=2**12)]


async def grow(
    tools: Tools, task: Task, episode: Episode, *, number: int | None = None, pause_at: int | None = None,
    reference: bool = False, greedy: bool = False, begun: Tokens = NO_TOKENS,
) -> Episode:  # fmt: skip
    """Continue an episode to the task's limit at most; one that is complete stays as it is. See `Tools.sample`."""
    left = task.limit - episode.size
    if episode.ended or episode.truncated or left < 1:
        return replace(episode, truncated=not episode.ended)
    return await tools.sample(
        episode, number=number, limit=left, pause_at=pause_at, reference=reference, greedy=greedy, begun=begun
    )


def _of_tokens(episode: Episode, name: str, value: float) -> Episode:
    """The episode, where the entry `name` of its info is this value for all tokens that have none yet."""
    known: Any = episode.info.get(name, ())
    return episode.with_info(**{name: [*known, *[float(value)] * (episode.size - len(known))]})


def beginning(episode: Episode, size: int) -> Episode:
    """`Episode.first`, with the nodes of these tokens."""
    nodes: Any = episode.info.get("node", ())
    return episode.first(size).with_info(node=list(nodes[:size]))


def by_prefix(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of one prompt with info["node"] by their common tokens: nodes are runs that no episode leaves."""
    rows = [episode.own.token for episode in episodes]
    numbers: dict[tuple[int, int], float] = {}
    out = []
    for row, episode in zip(rows, episodes, strict=True):
        ends = {common(row, other) for other in rows} | {len(row)}
        nodes, start = list[float](), 0
        for end in sorted(ends - {0}):
            node = numbers.setdefault((end, checksum(row[:end])), float(len(numbers)))
            nodes += [node] * (end - start)
            start = end
        out.append(episode.with_info(node=nodes))
    return out


def common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Number of equal tokens at the beginning of both.

    >>> common([1, 2, 3], [1, 2, 4, 5])
    2
    """
    a, b = np.asarray(a), np.asarray(b)
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


@part
def tree(*places: int, branches: Annotated[int, Range(least=2, most=1024)] = 2) -> Rollout:
    """Trees that fork into `branches` at each of the places, ascending numbers of completion tokens; 0 is the prompt.

    A tree has branches ** len(places) leaves, fewer where completions end before a fork. A group has one tree, or as
    many whole trees as its samples have leaves. Provides node. Raises InputError unless places ascend and branches is
    at least 2; a group fails if none of the places is below the limit of completions.
    """
    if not places or list(places) != sorted(set(places)) or places[0] < 0:
        raise InputError(f"a tree forks at {shown(places)}, but must at ascending numbers of tokens, at least 0")
    leaves = branches ** len(places)
    if leaves > 2**16:
        raise InputError(f"a tree with {len(places)} forks into {branches} has {leaves} leaves: use at most 65536")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        if places[0] >= task.limit:
            raise InputError(f"the first fork is at {places[0]} tokens, but completions have at most {task.limit}")
        trees = max(1, task.samples // leaves)

        async def below(episode: Episode, node: int, level: int) -> list[Episode]:
            whole, start = level == len(places), episode.size
            if whole or places[level] > start:
                pause = None if whole else places[level] - start
                episode = _of_tokens(await grow(tools, task, episode, pause_at=pause), "node", node)
            if whole or episode.ended or episode.truncated:
                return [episode]
            stride, parent = leaves // branches ** (level + 1), node // trees
            children = [
                below(
                    replace(episode, sample=episode.sample + k * stride),
                    (parent * branches + k + 1) * trees + node % trees,
                    level + 1,
                )
                for k in range(branches)
            ]
            return [leaf for found in await gather(*children) for leaf in found]

        roots = [Episode(task.prompt, task.prompt_id, i * leaves) for i in range(trees)]
        found = await gather(*(below(root, i, 0) for i, root in enumerate(roots)))
        return [leaf for one in found for leaf in one]

    name = f"tree({', '.join(map(str, places))}, branches={branches})"
    demands = Demands(variable_size=True, max_episodes=lambda G: max(1, G // leaves) * leaves, forks=places)
    return Rollout(program, name, frozenset({"node"}), demands=demands)


@part
def budgeted_tree(
    segment: Count = 512, depth: Count = 14, first_least: Count = 2, first_most: int = 8, branches: Count = 2
) -> Rollout:
    """One tree of `task.samples` leaves, which grows by segments of this many tokens.

    The prompt forks into first_least to first_most paths at random, each later segment into `branches`, until there
    are as many paths as leaves are wanted. A path is complete at its end token, after a boxed answer, when its last
    segment repeats itself, or, truncated, after `depth` segments. If all are complete but there are too few, the tree
    grows again from the beginning of random segments of complete paths. Provides node, a number for each segment.
    """
    check_number("first_most", first_most, least=first_least, whole=True)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers, nodes, done, live = count(), count(), list[Episode](), list[Path]()

        async def extend(path: Path, number: int, node: int) -> Path:
            episode, size = path
            return _of_tokens(await grow(tools, task, episode, number=number, pause_at=segment), "node", node), size + 1

        async def step(paths: Iterable[Path]) -> None:
            """Extend paths by a segment, each with a number of its own."""
            for episode, size in await gather(*(extend(path, next(numbers), next(nodes)) for path in paths)):
                is_answered = BOXED.search(tools.decode(sampled_ids(episode)))
                if episode.ended or episode.truncated or is_answered or repeats(episode, segment):
                    done.append(episode)
                elif size == depth:
                    done.append(replace(episode, truncated=True))
                else:
                    live.append((episode, size))

        root = (Episode(task.prompt, task.prompt_id), 0)
        await step([root] * min(first_least, task.samples))
        # What is random follows from sampled tokens, so that the program can be rerun from its log.
        random = np.random.default_rng(checksum([t for one in [*done, *(x for x, _ in live)] for t in one.tokens]))
        width = min(int(random.integers(first_least, first_most + 1)), task.samples)
        await step([root] * (width - len(done) - len(live)))
        while len(done) < task.samples:
            room = task.samples - len(done) - len(live)
            if not live:
                paths = [_restart(done, segment, random) for _ in range(room)]
            else:
                extra = [branches - 1] * len(live)
                while sum(extra) > room:
                    extra[int(np.argmax(extra))] -= 1
                paths = [path for path, more in zip(live, extra, strict=True) for _ in range(1 + more)]
            live.clear()
            await step(paths)
        return done

    return Rollout(program, f"budgeted_tree({segment})", frozenset({"node"}), demands=Demands(forks=(segment,)))


def _restart(done: Sequence[Episode], segment: int, random: np.random.Generator) -> Path:
    """The beginning of a random segment of a random episode."""
    chosen = done[int(random.integers(len(done)))]
    size = int(random.integers(max(1, -(-chosen.size // segment))))
    return beginning(chosen, size * segment), size


def repeats(episode: Episode, segment: int) -> bool:
    """Whether the last `segment` tokens, if there are 16 at least, are four or more times the same."""
    last = episode.own.token[-segment:]
    periods = range(1, len(last) // 4 + 1) if len(last) >= 16 else ()
    return any(np.array_equal(last[period:], last[:-period]) for period in periods)


@part
def entropy_forks(trees: Many = 12, forks: Many = 2, branches: Many = 2) -> Rollout:
    """Trees that fork at the tokens of highest entropy: trees * (1 + forks * branches) leaves.

    A tree begins with a whole completion. At each of the `forks` tokens of it with the highest entropy, `branches` new
    completions begin before that token. A completion of fewer tokens has fewer forks. Provides node.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        async def leaves(i: int) -> list[Episode]:
            number = i * (1 + forks * branches)
            trunk = await grow(tools, task, Episode(task.prompt, task.prompt_id, number))
            starts = [trunk.first(place) for place in most_uncertain(trunk, forks) for _ in range(branches)]
            grown = (grow(tools, task, start, number=number + 1 + k) for k, start in enumerate(starts))
            return [trunk, *await gather(*grown)]

        return by_prefix([leaf for one in await gather(*map(leaves, range(trees))) for leaf in one])

    demands = Demands(variable_size=True, max_episodes=lambda G: trees * (1 + forks * branches))
    return Rollout(program, f"entropy_forks({trees}, {forks}, {branches})", frozenset({"node"}), demands=demands)


def most_uncertain(episode: Episode, number: int) -> list[int]:
    """Ascending places of the tokens with the highest entropies, the earlier of equal ones."""
    return sorted(np.argsort(-episode.own.entropy, kind="stable")[:number].tolist())


@part
def valued(
    continuations: Annotated[int, Range(least=1, most=1024)] = 9, cut: Literal["uncertain", "lines"] = "uncertain",
    every: Count = 5, below: Fraction = 0.9, of: Literal["policy", "reference"] = "policy",
) -> Rollout:  # fmt: skip
    """Independent samples, cut into segments, with the mean reward of fresh completions from the start of each.

    cut: "uncertain", before every `every`-th token with a probability less than `below`, or "lines", after every
    `every`-th line break; the first segment begins at the prompt. Each state gets `continuations` completions, which
    are not trained on; all samples of a group share the prompt's. Provides node, a number for each segment, and
    state_value, the value at the segment's beginning; NaN if none of its completions was scored. of: which policy draws
    the completions from the states, and so whose values they are; the samples are always of the policy that learns.
    """
    by_reference = of == "reference"

    def cuts(tools: Tools, episode: Episode) -> list[int]:
        own = episode.own
        if cut == "uncertain":
            candidates = np.flatnonzero(np.exp(own.logp) < below)[every::every].tolist()
        else:
            candidates = line_starts(tools, episode)[every - 1 :: every]
        return [0, *(place for place in candidates if 0 < place < episode.size)]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        roots = [Episode(task.prompt, task.prompt_id, i) for i in range(task.samples)]
        episodes = await gather(*(grow(tools, task, root) for root in roots))
        places = [cuts(tools, episode) for episode in episodes]
        states = [roots[0], *(e.first(t) for e, own in zip(episodes, places, strict=True) for t in own[1:])]
        counts = [continuations] * len(states)
        values = await sampled_state_values(tools, task, states, counts, task.samples, by_reference)
        out, later, node = [], iter(values[1:]), 0
        for episode, own in zip(episodes, places, strict=True):
            sizes = np.diff([*own, episode.size])
            value = np.repeat([values[0], *(next(later) for _ in own[1:])], sizes)
            nodes = np.repeat(np.arange(node, node + len(own)), sizes)
            out.append(episode.with_info(node=nodes.tolist(), state_value=value.tolist()))
            node += len(own)
        return out

    name = f"valued({continuations}, {cut}{', of=reference' if by_reference else ''})"
    return Rollout(program, name, frozenset({"node", "state_value"}), demands=Demands(reference=by_reference))


def line_starts(tools: Tools, episode: Episode) -> list[int]:
    """Ascending places after the tokens with a line break; the last may be the episode's size."""
    return [t + 1 for t, token in enumerate(episode.own.token.tolist()) if "\n" in tools.decode([token])]


async def sampled_state_values(
    tools: Tools, task: Task, states: Sequence[Episode], counts: Sequence[int], first: int, reference: bool = False
) -> list[float]:
    """The mean reward of so many completions of each state, with sample numbers from `first` on; NaN: none is scored.

    A state that is complete has its own reward. reference: the completions are the reference policy's.
    """
    begun = [state for state, several in zip(states, counts, strict=True) for _ in range(several)]
    ends = await gather(
        *(grow(tools, task, state, number=first + i, reference=reference) for i, state in enumerate(begun))
    )
    ends, out = await scored_whole(tools, ends), []
    for several in counts:
        known, ends = known_scores(ends[:several]), ends[several:]
        out.append(float(known.mean()) if known.size else float("nan"))
    return out
