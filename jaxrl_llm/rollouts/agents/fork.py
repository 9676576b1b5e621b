"""Groups of episodes with environments that fork after observations, where these made the policy less certain.

And a tree of episodes that grows where episodes do well: Monte Carlo tree search with UCB.
"""

from __future__ import annotations

import logging
import math
from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import AtLeastTwo, Count, Fraction, NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed
from jaxrl_llm.rollouts.agents.metrics import FORKED
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, begun, converse, played
from jaxrl_llm.rollouts.agents.program import agents_part, ends_of, graded
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.trees import by_prefix

logger = logging.getLogger("jaxrl_llm.rollouts")
Forks = Callable[[float, float, int], bool]
"""Of the change of the entropy, a uniform number in [0, 1), and the rounds with forks just before: whether to fork."""


@part
def by_chance(probability: Fraction = 0.5, weight: float = 0.2, damping: NonNegative = 0.0) -> Forks:
    """Fork where clip((u + weight dH) max(0, 1 - damping l), 0, 1) >= 1 - probability.

    With damping 0 that has the probability `probability` + weight dH. dH: change of the entropy; l: see `Forks`.
    """

    def forks(change: float, uniform: float, rounds: int) -> bool:
        raised = (uniform + weight * change) * max(0.0, 1.0 - damping * rounds)
        return min(max(raised, 0.0), 1.0) >= 1.0 - probability

    return forks


def whole_paths(budget: int, at_question: float, of_turns: float, beta: float) -> int:
    """How many of `budget` paths begin at the question: floor(budget sigmoid(beta (H_question - H_turns))) + 1, or all.

    >>> whole_paths(16, 1.0, 2.0, 0.5), whole_paths(16, 2.0, 1.0, 0.5), whole_paths(4, 9.0, 0.0, 1.0)
    (7, 10, 4)
    """
    return min(math.floor(budget / (1 + math.exp(-beta * (at_question - of_turns)))) + 1, budget)


def reply_entropy(entropies: Sequence[float] | np.ndarray, first: int, vocabulary: int, summed: bool = False) -> float:
    """Mean or sum of the entropies of a reply's first tokens over the logarithm of the vocabulary's size; 0 without.

    >>> round(reply_entropy([2.0, 1.0, 9.0], 2, 10), 4), round(reply_entropy([2.0, 1.0, 9.0], 2, 10, summed=True), 4)
    (0.6514, 1.3029)
    """
    drawn = np.asarray(entropies, np.float64)[:first]
    if not drawn.size:
        return 0.0
    return float(np.sum(drawn) if summed else np.mean(drawn)) / math.log(max(vocabulary, 2))


@agents_part(
    "the episodes of agents fork after observations", "forking", provides={"node"},
    least=lambda initial, **_: (initial or 1) + 1,
)  # fmt: skip
async def forking_agents(
    tools: Tools,
    task: Task,
    settings: AgentSettings,
    forks: Forks,
    initial: Count | None = 8,
    branches: AtLeastTwo = 2,
    first_tokens: Count = 20,
    beta: float = 0.5,
    summed: bool = False,
) -> list[Episode]:
    """The episodes of the run's agents as trees that fork after observations, `task.samples` in all.

    `initial` of them begin at the question. All take their turns in rounds. After each reply to an observation `forks`
    says, `branches` - 1 times, whether another episode goes on from there with a reply of its own and a copy of the
    environment, until there are as many as the group has samples. If all are over before, the others begin at the
    question. initial None: a first episode is played to its end, and `whole_paths` of the entropy of its first reply,
    the mean of its replies', and beta says how many begin there, it included.

    The entropy of a reply is the mean over its first `first_tokens` tokens, or with `summed` their sum, divided by the
    logarithm of the vocabulary's size; its change is that to the first reply of the episode. Each episode has all of
    its tokens, those from before a fork too. Provides node, the same for tokens that episodes share. It goes around the
    run's agents; InputError around another rollout.
    """

    def entropy_of(path: Path) -> float:
        drawn = path.one.rows[-1].segments[-1].tokens.entropy
        return reply_entropy(drawn, first_tokens, len(path.tools.tokenizer), summed)

    paths: list[Path] = []
    at_first: dict[int, float] = {}
    begins: dict[int, int] = {}  # the first turns of forks, which have no observation of their own before them
    level = 0

    async def begin(number: int) -> None:
        first = len(paths)
        paths.extend(await gather(*(begun(tools, task, first + i, settings) for i in range(number))))
        for path in paths[first:]:
            path.one.info[FORKED] = 0.0

    wanted = min(initial or 1, task.samples)
    await begin(wanted)
    if initial is None:
        of_turns = list[float]()
        while not paths[0].over:
            await paths[0].draw()
            of_turns.append(entropy_of(paths[0]))
            await paths[0].hear()
        if of_turns:
            wanted = whole_paths(task.samples, of_turns[0], float(np.mean(of_turns)), beta)
        await begin(wanted - 1)
    while True:
        if not (live := [path for path in paths if not path.over]):
            if len(paths) == task.samples:
                break
            await begin(task.samples - len(paths))
            continue
        await gather(*(path.draw() for path in live))
        chosen = list[tuple[Path, int]]()
        for path in live:
            now = entropy_of(path)
            change = now - at_first.setdefault(path.number, now)
            for place in range(branches - 1 if path.turn > begins.get(path.number, 0) else 0):
                drawn = float(tools.random(f"fork {path.number}/{path.turn}/{place}").random())
                if len(paths) + len(chosen) < task.samples and forks(change, drawn, level):
                    number = len(paths) + len(chosen)
                    at_first[number], begins[number] = at_first[path.number], path.turn
                    chosen.append((path, number))
        made = await gather(*(forked(path, number) for path, number in chosen))
        await gather(*(path.hear() for path in live))
        level = level + 1 if chosen else 0
        paths += made
    await gather(*(path.close() for path in paths))
    found = [path.one for path in paths]
    rows = await graded(tools, found, settings.turn_rewards)
    return shared_nodes([row for of_one in rows for row in of_one])


async def forked(path: Path, number: int) -> Path:
    """The episode before the reply that was drawn last, as another sample. Not scored if there can be no copy."""
    fork = path.before(path.turn, number)
    try:
        await fork.copy_world()
        fork.one.info[FORKED] = 1.0
    except EnvironmentFailed as error:
        logger.warning(
            "sample %d of prompt %d does not fork, and is not scored: its environment is not copied: %s",
            *(number, path.task.prompt_id, error),
        )
        fork.one.scored, fork.over, fork.world = False, True, None
        fork.one.info[FORKED] = 0.0
    return fork


def shared_nodes(rows: Sequence[Episode]) -> list[Episode]:
    """The rows with info["node"] by their common tokens, `trees.by_prefix`; rows of other prompts share none."""
    out, first = list(rows), 0.0
    for prompt in dict.fromkeys(row.prompt for row in rows):
        places = [i for i, row in enumerate(rows) if row.prompt == prompt]
        found = by_prefix([rows[i] for i in places])
        highest = first
        for i, one in zip(places, found, strict=True):
            nodes = [node + first for node in np.atleast_1d(one.info["node"]).tolist()]
            highest = max([highest, *(node + 1 for node in nodes)])
            out[i] = one.with_info(node=nodes)
        first = highest
    return out


@dataclass
class _Node:
    """A state of the environment: that of an episode before one of its replies, or after its last."""

    path: Path | None = None  # an episode through it; None for the root before the first one
    turn: int = 0  # replies before it
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)  # states after replies that were tried here, in order
    visits: int = 0
    total: float = 0.0  # the values of the episodes through it, added up
    ended: bool = False

    def open(self, width: int) -> bool:
        """Whether another reply can be tried here or below."""
        return not self.ended and (len(self.children) < width or any(one.open(width) for one in self.children))


class Searched(NamedTuple):
    """A finished episode of the tree."""

    path: Path
    end: Episode  # its last row, scored by the run's reward functions
    value: float  # its score and the rewards of its turns; NaN: not scored


async def scored_paths(paths: Sequence[Path]) -> list[Searched]:
    """Episodes of one task that are over, with their ends, scored together."""
    settings = paths[0].settings
    ends = await ends_of(paths[0].tools, [path.one for path in paths], settings.turn_rewards)
    of_turns = [sum(path.one.rewards) if settings.turn_rewards else 0.0 for path in paths]
    return [Searched(path, end, end.score + more) for path, end, more in zip(paths, ends, of_turns, strict=True)]


def upper_bound(node: _Node, exploration: float) -> float:
    """The mean value of a child and exploration sqrt(ln n / n_child), n the visits of its parent (UCB1).

    >>> parent = _Node(visits=4)
    >>> round(upper_bound(_Node(parent=parent, visits=2, total=1.0), 1.0), 6)
    1.332555
    """
    assert node.parent is not None
    return node.total / node.visits + exploration * math.sqrt(math.log(node.parent.visits) / node.visits)


def _chosen(root: _Node, width: int, exploration: float) -> _Node | None:
    """Where the next episode leaves the tree; None where no state is open.

    From the root on to the open child with the largest `upper_bound`, the first of equal ones, until a state has been
    left by fewer than `width` replies.
    """
    if not root.open(width):
        return None
    node = root
    while len(node.children) >= width:
        node = max((one for one in node.children if one.open(width)), key=lambda one: upper_bound(one, exploration))
    return node


def _grow(node: _Node, path: Path, value: float) -> None:
    """Add the states of an episode after it left the tree at a node, and count it in all states that it went through.

    value: NaN counts as 0.
    """
    for turn in range(node.turn + 1, len(path.past) + 1):
        node.children.append(_Node(path, turn, node, ended=turn == len(path.past)))
        node = node.children[-1]
    above: _Node | None = node
    while above is not None:
        above.path = path if above.path is None else above.path
        above.visits += 1
        above.total += 0.0 if math.isnan(value) else value
        above = above.parent


async def searched(
    tools: Tools, task: Task, settings: AgentSettings, episodes: int, width: int, exploration: float
) -> tuple[list[Searched], _Node]:
    """So many episodes of a task as a tree, in the order of their sample numbers, and its root.

    The first `width` begin at the beginning. Each of the others leaves the tree at the `_chosen` state, with a reply of
    its own and a copy of the environment, and is played to its end, whose states all become part of the tree. Where no
    state is open, or there can be no copy, it is an episode of its own from the beginning on.
    """
    root, found = _Node(), list[Searched]()

    def add(node: _Node, one: Searched) -> None:
        found.append(one)
        if one.path.past:  # else its environment could not begin
            _grow(node, one.path, one.value)

    async def fresh(number: int) -> Searched:
        return (await scored_paths([await converse(tools, task, number, settings)]))[0]

    for one in await gather(*map(fresh, range(min(width, episodes)))):
        add(root, one)
    for number in range(min(width, episodes), episodes):
        node = _chosen(root, width, exploration)
        path = None
        if node is not None and node.path is not None and node.turn:
            path = node.path.before(node.turn, number)
        if node is None or path is None or not await path.has_copy():
            add(root, await fresh(number))
            continue
        path.one.info = {}  # which counts what happens in its own turns
        add(node, *await scored_paths([await played(path)]))
    return found, root
