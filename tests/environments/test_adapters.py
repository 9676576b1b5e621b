"""Environments of other libraries, unchanged, as conversations."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.adapters import OfTextArena, adapted, environments
from jaxrl_llm.environments.tools.base import Toolbox, WithTools, result_text, schema_of
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Purse:
    """As TRL documents them."""

    def reset(self, **row: Any) -> str | None:
        self.coins = int(row["coins"])
        return f"You have {self.coins} coins."

    def add(self, number: int) -> str:
        """Add coins.

        Args:
            number: How many.
        """
        self.coins += number
        return f"now {self.coins}"

    async def lose(self, number: int) -> str:
        """Lose coins.

        Args:
            number: How many.
        """
        await asyncio.sleep(0)
        self.coins -= number
        return f"only {self.coins}"

    def _hidden(self) -> None:
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.coins == 7)


ROWS = [{"prompt": "Have seven.", "coins": 2}, {"prompt": "Have seven coins.", "coins": 9}]


def seven(text: str, sample: int) -> str:
    """Sample 0 does what is needed, sample 1 nothing."""
    if sample or "now" in text or "only" in text:
        return f"Done.{END}"
    return (call("add", number=5) if "2 coins" in text else call("lose", number=2)) + END


def reward_of(episode: Episode) -> float:
    """What the environment gave."""
    return episode.rewards["environment"]


def test_a_class_of_trl() -> None:
    tokenizer = tokenizer_of("hermes")
    found, _ = run_agents(agent(environments(Purse)), tokenizer, seven, ROWS)
    assert [[reward_of(episode) for episode in one.episodes] for one in found.groups] == [[1.0, 0.0], [1.0, 0.0]]
    right, idle = found.groups[0].episodes
    text = tokenizer.decode(right.tokens)
    assert "Have seven.\n\nYou have 2 coins." in text
    assert "<tool_response>\nnow 7\n</tool_response>" in text
    assert (right.info["calls"], right.info["failed_calls"]) == (1.0, 0.0)
    assert idle.info["calls"] == 0.0
    assert '"name": "add"' in text
    assert "_hidden" not in text
    assert "get_reward" not in text


def test_several_environments_by_the_row() -> None:
    class Other(Purse):
        def reset(self, **row: Any) -> None:
            self.coins = 7

    tokenizer, kinds = tokenizer_of("hermes"), {"purse": Purse, "other": Other}
    rows = [{**row, "environment": name} for row, name in zip(ROWS, ("purse", "other"), strict=True)]
    found, _ = run_agents(agent(environments(kinds)), tokenizer, lambda *_: f"Done.{END}", rows)
    assert [reward_of(one.episodes[0]) for one in found.groups] == [0.0, 1.0]
    with pytest.raises(InputError, match="environment"):
        environments(kinds)({"environment": "third"})


class Corridor:
    """As Gymnasium has them, on texts: reach the end by going east."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.place, self.goal = 0, 2 + (seed or 0) % 2
        return f"goal {self.goal}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place += "east" in action
        over = self.place == self.goal
        return f"at {self.place}", float(over), over, False, {}


def test_an_environment_of_gymnasium() -> None:
    tokenizer = tokenizer_of("hermes")
    rollout = agent(environments(Corridor), turns=5, turn_rewards=True)
    found, _ = run_agents(rollout, tokenizer, lambda _, sample: ("west" if sample else "east") + END, ROWS)
    for one in found.groups:
        east, west = one.episodes
        assert len(east.turn_rewards) in (2, 3)
        assert sum(east.turn_rewards) == 1.0
        assert west.turn_rewards == (0.0,) * 5
        assert east.state_keys[0] == west.state_keys[0], "samples of a group have one seed"
        assert west.truncated
        assert not east.truncated
    assert {len(one.episodes[0].turn_rewards) for one in found.groups} == {2, 3}, "seeds differ"


def test_a_turn_may_have_no_reward() -> None:
    class Late(Corridor):
        def step(self, action: str) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, reward or None, *rest

    rollout = agent(environments(Late), turns=5, turn_rewards=True)
    found, _ = run_agents(rollout, tokenizer_of("hermes"), lambda _, sample: "east" + END, ROWS)
    assert all(sum(one.turn_rewards) == 1.0 for group in found.groups for one in group.episodes)


class Scores:
    """As TextWorld has them: states with feedback, and sums of scores."""

    class State:
        def __init__(self, feedback: str) -> None:
            self.feedback = feedback

    def reset(self) -> Scores.State:
        self.score = 0
        return self.State("A door.\n")

    def step(self, command: str) -> tuple[Scores.State, int, bool]:
        self.score += command == "open"
        return self.State(f"You {command}."), self.score, self.score == 2


def test_an_environment_of_textworld() -> None:
    rollout = agent(environments(Scores), turns=3, turn_rewards=True)
    found, _ = run_agents(rollout, tokenizer_of("hermes"), lambda *_: f"open{END}", ROWS[:1], samples=1)
    (episode,) = found.groups[0].episodes
    assert episode.turn_rewards == (1.0, 1.0)
    assert not episode.truncated


class Guess:
    """As TextArena has them; it draws from Python's one generator."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        self.said = ["Guess from 0 to 2."]
        self.number, self.over, self.asked = random.randrange(3), False, 0

    def get_observation(self) -> tuple[int, list[tuple[int, str, int]]]:
        said, self.said = self.said, []
        return 0, [(-1, text, 0) for text in said]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.asked += 1
        self.over = action == str(self.number) or self.asked == 2
        self.said = [f"no, nor {random.randrange(10)}"]
        self.right = action == str(self.number)
        return self.over, {}

    def close(self) -> dict[int, float]:
        return {0: float(self.right)}


def test_a_game_of_textarena_draws_its_own_numbers() -> None:
    """However many are played at once, and whatever else draws."""

    def guess(text: str, sample: int) -> str:
        return f"{sample % 3}{END}"

    def played(samples: int) -> list[tuple[Any, Any]]:
        random.seed(samples)
        rollout = agent(environments(Guess), turns=4)
        (one,) = run_agents(rollout, tokenizer_of("hermes"), guess, ROWS[:1], samples=samples)[0].groups
        return [(episode.tokens, reward_of(episode)) for episode in one.episodes]

    many = played(10)
    assert played(3) == many[:3]
    assert {reward for _, reward in many} == {0.0, 1.0}


def test_tools_alone() -> None:
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: Any.
        """
        return 2 * number

    def says(text: str, sample: int) -> str:
        return (f"It is {text.rpartition('<tool_response>')[2].split()[0]}." if "response" in text else call(
            "double", number=4 + sample
        )) + END  # fmt: skip

    found, _ = run_agents(agent(lambda row: WithTools([double])), tokenizer_of("hermes"), says, ROWS[:1])
    texts = [tokenizer_of("hermes").decode(episode.tokens) for episode in found.groups[0].episodes]
    assert [text.rpartition("assistant\n")[2] for text in texts] == [f"It is 8.{END}", f"It is 10.{END}"]


def broken(number: int) -> str:
    """Raise.

    Args:
        number: Any.
    """
    raise ValueError(f"no {number}")


def hanging() -> str:
    """Hang."""
    time.sleep(5)
    return "late"


def flooding() -> str:
    """Say too much."""
    return "x" * 10_000_000


def raw() -> bytes:
    """Give bytes."""
    return b"\xff"


@pytest.mark.parametrize(
    ("said", "told", "counts"),
    [
        (call("broken", number=3), "Error: ValueError: no 3", (1, 1)),
        (call("hanging"), "Error: hanging did not answer within 0.5 s", (1, 1)),
        (call("flooding"), "[... 9,980,000 characters are left out ...]", (1, 0)),
        (call("raw"), "Error: TypeError: the result is 1 bytes, which are no text", (1, 1)),
        (call("absent"), "Error: there is no tool 'absent', but broken, hanging, flooding, raw", (1, 1)),
        (call("broken", other=3), "unexpected keyword argument 'other'", (1, 1)),
    ],
)
def test_faults_of_tools_are_told_to_the_policy(said: str, told: str, counts: tuple[int, int]) -> None:
    box = Toolbox([broken, hanging, flooding, raw], seconds=0.5)
    reading = ChatTurns(tokenizer_of("hermes"), box.schemas).reading
    seen = asyncio.run(box.answer(reading.text(said + END)))
    assert told in seen.messages[0]["content"]
    assert (seen.info["calls"], seen.info["failed_calls"]) == counts
    assert not seen.done
    assert len(seen.messages[0]["content"]) < 21_000


def test_a_malformed_call_is_told_to_the_policy() -> None:
    def says(text: str, sample: int) -> str:
        return ("I give up." if "Error" in text else "<tool_call>\n{number}\n</tool_call>") + END

    found, _ = run_agents(agent(lambda row: WithTools([broken])), tokenizer_of("hermes"), says, ROWS[:1], samples=1)
    (episode,) = found.groups[0].episodes
    assert episode.info["malformed_calls"] == 1.0
    assert "could not be read" in tokenizer_of("hermes").decode(episode.tokens)


def test_what_is_no_environment_or_tool() -> None:
    with pytest.raises(InputError, match="an environment needs a method reset, but 3 has none"):
        adapted(3)
    with pytest.raises(InputError, match=r"the tool <lambda> is not described|the tool \w+ is not described"):
        schema_of(lambda x: x)
    with pytest.raises(InputError, match="two tools are called broken"):
        Toolbox([broken, broken])
    assert result_text("\ud800") == "?"


@pytest.mark.parametrize("name", ["FrozenLake-v0", "GuessTheNumber-v0", "Wordle-v0"])
def test_games_of_textarena_itself(name: str) -> None:
    arena = pytest.importorskip("textarena")
    game = adapted(arena.make(name))
    assert isinstance(game, OfTextArena)
    first = game.reset({}, 3)
    assert first.messages[0]["content"]
    assert first == adapted(arena.make(name)).reset({}, 3)


class Spaces:
    """Gymnasium's, as many write it: further arguments, documented methods."""

    action_space = object()

    def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """Reset."""
        self.seed_of = kwargs["seed"]
        return "Guess.", {}

    def step(self, action: str) -> Any:
        """Act.

        Args:
            action: The guess.
        """
        return self.answer(action)

    def answer(self, action: str) -> Any:
        return ("wrong", 0.0, True, False, {})


class SeedOrOptions:
    def reset(self, *, seed: int | None = None, options: Any = None, **kwargs: Any) -> Any:
        self.seed_of = seed
        return "Guess.", {}

    def step(self, action: str) -> Any:
        """Act.

        Args:
            action: The guess.
        """
        found = ("wrong", 0.0, True, False, {})
        return found


class FiveValues:
    def reset(self, **kwargs: Any) -> Any:
        self.seed_of = kwargs["seed"]
        return "Guess.", {}

    def step(self, action: str) -> Any:
        """Act.

        Args:
            action: The guess.
        """
        if action == "x":
            return "right", 1.0, True, False, {}
        return "wrong", 0.0, True, False, {}


@pytest.mark.parametrize("kind", [Spaces, SeedOrOptions, FiveValues])
def test_gymnasiums_classes_may_take_further_arguments(kind: type) -> None:
    world = environments(kind)({})
    assert world.tools == ()
    seen = asyncio.run(world.reset({"prompt": "x"}, 11))  # type: ignore[arg-type]
    assert seen.messages == [{"role": "user", "content": "Guess."}]
    assert world._world.seed_of == 11  # type: ignore[attr-defined]


def test_a_tool_of_trls_class_may_be_called_step() -> None:
    class Walk:
        def reset(self, **row: Any) -> str:
            self.seed_of = row.get("seed")
            return "Walk."

        def step(self, number: int) -> str:
            """Walk on.

            Args:
                number: Of steps.
            """
            return f"walked {number}"

    world = environments(Walk)({})
    assert [tool["function"]["name"] for tool in world.tools] == ["step"]


def test_trls_reset_gets_the_seed_that_it_asks_for_and_the_columns_that_it_takes() -> None:
    class Fixed:
        def reset(self, coins: int, seed: int = 0) -> str:
            return f"{coins} {seed}"

        def get_reward(self) -> float:
            return 1.0

    row = {"prompt": "x", "coins": 3}
    seen = asyncio.run(environments(Fixed)(row).reset(row, 11))  # type: ignore[arg-type]
    assert seen.messages[0]["content"] == "3 11"
    row["seed"] = 5  # of the row itself
    seen = asyncio.run(environments(Fixed)(row).reset(row, 11))  # type: ignore[arg-type]
    assert seen.messages[0]["content"] == "3 5"


def test_a_class_that_is_taken_for_trls_and_resets_as_gymnasiums_is_refused() -> None:
    class Unclear:
        def reset(self, **kwargs: Any) -> Any:
            return "Guess.", {}

        def guess(self, number: int) -> str:
            """Guess.

            Args:
                number: It.
            """
            return "no"

    with pytest.raises(InputError, match=r"reset of Unclear returns .*as Gymnasium's .* give it a step"):
        asyncio.run(environments(Unclear)({}).reset({}, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "answer", "words"),
    [
        ((None, {}), None, "its reset observes None"),
        (({"board": 1}, {}), None, r"its reset observes \{'board': 1\}"),
        ((np.zeros(3), {}), None, r"its reset observes array\("),
        (["a", "b"], None, "its reset observes"),
        (("3", {}), (None, 0.0, False, False, {}), "its step observes None"),
        (("3", {}), ({"board": 1}, 0.0, False, False, {}), "its step observes"),
        (("3", {}), ("4", 0.0, "no", False, {}), "done of its step is 'no'"),
        (("3", {}), ("4", 0.0, False, 0.5, {}), "truncated of its step is 0.5"),
        (("3", {}), ("4", 0.0, None, {}), "done of its step is None"),
    ],
)
def test_what_no_policy_can_read_is_refused(first: Any, answer: Any, words: str) -> None:
    class Board(Spaces):
        def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return first

        def step(self, action: str) -> Any:
            return answer

    async def play() -> None:
        world = environments(Board)({})
        await world.reset({}, 0)  # type: ignore[misc]
        await world.step(Reply({"role": "assistant", "content": "4"}, ()))  # type: ignore[misc]

    with pytest.raises(RuntimeError, match=words):
        asyncio.run(play())


def test_numbers_are_read_and_the_last_observation_may_be_none() -> None:
    class Board(Spaces):
        def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return np.int64(14), {}

        async def step(self, action: str) -> Any:
            return None, 1.0, np.bool_(True), 0, {}

    world = environments(Board)({})
    seen = asyncio.run(world.reset({}, 0))  # type: ignore[arg-type]
    assert seen.messages[0]["content"] == "14"
    seen = asyncio.run(world.step(Reply({"role": "assistant", "content": "4"}, ())))  # type: ignore[arg-type]
    assert (seen.done, seen.truncated, seen.reward) == (True, False, 1.0)


def test_who_asks_for_the_row_gets_it() -> None:
    class Row(Spaces):
        def __init__(self, row: Any = None, other: int = 1) -> None:
            self.row = row

    class Needed(Spaces):
        def __init__(self, anything: Any) -> None:
            self.row = anything

    class Other(Spaces):
        def __init__(self, word: str = "x") -> None:
            self.row = word

    for kind, expected in ((Row, {"a": 1}), (Needed, {"a": 1}), (Other, "x")):
        assert environments(kind)({"a": 1})._world.row == expected  # type: ignore[attr-defined]
