"""The runner keeps its promises whatever the reward functions do."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.rewards import Reward, require_columns, score
from jaxrl_llm.utils.errors import InputError

NAN = float("nan")


def lengths(completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_weighted_sum_of_two_components() -> None:
    def right(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    scores = score([Reward(right), Reward(lengths, weight=-0.5)], ["4", "five"], {"answer": ["4", "5"]})
    assert list(scores.components) == ["right", "lengths"]
    np.testing.assert_array_equal(scores.components["right"], [1.0, 0.0])
    np.testing.assert_array_equal(scores.components["lengths"], [1.0, 4.0])
    np.testing.assert_array_equal(scores.total, [0.5, -2.0])  # 1 - 0.5 * 1, 0 - 0.5 * 4
    assert scores.total.dtype == scores.components["right"].dtype == np.float32
    assert scores.failures == {"right": 0, "lengths": 0}
    assert set(scores.seconds) == {"right", "lengths"}


def test_a_function_gets_the_columns_that_it_names() -> None:
    seen = {}

    def narrow(completions, answer):
        seen["narrow"] = {"completions": completions, "answer": answer}
        return [0.0, 0.0]

    def wide(completions, **columns):
        seen["wide"] = {"completions": completions, **columns}
        return [0.0, 0.0]

    columns = {"answer": [1, 2], "prompts": ["p", "q"], "completion_ids": [[5], [6, 7]]}
    score([Reward(narrow), Reward(wide)], ["a", "b"], columns)
    assert seen["narrow"] == {"completions": ["a", "b"], "answer": [1, 2]}
    assert seen["wide"] == {"completions": ["a", "b"], **columns}


def test_conversational_completions_pass_through() -> None:
    messages = [[{"role": "assistant", "content": "hi"}]]
    scores = score([Reward(lambda completions: [len(completions[0][0]["content"])], name="count")], messages, {})
    np.testing.assert_array_equal(scores.total, [2.0])


def test_a_function_that_changes_its_lists_does_not_disturb_the_others() -> None:
    def greedy(completions, answer):
        result = [1.0] * len(completions)
        answer.clear()
        return result

    def patient(completions, answer):
        time.sleep(0.05)
        return [float(len(answer))] * len(completions)

    answers = ["x", "y"]
    scores = score([Reward(greedy), Reward(patient)], ["a", "b"], {"answer": answers})
    np.testing.assert_array_equal(scores.components["patient"], [2.0, 2.0])
    assert answers == ["x", "y"]


def test_not_scored_entries_are_left_out_of_the_sum() -> None:
    first = Reward(lambda completions: [1.0, None, NAN], name="first")
    second = Reward(lambda completions: [None, 3.0, NAN], name="second", weight=2.0)
    scores = score([first, second], ["a", "b", "c"], {})
    np.testing.assert_array_equal(scores.components["first"], [1.0, NAN, NAN])
    np.testing.assert_array_equal(scores.total, [1.0, 6.0, NAN])
    assert scores.failures == {"first": 0, "second": 0}


def test_async_functions_run_and_may_be_mixed_with_plain_ones() -> None:
    async def remote(completions, **_):
        await asyncio.sleep(0.01)
        return [2.0] * len(completions)

    scores = score([Reward(remote), Reward(lengths)], ["a", "bc"], {})
    np.testing.assert_array_equal(scores.total, [3.0, 4.0])


def test_functions_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=5)

    def meet(completions):
        barrier.wait()
        return [1.0]

    scores = score([Reward(meet, name=f"meet {index}") for index in range(3)], ["a"], {})
    assert sum(scores.failures.values()) == 0


def test_only_the_samples_that_raise_get_the_default(caplog: pytest.LogCaptureFixture) -> None:
    def fragile(completions, answer):
        if "bad" in completions:
            raise KeyError("no such\nthing")
        return [float(a) for a in answer]

    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        scores = score([Reward(fragile, default=-1.0)], ["a", "bad", "c"], {"answer": [1, 2, 3]})
    np.testing.assert_array_equal(scores.components["fragile"], [1.0, -1.0, 3.0])
    assert scores.failures == {"fragile": 1}
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "'fragile'" in message
    assert "KeyError" in message
    assert "1 of 3" in message
    assert "\n" not in message


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), MemoryError()])
def test_no_exception_propagates(error: BaseException) -> None:
    def hostile(completions):
        raise error

    async def hostile_later(completions):
        raise error

    scores = score([Reward(hostile), Reward(hostile_later), Reward(lengths)], ["a", "bc"], {})
    assert scores.failures == {"hostile": 2, "hostile_later": 2, "lengths": 0}
    assert max(scores.seconds.values()) < 5  # seen at once, not taken for hung
    np.testing.assert_array_equal(scores.total, [1.0, 2.0])


def test_a_hung_function_costs_its_own_limit_only(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hung(completions):
        release.wait(30)
        return [9.0] * len(completions)

    async def hung_later(completions):
        await asyncio.sleep(30)
        return [9.0] * len(completions)

    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        rewards = [Reward(hung, time_limit=0.2, default=-2.0), Reward(hung_later, time_limit=0.2), Reward(lengths)]
        scores = score(rewards, ["a", "bc"], {})
    release.set()
    assert time.monotonic() - start < 5
    for name in ("hung", "hung_later"):  # not scored, whatever the default
        np.testing.assert_array_equal(scores.components[name], [NAN, NAN])
    assert scores.failures == {"hung": 2, "hung_later": 2, "lengths": 0}
    assert sum("time limit of 0.2 s" in record.getMessage() for record in caplog.records) == 2


def test_a_slow_neighbour_does_not_extend_a_time_limit() -> None:
    def takes(seconds):
        def reward(completions):
            time.sleep(seconds)
            return [1.0]

        return reward

    # The patient one is listed first: the hasty one is done by the time it has been waited for, but too late.
    patient = Reward(takes(0.6), name="patient", time_limit=20.0)
    hasty = Reward(takes(0.4), name="hasty", time_limit=0.1)
    assert score([patient, hasty], ["a"], {}).failures == {"patient": 0, "hasty": 1}


def test_only_the_samples_that_hang_are_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    """A batch of 8 has 4 limits; then each sample has its own."""
    sizes = []

    def hangs(completions):
        sizes.append(len(completions))
        time.sleep(30 if "hang" in completions else 0)
        return [1.0] * len(completions)

    async def hangs_later(completions):
        await asyncio.gather(*(asyncio.sleep(30 if one == "hang" else 0) for one in completions))
        return [1.0] * len(completions)

    completions = ["a", "b", "hang", "c", "d", "e", "hang", "f"]
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        scores = score(
            [Reward(hangs, time_limit=0.3, default=-1), Reward(hangs_later, time_limit=0.3)], completions, {}
        )
    assert 1.2 < time.monotonic() - start < 5
    wanted = [1.0, 1.0, NAN, 1.0, 1.0, 1.0, NAN, 1.0]
    np.testing.assert_array_equal(scores.components["hangs"], wanted)
    np.testing.assert_array_equal(scores.components["hangs_later"], wanted)
    assert scores.failures == {"hangs": 2, "hangs_later": 2}
    assert scores.scored == {"hangs": 0.75, "hangs_later": 0.75}
    assert sizes == [8] + [1] * 8
    assert "reward 'hangs' failed on 2 of 8 samples, which are not scored: TimeoutError" in caplog.text


@pytest.mark.heavy
def test_a_batch_may_take_longer_than_a_sample() -> None:
    calls = []

    def slow(completions):
        calls.append(len(completions))
        for _ in completions:
            time.sleep(0.17)
        return [1.0] * len(completions)

    assert score([Reward(slow, time_limit=0.5)], ["a"] * 8, {}).failures == {"slow": 0}  # 1.4 s of 2 s
    assert calls == [8]
    with_load = score([Reward(slow, time_limit=0.5)], ["a"] * 16, {})  # 2.7 s of 2.5 s, but 0.17 s each
    np.testing.assert_array_equal(with_load.total, [1.0] * 16)
    assert calls == [8, 16, *[1] * 16]


@pytest.mark.heavy
def test_a_prompt_whose_completions_all_hang_leaves_the_others() -> None:
    """16 of 64 in a row: more than are tried in vain, if they came one after the other."""

    def hangs(completions):
        time.sleep(30 if "hang" in completions else 0)
        return [1.0] * len(completions)

    completions = ["a"] * 16 + ["hang"] * 16 + ["b"] * 32
    found = score([Reward(hangs, time_limit=0.4)], completions, {}).total
    np.testing.assert_array_equal(found, [1.0] * 16 + [NAN] * 16 + [1.0] * 32)


def test_what_hangs_on_every_sample_is_given_up() -> None:
    calls = []

    def slow_failure(completions):
        calls.append(len(completions))
        time.sleep(0.1)
        raise ValueError("no")

    start = time.monotonic()
    scores = score([Reward(slow_failure, time_limit=0.15)], ["a"] * 100, {})
    assert time.monotonic() - start < 5
    assert scores.failures == {"slow_failure": 100}
    assert np.isnan(scores.total).any()
    assert 5 < len(calls) < 20  # 8 limits are 1.2 s
    assert calls[:2] == [100, 1]


def test_a_hung_function_does_not_keep_the_interpreter_alive() -> None:
    program = (
        "import time\n"
        "from jaxrl_llm.rewards.workers.runner import Reward, score\n"
        "print(score([Reward(lambda completions: time.sleep(60), name='hung', time_limit=0.1)], ['a'], {}).failures)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=True)
    assert done.stdout.strip() == "{'hung': 1}"


@pytest.mark.parametrize(
    "result", [None, 1.0, "01", {"a": 1, "b": 2}, [1.0], [1.0, 2.0, 3.0], [], np.float32(1), np.zeros((1, 2))]
)
def test_a_result_of_another_shape_fails_the_batch(result: object) -> None:
    scores = score([Reward(lambda completions: result, name="odd", default=0.25)], ["a", "b"], {})
    assert scores.failures == {"odd": 2}
    np.testing.assert_array_equal(scores.total, [0.25, 0.25])


@pytest.mark.parametrize("entry", [math.inf, -math.inf, 1e39, 10**400, "0.5", [0.5], 1j, np.str_("1"), object()])
def test_an_entry_that_is_no_finite_number_fails_its_sample(entry: object) -> None:
    scores = score([Reward(lambda completions: [entry, 0.5], name="odd", default=-1.0)], ["a", "b"], {})
    assert scores.failures == {"odd": 1}
    np.testing.assert_array_equal(scores.total, [-1.0, 0.5])


def test_numbers_of_all_kinds_are_accepted() -> None:
    entries = [True, 2, np.float64(0.5), np.bool_(True), np.asarray(3.0), np.int32(-4)]
    scores = score([Reward(lambda completions: tuple(entries), name="kinds")], ["x"] * 6, {})
    np.testing.assert_array_equal(scores.total, [1.0, 2.0, 0.5, 1.0, 3.0, -4.0])
    array = score([Reward(lambda completions: np.arange(3.0), name="array")], ["x"] * 3, {})
    np.testing.assert_array_equal(array.total, [0.0, 1.0, 2.0])


def test_default_of_nan_means_not_scored() -> None:
    def broken(completions):
        raise ValueError

    scores = score([Reward(broken, default=NAN), Reward(lengths)], ["abc"], {})
    np.testing.assert_array_equal(scores.total, [3.0])
    assert scores.failures == {"broken": 1, "lengths": 0}


def test_an_empty_batch_has_empty_scores() -> None:
    scores = score([Reward(lengths)], [], {"answer": []})
    assert scores.total.shape == (0,)
    assert scores.failures == {"lengths": 0}


def test_misuse_is_refused() -> None:
    with pytest.raises(InputError, match="two rewards are named 'lengths'"):
        score([Reward(lengths), Reward(lengths)], ["a"], {})
    with pytest.raises(InputError, match="no rewards"):
        score([], ["a"], {})
    with pytest.raises(InputError, match=r"'answer' needs a list of 2 values.*found 1 values"):
        score([Reward(lengths)], ["a", "b"], {"answer": ["x"]})
    with pytest.raises(InputError, match="'answer' needs a list of 2 values"):
        score([Reward(lengths)], ["a", "b"], {"answer": "xy"})
    with pytest.raises(InputError, match="completions must be a list"):
        score([Reward(lengths)], "ab", {})
    with pytest.raises(InputError, match="rewards must be a list of Reward"):
        score(Reward(lengths), ["ab"], {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rewards must be a list of Reward"):
        score([lengths], ["ab"], {})  # type: ignore[list-item]
    with pytest.raises(InputError, match="needs a function, found str"):
        Reward("lengths")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"weight": NAN},
        {"weight": "1"},
        {"time_limit": 0.0},
        {"time_limit": NAN},
        {"time_limit": math.inf},
        {"time_limit": 1e300},
        {"time_limit": None},
        {"default": math.inf},
        {"default": 1e39},
        {"memory_limit": 0},
        {"memory_limit": NAN},
    ],
)
def test_numbers_out_of_their_range_are_refused(options: dict[str, float]) -> None:
    ((field, value),) = options.items()
    with pytest.raises(InputError, match=re.escape(f"reward 'lengths': {field} is {value!r}, but must be")):
        Reward(lengths, **options)


def test_a_batch_that_nothing_scored_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def broken(completions):
        raise ValueError

    nones = Reward(lambda completions: [None] * len(completions), name="nones")
    nans = Reward(lambda completions: [NAN] * len(completions), name="nans")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        score([nones, nans], ["a", "b"], {})
        assert caplog.messages == ["no reward scored any of the 2 completions: they return None or NaN (nones, nans)"]
        caplog.clear()
        score([nones, Reward(lengths)], ["a", "b"], {})
        score([nones], [], {})
        assert caplog.messages == []
        score([nones, Reward(broken, default=NAN)], ["a"], {})
        assert "they fail, or return None or NaN (nones, broken)" in caplog.messages[-1]


def test_components_add_up_with_their_shares() -> None:
    """0.375 + 0.5 x 1 x 0.5 = 0.625: the means of what was scored alone do not add up."""
    rewards = [
        Reward(lambda completions: [0.25, 0.5, 0.25, 0.5], name="even"),
        Reward(lambda completions: [1.0, None, 1.0, None], name="half", weight=0.5),
    ]
    found = score(rewards, ["a"] * 4, {})
    means = {name: float(np.nanmean(x)) for name, x in found.components.items()}
    assert found.scored == {"even": 1.0, "half": 0.5}
    parts = [reward.weight * found.scored[reward.name] * means[reward.name] for reward in rewards]
    assert sum(parts) == pytest.approx(float(found.total.mean()))


def test_an_exception_that_cannot_be_shown_is_a_failure_too(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def broken(completions):
        raise Mute

    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        scores = score([Reward(broken)], ["a"], {})
    assert scores.failures == {"broken": 1}
    assert scores.seconds["broken"] < 5  # not taken for hung
    assert "Mute" in caplog.text


def test_a_generator_without_end_fails() -> None:
    def endless(completions):
        while True:
            yield 1.0

    assert score([Reward(endless)], ["a"], {}).failures == {"endless": 1}


def test_required_columns_are_checked_ahead() -> None:
    def needs(completions, answer, hint="none", **columns):
        return [0.0]

    require_columns([Reward(needs), Reward(lengths)], ["prompt", "answer"])
    with pytest.raises(InputError, match="reward 'needs' needs, 'answer': did you mean 'answers'"):
        require_columns([Reward(needs)], ["prompt", "answers"])


values = st.lists(st.lists(st.none() | st.floats(-100, 100, width=32), min_size=4, max_size=4), min_size=1, max_size=4)


@given(table=values, weights=st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4))
def test_total_agrees_with_a_plain_loop(table: list[list[float | None]], weights: list[float]) -> None:
    rewards = [
        Reward(lambda completions, row=tuple(row): list(row), weight=weight, name=str(index))
        for index, (row, weight) in enumerate(zip(table, weights, strict=False))
    ]
    total = score(rewards, ["x"] * 4, {}).total
    for sample in range(4):
        present = [
            (row[sample], weight) for row, weight in zip(table, weights, strict=False) if row[sample] is not None
        ]
        expected = math.fsum(value * weight for value, weight in present) if present else NAN
        np.testing.assert_allclose(total[sample], expected, rtol=1e-5, atol=1e-4)
