"""A tree of episodes with an environment that grows where episodes do well: Monte Carlo tree search with UCB."""

from __future__ import annotations

import math
from asyncio import gather
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, converse, played
from jaxrl_llm.rollouts.agents.program import ends_of
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode


@dataclass
class Node:
    """A state of the environment: that of an episode before one of its replies, or after its last."""

    path: Path | None = None  # an episode through it; None for the root before the first one
    turn: int = 0  # replies before it
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)  # states after replies that were tried here, in order
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


def upper_bound(node: Node, exploration: float) -> float:
    """The mean value of a child and exploration sqrt(ln n / n_child), n the visits of its parent (UCB1).

    >>> parent = Node(visits=4)
    >>> round(upper_bound(Node(parent=parent, visits=2, total=1.0), 1.0), 6)
    1.332555
    """
    assert node.parent is not None
    return node.total / node.visits + exploration * math.sqrt(math.log(node.parent.visits) / node.visits)


def chosen(root: Node, width: int, exploration: float) -> Node | None:
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


def grow(node: Node, path: Path, value: float) -> None:
    """Add the states of an episode after it left the tree at a node, and count it in all states that it went through.

    value: NaN counts as 0.
    """
    for turn in range(node.turn + 1, len(path.past) + 1):
        node.children.append(Node(path, turn, node, ended=turn == len(path.past)))
        node = node.children[-1]
    above: Node | None = node
    while above is not None:
        above.path = path if above.path is None else above.path
        above.visits += 1
        above.total += 0.0 if math.isnan(value) else value
        above = above.parent


async def searched(
    tools: Tools, task: Task, settings: AgentSettings, episodes: int, width: int, exploration: float
) -> tuple[list[Searched], Node]:
    """So many episodes of a task as a tree, in the order of their sample numbers, and its root.

    The first `width` begin at the beginning. Each of the others leaves the tree at the `chosen` state, with a reply of
    its own and a copy of the environment, and is played to its end, whose states all become part of the tree. Where no
    state is open, or there can be no copy, it is an episode of its own from the beginning on.
    """
    root, found = Node(), list[Searched]()

    async def graded(path: Path) -> Searched:
        (end,) = await ends_of(tools, [path.one], settings.turn_rewards)
        of_turns = sum(path.one.rewards) if settings.turn_rewards else 0.0
        return Searched(path, end, end.score + of_turns)

    def add(node: Node, one: Searched) -> None:
        found.append(one)
        if one.path.past:  # else its environment could not begin
            grow(node, one.path, one.value)

    async def fresh(number: int) -> Searched:
        return await graded(await converse(tools, task, number, settings))

    for one in await gather(*map(fresh, range(min(width, episodes)))):
        add(root, one)
    for number in range(min(width, episodes), episodes):
        node = chosen(root, width, exploration)
        path = None if node is None or node.path is None or not node.turn else node.path.before(node.turn, number)
        if node is None or path is None or not await path.has_copy():
            add(root, await fresh(number))
            continue
        path.one.info = {}  # which counts what happens in its own turns
        add(node, await graded(await played(path)))
    return found, root
