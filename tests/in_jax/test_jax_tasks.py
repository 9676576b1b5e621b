"""Tasks in JAX: prompts, answers and rewards against plain Python arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.in_jax.tasks import TASKS, Task, addition, get_task, sequence_lock
from jaxrl_llm.utils.errors import InputError


def sampled(task: Task, count: int = 64) -> tuple[np.ndarray, jax.Array]:
    prompts = jax.vmap(task.sample)(jax.random.split(jax.random.key(0), count))
    return np.asarray(prompts), prompts


def rewards_of(task: Task, prompt: list[int], completion: list[int]) -> tuple[dict[str, float], float]:
    components, reward = task.score(jnp.array(prompt), jnp.array(completion))
    return {name: float(value) for name, value in components.items()}, float(reward)


def test_a_sum_worked_by_hand() -> None:
    task = addition()
    prompt = [3, 7, 10, 2, 5, 11]  # 37+25=
    assert task.answer(jnp.array(prompt)).tolist() == [2, 6, 0, 12]  # 062, the least significant digit first
    assert int(task.number(jnp.array(prompt))) == 3725
    assert rewards_of(task, prompt, [2, 6, 0, 12]) == ({"digits": 1.0, "exact": 1.0}, 1.0)
    components, reward = rewards_of(task, prompt, [2, 5, 0, 12])
    assert components["digits"] == pytest.approx(2 / 3)
    assert reward == pytest.approx(1 / 3)
    # All digits, but no end: not exact.
    assert rewards_of(task, prompt, [2, 6, 0, 0])[1] == pytest.approx(0.5)
    # Ended after one right digit.
    assert rewards_of(task, prompt, [2, 12, 12, 12])[0]["digits"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("base", [5, 10])
def test_sums_are_right(base: int) -> None:
    task = addition(2, base)
    prompts, given = sampled(task)
    answers = np.asarray(jax.vmap(task.answer)(given))
    for prompt, answer in zip(prompts, answers, strict=True):
        first, second = (base * int(a) + int(b) for a, b in (prompt[:2], prompt[3:5]))
        assert prompt[2] == base
        assert prompt[5] == base + 1
        assert sum(int(d) * base**i for i, d in enumerate(answer[:3])) == first + second
        assert answer[3] == task.end


def test_only_the_whole_key_opens_the_lock() -> None:
    task = sequence_lock(3, 4)
    prompt = [2, 0, 3, 4]
    assert task.answer(jnp.array(prompt)).tolist() == [2, 0, 3, 5]
    assert rewards_of(task, prompt, [2, 0, 3, 5]) == ({"open": 1.0}, 1.0)
    for wrong in ([2, 0, 1, 5], [2, 0, 3, 3], [5, 5, 5, 5]):
        assert rewards_of(task, prompt, wrong) == ({"open": 0.0}, 0.0)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_its_word(name: str) -> None:
    task = get_task(name)
    prompts, given = sampled(task)
    answers = jax.vmap(task.answer)(given)
    assert prompts.shape == (64, task.prompt_length + task.hidden)
    assert answers.shape == (64, task.completion_length)
    assert prompts.dtype == answers.dtype == np.int32
    seen = prompts[:, : task.prompt_length]
    assert 0 <= seen.min() <= max(seen.max(), int(answers.max())) < task.vocabulary
    _, reward = jax.vmap(task.score)(given, answers)
    # In tasks with environments the reward is a sum of shares of 1, each rounded.
    np.testing.assert_allclose(reward, 1.0, rtol=0 if task.environment is None else 1e-6)
    numbers = np.asarray(jax.vmap(task.number)(given))
    assert len(np.unique(numbers)) == len(np.unique(prompts, axis=0)) > 1


def test_bad_names_and_options_are_refused() -> None:
    with pytest.raises(InputError, match="addition"):
        get_task("additon")
    with pytest.raises(InputError, match="terms"):
        get_task("addition", terms=3)
    with pytest.raises(InputError, match="base"):
        addition(base=16)
