"""ReSim: what the policy is told before a reply, what goes on and what is learnt, in rooms whose best way is known."""

from __future__ import annotations

import doctest
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from method_step import learn

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))
import test_simulations
from speaking import run_agents, tokenizer_of
from test_simulations import END, Locked, environment_reward, text_of

from jaxrl_llm.algorithms.agents import resim
from jaxrl_llm.algorithms.agents.resim import foreseeing
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.utils.errors import InputError

TOLD = "tried out"


class Rooms(test_simulations.Rooms):
    """The same rooms, where each "b" has the reward 1 at once, and -1 is for the end."""

    def step(self, reply: Reply) -> Observation:
        return replace(super().step(reply), reward=float(self.done[-1] == "b"))

    def close(self) -> float:
        return -1.0


def says(text: str, sample: int) -> str:
    """The action of the best way that it was told, else a or b by the number of the sample."""
    if TOLD not in text:
        return "ab"[sample % 2] + END
    ways = [way.splitlines() for way in text.rpartition("Way 1")[2].split("\nWay ")]
    best = max(ways, key=lambda lines: float(lines[0].split("of value ")[1].rstrip(":")))
    return best[1].removeprefix("you: ") + END


def played(
    monkeypatch: pytest.MonkeyPatch, environment: Any = Rooms, **options: Any
) -> tuple[list[Episode], list[str]]:
    """The rows of two episodes, and what the policy saw before each reply."""
    monkeypatch.setattr("speaking.by_length", environment_reward)
    rollout = foreseeing(**options).wrap(agent(environment, turns=3))  # type: ignore[misc]
    flight = (GroupLog((1,), 0, 2, 0),)
    found, engines = run_agents(rollout, tokenizer_of("plain"), says, [{"prompt": "Go."}], 2, flight=flight)
    asked = [text_of([*one.prompt, *one.begun.token.tolist()]) for one in engines[0].requests]
    return list(found.groups[0].episodes), asked


def test_resim_learns_replies_that_have_seen_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ways of two replies: aa is worth -1, bb 1; at the end one reply each, -1 and 0. It takes b each time."""
    rows, asked = played(monkeypatch, branches=3, depth=2)
    for row in rows:
        said = "".join(f"b{END}\n<|im_start|>user\nroom {'b' * n}{END}\n<|im_start|>assistant\n" for n in (1, 2))
        assert text_of(row.own.token) == f"{said}b{END}"
        assert (row.reward, row.info["pivot"], row.info["off_prompt"]) == (2.0, 0.0, 1.0)
    told = [text for text in asked if TOLD in text]
    assert len(told) == 6
    for before, ways in (("", (("aa", -1), ("bb", 1), ("aa", -1))), ("bb", (("a", -1), ("b", 0), ("a", -1)))):
        lines = list[str]()
        for number, (said, value) in enumerate(ways, start=1):
            lines.append(f"Way {number}, of value {value}:")
            for n, one in enumerate(said, start=1):
                lines += [f"you: {one}", f"then: room {before}{said[:n]}"]
        assert sum("\n".join(lines) in text for text in told) == 2
    assert not any(TOLD in text_of(row.tokens) for row in rows)
    # Of what is learnt, no episode has a reward above 2.
    rows, _ = played(monkeypatch, branches=3, depth=2, success=2.0)
    assert [row.info["pivot"] for row in rows] == [3.0, 3.0]


def test_without_a_copy_replies_are_ordinary(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rows, asked = played(monkeypatch, Locked, branches=2, depth=2)
    assert not any(TOLD in text for text in asked)
    assert len(asked) == 2 * 3
    assert sum("is not foreseen" in text for text in caplog.messages) == 2 * 3 * 2
    assert [len(row.own.token) for row in rows] == [len(rows[0].own.token)] * 2


def test_the_loss_is_the_mean_over_replies_of_successes() -> None:
    turn = np.array([[0, -1, 1, 1], [0, -1, 1, 1], [0, 0, -1, -1]])
    logp = -np.random.default_rng(1).gamma(2.0, 0.5, turn.shape)
    info = {"pivot": np.array([2.0, 0, 0]), "episode": np.arange(3.0), "first_turn": np.zeros(3)}
    batch = batch_of(turn >= 0, [0.0, 1, 1], logp, info=info).replace(
        turn=jnp.asarray(turn, jnp.int32), state_key=jnp.ones((3, 2), jnp.uint32)
    )
    found = learn(resim.resim(), batch, logp)
    kept = (turn >= 0) & (np.arange(3) > 0)[:, None]
    assert found.loss == pytest.approx(-logp[kept].mean(), rel=1e-6)
    np.testing.assert_allclose(found.gradient, -1.0 * kept / kept.sum(), atol=1e-7)


def test_the_example_holds_and_agents_are_needed() -> None:
    assert doctest.testmod(resim).failed == 0
    with pytest.raises(InputError, match="the rollout group has none"):
        foreseeing().wrap(group())  # type: ignore[misc]
