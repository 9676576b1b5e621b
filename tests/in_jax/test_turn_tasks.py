"""Tasks with environments: against slow plays in Python, masks at every boundary, and log-probabilities of sampling."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few

from jaxrl_llm.advantages.turns import episode_returns, turn_mask
from jaxrl_llm.algorithms import get
from jaxrl_llm.in_jax.rollout import greedy_reward, roll_out, sample_batch, true_reward
from jaxrl_llm.in_jax.settings import LabSettings, fresh_params, make_policy
from jaxrl_llm.in_jax.tasks import Task, get_task
from jaxrl_llm.in_jax.tasks.maze import distances, passages
from jaxrl_llm.in_jax.tasks.task import Environment, Played, environment_task, final_scores, play
from jaxrl_llm.in_jax.train import by_turn, task_provides
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.utils.errors import InputError

SMALL = LabSettings(prompts=2, group_size=2, hidden=4, layers=1, heads=1)
LITTLE: dict[str, dict[str, Any]] = {
    "text_maze": {"size": 3, "turns": 5, "doors": 1, "outcome": 0.5},
    "tool_first": {"questions": 2, "symbols": 3, "spare": 1, "outcome": 0.5},
    "search": {"hops": 2, "terms": 4, "passages": 2, "spare": 1, "outcome": 0.5},
}
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def mixed(x: int) -> int:
    """A hash of 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def maze_in_python(prompt: list[int], replies: list[list[int]]) -> tuple[list[list[int]], list[float], bool, float]:
    """Observations, rewards of turns, whether it is over, and the final reward; `LITTLE` has 3 x 3 cells."""
    ways, (_, cell, goal, seed) = passages(3, 1, 0).tolist(), prompt

    def far(cell: int) -> int:
        reached, moves = {cell}, 0
        while goal not in reached:
            reached, moves = reached | {x for place in reached for x in ways[place]}, moves + 1
        return moves

    seen, rewards, goals = [[cell, goal]], [], 0
    for (move,) in replies[:5]:
        there = ways[cell][move - 9] if 9 <= move < 13 else cell
        rewards.append(0.1 * (far(there) < far(cell)))
        cell = there
        if cell == goal:
            goal = (cell + 1 + mixed((mixed(seed) + goals) % 2**32) % 8) % 9
            goals += 1
        seen.append([cell, goal])
    return seen, rewards, len(replies) >= 5, 0.5 * (min(rewards) > 0)


def tool_in_python(prompt: list[int], replies: list[list[int]]) -> tuple[list[list[int]], list[float], bool, float]:
    """As `maze_in_python`. Symbols 0 to 2, then call, answer, question, value, nothing."""
    questions, values = prompt[1:3], prompt[3:]
    seen, rewards, right, at, told = [[5, questions[0]]], [], 0, 0, False
    for verb, symbol in replies:
        if at == 2:
            break
        good, word = verb == 4 and symbol == values[at], [5, questions[at]]
        hit = verb == 3 and symbol == questions[at]
        rewards.append(0.125 * (good or (hit and not told)))
        told = (told or hit) and verb != 4
        if verb == 3:
            word = [6, values[at]] if hit else [7, questions[at]]
        right += good
        at += verb == 4
        seen.append(word if verb != 4 else [5, questions[min(at, 1)]])
    return seen, rewards, at == 2, 0.5 * (right == 2)


def search_in_python(prompt: list[int], replies: list[list[int]]) -> tuple[list[list[int]], list[float], bool, float]:
    """As `maze_in_python`; the observation of a search is its term."""
    seen, rewards, found, final, over = [[-1]], [], 0, 0.0, False
    for verb, term in replies:
        if over:
            break
        on = verb == 4 and found < 2 and prompt[found] == term
        found += on
        over = verb == 5
        final = 0.5 * (over and found == 2 and term == prompt[2])
        rewards.append(0.25 * on)
        seen.append([term if verb == 4 and term < 4 else -1])
    return seen, rewards, over, final


SLOW = {"text_maze": maze_in_python, "tool_first": tool_in_python, "search": search_in_python}


def assert_observed(name: str, prompt: list[int], seen: list[int], expected: list[int]) -> None:
    if name != "search":
        assert seen == expected
    elif expected == [-1]:
        assert seen == [6] * 4  # nothing
    else:
        said = dict(zip(seen[::2], seen[1::2], strict=True))
        following = {term: prompt[(i + 1) % 4] for i, term in enumerate(prompt)}
        assert len(said) == 2
        assert said[expected[0]] == following[expected[0]]
        assert sum(said[term] == following[term] for term in said) == 1  # the distractor says what is false


@cache
def games(name: str) -> tuple[Task, np.ndarray, Played, np.ndarray]:
    """Episodes of 64 prompts in which the best reply is taken in two of three turns, and else one at random."""
    task = get_task(name, **LITTLE[name])
    world = task.environment
    assert world is not None
    prompts = jax.vmap(task.sample)(jax.random.split(jax.random.key(0), 64))

    def act(own: None, state: Any, seen: Any, given: Any) -> tuple[None, Any, None]:
        random, chance = given
        return own, jnp.where(chance < 0.67, jax.vmap(world.best)(state), random), None

    replies = jax.random.randint(jax.random.key(1), (world.turns, 64, world.reply), 0, task.vocabulary)
    chances = jax.random.uniform(jax.random.key(2), (world.turns, 64, 1))
    found = jax.jit(lambda p: play(world, p, task.end, act, inputs=(replies, chances)))(prompts)
    return task, np.asarray(prompts), jax.tree.map(np.asarray, found), np.asarray(final_scores(world, found)[1])


def assert_as_in_python(task: Task, name: str, prompt: list[int], tokens: list[int], rewards: Any, final: float) -> int:
    """Observations, turns and rewards of a completion; returns its number of turns."""
    world = task.environment
    assert world is not None
    turns = np.array(tokens).reshape(world.turns, -1)
    seen, own, over, last = SLOW[name](prompt, turns[:, world.observation :].tolist())
    assert over or len(own) == world.turns
    for turn, expected in zip(turns[: len(own)].tolist(), seen, strict=False):
        assert_observed(name, prompt, turn[: world.observation], expected)
    assert (turns[len(own) :] == task.end).all()
    np.testing.assert_allclose(rewards, own + [0.0] * (world.turns - len(own)), atol=1e-6)
    assert final == pytest.approx(last)
    return len(own)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LITTLE)
def test_a_play_in_python_gives_the_same(name: str) -> None:
    task, prompts, found, finals = games(name)
    for i, prompt in enumerate(prompts.tolist()):
        turns = assert_as_in_python(task, name, prompt, found.tokens[i].tolist(), found.rewards[i], float(finals[i]))
        np.testing.assert_array_equal(found.played[i], np.arange(found.played.shape[1]) < turns)
    assert found.played.all() == (name == "text_maze")
    assert 0.1 < (finals > 0).mean() < 0.9
    scores = jax.vmap(task.score)(prompts, found.tokens)[1]  # which plays the replies again
    np.testing.assert_allclose(scores, finals + found.rewards.sum(axis=1), atol=1e-6)


@pytest.mark.parametrize("name", LITTLE)
def test_the_best_policy_takes_the_turns_that_it_needs(name: str) -> None:
    """Its return is the stated best of 1, above which no episode is."""
    task = get_task(name, **LITTLE[name])
    world = task.environment
    assert world is not None
    prompts = np.unique(jax.vmap(task.sample)(jax.random.split(jax.random.key(3), 64)), axis=0)
    answers = np.asarray(jax.jit(jax.vmap(task.answer))(prompts))
    for prompt, said in zip(prompts.tolist(), answers.tolist(), strict=True):
        replies = np.array(said).reshape(world.turns, -1)[:, world.observation :].tolist()
        _, rewards, over, final = SLOW[name](prompt, replies)
        assert over
        assert sum(rewards) + final == pytest.approx(task.best)
        assert len(rewards) == {"text_maze": 5, "tool_first": 4, "search": 3}[name]
    _, _, found, finals = games(name)
    assert (finals + found.rewards.sum(axis=1)).max() <= task.best + 1e-6


def test_states_are_equal_where_they_should_be() -> None:
    """In the maze those of the same cell, goal and number of goals before; in the other tasks of the same progress."""
    _, _, found, _ = games("text_maze")
    turns = found.tokens.reshape(64, -1, 3)[:, :, :2]
    goals = np.cumsum(np.diff(turns[:, :, 1], axis=1, prepend=turns[:, :1, 1]) != 0, axis=1)
    numbers = (goals * 9 + turns[:, :, 1]) * 9 + turns[:, :, 0]
    pairs = set(zip(numbers.ravel().tolist(), found.states.ravel().tolist(), strict=True))
    assert len(pairs) == len({number for number, _ in pairs}) == len({state for _, state in pairs}) > 100
    _, _, found, _ = games("tool_first")
    assert (found.states[~found.played] == 0).all()
    assert len(np.unique(found.states[found.played])) == 4  # two questions, with and without the value
    _, _, found, _ = games("search")
    assert len(np.unique(found.states[found.played])) == 3


def test_every_cell_of_the_maze_can_be_reached() -> None:
    for size, doors in ((2, 0), (4, 3), (5, 8)):
        ways = passages(size, doors, 7)
        cells = np.arange(size**2)
        assert (distances(ways) < size**2).all()
        for cell in cells:
            for move, there in enumerate(ways[cell]):
                assert there == cell or ways[there][move ^ 1] == cell  # the way back is the opposite move
        assert (ways != cells[:, None]).sum() == 2 * (size**2 - 1 + min(doors, (size - 1) ** 2))


@cache
def sampled(name: str) -> tuple[Task, Any, Any, Any, Any]:
    task = get_task(name, **LITTLE[name])
    policy, params = make_policy(task, SMALL), fresh_params(jax.random.key(0), task, SMALL)
    params = jax.tree.map(lambda x: 3 * x, params)

    def sample(key: jax.Array) -> Any:
        batch, prompts = sample_batch(policy, params, task, key, 5, 8, 4, by_turn=True)
        return batch, prompts, policy_outputs(policy, params, batch)

    batch, prompts, outputs = jax.jit(sample, compiler_options=UNOPTIMISED)(jax.random.key(4))
    return task, policy, params, jax.tree.map(np.asarray, batch), (np.asarray(prompts), outputs)


@pytest.mark.parametrize("name", few(LITTLE, ("search",)))
def test_masks_turns_and_log_probabilities_of_a_batch(name: str) -> None:
    """The trainer's log-probabilities are those of sampling: all ratios are 1."""
    task, _, _, batch, (prompts, outputs) = sampled(name)
    world, P = task.environment, task.prompt_length
    assert world is not None
    length = world.observation + world.reply
    np.testing.assert_allclose(outputs.logp, batch.behaviour_logp, atol=1e-5)
    np.testing.assert_allclose(outputs.entropy, batch.entropy, atol=1e-5)
    repeated = np.repeat(prompts, 4, axis=0)
    np.testing.assert_array_equal(batch.tokens[:, :P], repeated[:, :P])
    for i, prompt in enumerate(repeated.tolist()):
        turns = assert_as_in_python(
            task, name, prompt, batch.tokens[i, P:].tolist(), batch.turn_rewards[i], float(batch.reward[i])
        )
        place = np.arange(world.turns * length)
        real, acts = place < turns * length, (place < turns * length) & (place % length >= world.observation)
        np.testing.assert_array_equal(batch.token_mask[i], [True] * P + real.tolist())
        np.testing.assert_array_equal(batch.action_mask[i], [False] * P + acts.tolist())
        np.testing.assert_array_equal(batch.turn[i], [-1] * P + np.where(acts, place // length, -1).tolist())
        assert (batch.behaviour_logp[i] < 0).tolist() == batch.action_mask[i].tolist()
    np.testing.assert_array_equal(turn_mask(batch).sum(axis=1), batch.turn.max(axis=1) + 1)
    np.testing.assert_allclose(episode_returns(batch), true_reward(batch), atol=1e-6)
    np.testing.assert_array_equal(batch.info["episode"], np.tile(np.arange(4), 8))
    np.testing.assert_array_equal(batch.info["first_turn"], 0)
    assert set(task_provides(task)) >= set(batch.info) - {"true_reward"}


@pytest.mark.heavy
def test_the_reward_is_the_return_unless_turns_are_apart() -> None:
    task, policy, params, apart, (prompts, _) = sampled("search")
    sample = jax.jit(lambda key: sample_batch(policy, params, task, key, 5, 8, 4), compiler_options=UNOPTIMISED)
    batch, again = sample(jax.random.key(4))
    np.testing.assert_array_equal(again, prompts)
    np.testing.assert_array_equal(batch.tokens, apart.tokens)
    assert batch.turn_rewards is None
    np.testing.assert_allclose(batch.reward, apart.reward + apart.turn_rewards.sum(axis=1), atol=1e-6)


def test_calls_and_failed_ones_are_counted() -> None:
    task, prompts, found, _ = games("tool_first")
    turns = np.where(found.real, found.tokens, -1).reshape(64, -1, 4)
    calls = turns[:, :, 2] == 3
    before = np.cumsum(turns[:, :, 2] == 4, axis=1) - (turns[:, :, 2] == 4)  # answers
    question = np.take_along_axis(prompts[:, 1:3], np.minimum(before, 1), axis=1)
    failed = calls & (turns[:, :, 3] != question)
    assert failed.any()
    assert task.environment is not None
    for known, counted in zip(jax.vmap(task.environment.calls)(found.last), (calls, failed), strict=True):
        np.testing.assert_array_equal(known, counted.sum(axis=1))


def said_by(length: int) -> tuple[Task, Task]:
    """A task of one token, the first of the prompt's, and the same as an environment of one turn without
    observations."""
    alone = get_task("sequence_lock", length=length, symbols=3)._replace(completion_length=1)

    def score(said: tuple[jax.Array, jax.Array]) -> Any:
        right = (said[0] == said[1]).astype(jnp.float32)
        return {"open": right}, right

    def step(state: Any, reply: jax.Array) -> Any:
        return (state[0], reply[0]), jnp.zeros(0, jnp.int32), jnp.float32(0), jnp.bool_(True)

    world = Environment(
        1, 0, 1, lambda prompt: ((prompt[0], jnp.int32(-1)), jnp.zeros(0, jnp.int32)), step, lambda state: jnp.int32(0),
        score, lambda state: state[0][None],
    )  # fmt: skip
    turns = environment_task(
        "one_turn", alone.vocabulary, length + 1, 0, alone.end, alone.sample, alone.number, alone.prompts, "open", world
    )
    return alone._replace(score=lambda prompt, said: score((prompt[0], said[0]))), turns


def test_one_turn_without_observations_is_a_task_of_one_turn() -> None:
    alone, turns = said_by(2)
    params = jax.tree.map(lambda x: 3 * x, fresh_params(jax.random.key(0), alone, SMALL))
    policy, prompts = make_policy(alone, SMALL), jax.vmap(alone.sample)(jax.random.split(jax.random.key(1), 32))

    def both(params: Any) -> Any:
        found = [roll_out(policy, params, task, prompts, jax.random.key(0), greedy=True) for task in (alone, turns)]
        return found, [greedy_reward(policy, params, task, prompts) for task in (alone, turns)]

    (one, other), (reward, same) = jax.jit(both, compiler_options=UNOPTIMISED)(params)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-6)
    np.testing.assert_array_equal(reward, same)
    assert 0 < reward.mean() < 1


def test_methods_that_credit_turns_are_given_their_rewards() -> None:
    apart = {name for name in ("grpo", "ppo", "gigpo", "hgpo", "salt", "srgpo", "trloo", "poad") if by_turn(get(name))}
    apart |= {name for name in ("multi_turn_recipe", "g_ra", "grpo_tcr", "grpo_roc", "epo") if by_turn(get(name))}
    assert apart == {"gigpo", "hgpo", "salt", "srgpo", "trloo", "poad", "multi_turn_recipe", "g_ra"}
    known = {"greedy_reward", "turns", "turn_rewards", "state_key", "episode", "first_turn"}
    assert task_provides(get_task("text_maze")) == known
    assert task_provides(get_task("tool_first")) == known | {"calls", "failed_calls"}


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="hops is 4, too many for 4 terms"):
        get_task("search", hops=4, terms=4)
    with pytest.raises(InputError, match="passages is 5, too many for 4 terms"):
        get_task("search", terms=4, passages=5)
    with pytest.raises(InputError, match="size"):
        get_task("text_maze", size=9)
