"""Tools that raise anything, hang, flood or are not described: the policy is told, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import PLAIN, TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.environments.tools.base import EachEpisode, Toolbox, with_tools
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.runtime.collate import program_metrics

END = TEMPLATES["hermes"][1]
CALL = f'<tool_call>\n{{"name": "tool", "arguments": {{}}}}\n</tool_call>{END}'
ROWS = [{"prompt": "Begin."}, {"prompt": "Go on."}]
REPLY = Reply({"role": "assistant", "content": ""}, (ReadCall("tool", {}),))


class PanicError(BaseException):
    """As extensions in other languages raise it."""


class MuteError(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Unreadable:
    """A result that is no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raising(error: BaseException) -> Callable[[], Any]:
    def tool() -> Any:
        """Do nothing."""
        raise error

    return tool


def returning(value: Any) -> Callable[[], Any]:
    def tool() -> Any:
        """Do nothing."""
        return value

    return tool


def hanging() -> Callable[[], Any]:
    def tool() -> Any:
        """Do nothing."""
        time.sleep(2)

    return tool


def as_async(tool: Callable[[], Any]) -> Callable[[], Any]:
    async def tool_() -> Any:
        """Do nothing."""
        await asyncio.sleep(0)
        return tool()

    tool_.__name__ = "tool"
    return tool_


def says(text: str, sample: int) -> str:
    """Sample 0 calls the tool, and ends after its answer; sample 1 does nothing."""
    return CALL if sample == 0 and "<tool_response>" not in text else f"Done.{END}"


FAULTS: dict[str, tuple[Callable[[], Any], str, float, float]] = {
    "leaves": (raising(SystemExit(0)), "Error: SystemExit: 0", 1, 0),
    "interrupts": (raising(KeyboardInterrupt()), "Error: KeyboardInterrupt: ", 1, 0),
    "cancels": (raising(asyncio.CancelledError("gone")), "Error: CancelledError: gone", 1, 0),
    "panics": (raising(PanicError("index")), "Error: PanicError: index", 1, 0),
    "times out itself": (raising(TimeoutError("read")), "Error: TimeoutError: read", 1, 0),
    "mute": (raising(MuteError()), "Error: MuteError", 1, 0),
    "unreadable": (returning(Unreadable()), "Error: ValueError: no text", 1, 0),
    "bytes": (returning(b"\xff" * 3), "Error: TypeError: the result is 3 bytes, which are no text", 1, 0),
    "floods": (returning("x" * 10_000_000), "x\n[... 9,980,000 characters are left out ...]\nx", 0, 1),
    "nothing": (returning(None), "<tool_response>\nNone\n", 0, 0),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_policy_is_told_and_the_run_goes_on(
    fault: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tool, told, failed, cut = FAULTS[fault]
    rollout = agent(with_tools([as_async(tool) if asynchronous else tool]))
    found, _ = run_agents(rollout, tokenizer_of("hermes"), says, ROWS, time_limit=5.0)
    assert not any(one.failed for one in found.groups)
    for one in found.groups:
        caller, other = (tokenizer_of("hermes").decode(episode.tokens) for episode in one.episodes)
        assert told in caller
        assert caller.endswith(f"Done.{END}")
        assert "<tool_response>" not in other
        assert len(caller) < 21_000
    metrics = program_metrics(found.groups)
    assert (metrics["rollout/calls"], metrics["rollout/failed_calls"]) == (0.5, 0.5 * failed)
    assert metrics["rollout/cut_observations"] == 0.5 * cut
    assert metrics["rollout/failed_environments"] == 0.0
    assert not caplog.records


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_generator_that_ends_is_no_end_of_a_coroutine(asynchronous: bool) -> None:
    tool = raising(StopIteration(3))
    seen = asyncio.run(Toolbox([as_async(tool) if asynchronous else tool]).answer(REPLY))
    assert "StopIteration" in seen.messages[0]["content"]
    assert seen.info["failed_calls"] == 1.0


def test_a_tool_that_hangs_holds_up_no_other() -> None:
    began = time.monotonic()
    found, _ = run_agents(agent(with_tools([hanging()], 0.1)), tokenizer_of("hermes"), says, ROWS)
    assert time.monotonic() - began < 1.5
    text = tokenizer_of("hermes").decode(found.groups[0].episodes[0].tokens)
    assert "Error: tool did not answer within 0.1 s" in text


def test_a_plain_function_may_return_an_awaitable() -> None:
    async def later() -> str:
        return "late"

    def tool() -> Any:
        """Do nothing."""
        return later()

    seen = asyncio.run(Toolbox([tool]).answer(REPLY))
    assert seen.messages[0]["content"] == "late"


def test_all_kits_are_closed_even_if_one_raises() -> None:
    closed = list[int]()

    class Kit:
        def __init__(self, number: int) -> None:
            self.number, self.functions = number, ()

        def close(self) -> None:
            closed.append(self.number)
            raise OSError(f"kit {self.number}")

    box = Toolbox([EachEpisode(lambda number=number: Kit(number)) for number in range(3)])  # type: ignore[misc]
    with pytest.raises(OSError, match="kit 0"):
        box.close()
    assert closed == [2, 1, 0]
    box.close()
    assert closed == [2, 1, 0], "once"


REFUSING = PLAIN.replace(
    "<|im_start|>{{ m.role }}",
    "{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}<|im_start|>{{ m.role }}",
)
SILENT = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


@pytest.mark.parametrize("template", [PLAIN, REFUSING, SILENT], ids=["plain", "refusing", "silent"])
def test_a_template_without_tools_or_system_messages_tells_of_them_all_the_same(template: str) -> None:
    tokenizer = tokenizer_of("plain")
    tokenizer.chat_template = template

    def answers(text: str, sample: int) -> str:
        return CALL if text.count("<|im_start|>assistant") == 1 else f"Done.{END}"

    (one,) = run_agents(agent(with_tools([returning(41)])), tokenizer, answers, ROWS[:1], samples=1)[0].groups
    (episode,) = one.episodes
    text = tokenizer.decode(episode.tokens)
    assert text.startswith(f"<|im_start|>{'system' if template == PLAIN else 'user'}\nYou may call these tools:")
    assert text.count("You may call these tools:") == text.count("Begin.") == 1
    assert json.dumps("Do nothing.") in text
    assert episode.info["calls"] == 1.0
    assert "41" in text.rpartition(CALL)[2]
