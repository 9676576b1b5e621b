"""Copies of environments within an episode share nothing; what cannot be copied is replayed and checked."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.environments.adapters import environments
from jaxrl_llm.environments.copies import NotCopiedError, Replayable, deep_copy
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.tools.base import EachEpisode, with_tools
from jaxrl_llm.environments.tools.files import files
from jaxrl_llm.rollouts.agents.environment_calls import copied
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.utils.errors import InputError


def says(text: str, /, **arguments: Any) -> Reply:
    """A text, or a call of the tool of this name."""
    calls = (ReadCall(text, arguments),) if arguments else ()
    return Reply({"role": "assistant", "content": text}, calls)


def text_of(seen: Observation) -> str:
    return "\n".join(str(message["content"]) for message in seen.messages)


class Sums:
    """Of TRL's kind: it adds numbers, and one of its own."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.numbers, self.random = list[int](), random.Random(3)

    def reset(self, **row: Any) -> None:
        self.numbers.append(row["first"])

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: What is added.
        """
        self.numbers += [number, self.random.randrange(1000)]
        return str(self.numbers)

    def get_reward(self) -> float:
        return float(len(self.numbers))


class Locked(Sums):
    """The same, with what has no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class InFolder(Sums):
    """The same, with what would be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path("/nowhere")


class OnTexts(Sums):
    """The same as Gymnasium has them."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        self.numbers = [seed % 10]
        return str(self.numbers), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.add(int(text)), 1.0, False, False, {}

    get_reward = None  # type: ignore[assignment]


class Own:
    """Of the protocol, with a copy of its own."""

    tools = ()
    copies = 0

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.said = list[str]()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation()

    def step(self, reply: Reply) -> Observation:
        self.said.append(str(reply.message["content"]))
        return Observation([{"role": "user", "content": " ".join(self.said)}])

    def close(self) -> None: ...

    def copy(self) -> Own:
        Own.copies += 1
        other = Own({})
        other.said = list(self.said)
        return other


async def played(make: Any, replies: list[Reply]) -> Replayable:
    world = Replayable(make, {"first": 7})
    await world.reset({"first": 7}, 5)
    for reply in replies:
        await world.step(reply)
    return world


def adds(make: Any, number: int) -> Reply:
    return says(str(number)) if make is OnTexts else says("add", number=number)


# How many are made: of those that are replayed, a second one.
@pytest.mark.parametrize(("kind", "made"), [(Sums, 1), (OnTexts, 1), (Locked, 2), (InFolder, 2)])
def test_a_copy_goes_on_as_the_environment_does_and_apart_from_it(kind: Any, made: int) -> None:
    async def main() -> None:
        kind.made = 0
        world = await played(environments(kind), [adds(kind, 1), adds(kind, 2)])
        other = await world.copy()
        assert kind.made == made
        one, same = await world.step(adds(kind, 3)), await other.step(adds(kind, 3))
        assert one == same
        assert "1, " in text_of(one)
        another = text_of(await other.step(adds(kind, 44)))
        assert "44" in another
        assert "44" not in text_of(await world.step(adds(kind, 5))), "it is apart"
        assert [len(x.seen) for x in (world, other)] == [5, 5]
        third = await other.copy()
        assert text_of(await third.step(adds(kind, 6))).startswith(another[:-1]), "copies have copies"
        before = await world.copy(turns=1)
        assert kind.made == made + (2 if made == 2 else 1)
        assert await before.step(adds(kind, 2)) == world.seen[2]
        rewards = [await x.close() for x in (world, other, third, before)]
        assert rewards == ([None] * 4 if kind is OnTexts else [9.0, 9.0, 11.0, 5.0])

    asyncio.run(main())


def test_an_environments_own_copy_is_used() -> None:
    async def main() -> None:
        Own.copies = 0
        world = await played(Own, [says("a")])
        other = await world.copy()
        assert Own.copies == 1
        assert text_of(await other.step(says("b"))) == "a b"
        assert text_of(await world.step(says("c"))) == "a c"

    asyncio.run(main())


def test_an_environments_own_copy_may_ask_for_a_replay() -> None:
    class Sometimes(Own):
        def copy(self) -> Own:
            raise NotCopiedError("not now")

    async def main() -> None:
        world = await played(Sometimes, [says("a")])
        assert text_of(await (await world.copy()).step(says("b"))) == "a b"

    asyncio.run(main())


def test_tools_are_shared_and_what_they_keep_is_copied() -> None:
    class Notes:
        """Without a copy."""

        def __init__(self) -> None:
            self.lines, self.functions = list[str](), (self.note,)

        def note(self, text: str) -> str:
            """Note.

            Args:
                text: What.
            """
            self.lines.append(text)
            return "".join(self.lines)

        def close(self) -> None:
            self.lines.clear()

    asked = list[int]()

    def ask(number: int) -> str:
        """Ask.

        Args:
            number: Which.
        """
        asked.append(number)
        return str(number)

    async def main() -> None:
        world = await played(with_tools([ask, files]), [says("write_file", path="a", text="x"), says("ask", number=1)])
        other = await world.copy()
        assert asked == [1], "it is no replay"
        assert text_of(await other.step(says("read_file", path="a"))) == "x"
        await other.step(says("write_file", path="a", text="longer"))
        assert text_of(await world.step(says("read_file", path="a"))) == "x"
        await world.close()
        assert text_of(await other.step(says("read_file", path="a"))) == "longer", "its folder is still there"
        await other.close()
        world = await played(with_tools([ask, EachEpisode(Notes)]), [says("note", text="x"), says("ask", number=2)])
        other = await world.copy()
        assert asked == [1, 2, 2], "it is a replay"
        assert text_of(await other.step(says("note", text="y"))) == "xy"
        assert text_of(await world.step(says("note", text="z"))) == "xz"

    asyncio.run(main())


class Forgetful(Locked):
    """It counts those that were made, so that no other answers as it does."""

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: What is added.
        """
        return f"{type(self).made}"


class Brittle(Locked):
    """The second one fails."""

    def reset(self, **row: Any) -> None:
        if type(self).made > 1:
            raise OSError("the server is gone")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Forgetful, "Forgetful holds what has no copy.*a replay answers .*after 1 of its"),
        (Brittle, "a replay fails after 0 replies: .*the server is gone.*Give it a method copy"),
    ],
)
def test_what_answers_a_replay_otherwise_is_refused(kind: Any, said: str) -> None:
    async def main() -> None:
        kind.made = 0
        world = await played(environments(kind), [adds(kind, 1)])
        with pytest.raises(InputError, match=said):
            await world.copy()
        for turns in (-1, 2):
            with pytest.raises(InputError, match=f"with 1 replies cannot be copied as it was after {turns}"):
                await world.copy(turns)

    asyncio.run(main())


def test_what_a_deep_copy_would_share_is_found() -> None:
    data = {"array": np.arange(3), "random": np.random.default_rng(0), "kinds": [Sums, len], "nested": [Sums()]}
    other = deep_copy(data)
    assert other["array"] is not data["array"]
    assert other["nested"][0] is not data["nested"][0]
    assert other["random"].integers(1000) == data["random"].integers(1000)
    counts = [0]

    def count() -> int:
        return counts[0]

    class Ends:
        def __del__(self) -> None: ...

    for held in (count, Path("x"), threading.Lock(), Ends(), (n for n in [1])):
        with pytest.raises(NotCopiedError):
            deep_copy({"deep": [held]})


def test_a_program_forks_its_environment_and_goes_on_from_its_log() -> None:
    """The fork's environment is copied again when the program is rerun, and no token of it is sampled anew."""
    tokenizer, end = tokenizer_of("plain"), TEMPLATES["plain"][1]

    async def told(world: Replayable, number: int) -> str:
        return text_of(await world.step(says("add", number=number)))

    async def begun(world: Replayable, row: Mapping[str, Any]) -> str:
        return text_of(await world.reset(row, 1))

    async def program(tools: Tools, task: Task) -> list[Episode]:
        world, found = Replayable(environments(Locked), task.row), list[Episode]()
        await tools.call(begun, world, task.row, name="reset", again=True)
        stem = await tools.sample(task.prompt, number=0, limit=4)
        await tools.call(told, world, 1, name="stem", again=True)
        for number in range(2):
            fork = await copied(tools, world, name=f"fork {number}")
            text = await tools.call(told, fork, 10 + number, name=f"step {number}", again=True)
            found.append(await tools.sample(stem + given(tools.encode(text)), number=number, limit=4))
        return await tools.score(found)

    rows = [{"prompt": "x", "first": 7}]
    rollout = Rollout(program)
    (one,) = run_agents(rollout, tokenizer, lambda *_: f"a{end}", rows)[0].groups
    assert not one.failed
    texts = [tokenizer.decode(episode.tokens) for episode in one.episodes]
    assert "10, " in texts[0]
    assert "11, " in texts[1]
    assert "10, " not in texts[1].split("11, ")[0][-8:]
    logs = (GroupLog((1,), 0, 2, 0, recorded={"reset": "", "fork 0": 1, "fork 1": 1}),)
    (again,) = run_agents(rollout, tokenizer, lambda *_: f"a{end}", rows, flight=logs)[0].groups
    assert [episode.tokens for episode in again.episodes] == [episode.tokens for episode in one.episodes]
    wrong = (logs[0]._replace(recorded={"reset": "", "fork 0": {"failed": "no"}}),)
    (refused,) = run_agents(rollout, tokenizer, lambda *_: f"a{end}", rows, flight=wrong)[0].groups
    assert refused.failed
