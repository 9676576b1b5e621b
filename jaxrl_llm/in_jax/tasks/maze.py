"""Tasks of several turns in mazes: one whose walls are shown, in which the environment answers each move with the place
that it led to, and one that the policy has to learn, with a reward for each move that leads nearer to its goal."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.task import Environment, Scores, Task, check_sizes, environment_task, number_of
from jaxrl_llm.selection.rows import mix

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right


def maze(size: int = 3, moves: int = 6) -> Task:
    """Go to a goal in a square of `size` x `size` cells, one of which is a wall, in at most so many moves.

    The prompt shows start, goal and wall. The policy chooses a move; the environment answers with the cell that it led
    to, or with the end at the goal. Moves against a wall, and tokens that are no moves, lead nowhere; an end gives up.
    "reached", the reward, is 1 where the goal was reached. One wall cuts nothing off, and `moves` are enough for any
    prompt. `answer` is a shortest way.
    """
    check_sizes(size=(size, 3, 5))
    cells = size * size
    check_sizes(moves=(moves, 2 * size, 4 * size))
    separator, end = cells + len(MOVES), cells + len(MOVES) + 1
    T = 2 * moves
    rows, columns = np.divmod(np.arange(cells), size)
    ways = [np.clip(rows + down, 0, size - 1) * size + np.clip(columns + right, 0, size - 1) for down, right in MOVES]
    beside = jnp.array(ways, jnp.int32).T

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
        return jnp.append(jax.random.permutation(key, cells)[:3], separator).astype(jnp.int32)

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

    return Task(
        "maze", cells + len(MOVES) + 2, 4, T, end, sample, answer, score,
        lambda prompt: number_of(prompt[:3], cells), cells**3, "reached", given=given,
    )  # fmt: skip


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
    part = list(range(cells))
    closed = []
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
    check_sizes(size=(size, 2, 5), turns=(turns, 1, 64), doors=(doors, 0, 16), layout=(layout, 0, 2**31 - 1))
    check_number("outcome", outcome, least=0, most=1)
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
