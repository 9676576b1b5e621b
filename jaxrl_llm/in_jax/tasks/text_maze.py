"""A maze that the policy has to learn: it hears after each move where it is, and is rewarded for each that leads nearer
to its goal."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.environment import environment_task
from jaxrl_llm.in_jax.tasks.maze import MOVES
from jaxrl_llm.in_jax.tasks.task import Environment, Scores, Task
from jaxrl_llm.selection.noise import mix


class Place(NamedTuple):
    """Where an episode is."""

    cell: Array
    goal: Array
    seed: Array  # of the goals to come
    turn: Array
    nearer: Array  # moves that led nearer to their goal
    goals: Array  # that were reached


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


SEEDS = 64


def text_maze(size: int = 3, turns: int = 12, doors: int = 0, outcome: float = 0.25, layout: int = 0) -> Task:
    """Walk to one goal after the other in a maze of `size` x `size` cells, always the same, whose walls are not shown.

    Each turn tells the cell and the goal, and the policy replies with a move. The goal is another one as soon as it is
    reached. A move that leads nearer to the goal is worth (1 - outcome) / turns, any other nothing, and "straight",
    worth `outcome`, is 1 where all moves did. doors: passages beyond those of a tree, so that several ways lead to a
    goal. layout: another number is another maze.
    """
    check_number("size", size, least=2, most=5, whole=True)
    check_number("turns", turns, least=1, most=64, whole=True)
    check_number("doors", doors, least=0, most=16, whole=True)
    check_number("outcome", outcome, least=0, most=1)
    check_number("layout", layout, least=0, most=2**31 - 1, whole=True)
    cells = size * size
    ways = passages(size, doors, layout)
    beside, far = jnp.asarray(ways, jnp.int32), jnp.asarray(distances(ways), jnp.int32)
    begin, end = cells + len(MOVES), cells + len(MOVES) + 1

    def sample(key: Array) -> Array:
        for_cells, for_seed = jax.random.split(key)
        hidden = jax.random.permutation(for_cells, cells)[:2], jax.random.randint(for_seed, (1,), 0, SEEDS)
        return jnp.concatenate([jnp.array([begin]), *hidden]).astype(jnp.int32)

    def reset(prompt: Array) -> tuple[Place, Array]:
        none = jnp.int32(0)
        return Place(prompt[1], prompt[2], prompt[3], none, none, none), prompt[1:3]

    def step(state: Place, reply: Array) -> tuple[Place, Array, Array, Array]:
        move = reply[0] - cells
        there = beside[state.cell, jnp.clip(move, 0, len(MOVES) - 1)]
        cell = jnp.where((move >= 0) & (move < len(MOVES)), there, state.cell)
        nearer = far[state.goal, cell] < far[state.goal, state.cell]
        chance = mix(mix(state.seed.astype(jnp.uint32)) + state.goals.astype(jnp.uint32))
        another = (cell + 1 + (chance % (cells - 1)).astype(jnp.int32)) % cells
        reached = cell == state.goal
        after = Place(
            cell, jnp.where(reached, another, state.goal), state.seed, state.turn + 1, state.nearer + nearer,
            state.goals + reached,
        )  # fmt: skip
        return after, jnp.stack([cell, after.goal]), (1 - outcome) / turns * nearer, after.turn == turns

    def score(state: Place) -> tuple[Scores, Array]:
        straight = (state.nearer == turns).astype(jnp.float32)
        return {"straight": straight}, outcome * straight

    def best(state: Place) -> Array:
        return (cells + jnp.argmin(far[state.goal][beside[state.cell]]))[None].astype(jnp.int32)

    def number(prompt: Array) -> Array:
        return (prompt[1] * cells + prompt[2]) * SEEDS + prompt[3]

    environment = Environment(
        turns, 2, 1, reset, step, lambda state: (state.goals * cells + state.goal) * cells + state.cell, score, best
    )
    return environment_task("text_maze", end + 1, 1, 3, end, sample, number, cells**2 * SEEDS, "straight", environment)
