"""A task of several turns: a maze in which the environment answers each move with the place that it led to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.task import Scores, Task, number_of

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right


def maze(size: int = 3, moves: int = 6) -> Task:
    """Go to a goal in a square of `size` x `size` cells, one of which is a wall, in at most so many moves.

    The prompt shows start, goal and wall. The policy chooses a move; the environment answers with the cell that it led
    to, or with the end at the goal. Moves against a wall, and tokens that are no moves, lead nowhere; an end gives up.
    "reached", the reward, is 1 where the goal was reached. One wall cuts nothing off, and `moves` are enough for any
    prompt. `answer` is a shortest way.
    """
    check_number("size", size, least=3, most=5, whole=True)
    cells = size * size
    check_number("moves", moves, least=2 * size, most=4 * size, whole=True)
    separator, end = cells + len(MOVES), cells + len(MOVES) + 1
    T = 2 * moves
    rows, columns = np.divmod(np.arange(cells), size)
    beside = jnp.array(
        [
            np.clip(rows + down, 0, size - 1) * size + np.clip(columns + right, 0, size - 1)
            for down, right in MOVES
        ],
        jnp.int32,
    ).T  # fmt: skip

    def step(prompt: Array, cell: Array, token: Array) -> Array:
        """int32[]: where a move leads to from a cell."""
        move = token - cells
        there = beside[cell, jnp.clip(move, 0, len(MOVES) - 1)]
        return jnp.where((move >= 0) & (move < len(MOVES)) & (there != prompt[2]), there, cell)

    def distances(prompt: Array) -> Array:
        """int32[cells]: moves to the goal; more than any way takes for the wall."""
        far = jnp.full(cells, 2 * cells).at[prompt[1]].set(0)
        wall = jnp.arange(cells) == prompt[2]
        for _ in range(2 * size):  # as many as the longest way takes
            far = jnp.where(wall, 2 * cells, jnp.minimum(far, 1 + jnp.min(far[beside], axis=1)))
        return far

    def sample(key: Array) -> Array:
        chosen = jax.random.permutation(key, cells)[:3]
        return jnp.append(chosen, separator).astype(jnp.int32)

    def given(prompt: Array, completion: Array, place: Array) -> Array:
        before = jnp.where(place >= 2, completion[jnp.maximum(place - 2, 0)], prompt[0])
        cell = step(prompt, jnp.minimum(before, cells - 1), completion[jnp.maximum(place - 1, 0)])
        return jnp.where(place % 2 == 1, jnp.where(cell == prompt[1], end, cell), -1).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        far, cell, said = distances(prompt), prompt[0], []
        for _ in range(moves):
            ways = jax.vmap(lambda move, cell=cell: step(prompt, cell, move))(cells + jnp.arange(len(MOVES)))
            best = jnp.argmin(far[ways])
            there = cell == prompt[1]
            cell = jnp.where(there, cell, ways[best])
            said += [jnp.where(there, end, cells + best), jnp.where(cell == prompt[1], end, cell)]
        return jnp.stack(said).astype(jnp.int32)

    def score(prompt: Array, completion: Array) -> tuple[Scores, Array]:
        cell = prompt[0]
        for i in range(moves):
            cell = jnp.where(cell == prompt[1], cell, step(prompt, cell, completion[2 * i]))
        reached = (cell == prompt[1]).astype(jnp.float32)
        return {"reached": reached}, reached

    def number(prompt: Array) -> Array:
        return number_of(prompt[:3], cells)

    return Task(
        "maze", cells + len(MOVES) + 2, 4, T, end, sample, answer, score, number, cells**3, "reached", given=given
    )
