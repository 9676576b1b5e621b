"""A maze that the policy has to learn: it hears after each move where it is, and is rewarded for every step nearer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.in_jax.tasks.environment import Environment, environment_task
from jaxrl_llm.in_jax.tasks.maze import MOVES
from jaxrl_llm.in_jax.tasks.task import Array, Scores, Task


class Place(NamedTuple):
    """Where an episode is."""

    start: Array
    goal: Array
    cell: Array


def passages(size: int, doors: int, layout: int) -> np.ndarray:
    """int[size * size, 4]: the cell that each move leads to, the cell itself at a wall.

    Every cell can be reached: the passages are a tree over all cells and `doors` more, drawn by the number `layout`.
    """
    cells, random = size * size, np.random.default_rng(layout)
    beside = np.tile(np.arange(cells)[:, None], (1, len(MOVES)))
    walls = [
        (row * size + column, move, (row + down) * size + column + right)
        for row in range(size) for column in range(size) for move, (down, right) in enumerate(MOVES)
        if move % 2 and row + down < size and column + right < size
    ]  # fmt: skip
    random.shuffle(walls)
    part, closed = list(range(cells)), []
    for cell, move, other in walls:
        if part[cell] == part[other]:
            closed.append((cell, move, other))
            continue
        part = [part[cell] if x == part[other] else x for x in part]
        beside[cell, move], beside[other, move - 1] = other, cell
    for cell, move, other in closed[:doors]:
        beside[cell, move], beside[other, move - 1] = other, cell
    return beside


def distances(beside: np.ndarray) -> np.ndarray:
    """int[cells, cells]: the fewest moves to a goal (the first axis) from a cell."""
    cells = len(beside)
    far = np.where(np.eye(cells, dtype=bool), 0, cells)
    for _ in range(cells):
        far = np.minimum(far, 1 + far[:, beside].min(axis=2))
    return far


def text_maze(size: int = 4, doors: int = 3, spare: int = 2, outcome: float = 0.5, layout: int = 0) -> Task:
    """Go to a goal in a maze of `size` x `size` cells, always the same, whose walls are not shown.

    The prompt is the goal. Each turn tells the cell, and whether the last move led anywhere; the policy replies with a
    move. There are `spare` turns more than the longest way has moves. A turn is worth the share of the shortest way that
    its move was nearer to the goal, negative for steps back; together that is at most 1 - outcome. "reached", worth
    `outcome`, is 1 at the goal, where the episode ends. doors: passages beyond those of a tree, so that several ways
    lead to a goal. layout: another number is another maze.
    """
    check_number("size", size, least=2, most=5, whole=True)
    check_number("doors", doors, least=0, most=8, whole=True)
    check_number("spare", spare, least=0, most=16, whole=True)
    check_number("outcome", outcome, least=0, most=1)
    check_number("layout", layout, least=0, most=2**31 - 1, whole=True)
    cells = size * size
    ways = passages(size, doors, layout)
    beside, far = jnp.asarray(ways, jnp.int32), jnp.asarray(distances(ways), jnp.int32)
    begin, moved, blocked, end = range(cells + len(MOVES), cells + len(MOVES) + 4)

    def sample(key: Array) -> Array:
        return jax.random.permutation(key, cells)[:2].astype(jnp.int32)  # the goal, and the hidden start

    def reset(prompt: Array) -> tuple[Place, Array]:
        return Place(prompt[1], prompt[0], prompt[1]), jnp.stack([jnp.int32(begin), prompt[1]])

    def step(state: Place, reply: Array) -> tuple[Place, Array, Array, Array]:
        move = reply[0] - cells
        there = beside[state.cell, jnp.clip(move, 0, len(MOVES) - 1)]
        cell = jnp.where((move >= 0) & (move < len(MOVES)), there, state.cell)
        to_goal = far[state.goal]
        reward = (1 - outcome) * (to_goal[state.cell] - to_goal[cell]) / to_goal[state.start]
        word = jnp.where(cell == state.cell, blocked, moved)
        return state._replace(cell=cell), jnp.stack([word, cell]).astype(jnp.int32), reward, cell == state.goal

    def score(state: Place) -> tuple[Scores, Array]:
        reached = (state.cell == state.goal).astype(jnp.float32)
        return {"reached": reached}, outcome * reached

    def best(state: Place) -> Array:
        return (cells + jnp.argmin(far[state.goal][beside[state.cell]]))[None].astype(jnp.int32)

    longest = int(distances(ways).max())
    environment = Environment(longest + spare, 2, 1, reset, step, lambda state: state.cell, score, best)
    return environment_task(
        "text_maze", end + 1, 1, 1, end, sample, lambda prompt: prompt[0] * cells + prompt[1], cells**2, "reached",
        environment,
    )  # fmt: skip
