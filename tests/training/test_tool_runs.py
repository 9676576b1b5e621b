"""Methods with replay and modes, by name, over episodes with tools: what is stored, copied or begun for them."""

from __future__ import annotations

import string
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
import worlds
from test_agent_runs import WORLDS, AsCalls, config_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import policy_outputs

pytestmark = pytest.mark.heavy
TAGS = ("<instant>", "<reasoning>", "<agentic>")


class SomeCalls(AsCalls):
    """Two in three replies are calls, all that begin with the tag of the agentic mode and none with another's."""

    def __call__(self, ids: Any) -> Reply:
        text = self.chat.tokenizer.decode(list(ids), skip_special_tokens=True)
        if text.startswith(TAGS[:2]) or (not text.startswith(TAGS[2]) and sum(ids) % 3 == 0):
            return Reply({"role": "assistant", "content": text}, ())
        return super().__call__(ids)


@pytest.fixture(autouse=True)
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = cached_property(SomeCalls)
    reading.__set_name__(ChatTurns, "reading")
    monkeypatch.setattr(ChatTurns, "reading", reading)
    monkeypatch.setattr(worlds.Tried, "MADE", {})


def taken_by(folder: Path, name: str, **changes: Any) -> tuple[list[dict[str, Any]], list[runs.Taken]]:
    """The metrics of two steps of two groups, and their batches; each prompt comes in both steps."""
    taken: list[runs.Taken] = []
    settings: dict[str, Any] = {
        "algorithm": name, "steps": 2, "eval_size": 0, "prompts_per_step": 2, "checkpoint_every": 0, **changes,
    }  # fmt: skip
    config = config_of(folder, settings.pop("environment", "Tried"), **settings)
    runs.write_prompts(Path(config.prompts), 2)
    with runs.watched(taken):
        runs.train(config)
    lines = runs.finite_lines_of(folder)
    assert all("rollout/failed_groups" not in line for line in lines)
    assert lines[0]["rollout/calls"] > 0.25
    assert lines[0]["mismatch"] < 1e-5
    return lines, taken


def check_rows(folder: Path, taken: list[runs.Taken], step: int) -> np.ndarray:
    """Which rows of a step are from an earlier one, bool[N].

    All actions have the log-probabilities of the weights that drew them after the same observations, which are masked.
    """
    policy, _, tokenizer = load_policy(folder / "model")
    batch: Any = taken[step].scored.batch
    action, turn, drawn = (np.asarray(x) for x in (batch.action_mask, batch.turn, batch.policy_step))
    np.testing.assert_array_equal(action, turn >= 0)
    outputs = jax.jit(policy_outputs, static_argnums=0)
    for number in np.unique(drawn[action]):
        there = action & (drawn == number)
        logp = np.asarray(outputs(policy, taken[number].params, batch).logp)
        np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[there], logp[there], rtol=0, atol=1e-4)
    for row, number in zip(np.asarray(batch.tokens), turn, strict=True):
        for k in range(1, number.max() + 1):
            before, here = np.flatnonzero(number == k - 1)[-1], np.flatnonzero(number == k)[0]
            assert tokenizer.decode(row[before + 1 : here]).removeprefix("<eos>").startswith("t:")
            assert " coins" in tokenizer.decode(row[before + 1 : here])
    return np.asarray((drawn < step) & action).any(axis=1)


@pytest.mark.parametrize("name", ["arpo_replay", "rapo_reward_aware"])
def test_a_failed_group_gets_an_earlier_success_with_what_its_tools_said(name: str, tmp_path: Path) -> None:
    lines, taken = taken_by(tmp_path, name)
    first: Any = taken[0].scored.batch
    batch: Any = taken[1].scored.batch
    assert not check_rows(tmp_path, taken, 0).any()
    again = check_rows(tmp_path, taken, 1)
    np.testing.assert_array_equal(batch.info["replayed"], again)
    # The prompt whose episodes have 1/2 has no success above 1/2, and its mean is not low: it gets none.
    assert again.sum() == 1
    (row,) = np.flatnonzero(again)
    assert lines[1]["replay/share"] == pytest.approx(1 / 8)
    assert batch.reward[row] == 1.0
    assert (np.asarray(batch.reward)[batch.group == batch.group[row]] == 1.0).sum() == 1
    assert np.asarray(batch.turn)[row].max() > 0, "it has several turns, of which observations are checked above"
    n = int(batch.token_mask[row].sum())
    known = [r[:n].tolist() for r, x in zip(np.asarray(first.tokens), first.reward, strict=True) if x == 1.0]
    assert np.asarray(batch.tokens)[row, :n].tolist() in known
    members = np.asarray(batch.info["episode"])[batch.group == batch.group[row]]
    assert sorted(members.tolist()) == [0.0, 1.0, 2.0, 3.0]


def test_spear_imitates_its_own_episodes_and_rewards_calls(tmp_path: Path) -> None:
    given = {"replay_rows": 2, "surplus": 0.5, "call_steps": 2.0, "varied": 1.0}
    _, taken = taken_by(tmp_path, "spear", hyperparameters=given)
    assert not check_rows(tmp_path, taken, 0).any()
    again, means = check_rows(tmp_path, taken, 1), list[float]()
    for number, fading in ((0, 1.0), (1, 0.5)):
        batch: Any = taken[number].scored.batch
        here = np.asarray(batch.policy_step).max(axis=1) == number
        bonus = fading * np.minimum(0.1 * np.asarray(batch.info["calls"]), 1.0)
        np.testing.assert_allclose(
            np.asarray(batch.reward)[here], (np.asarray(batch.rewards["environment"]) + bonus)[here], rtol=1e-5
        )
        if number == 0:
            means = [float(np.mean(np.asarray(batch.reward)[batch.group == g])) for g in range(2)]
    assert again.sum() == 2
    np.testing.assert_array_equal(np.asarray(batch.info["replayed"]) > 0, again)
    assert not np.asarray(batch.truncated).all(), "such episodes are left out"
    np.testing.assert_allclose(
        np.asarray(batch.info["replay_advantage"])[again],
        np.asarray(batch.reward)[again] - np.median(means), rtol=1e-4,
    )  # fmt: skip
    assert (np.asarray(batch.info["replay_advantage"])[again] > 0).all()
    assert (np.asarray(batch.turn)[again].max(axis=1) > 0).any(), "none has an observation: this test shows nothing"


def test_vspo_copies_episodes_of_a_group_that_varies(tmp_path: Path) -> None:
    given = {"copies": 1.0}
    rewards = ("environment", "format_match(.*)*0.25")  # in this order they are the stages
    _, taken = taken_by(tmp_path, "vspo_prs", hyperparameters=given, rewards=rewards, steps=1)
    check_rows(tmp_path, taken, 0)
    batch: Any = taken[0].scored.batch
    assert len(set(np.asarray(batch.prompt_id).tolist())) == 1, "the group of equal rewards is gone"
    np.testing.assert_allclose(batch.info["copy_weight"], 0.5)
    group, copied = np.asarray(batch.group), np.asarray(batch.info["replayed"]) > 0
    np.testing.assert_array_equal(np.asarray(batch.tokens)[~copied], np.asarray(batch.tokens)[copied])
    assert len(set(group[copied].tolist())) == len(set(group[~copied].tolist())) == 1
    form, right = (np.asarray(batch.rewards[name]) for name in ("format_match", "environment"))
    np.testing.assert_allclose(batch.reward, right + np.where(right > 0.5, 0.25 * form, 0.0), rtol=1e-6)
    assert np.asarray(batch.turn).max() > 0


def test_modes_of_a2fm_and_a_tool_in_the_agentic_one(tmp_path: Path) -> None:
    _, taken = taken_by(
        tmp_path, "a2fm_apo", environment=None, tools=(f"{WORLDS}:add",), group_size=7, max_new_tokens=30,
        rewards=(f"{runs.write_rewards(tmp_path)}:from_answer",), hyperparameters={"forced": 2}, turns=2,
        stop=tuple(string.printable),
    )  # fmt: skip
    check_rows(tmp_path, taken, 0)
    tokenizer = load_policy(tmp_path / "model")[2]
    batch: Any = taken[0].scored.batch
    for g, prompt in zip(range(2), np.asarray(batch.prompt_id)[::7], strict=True):
        rows = np.flatnonzero(np.asarray(batch.group) == g)
        assert np.asarray(batch.info["mode"])[rows].tolist() == [0, 0, 1, 1, 2, 2, -1]
        for row in rows:
            action, mode = np.asarray(batch.action_mask)[row], int(batch.info["mode"][row])
            begin = np.flatnonzero(action)[0]
            text = tokenizer.decode(np.asarray(batch.tokens)[row, :begin])
            assert text.endswith(f"a:{TAGS[mode]}" if mode >= 0 else "a:"), "the tag is given, and masked"
            assert mode < 0 or np.asarray(batch.turn)[row].max() == (mode == 2), "a tool answers in the agentic mode"
            assert batch.info["prefix"][row] == (len(TAGS[mode]) if mode >= 0 else 0)
        expected = [1.0] * 6 + [0.0] if prompt % 2 else [0.0] * 7  # a free sample without a tag has another form
        assert np.asarray(batch.reward)[rows].tolist() == expected
