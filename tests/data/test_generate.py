"""Generated tasks: items that a seed repeats, options that are checked, and tasks that would never end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxrl_llm.data import generate, load_prompts
from jaxrl_llm.utils.errors import InputError

pytest.importorskip("reasoning_gym")


def test_generated_tasks_are_deterministic_and_score_full_marks_for_their_answer() -> None:
    from jaxrl_llm.rewards import Reward, require_columns, score
    from jaxrl_llm.rewards.verifiers import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    options |= {"allow_negation": False, "allow_parentheses": False}
    rows = load_prompts("reasoning-gym:basic_arithmetic", limit=5, seed=3, task_options=options)
    assert rows == load_prompts("reasoning-gym:basic_arithmetic", limit=5, seed=3, task_options=options)
    assert rows != load_prompts("reasoning-gym:basic_arithmetic", limit=5, seed=4, task_options=options)
    assert len(rows) == 5
    for row in rows:
        left, right = row["reasoning_gym_entry"]["metadata"]["expression"].split("+")
        assert int(row["answer"]) == int(left) + int(right)
        assert row["prompt"] == row["reasoning_gym_entry"]["question"]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    reward = Reward(reasoning_gym, time_limit=60.0)
    require_columns([reward], columns)
    assert score([reward], columns["answer"], columns).total.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("basic_arithmetics", {}, "unknown reasoning-gym task 'basic_arithmetics': did you mean 'basic_arithmetic'"),
        ("", {}, "unknown reasoning-gym task ''"),
        ("basic_arithmetic", {"max_digit": 3}, "'max_digit': did you mean 'max_digits'"),
        ("basic_arithmetic", {"size": 3}, "pass it as limit"),
        ("basic_arithmetic", {"seed": 3}, "pass it as seed"),
        ("basic_arithmetic", {"min_terms": -1}, "min_terms must be positive"),
        ("chain_sum", {"max_digits": "3 or 4"}, "option max_digits .* is '3 or 4', but must be a whole number"),
        ("chain_sum", {"max_digits": 2.5}, r"option max_digits .* is 2\.5, but must be a whole number"),
        ("chain_sum", {"max_digits": True}, "option max_digits .* is True, but must be a whole number"),
        ("chain_sum", {"allow_negation": 1}, "option allow_negation .* is 1, but must be true or false"),
        ("basic_arithmetic", {"operators": None}, "cannot generate 'basic_arithmetic' with {'operators': None}: "),
        ("composite", {}, "cannot generate 'composite'"),
    ],
)
def test_bad_tasks(task: str, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(f"reasoning-gym:{task}", limit=2, task_options=options)
    assert "\n" not in str(caught.value)


def test_more_items_than_memory_can_hold_are_refused() -> None:
    with pytest.raises(InputError, match="limit is 1000000000, but at most 1,000,000 items"):
        load_prompts("reasoning-gym:chain_sum", limit=10**9)


def test_a_failure_without_a_text_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(generate, "_items", fail)
    with pytest.raises(InputError, match=r"cannot generate 'chain_sum' with \{\}: AssertionError$"):
        load_prompts("reasoning-gym:chain_sum", limit=2)


@pytest.mark.parametrize(
    "value, default, usual",
    [
        (3, 2, True), (20, 2, True), (21, 2, False), (200, 100, True), (201, 100, False), (10**9, 1000, False),
        (1e300, 0.5, False), (True, None, True), (None, 3, True), ("+", None, True), ("x" * 101, None, False),
        ([1, 2], None, True), ([1, [10**9]], None, False), ([0] * 21, None, False), ({"a": 1}, None, False),
    ],
)  # fmt: skip
def test_what_is_far_from_a_tasks_own_options(value: object, default: object, usual: bool) -> None:
    assert generate._is_usual(value, default) is usual


def test_unusual_options_give_the_same_items_from_a_process() -> None:
    options = {"min_digits": 1, "max_digits": 30}
    apart = load_prompts("reasoning-gym:chain_sum", limit=3, seed=5, task_options=options)
    here = list(generate._items("chain_sum", 5, {"size": 3}, options))
    assert [row["reasoning_gym_entry"] for row in apart] == here
    assert apart[0]["answer"] == here[0]["answer"]


def test_a_task_that_never_ends_is_given_up_and_its_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, command: list[str], **options: object) -> None:
            # A process that is ready at once and then holds its interpreter.
            code = "from multiprocessing.connection import Connection; out = Connection(1)"
            code += "; out.send(('ready', None)); 9**9**9**9"
            super().__init__([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(generate, "_TIMEOUT", 0.2)
    with pytest.raises(InputError, match=r"with \{'max_digits': 1000000000\}: no item in 0\.2 s; give smaller options"):
        load_prompts("reasoning-gym:chain_sum", limit=2, task_options={"max_digits": 10**9})
    assert started[0].returncode is not None


def test_a_process_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_CHILD", "import os; os._exit(9)")
    with pytest.raises(InputError, match="its process ended; give smaller options"):
        load_prompts("reasoning-gym:chain_sum", limit=2, task_options={"max_digits": 10**9})
