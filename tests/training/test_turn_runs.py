"""Whole runs of the methods of multi-turn credit, by name, with an environment of three turns."""

from __future__ import annotations

import dataclasses
import json
import shutil
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from test_resume import STEPS, assert_same_records, assert_same_run

from jaxrl_llm import algorithms
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.critic import critic_of
from jaxrl_llm.training import loop
from jaxrl_llm.training import step as training_step
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
METHODS: dict[str, dict[str, Any]] = {
    "gigpo": {"similarity": 0.95},
    "hgpo": {},
    "salt": {},
    "srgpo": {"size": 8},
    "trloo": {},
    "multi_turn_recipe": {},
    "poad": {},
    "eapo_iterresearch": {},
    "g_ra": {},
    "deeptravel": {"every": 1, "replay_share": 1.0},
    "grpo_roc": {"component": None},
    "grpo_tcr": {},
    "loop": {},
    "epo": {},
    "llds": {},
    "seeupo": {},
    "hiper": {},
    "pdppo": {},
    "flow_grpo": {},
    "dart_gui": {},
    "ipa": {},
    "ui_s1": {"least_deviation": 0.0},
    "dgrpo_vital": {},
    "arpo_agentic": {"initial": 2, "probability": 1.0},
    "aepo_agentic": {},
    "igpo_information_gain": {},
    "infopo": {},
    "istar": {},
    "archer": {"critic_updates": 1, "states": 3},
    "r3l": {"reflection_tokens": 8},
    "agent_r": {"alphas": "0.1", "beta": 0.0, "width": 2},
    "evocua": {"low": 0.0, "high": 1.0, "success": 0.1},
    "dyna_grpo": {},
    "resim": {"branches": 2, "depth": 2},
    "polychromic": {"states": 1},
}
# Episodes as a whole are compared; salt compares equal replies, which random weights do not give.
OF_EPISODES = (
    "arpo_agentic",
    "deeptravel",
    "dgrpo_vital",
    "g_ra",
    "grpo_roc",
    "grpo_tcr",
    "salt",
    "loop",
    "epo",
    "llds",
    "seeupo",
    "agent_r",
    "evocua",
    "r3l",
    "resim",
    "dyna_grpo",
)
FORKING = ("aepo_agentic", "arpo_agentic")  # from episodes that begin with the same tokens
OF_ROUNDS = ("dart_gui", "eapo_iterresearch", "flow_grpo", "ui_s1")
WORLDS = Path(__file__).parent / "worlds.py"
# Those that take the episode's reward alone, as --environment has it; llds acts from the second update of a batch on.
ENVIRONMENT: dict[str, Any] = {
    "rollout": "group", "environment": f"{WORLDS}:Walk", "turns": 3, "rewards": ("environment",), "epochs": 2,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "hiper": {"rollout": f"{WORLDS}:plans"},
    "ipa": ENVIRONMENT,
    "grpo_roc": {"hyperparameters": {"component": None, "without": "one_answer"}},
    "ui_s1": {"rollout": f"{WORLDS}:recorded", "rewards": ("environment",)},
    "loop": ENVIRONMENT,
    "epo": ENVIRONMENT,
    "llds": ENVIRONMENT,
    "seeupo": ENVIRONMENT,
    "agent_r": ENVIRONMENT,
    "evocua": ENVIRONMENT,
    "r3l": ENVIRONMENT,
    "dyna_grpo": ENVIRONMENT,
    "resim": ENVIRONMENT,
    "polychromic": {**ENVIRONMENT, "hyperparameters": {"states": 1, "without": "answer_key"}},
}


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Two steps of groups of four episodes, with a model whose tokenizer has a chat template."""
    model = folder / "model"
    if not model.exists():
        shutil.copytree(runs.MODEL, model, ignore=shutil.ignore_patterns("*.npz"))
        written = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**written, "chat_template": TEMPLATE}))
    settings: dict[str, Any] = {
        "algorithm": name, "hyperparameters": METHODS[name], "model": str(model), "steps": 2, "eval_size": 0,
        "reward": "even" if name in FORKING else "starts_even", "top_p": 1.0,
        "minibatches": 1, "max_new_tokens": 8, "prompts_per_step": 2,
        "stop": tuple(string.ascii_letters + string.punctuation),  # or replies of random weights have no end
        "rollout": f"{WORLDS}:{'rounds' if name in OF_ROUNDS else 'walks'}", **CHANGES.get(name, {}),
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


@pytest.mark.heavy
@pytest.mark.parametrize("name", METHODS)
def test_it_trains_by_name(name: str, tmp_path: Path) -> None:
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config_of(tmp_path, name))
    lines = runs.finite_lines_of(tmp_path)
    assert len(lines) == 2
    assert all(line.get("rollout/failed_groups", 0) == 0 for line in lines)
    assert lines[0]["mismatch"] < 1e-5
    assert (lines[0].get("rollout/forks", 0.0) > 0) == (name in FORKING)
    assert (lines[0].get("rollout/restarts", 0.0) > 0) == (name == "ipa")
    first = taken[name == "istar"]  # whose reward model is the policy at first
    batch, method = first.scored.batch, algorithms.get(name, **METHODS[name])
    assert batch.state_key is not None
    assert len(np.unique(batch.state_key)) in (2, 3), "left and right, and 0 for turns that are not there"
    if any(need.startswith("values") for need in method.needs):
        assert all(line["value/loss"] > 0 for line in lines)
        return
    if name == "ipa":
        assert np.asarray((batch.info or {})["imitated"] > 0).any(), "some begin with a success"
        batch = batch.replace(old_logp=batch.behaviour_logp)
    if asked := method.needs & {"answer_logp", "blanked_logp", "implicit_logp"}:
        policy = dataclasses.replace(load_policy(runs.MODEL)[0], critic=critic_of(method.needs))
        batch = provide(policy, asked | {"old_logp"}, first.params, None, batch)
    if name == "dart_gui":
        batch = provide(load_policy(runs.MODEL)[0], frozenset({"old_logp"}), first.params, None, batch)
    found = np.asarray(method.transform.apply(method.transform.init(), batch)[1].advantages)
    assert found.any()
    if name in FORKING:
        node = np.where(batch.action_mask, (batch.info or {})["node"], -1)
        ends = {(int(g), float(row[mask][-1])) for g, row, mask in zip(batch.group, node, node >= 0, strict=True)}
        assert len(ends) > 4, "episodes go on apart from each other"
        first = np.asarray(batch.turn) == 0
        tokens = {(int(g), *row[mask]) for g, row, mask in zip(batch.group, batch.tokens, first, strict=True)}
        assert len(tokens) < 8, "episodes share their first turns"
    if name == "aepo_agentic":
        return  # its credit depends on the entropy of each token
    if name in OF_ROUNDS:
        assert len(found) > 8, "a row for each turn"
        assert set(np.asarray((batch.info or {})["first_turn"]).tolist()) == {0.0, 1.0, 2.0}
        return
    turn = np.asarray(batch.turn)
    credit = [[set(row[turn[i] == k].tolist()) for k in range(3)] for i, row in enumerate(found)]
    assert all(len(one) <= 1 for row in credit for one in row), "all tokens of a turn have the same"
    assert any(len(set().union(*row)) > 1 for row in credit) == (name not in OF_EPISODES), "turns of an episode differ"


@pytest.mark.heavy
@pytest.mark.parametrize("rollback", ["parallel", "sequential"])
def test_what_nobody_solves_begins_in_the_middle_of_a_teachers_episode(rollback: str, tmp_path: Path) -> None:
    """No reward is above 0. In sequence nothing is imitated until a chunk is known to be crucial."""
    said = ["ab.", "cd.", "ef."]
    rows = [{"prompt": f"number {i:02d}:", "answer": "0", "teacher": said} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        tmp_path, "ipa", prompts=str(tmp_path / "rows.jsonl"),
        hyperparameters={"teacher": "teacher", "rollback": rollback},
        rewards=(f"{runs.write_rewards(tmp_path)}:from_answer",), epochs=1,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["rollout/restarts"] == 2 and line["reward/mean"] == 0 for line in lines)
    assert all(line["mismatch"] < 1e-5 for line in lines)
    tokenizer = load_policy(runs.MODEL)[2]
    for number, one in enumerate(taken):
        batch, info = one.scored.batch, one.scored.batch.info or {}
        left, turn = np.asarray(info["imitated"]), np.asarray(batch.turn)
        places = [int(turn[row][left[row] != 0].max(initial=-1)) + 1 for row in range(8)]
        assert sorted(places) == [0] * 4 + ([1, 1, 2, 2] if rollback == "parallel" else [2] * 4)
        for row in np.flatnonzero(places):
            for k in range(places[row]):
                assert tokenizer.decode(np.asarray(batch.tokens)[row][turn[row] == k]).startswith(said[k])
        learnt = (left > 0).any(axis=1)
        assert learnt.sum() == (0 if rollback == "sequential" and number == 0 else 4)
    if rollback == "sequential":
        assert [line["curriculum/taken_over"] for line in lines] == pytest.approx([2 / 3, 2 / 3])


@pytest.mark.heavy
def test_a_target_critic_follows_the_critic_and_transitions_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any, Any]] = []
    learn = training_step.learn

    def watched(parts: Any, config: Any, state: Any, batch: Any, *more: Any) -> Any:
        before = jax.tree.map(np.array, state.policies["target"])
        after, learned = learn(parts, config, state, batch, *more)
        seen.append((before, *jax.tree.map(np.array, (after.train.params["critic"], after.policies["target"]))))
        return after, learned

    monkeypatch.setattr(training_step, "learn", watched)
    runs.train(config_of(tmp_path, "archer"))
    for before, critic, after in seen:
        wanted = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, before, critic)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, wanted)
        assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["replay/rows"] > 0 for line in lines] == [True, True]
    assert [line["replay/share"] for line in lines] == pytest.approx([0.0, 8 / 22])
    assert lines[1]["reward/unscored"] > 0, "of replies at stored states"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["gigpo", "ipa", "archer"])
def test_a_run_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill behind the last checkpoint it ends the same, with restarts from turns too."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    runs.train(config_of(tmp_path, name, steps=STEPS, checkpoint_every=1, keep_checkpoints=9))
    copy = runs.resumed_copy(tmp_path, range(3, STEPS + 1))
    same = assert_same_records if name == "archer" else assert_same_run  # a critic is among the parameters
    same(copy, tmp_path / "run")


@pytest.mark.parametrize("name, need", [("gigpo", "state_key"), ("trloo", "turn_rewards")])
def test_a_run_without_turns_is_refused(name: str, need: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{name} needs {need} .*--algorithm.without {need},turns$"):
        loop.train(config_of(tmp_path, name, rollout="group"))
