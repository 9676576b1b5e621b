"""Environments that raise anything, hang, or answer what is no answer: counted, said in one line, never a crash."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.adapters import environments
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents import environment_calls
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.program_host import NotDeterministicError
from jaxrl_llm.rollouts.runtime.collate import program_metrics
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
GOOD, BAD = {"prompt": "Good."}, {"prompt": "Bad."}
SAID = Observation([{"role": "user", "content": "on"}], 1.0)
RESET = "in reset, so that its episode is not scored: "
STEP = "in step, where its episode ends: "
CLOSE = "in close, so that its episode is not scored: "


class World:
    """Over after two replies, each with a reward of 1; the end gives 10. A subclass is bad for one of the prompts."""

    tools: Any = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.bad, self.turn = row["prompt"] == "Bad.", 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return Observation()

    def step(self, reply: Reply) -> Any:
        self.turn += 1
        return replace(SAID, done=self.turn == 2)

    def close(self) -> Any:
        return 10.0


class TrlWorld:
    """As TRL has them."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.bad = row["prompt"] == "Bad."

    def reset(self, **row: Any) -> Any:
        return None

    def get_reward(self) -> Any:
        return 10.0


def bad(method: str, does: Callable[[], Any], asynchronous: bool = False, of: type = World) -> type:
    """A class of environments, one of whose methods does this for the bad prompt."""
    own = getattr(of, method)

    def plain(self: Any, *arguments: Any, **options: Any) -> Any:
        return does() if self.bad else own(self, *arguments, **options)

    async def later(self: Any, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return plain(self, *arguments, **options)

    return type("Bad", (of,), {method: later if asynchronous else plain})


def raises(error: BaseException) -> Callable[[], Any]:
    def does() -> Any:
        raise error

    return does


def play(make: Any, caplog: pytest.LogCaptureFixture, said: str, *, scored: bool, **settings: Any) -> Any:
    """A good and a bad prompt: the bad one's episode fails alone, which is counted and said once."""
    caplog.clear()
    settings = {"time_limit": 5.0, **settings}
    found, _ = run_agents(agent(make), TOKENIZER, lambda *_: f"ok{END}", [GOOD, BAD], samples=1, **settings)
    assert not any(one.failed for one in found.groups)
    good, wrong = (one.episodes[0] for one in found.groups)
    assert good.rewards["environment"] >= 10.0
    assert np.isfinite(wrong.reward) == scored
    metrics = program_metrics(found.groups)
    assert metrics["rollout/failed_environments"] == 1.0
    assert len(caplog.records) == 1
    assert said in caplog.text
    return wrong


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), BaseException("gone")])
@pytest.mark.parametrize(("method", "where"), [("reset", RESET), ("step", STEP), ("close", CLOSE)])
def test_whatever_it_raises_the_run_goes_on(
    method: str, where: str, error: BaseException, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"{where}{type(error).__name__}: {error}".rstrip()
    play(bad(method, raises(error), asynchronous), caplog, said, scored=method == "step")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_end_of_iteration_is_a_failure_too(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    play(bad("step", raises(StopIteration()), asynchronous), caplog, "StopIteration", scored=True)


ANSWERS = {
    "nothing": (None, "it returns None, but must return an Observation"),
    "a text": ("on", "it returns 'on', but must return an Observation"),
    "messages of text": (replace(SAID, messages="on"), "its messages are 'on', but must be a list of dicts"),
    "no role": (replace(SAID, messages=[{"content": "on"}]), "its messages are [{'content': 'on'}], but must"),
    "bytes": (
        replace(SAID, messages=[{"role": "user", "content": b"on"}]), "TypeError: the result is 2 bytes, which are no"
    ),
    "NaN": (replace(SAID, reward=math.nan), "its reward is nan, but must be a finite number"),
    "no reward": (replace(SAID, reward=None), "its reward is None, but must be a finite number"),  # type: ignore[arg-type]
    "a reward of text": (replace(SAID, reward="1"), "its reward is '1', but must be"),  # type: ignore[arg-type]
    "info of text": (replace(SAID, info={"x": "y"}), "could not convert string to float: 'y'"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_no_observation(answer: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    value, said = ANSWERS[answer]
    where = STEP if method == "step" else RESET
    play(bad(method, lambda: value), caplog, where + said if "convert" not in said else said, scored=method == "step")


@pytest.mark.parametrize("messages", [[], (), None, ""])
@pytest.mark.parametrize("fresh", [False, True])
def test_an_observation_without_messages(messages: Any, fresh: bool, caplog: pytest.LogCaptureFixture) -> None:
    """After a reply there must be some, unless the episode is over; after `reset` the prompt's own suffice."""
    silent = bad("step", lambda: Observation(messages, 2.0))
    said = f"{STEP}the environment says nothing, though the episode is not over"
    if not fresh:
        episode = play(silent, caplog, said, scored=True)
        assert episode.rewards == {"environment": 12.0}
        assert episode.truncated
    run_agents(agent(silent, fresh=fresh), TOKENIZER, lambda *_: f"ok{END}", [BAD], samples=1)
    assert said in caplog.text
    caplog.clear()
    for make, rows in ((bad("reset", lambda: Observation(messages)), [BAD]), (World, [GOOD, {"prompt": ""}])):
        found, _ = run_agents(agent(make, fresh=fresh), TOKENIZER, lambda *_: f"ok{END}", rows, samples=1)
        assert found.groups[0].episodes[0].rewards == {"environment": 12.0}
    assert f"{RESET}there is nothing to reply to: neither the row's prompt nor the environment" in caplog.text
    assert len(caplog.records) == 1


FINALS = {
    "NaN": (lambda: math.nan, "is nan, but must be a finite number"),
    "infinite": (lambda: -math.inf, "is -inf, but must be a finite number"),
    "text": (lambda: "1.0", "is '1.0', but must be a finite number"),
    "a list": (lambda: [1.0], "is [1.0], but must be a finite number"),
    "too large": (lambda: 10**400, "is a number of over 80 digits, but must be a finite number"),
    "raises": (raises(OSError("gone")), "OSError: gone"),
    "hangs": (lambda: time.sleep(3.0), "'0/close' did not answer within 0.5 s"),
}


@pytest.mark.parametrize("trl", [False, True])
@pytest.mark.parametrize("final", FINALS)
def test_what_is_no_final_reward(final: str, trl: bool, caplog: pytest.LogCaptureFixture) -> None:
    does, said = FINALS[final]
    make = environments(bad("get_reward", does, of=TrlWorld)) if trl else bad("close", does)
    what = "" if final in ("raises", "hangs") else "get_reward() " if trl else "its final reward "
    play(make, caplog, CLOSE + what + said, scored=False, time_limit=0.5 if final == "hangs" else 5.0)


def test_no_final_reward() -> None:
    """The protocol's environments may have rewards of turns alone; a get_reward that forgets to return has none."""
    none = bad("close", lambda: None)
    (one,) = run_agents(agent(none), TOKENIZER, lambda *_: f"ok{END}", [BAD], samples=1)[0].groups
    assert one.episodes[0].rewards == {"environment": 2.0}


def test_a_get_reward_without_return(caplog: pytest.LogCaptureFixture) -> None:
    make = environments(bad("get_reward", lambda: None, of=TrlWorld))
    play(make, caplog, f"{CLOSE}get_reward() is None, but must be a finite number", scored=False)


def test_a_reset_of_trls_kind_that_hangs_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    make = environments(bad("reset", lambda: time.sleep(3.0), of=TrlWorld))
    play(make, caplog, f"{RESET}'0/reset again' did not answer within 0.5 s", scored=False, time_limit=0.5)
    assert time.monotonic() - began < 2.5


def test_what_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def raising(row: Mapping[str, Any]) -> Any:
        if row["prompt"] == "Bad.":
            raise SystemExit("no licence")
        return World(row)

    play(raising, caplog, f"{RESET}SystemExit: no licence", scored=False)
    play(environments(lambda row: None if row["prompt"] == "Bad." else TrlWorld(row)), caplog,
         f"{RESET}InputError: an environment needs a method reset, but None has none", scored=False)  # fmt: skip

    class Toolless(World):
        @property
        def tools(self) -> Any:  # type: ignore[override]
            if self.bad:
                raise OSError("no list")
            return ()

    play(Toolless, caplog, f"{RESET}OSError: no list", scored=False)


def test_a_long_observation_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "MOST", 30)

    class Steps:
        def reset(self) -> tuple[str, dict[str, Any]]:
            return "x" * 31, {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "y" * 10_000_000, 1.0, False, False, {}

    class Own(World):
        def reset(self, row: Mapping[str, Any], seed: int) -> Any:
            return Observation([{"role": "user", "content": "x" * 31}])

        def step(self, reply: Reply) -> Any:
            return Observation([{"role": "user", "content": "y" * 10_000_000}], 1.0)

    for make in (environments(Steps), Own):
        found, _ = run_agents(agent(make, turns=3), TOKENIZER, lambda *_: f"ok{END}", [BAD], samples=1)
        text = TOKENIZER.decode(found.groups[0].episodes[0].tokens)
        assert f"{'x' * 15}\n[... 1 characters are left out ...]\n{'x' * 15}{END}" in text
        cut = f"{'y' * 15}\n[... 9,999,970 characters are left out ...]\n{'y' * 15}{END}"
        assert text.count(cut) == 2
        assert "x" * 31 not in text
        assert program_metrics(found.groups)["rollout/cut_observations"] == 4.0, "the one after the last reply, too"


def recorded(**changes: Any) -> tuple[GroupLog, ...]:
    seen = replace(Observation([{"role": "user", "content": "on"}]), **changes).as_json()
    return (GroupLog((1,), 0, 1, 0, recorded={"0/reset": seen}),)


def test_a_rerun_takes_nan_as_equal_and_another_answer_as_an_error() -> None:
    """A strict run ends there: the environment is not counted as one that failed."""
    world = bad("reset", lambda: Observation([{"role": "user", "content": "on"}], info={"x": math.nan}))

    def again(flight: tuple[GroupLog, ...]) -> Any:
        found, _ = run_agents(agent(world), TOKENIZER, lambda *_: f"ok{END}", [BAD], flight=flight, strict=True)
        return found.groups[0]

    assert again(recorded(info={"x": math.nan})).episodes[0].rewards == {"environment": 12.0}
    with pytest.raises(NotDeterministicError, match=r"is not deterministic: .*'0/reset' returns another answer"):
        again(recorded(state="elsewhere"))


def test_an_environment_whose_messages_do_not_fit_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    closed = list[str]()

    class Closing(World):
        def close(self) -> Any:
            closed.append("bad" if self.bad else "good")
            return super().close()

    found, _ = run_agents(agent(Closing, context_tokens=9), TOKENIZER, lambda *_: f"ok{END}", [BAD], samples=1)
    assert np.isnan(found.groups[0].episodes[0].reward or 0.0)
    assert "leaves no room for a reply: context_tokens 9 is too small" in caplog.text
    assert closed == ["bad"]


def test_states_may_be_numbers_and_info_none() -> None:
    world = bad("step", lambda: Observation([{"role": "user", "content": "on"}], state=3, info=None))  # type: ignore[arg-type]
    (one,) = run_agents(agent(world, turns=3), TOKENIZER, lambda *_: f"ok{END}", [BAD], samples=1)[0].groups
    keys = one.episodes[0].state_keys
    assert keys[1] == keys[2] != keys[0]


def test_an_async_method_that_blocks_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    blocking = bad("step", lambda: time.sleep(3.0), asynchronous=True)

    def make(row: Mapping[str, Any]) -> World:
        return blocking(row) if row["prompt"] == "Bad." else World(row)

    play(make, caplog, f"{STEP}'0/0' did not answer within 0.5 s", scored=True, time_limit=0.5)
    assert time.monotonic() - began < 2.5
