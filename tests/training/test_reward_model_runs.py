"""Runs that train reward models: killed, resumed, exported, with adapters, and from another reward model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import load_reward_model
from jaxrl_llm.cli.program import main
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.rewards import get_reward, score
from jaxrl_llm.rewards.models.whole import Scorer, encoded
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy
MODEL = Path(__file__).parents[1] / "reward_models" / "llama_1"


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    rows = [{"prompt": f"number {i:02d}:", "chosen": f" {i} yes", "rejected": f" {i} no"} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"reward": "even", "prompts": str(folder / "rows.jsonl"), "top_p": 1.0, "minibatches": 1, **changes}
    config = runs.small_config(folder, algorithm="reward_model", **settings)
    default = TrainConfig()
    given: dict[str, Any] = {"rewards": default.rewards, "group_size": default.group_size}
    return TrainConfig(**{
        field: given.get(field, getattr(config, field)) for field in TrainConfig.__dataclass_fields__
    })  # fmt: skip


@pytest.mark.parametrize("adapters", [0, 4])
def test_a_run_that_is_killed_resumed_and_exported(tmp_path: Path, adapters: int) -> None:
    config = config_of(tmp_path, eval_size=6, lora_rank=adapters, steps=4)
    summary = runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"]
    assert summary["eval_after"]["loss"] < summary["eval_before"]["loss"]
    assert not any("single token" in text for text in summary["warnings"])  # each response is one action
    resumed = runs.resumed_copy(tmp_path, [4])
    for one, other in zip(lines, runs.lines_of(resumed / "metrics.jsonl"), strict=True):
        for name in ("loss", "grad_norm", "rewards/chosen", "rewards/margins"):
            assert one[name] == other[name]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "judge")]) == 0
    model, params, tokenizer = load_reward_model(tmp_path / "judge")
    asked = [f"number {i:02d}:" for i in range(24)]
    scores = [
        Scorer(model, params).scores([encoded(tokenizer, text, f" {i} {end}") for i, text in enumerate(asked)])
        for end in ("yes", "no")
    ]
    assert (scores[0] > scores[1]).mean() > 0.9


def test_a_reward_model_learns_on_unless_it_has_other_labels(tmp_path: Path) -> None:
    runs.train(config_of(tmp_path, eval_size=0, steps=1, model=str(MODEL)))
    with pytest.raises(InputError, match=r"a reward model of 3 labels .* trains one of 1 label "):
        runs.train(
            config_of(tmp_path, eval_size=0, steps=1, model=str(MODEL.parent / "qwen3_3"), output=str(tmp_path / "b"))
        )


@pytest.mark.parametrize(("only_last", "separator"), [(False, "\n"), (False, " !"), (True, "\n")])
def test_a_process_reward_model_learns_the_labels_of_steps(tmp_path: Path, only_last: bool, separator: str) -> None:
    rows = [
        {"prompt": f"{i}:", "completions": [f"{k} good" if (i + k) % 2 else f"{k} bad" for k in range(3)],
         "labels": [bool((i + k) % 2) for k in range(3)]}
        for i in range(16)
    ]  # fmt: skip
    config = config_of(tmp_path, eval_size=4, steps=8, max_new_tokens=64)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"only_last": only_last, "separator": separator}
    taken = list[runs.Taken]()
    with runs.watched(taken):
        summary = runs.train(dataclasses.replace(config, algorithm="process_reward_model", hyperparameters=options))
    batch, tokenizer = taken[0].scored.batch, load_tokenizer(config.model)
    for ids, action, rewards in zip(
        *map(np.asarray, (batch.tokens, batch.action_mask, batch.turn_rewards)), strict=True
    ):
        before = [tokenizer.decode(ids[:at]) for at in np.flatnonzero(action)]
        assert len(before) == (1 if only_last else 3)
        for text, label in zip(before, rewards[: len(before)], strict=True):
            assert text.endswith(("good" if label else "bad") + separator)
    assert summary["eval_after"]["loss"] < summary["eval_before"]["loss"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "judge")]) == 0
    model, _, _ = load_reward_model(tmp_path / "judge")
    assert model.config.score is not None
    assert len(model.config.score.labels) == 2
    assert model.config.score.step_separator == separator
    if not only_last:  # its rewards are those of what it was trained on
        found = score([get_reward(f"steps:{tmp_path / 'judge'}")], ["0 good\n1 bad"], {"prompts": ["1:"]})
        (*_, good), (*_, bad) = found.entries["spans"][0]
        assert 0 < bad < good < 1
        other = dataclasses.replace(
            config, algorithm="process_reward_model", model=str(tmp_path / "judge"), output=str(tmp_path / "b"),
            hyperparameters={"separator": "?"},
        )  # fmt: skip
        with pytest.raises(
            InputError, match=r"those of process_reward_model end with '\?': set --algorithm\.separator"
        ):
            runs.train(other)
