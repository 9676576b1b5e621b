"""Tasks against plain Python: rewards of completions, the best that can be earned, and what chance earns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few

from jaxrl_llm.in_jax.lab.config import OPTIONS, WARM_STEPS
from jaxrl_llm.in_jax.rollout import evaluate_task, sample_batch, true_reward
from jaxrl_llm.in_jax.settings import LabSettings, fresh_params, make_policy
from jaxrl_llm.in_jax.tasks import TASKS, Task, get_task
from jaxrl_llm.in_jax.train import make_train, warm_start
from jaxrl_llm.utils.errors import InputError

SMALL = LabSettings(prompts=2, group_size=2, hidden=4, layers=1, heads=1)
# Tasks that are small enough to go through every completion of every prompt.
LITTLE = {
    "addition": {"digits": 1, "base": 2},
    "sequence_lock": {"length": 1, "symbols": 2},
    "sorting": {"length": 2, "symbols": 2},
    "noisy_copying": {"length": 1, "noise": 1, "symbols": 2},
    "brackets": {"length": 2, "kinds": 1},
    "correct_and_short": {"base": 2, "thoughts": 1},
    "long_tail": {"levels": 2, "symbols": 2},
    "noisy_verifier": {"length": 1, "symbols": 2},
}


def prompts_of(name: str) -> Iterator[tuple[float, list[int]]]:
    """Every prompt of a little task and its probability."""
    match name:
        case "addition":  # plus is 2, equals 3
            yield from ((1 / 4, [a, 2, b, 3]) for a in (0, 1) for b in (0, 1))
        case "sequence_lock" | "noisy_verifier":
            yield from ((1 / 2, [a, 2]) for a in (0, 1))
        case "sorting":
            yield from ((1 / 4, [a, b, 2]) for a in (0, 1) for b in (0, 1))
        case "noisy_copying":  # noise is 2
            yield from ((1 / 4, [*pair, 3]) for a in (0, 1) for pair in ((a, 2), (2, a)))
        case "brackets":  # "((" and "()"
            yield from ((1 / 2, [0, 0, 2]), (1 / 2, [0, 1, 2]))
        case "correct_and_short":
            yield from ((1 / 4, [a, b, 3]) for a in (0, 1) for b in (0, 1))
        case "long_tail":  # level 2 is a quarter as likely as level 1
            yield from ((0.8 / 2, [a, 2, 3]) for a in (0, 1))
            yield from ((0.2 / 4, [a, b, 3]) for a in (0, 1) for b in (0, 1))


def closes(prompt: list[int], said: list[int]) -> bool:
    """Whether a text of brackets of one kind is balanced; 0 opens, 1 closes."""
    depth = 0
    for token in [*prompt[:-1], *said]:
        depth += {0: 1, 1: -1}.get(token, -1000)
        if depth < 0:
            return False
    return depth == 0


def worth(name: str, prompt: list[int], said: list[int], ended: bool) -> float:
    """The reward of what was said before the end, in a little task."""

    def graded(right: list[int]) -> float:
        places = [i < len(said) and said[i] == token for i, token in enumerate(right)]
        return 0.5 * sum(places) / len(right) + 0.5 * (ended and said == right)

    match name:
        case "addition":
            total = prompt[0] + prompt[2]
            return graded([total % 2, total // 2])
        case "sequence_lock" | "noisy_verifier":
            return float(ended and said == prompt[:1])
        case "sorting":
            return graded(sorted(prompt[:2]))
        case "noisy_copying":
            return graded([token for token in prompt[:2] if token != 2])
        case "brackets":
            return float(ended and closes(prompt, said))
        case "correct_and_short":
            right = ended and len(said) > 0 and said[-1] == sum(prompt[:2]) % 2
            return right * (1.0, 0.5)[len(said) - 1] if right else 0.0
        case "long_tail":
            return float(ended and said == [token for token in prompt[:2] if token != 2][::-1])
    raise AssertionError(name)


def completions(task: Task) -> Iterator[tuple[list[int], bool]]:
    """What may be said before the end, and whether the end was said; every completion once for each way to draw it."""
    for drawn in itertools.product(range(task.vocabulary), repeat=task.completion_length):
        ended = task.end in drawn
        yield list(drawn[: drawn.index(task.end)] if ended else drawn), ended


@pytest.mark.parametrize("name", LITTLE)
def test_every_completion_is_worth_what_plain_python_says(name: str) -> None:
    task = get_task(name, **LITTLE[name])
    score = jax.jit(jax.vmap(lambda prompt, completion: task.score(prompt, completion)[1], (None, 0)))
    for _, prompt in prompts_of(name):
        said = list(completions(task))
        padded = [(tokens + [task.end] * task.completion_length)[: task.completion_length] for tokens, _ in said]
        np.testing.assert_allclose(
            score(jnp.array(prompt), jnp.array(padded)), [worth(name, prompt, *each) for each in said], atol=1e-6
        )


@pytest.mark.parametrize("name", LITTLE)
def test_prompts_are_as_likely_as_they_should_be(name: str) -> None:
    task = get_task(name, **LITTLE[name])
    drawn = np.asarray(jax.vmap(task.sample)(jax.random.split(jax.random.key(1), 4000)))
    expected = list(prompts_of(name))
    assert sum(chance for chance, _ in expected) == pytest.approx(1)
    for chance, prompt in expected:
        found = np.mean(np.all(drawn == prompt, axis=1))
        assert abs(found - chance) < 4 * (chance * (1 - chance) / 4000) ** 0.5


def steps_of(start: int, goal: int, wall: int) -> list[list[int]]:
    """Where each of the four moves leads to from each of the 3 x 3 cells."""
    found = []
    for cell in range(9):
        row, column = divmod(cell, 3)
        ways = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        there = [r * 3 + c if 0 <= r < 3 and 0 <= c < 3 else cell for r, c in ways]
        found.append([cell if x == wall else x for x in there])
    return found


def by_chance_in_the_maze() -> float:
    """The probability that a uniformly random policy reaches the goal, over all prompts of the maze."""
    vocabulary, chances = 9 + 4 + 2, []
    for start, goal, wall in itertools.permutations(range(9), 3):
        ways, there = steps_of(start, goal, wall), [0.0] * 9
        there[goal] = 1.0
        for _ in range(6):
            # Four moves; the end gives up; ten other tokens lead nowhere.
            after = [(sum(there[x] for x in ways[cell]) + 10 * there[cell]) / vocabulary for cell in range(9)]
            after[goal] = 1.0
            there = after
        chances.append(there[start])
    return sum(chances) / len(chances)


def by_chance(name: str) -> float:
    """The expected reward of a uniformly random policy."""
    if name == "maze":
        return by_chance_in_the_maze()
    task = get_task(name, **LITTLE[name])
    rewards = [[worth(name, prompt, *said) for said in completions(task)] for _, prompt in prompts_of(name)]
    return sum(chance * sum(each) / len(each) for (chance, _), each in zip(prompts_of(name), rewards, strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("name", few([*LITTLE, "maze"], ("maze", "brackets")))
def test_what_a_random_policy_earns(name: str) -> None:
    """Of rollouts by a decoder whose unembedding is 0, within four standard errors."""
    task = get_task(name, **LITTLE.get(name, {}))
    params = fresh_params(jax.random.key(0), task, SMALL)
    params = {**params, "unembed": jnp.zeros_like(params["unembed"])}
    rewards = np.asarray(evaluate_task(params, task, SMALL, jax.random.key(1), prompts=4096)["reward"])
    expected = by_chance(name)
    assert 0 < expected < 0.6
    assert abs(rewards.mean() - expected) < 4 * rewards.std() / 64


@pytest.mark.parametrize("name", TASKS)
def test_the_best_policy_earns_the_best(name: str) -> None:
    """At the tasks' own sizes: the answer is a completion that rollouts can make, and no reward is above it."""
    task = get_task(name)
    prompts = jax.vmap(task.sample)(jax.random.split(jax.random.key(2), 64))
    answers = jax.vmap(task.answer)(prompts)
    components, rewards = jax.vmap(task.score)(prompts, answers)
    np.testing.assert_allclose(np.mean(rewards), task.best, atol=1e-6)
    np.testing.assert_array_equal(components[task.correct], 1.0)
    after_end = np.cumsum(np.asarray(answers) == task.end, axis=1)
    if task.environment is None or after_end.any():  # some environments end with the last turn
        assert (after_end[:, -1] == task.completion_length - np.argmax(after_end > 0, axis=1)).all()
    others = jax.random.randint(jax.random.key(3), answers.shape, 0, task.vocabulary)
    assert float(jax.vmap(task.score)(prompts, others)[1].max()) <= task.best
    if task.given is not None:
        places = jnp.arange(task.completion_length)
        given = np.asarray(jax.vmap(jax.vmap(task.given, (None, None, 0)), (0, 0, None))(prompts, answers, places))
        before = after_end - (np.asarray(answers) == task.end) == 0
        np.testing.assert_array_equal(np.asarray(answers)[before & (given >= 0)], given[before & (given >= 0)])


def test_ways_through_the_maze_are_shortest() -> None:
    task = get_task("maze")
    ways = jax.jit(jax.vmap(task.answer))
    prompts = np.array([[*each, 13] for each in itertools.permutations(range(9), 3)], np.int32)
    for (start, goal, wall, _), said in zip(prompts.tolist(), np.asarray(ways(prompts)).tolist(), strict=True):
        reached, moves = {start}, 0
        while goal not in reached:
            reached |= {x for cell in reached for x in steps_of(start, goal, wall)[cell]}
            moves += 1
        assert said.index(task.end) == 2 * moves - 1  # the environment says the end in answer to the last move


@pytest.fixture(scope="module")
def walks() -> tuple[Task, np.ndarray, object]:
    """The maze, prompts int32[256, 4] and a batch of random walks."""
    task = get_task("maze")
    params = fresh_params(jax.random.key(0), task, SMALL)
    sample = jax.jit(lambda key: sample_batch(make_policy(task, SMALL), params, task, key, 0, 64, 4))
    batch, prompts = sample(jax.random.key(4))
    return task, np.repeat(np.asarray(prompts), 4, axis=0), jax.tree.map(np.asarray, batch)


def test_the_maze_answers_each_move(walks: tuple[Task, np.ndarray, object]) -> None:
    task, prompts, batch = walks
    lengths = set()
    for prompt, tokens, mask, real, turn, reward, truncated in zip(
        prompts.tolist(), batch.tokens[:, 4:].tolist(), batch.action_mask[:, 4:].tolist(),
        batch.token_mask[:, 4:].tolist(), batch.turn[:, 4:].tolist(), batch.reward, batch.truncated, strict=True,
    ):  # fmt: skip
        start, goal, wall, _ = prompt
        cell, said, chosen = start, [], 0
        for move in tokens[::2]:
            said.append(move)
            chosen += 1
            if move == task.end:
                break
            cell = steps_of(start, goal, wall)[cell][move - 9] if 9 <= move < 13 else cell
            said.append(task.end if cell == goal else cell)
            if cell == goal:
                break
        rest = 12 - len(said)
        assert tokens == said + [task.end] * rest
        assert real == [True] * len(said) + [False] * rest
        assert mask == [i % 2 == 0 and i < len(said) for i in range(12)]
        assert [x for x, acts in zip(turn, mask, strict=True) if acts] == list(range(chosen))
        assert {x for x, acts in zip(turn, mask, strict=True) if not acts} <= {-1}
        assert reward == (cell == goal)
        assert truncated == (said[-1] != task.end)
        lengths.add(len(said))
    assert len(lengths) > 4


def test_the_verifier_errs_as_often_as_it_should() -> None:
    task = get_task("noisy_verifier", length=1, symbols=2, false_negative=0.3, false_positive=0.1)
    keys = jax.random.split(jax.random.key(5), 4000)
    for truth, expected in ((1.0, 0.7), (0.0, 0.1)):
        _, seen = jax.vmap(task.observe, (0, None, None))(keys, {"open": jnp.float32(truth)}, jnp.float32(truth))
        assert float(seen.mean()) == pytest.approx(expected, abs=0.03)


@pytest.mark.heavy
def test_training_sees_verdicts_and_reports_the_truth() -> None:
    """Verdicts that are wrong half of the time: the reward of the metrics is the truth, its component the verdict."""
    task = get_task("noisy_verifier", length=1, symbols=2, false_negative=0.49, false_positive=0.0)
    policy, params = make_policy(task, SMALL), fresh_params(jax.random.key(0), task, SMALL)
    batch, _ = jax.jit(lambda key: sample_batch(policy, params, task, key, 0, 64, 16))(jax.random.key(6))
    truth, seen = np.asarray(true_reward(batch)), np.asarray(batch.reward)
    assert 0.3 < seen.sum() / truth.sum() < 0.7
    np.testing.assert_array_equal(seen, batch.rewards["open"])
    assert (seen <= truth).all()
    train = make_train(
        task, "reinforce", LabSettings(iterations=2, prompts=64, group_size=4, hidden=4, layers=1, heads=1)
    )
    metrics = jax.jit(train)(jax.random.key(7), None, params).metrics
    assert (metrics["reward/open"] < metrics["reward"]).all()


def test_examples_think_before_they_answer() -> None:
    task = get_task("correct_and_short")
    prompts = jax.vmap(task.sample)(jax.random.split(jax.random.key(8), 200))
    examples = jax.vmap(task.example)(jax.random.split(jax.random.key(9), 200), prompts)
    components, reward = jax.vmap(task.score)(prompts, examples)
    np.testing.assert_array_equal(components["correct"], 1.0)
    lengths = np.argmax(np.asarray(examples) == task.end, axis=1)
    assert set(lengths) == {1, 2, 3, 4, 5}
    np.testing.assert_allclose(reward, 1 - 0.5 * (lengths - 1) / 4)


@pytest.mark.heavy
def test_methods_of_several_turns_run_in_the_maze() -> None:
    """Elsewhere a method that needs turns is refused."""
    settings = replace(SMALL, iterations=2)
    train = jax.jit(make_train(get_task("maze"), "epo", settings))
    metrics = train(jax.random.key(0)).metrics
    assert all(np.isfinite(values).all() for values in metrics.values())
    assert (metrics["length"] <= 6).all()  # only the policy's own tokens count
    with pytest.raises(InputError, match="needs turns"):
        make_train(get_task("sequence_lock"), "epo", settings)(jax.random.key(0))


@pytest.mark.heavy
@pytest.mark.parametrize("name", TASKS)
def test_starts_earn_a_part_of_the_reward(name: str) -> None:
    """After the laboratory's supervised steps there is something to reward, and much to learn."""
    task, settings = get_task(name, **OPTIONS.get(name, {})), LabSettings()
    params = warm_start(jax.random.key(0), task, settings, WARM_STEPS[name])
    rewards = evaluate_task(params, task, settings, jax.random.key(2))["reward"]
    assert 0.05 * task.best < float(rewards.mean()) < 0.6 * task.best
