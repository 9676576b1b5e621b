"""Games of several players: each player's turns are rows of the policy with that player's reward."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.environments.adapters import adapted, environments
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.self_play import self_play
from jaxrl_llm.rollouts.runtime.collate import program_metrics, to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
ROWS = [{"prompt": ""}, {"prompt": "Play well."}]


class Stones:
    """As TextArena has them: who takes the last of four stones wins; what is no number loses. Messages as they are."""

    first = 0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        random.seed(seed)
        self.players, self.left, self.turn, self.won = num_players, 4, self.first, -1
        self.secret = random.randrange(1000)
        self.said = {
            player: [(-1, f"You are {player}. Secret {self.secret + player}.", 1)] for player in range(num_players)
        }
        self.tell(-1, "4 left.")

    def tell(self, sender: int, text: str) -> None:
        for lines in self.said.values():
            lines.append((sender, text, 2))

    def get_observation(self) -> tuple[int, Any]:
        said, self.said[self.turn] = self.said[self.turn], []
        return self.turn, said

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.tell(self.turn, action)
        if not action.isdigit():
            self.won = (self.turn + 1) % self.players
            return True, {}
        self.left -= int(action)
        self.tell(-1, f"{self.left} left.")
        if self.left <= 0:
            self.won = self.turn
        self.turn = (self.turn + 1) % self.players
        return self.left <= 0, {}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        return {player: 1.0 if player == self.won else -1.0 for player in range(self.players)}, {}


class Whole(Stones):
    """Each player is told all that was said so far, as TextArena's wrapper for language models does."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.told = dict.fromkeys(range(num_players), "")
        super().reset(num_players, seed)

    def get_observation(self) -> tuple[int, str]:
        player, said = super().get_observation()
        self.told[player] += "".join(f"\n[{'GAME' if who < 0 else f'Player {who}'}] {text}" for who, text, _ in said)
        return player, self.told[player]


def says(text: str, sample: int) -> str:
    """Player 0 takes two in its second turn of the first game and one otherwise; the others take one."""
    player = int(re.findall(r"You are (\d)", text)[0])
    return ("2" if player == 0 and sample == 0 and "2 left" in text else "1") + END


def play(
    make: Any = Stones, players: int = 2, says: Any = says, samples: int = 2, rows: Any = ROWS[:1], **settings: Any
) -> Any:
    rollout = self_play(environments(make, players=players), players, **settings)
    return run_agents(rollout, TOKENIZER, says, rows, samples=samples)[0].groups


def test_each_player_has_a_conversation_and_a_reward_of_its_own() -> None:
    (one,) = play()
    secret = int(re.findall(r"Secret (\d+)", TOKENIZER.decode(one.episodes[0].tokens))[0])

    def chat(player: int, *turns: str) -> str:
        start, end = "<|im_start|>", f"{END}\n"
        said = f"{start}user\nYou are {player}. Secret {secret + player}.\n" + turns[0] + end
        for number, text in enumerate(turns[1:]):
            said += f"{start}{('assistant', 'user')[number % 2]}\n{text}{end}"
        return said[:-1]

    # Games 0 and 1 of player 0, then those of player 1. In game 0 player 0 takes the last stones.
    assert [TOKENIZER.decode(row.tokens) for row in one.episodes] == [
        chat(0, "4 left.", "1", "3 left.\n[Player 1] 1\n2 left.", "2"),
        chat(0, "4 left.", "1", "3 left.\n[Player 1] 1\n2 left.", "1"),
        chat(1, "4 left.\n[Player 0] 1\n3 left.", "1"),
        chat(1, "4 left.\n[Player 0] 1\n3 left.", "1", "2 left.\n[Player 0] 1\n1 left.", "1"),
    ]
    assert [row.rewards["environment"] for row in one.episodes] == [1.0, -1.0, -1.0, 1.0]
    assert [row.part for row in one.episodes] == [0, 0, 1, 1]
    assert [int(row.turns.max()) + 1 for row in one.episodes] == [2, 2, 1, 2]
    assert not any(row.truncated for row in one.episodes)
    assert len({row.sample for row in one.episodes}) == 4


def test_players_are_compared_with_the_same_player() -> None:
    found = play(rows=ROWS)
    batch = to_batch(found, SamplingConfig(max_new_tokens=200), 0)
    np.testing.assert_array_equal(batch.group, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(batch.prompt_id, [0] * 4 + [1] * 4)
    np.testing.assert_array_equal(batch.info["part"], [0, 0, 1, 1] * 2)
    batch = batch.replace(reward=np.asarray([row.rewards["environment"] for one in found for row in one.episodes]))
    credit = group_relative(scale="none")
    _, ready = credit.apply(credit.init(), batch)
    signs = np.asarray([np.unique(row[mask]) for row, mask in zip(ready.advantages, batch.action_mask, strict=True)])
    np.testing.assert_array_equal(signs[:, 0], [1, -1, -1, 1] * 2)
    metrics = program_metrics(found)
    assert (metrics["rollout/parts"], metrics["rollout/turns"]) == (2.0, 7 / 4)


def test_what_is_told_again_is_left_out() -> None:
    told = [TOKENIZER.decode(row.tokens) for row in play(Whole)[0].episodes]
    assert [text.count("4 left.") for text in told] == [1] * 4
    assert [text.count("Secret") for text in told] == [1] * 4
    assert "[GAME] 3 left.\n[Player 1] 1\n[GAME] 2 left." in told[0]


def test_games_draw_their_own_numbers_and_are_the_same_for_all_samples() -> None:
    random.seed(1)
    two = play()[0].episodes
    random.seed(2)
    three = play(samples=3)[0].episodes
    assert [row.tokens for row in two] == [three[place].tokens for place in (0, 1, 3, 4)]


def test_a_player_without_a_turn_is_not_scored() -> None:
    """A malformed action ends the game, before the third had a turn."""
    (one,) = play(players=3, says=lambda text, sample: ("oh" if "Player 0" in text else "1") + END, samples=1)
    assert [int(row.actions.sum()) for row in one.episodes] == [2, 3, 0]
    np.testing.assert_array_equal([row.reward for row in one.episodes], [2.0, 3.0, np.nan])
    assert [row.rewards["environment"] for row in one.episodes[:2]] == [-1.0, -1.0]
    assert program_metrics([one])["rollout/failed_environments"] == 0.0


def test_a_game_that_does_not_end_is_cut_for_all() -> None:
    (one,) = play(says=lambda text, sample: f"0{END}", samples=1, turns=3)
    assert [int(row.turns.max()) + 1 for row in one.episodes] == [3, 3]
    assert [row.truncated for row in one.episodes] == [True, True]
    assert [row.rewards for row in one.episodes] == [{"environment": 0.0}] * 2
    (one,) = play(says=lambda text, sample: "000" if "Player 0" in text else f"0{END}", samples=1, turn_tokens=3)
    assert [int(row.turns.max()) + 1 for row in one.episodes] == [1, 1], "a reply was cut"
    assert [row.truncated for row in one.episodes] == [True, True]


@pytest.mark.parametrize(
    ("fault", "scored", "said"),
    [
        ("reset", False, "in reset, so that its episode is not scored: OSError: gone"),
        ("get_observation", False, "in reset, so that its episode is not scored: OSError: gone"),
        ("step", True, "in step, where its episode ends: OSError: gone"),
        ("close", False, "in close, so that its episode is not scored: OSError: gone"),
    ],
)
def test_a_game_that_fails_is_counted_once_and_said(
    fault: str, scored: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*arguments: Any, **options: Any) -> Any:
        raise OSError("gone")

    broken = type("Broken", (Stones,), {fault: raises})
    found = play(broken, samples=1)
    assert len(found[0].episodes) == 2
    assert [np.isfinite(row.reward) for row in found[0].episodes] == [scored, False]
    assert program_metrics(found)["rollout/failed_environments"] == 1.0
    assert said in caplog.text
    assert len(caplog.records) == 1


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="players is 1, but must be a whole number, at least 2"):
        self_play(environments(Stones, players=2), 1)

    class Steps:
        def reset(self) -> str:
            return ""

        def step(self, text: str) -> Any:
            return "", 0.0, True, {}

    with pytest.raises(InputError, match="players is 2, but Steps is for 1: games of several"):
        adapted(Steps(), players=2)

    class Ring(Stones):
        players, tools = 3, ()

    assert adapted(Ring(), players=3).players == 3  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="players is 2, but Ring is for 3"):
        adapted(Ring(), players=2)


def test_a_game_of_other_players_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = environments(Stones, players=3)
    found = run_agents(self_play(made, 2), TOKENIZER, says, ROWS[:1], samples=1)[0].groups
    assert "in step, where its episode ends: it is the turn of player 2, but 2 play, numbered from 0" in caplog.text
    assert program_metrics(found)["rollout/failed_environments"] == 1.0

    class One(Stones):
        tools, players = (), 2

        def reset(self, row: Any, seed: int) -> Any:  # type: ignore[override]
            return Observation([{"role": "user", "content": "You are 0."}])

        def step(self, reply: Any) -> Any:
            return Observation(done=True)

        def close(self) -> float:  # type: ignore[override]
            return 1.0

    found = play(One, samples=1)
    assert "it returns 1.0, but must return a reward for each of 2 players" in caplog.text
    assert np.isnan(found[0].episodes[0].reward)


@pytest.mark.parametrize("name", ["TicTacToe-v0", "KuhnPoker-v0", "TicTacToe-v0-raw"])
def test_games_of_textarena_itself(name: str) -> None:
    arena = pytest.importorskip("textarena")
    (one,) = play(lambda: arena.make(name), says=lambda text, sample: f"[nonsense]{END}", samples=1, turns=4)
    assert {row.part for row in one.episodes} == {0, 1}
    assert program_metrics([one])["rollout/failed_environments"] == 0.0
