"""Games against a league: who is drawn, what is trained on, and which policies a league keeps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.core.population import League
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.environments.games import TextGame
from jaxrl_llm.games import matrix_game
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.agents.self_play import league_play, self_play
from jaxrl_llm.rollouts.program_host import Draws
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
ROWS = [{"prompt": ""} for _ in range(12)]
GAME = matrix_game([[1, 2], [3, 5]], names=["up", "down"])


def says(text: str, sample: int) -> str:
    """The second game of the first player is another than the rest."""
    return ("up" if "first" in text and sample == 1 else "down") + END


def against(league: League, rows: Any = ROWS, first_seat: int | None = None, **settings: Any) -> Any:
    games = self_play(lambda row: TextGame(GAME), 2)
    return run_agents(league_play(games, league, first_seat), TOKENIZER, says, rows, samples=3, **settings)


def test_one_player_learns_and_the_others_are_a_member() -> None:
    found, engines = against(League(3))
    asked = {engine.draws: {(one.prompt_id, one.sample) for one in engine.requests} for engine in engines}
    seats, members = set(), set()
    for one in found.groups:
        place = one.task.prompt_id
        assert len(one.episodes) == 3
        seat = one.episodes[0].sample // 3  # the second player's samples come after the first's
        member = int(one.episodes[0].info["league_member"])
        own, other = ({(place, 3 * player + game) for game in range(3)} for player in (seat, 1 - seat))
        assert {(place, row.sample) for row in one.episodes} == own
        assert own <= asked[Draws()]
        assert other <= asked[Draws(snapshot=member)]
        payoffs = [5.0, 2.0, 5.0]
        assert [row.rewards["environment"] for row in one.episodes] == [x if seat == 0 else -x for x in payoffs]
        assert {row.info["league_member"] for row in one.episodes} == {member}
        seats.add(seat)
        members.add(member)
    assert seats == {0, 1}
    assert members == {0, 1, 2}, "uniform before the first update"
    assert against(League(3))[0].groups[5].episodes[0].info == found.groups[5].episodes[0].info, "the same again"


def test_members_are_drawn_by_the_controls() -> None:
    found, _ = against(League(3), controls={"league/0": 0.0, "league/1": 0.5, "league/2": 0.0, "league/7": 3.0})
    assert {one.episodes[0].info["league_member"] for one in found.groups} == {1.0}


@pytest.mark.parametrize(
    ("first", "controls", "expected"), [(1, {}, 1), (0, {"league/seat": 1.0}, 1), (1, {"league/seat": 0.0}, 0)]
)
def test_a_control_says_who_learns(first: int, controls: dict[str, float], expected: int) -> None:
    found, _ = against(League(3), first_seat=first, controls=controls)
    assert {one.episodes[0].sample // 3 for one in found.groups} == {expected}


def test_a_league_keeps_the_first_policy_and_the_last_snapshots() -> None:
    league = League(4, every=2)
    kept, seen = ({"w": jnp.zeros((2, 3)), "b": jnp.zeros(1)},) * 4, []
    for updates in range(1, 9):
        params = {"w": jnp.full((2, 3), float(updates)), "b": jnp.full(1, -float(updates))}
        kept = league.update(kept, params, jnp.int32(updates))
        for one in kept:
            np.testing.assert_array_equal(one["w"], np.full((2, 3), -one["b"][0]))
        seen.append([float(one["b"][0]) for one in kept])
    assert seen[0] == [0, 0, 0, 0]
    assert seen[1] == seen[2] == [0, -2, 0, 0]
    assert seen[5] == [0, -2, -4, -6]
    assert seen[7] == [0, -8, -4, -6]


def test_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="size of League is 1, but must be at least 2"):
        League(1)
    alone = agent(lambda row: TextGame(GAME))
    for rollout in (group(), alone):
        with pytest.raises(InputError, match=r"a league needs a game of several players.*--players 2"):
            league_play(rollout)

    with pytest.raises(InputError, match="first_seat is 2, but the game has players 0 to 1"):
        league_play(self_play(lambda row: TextGame(GAME), 2), first_seat=2)

    async def program(tools: Any, task: Any) -> Any:
        return [await tools.sample(task.prompt, snapshot=task.row["place"])]

    for rollout, place, why in (
        (Rollout(program), 0, "declare a league, Rollout(..., demands=Demands(league=League()))"),
        (Rollout(program, demands=Demands(league=League())), 8, "snapshot is 8, but must be"),
    ):
        assert run_agents(rollout, TOKENIZER, says, [{"place": place}], samples=1)[0].groups[0].failed
        assert why in caplog.text
