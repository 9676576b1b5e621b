"""Runs of methods with given prefixes and second prompts, by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.guidance.masa import masa
from jaxrl_llm.core.rules import DynamicSampling
from jaxrl_llm.models import load_policy, save_policy
from jaxrl_llm.rollouts.guidance.prefixes import guide_begins
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.utils.errors import InputError

# method -> its hyper-parameters, groups of the batch for 4 prompts, whether some completions begin with given tokens
METHODS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "drpo_dataset_reset": ({}, (4, 4), True),
    "prefixrl": ({}, (4, 8), True),
    "a2fm_apo": ({"forced": 1}, (4, 4), True),
    "masa": ({}, (8, 8), False),
    "spark_co_evolving": ({"share": 1.0}, (8, 12), False),
    "rlgf": ({}, (4, 4), True),
    "zppo": ({"threshold": 2.0, "second_share": 1.0, "words": 4}, (4, 12), False),
}


def with_long_context(folder: Path) -> Path:
    """The tiny model, which has a token for each character, with room for second prompts."""
    shutil.copytree(runs.MODEL, folder / "model", dirs_exist_ok=True)
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1024}))
    return folder / "model"


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    path = folder / "responses.jsonl"
    rows = [
        {
            "prompt": f"number {i:02d}:",
            "answer": str(i % 2),
            "response": "1 2 3",
            "trace": "1 2 3" if i % 2 else "",
            "teacher": "0 0 0",
            "guide": "1 2 3",
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "algorithm": name, "hyperparameters": METHODS[name][0], "steps": 2, "eval_size": 0, "minibatches": 1,
        "model": str(with_long_context(folder)),
        "top_p": 1.0, "checkpoint_every": 2, "max_new_tokens": 16, "prompts": str(path), "log_completions_every": 1,
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


@pytest.mark.heavy
@pytest.mark.parametrize("name", METHODS)
def test_it_trains_by_name(name: str, tmp_path: Path) -> None:
    config, taken = config_of(tmp_path, name), list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert len(lines) == len(taken) == 2
    _, (least, most), given = METHODS[name]
    for line, one in zip(lines, taken, strict=True):
        assert np.isfinite(line["loss"])
        assert line["mismatch"] < 1e-4
        batch = one.scored.batch
        assert least <= len(np.unique(batch.group)) <= most
        assert np.isfinite(batch.reward).all()
        if most > 4:
            assert line["rollout/parts"] > 1
        if given:
            assert line["rollout/prefixed"] > 0
            masked = np.asarray(batch.token_mask).sum(axis=1) - np.asarray(batch.action_mask).sum(axis=1)
            assert len(np.unique(masked - np.asarray(batch.info["prefix"]))) == 1, "beside the prompt's, of one length"
    assert any(line["grad_norm"] > 0 for line in lines)
    if name == "zppo":
        assert [line["curriculum/buffer"] for line in lines] == [4, 7], "the second step asks one again"


@pytest.mark.heavy
def test_dynamic_sampling_keeps_all_groups_of_a_prompt(tmp_path: Path) -> None:
    """In two rounds, whose groups are renumbered."""
    rule = DynamicSampling(lambda batch: batch.prompt_id % 2 == 0, rounds=3)
    config, taken = config_of(tmp_path, "masa", steps=1), list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config, algorithm=replace(masa(), curriculum=rule))
    batch = taken[0].scored.batch
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(8), 4))
    np.testing.assert_array_equal(batch.info["part"], np.tile(np.repeat([0, 1], 4), 4))
    assert all(len(np.unique(np.asarray(batch.prompt_id)[8 * i : 8 * i + 8])) == 1 for i in range(4))


@pytest.mark.heavy
def test_a_guide_completes_responses(tmp_path: Path) -> None:
    """Its tokens, which have no log-probability, are in no metric of the policy."""
    (tmp_path / "guide.py").write_text("def complete(problem, begun):\n    return '7 7'\n")
    hyperparameters = {"begins": "learner", "guide": f"{tmp_path / 'guide.py'}:complete"}
    config, taken = config_of(tmp_path, "rlgf", hyperparameters=hyperparameters), list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    for line, one in zip(runs.lines_of(Path(config.output) / "metrics.jsonl"), taken, strict=True):
        assert np.isfinite(line["loss"])
        assert line["mismatch"] < 1e-4
        assert line["grad_norm"] > 0
        assert (np.asarray(one.scored.batch.info["switch"]) >= 0).all()


@pytest.mark.heavy
def test_the_reference_policy_guides_a_run(tmp_path: Path) -> None:
    """It completes in the first step, and begins in the second."""
    given = {"begins": "learner_first", "learner_steps": 1, "guide": "reference", "share": 1.0}
    config, taken = config_of(tmp_path, "rlgf", hyperparameters=given), list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) and line["mismatch"] < 1e-4 for line in lines)
    first, second = (one.scored.batch.info for one in taken)
    assert np.asarray(first["switch"]).min() >= 0 < np.asarray(first["switch"]).max()
    assert (np.asarray(second["switch"]) == -1).all()
    assert lines[0]["rollout/prefixed"] == 0 < lines[1]["rollout/prefixed"]


@pytest.mark.heavy
def test_each_step_of_lols_trains_one_critic(tmp_path: Path) -> None:
    """Who begins is drawn for each step. The guide is another model, which only says the last token again."""
    policy, params, tokenizer = load_policy(str(with_long_context(tmp_path)))
    repeats = {
        name: jax.tree.map(lambda x: 0 * x, params[name]) if name == "layers" else params[name] for name in params
    }
    repeats["final_norm"] = jax.tree.map(lambda x: 100 * jnp.ones_like(x), params["final_norm"])
    save_policy(tmp_path / "other", policy, repeats, tokenizer)
    given = {
        "begins": "either", "guide": "reference", "guide_model": str(tmp_path / "other"), "guide_often": 0.5, "seed": 2,
        "share": 1.0,
    }  # fmt: skip
    assert [guide_begins(0.5, 2, step) for step in (0, 1)] == [True, False]
    config = config_of(tmp_path, "rlgf", hyperparameters=given, critic="shared", minibatches=1)
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) and line["mismatch"] < 1e-4 for line in lines)
    first, second = (one.scored.batch for one in taken)
    for row, said in enumerate(np.asarray(first.tokens)):
        given_tokens = np.asarray(first.token_mask[row] & ~first.action_mask[row])
        assert len(set(said[given_tokens][9:])) == 1, "the guide begins, and says the prompt's last token again"
    assert (np.asarray(first.info["switch"]) == -1).all()
    assert np.asarray(first.info["prefix"]).max() > 0
    own = np.asarray(second.info["switch"]).astype(int)
    assert own.min() >= 1, "the learner begins"
    for row, said in enumerate(np.asarray(second.tokens)):
        response = said[np.asarray(second.action_mask[row])]
        assert len(set(response[own[row] - 1 :])) == 1
    learnt = Checkpoints(Path(config.output) / "checkpoints").latest(taken[0].params)
    assert learnt is not None
    bias = [np.asarray(one.params["critic"]["head"]["bias"]) for one in (*taken, learnt)]
    assert [(x != 0).tolist() for x in bias] == [[False, False], [True, False], [True, True]]


def test_what_a_run_lacks_is_named_before_it_starts(tmp_path: Path) -> None:
    small = config_of(tmp_path, "a2fm_apo", hyperparameters={"forced": 2})
    with pytest.raises(InputError, match=r"group_size is 4, but the rollout tagged.* needs at least 5 samples"):
        runs.train(small)
    other = config_of(tmp_path, "prefixrl", hyperparameters={"column": "hints"})
    with pytest.raises(
        InputError, match=r"the rollout prefixed_groups.* reads the column 'hints', which no prompt has"
    ):
        runs.train(other)
    assert set(METHODS) <= set(algorithms.names())
