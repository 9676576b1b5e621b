"""A model that gets control tokens, learns them from answers of both modes, and then chooses: Thinkless by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import load_policy
from jaxrl_llm.cli.program import main
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.rewards.graded import MODES
from jaxrl_llm.training.config import TrainConfig

pytestmark = pytest.mark.heavy


def supervised(folder: Path, model: Path) -> TrainConfig:
    rows = [{"prompt": f"number {i % 4}:", "completion": f"{tag}{i % 4}"} for i in range(4) for tag in MODES]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    default = TrainConfig()
    return runs.small_config(
        folder, algorithm="sft", model=str(model), prompts=str(folder / "rows.jsonl"), rewards=default.rewards,
        group_size=default.group_size, minibatches=1, top_p=1.0, eval_size=0, steps=24, checkpoint_every=8,
        optimizer=OptimizerConfig(learning_rate=5e-3),
    )  # fmt: skip


def test_from_a_model_without_the_tokens_to_a_choice_between_them(tmp_path: Path) -> None:
    base, learned = tmp_path / "base", tmp_path / "learned"
    assert main(["export", str(runs.MODEL), str(base), "--add-tokens", *MODES]) == 0
    config = supervised(tmp_path, base)
    runs.train(config)
    resumed = runs.resumed_copy(tmp_path, range(17, 25))
    assert main(["export", str(resumed), str(learned)]) == 0
    policy, _, tokenizer = load_policy(learned)
    ids = tokenizer.convert_tokens_to_ids(list(MODES))
    assert policy.config.known_tokens == max(ids) + 1
    questions, taken = tmp_path / "questions.jsonl", list[runs.Taken]()
    rows = [{"prompt": f"number {i}:", "answer": str(i)} for i in range(4)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with runs.watched(taken):
        runs.train(
            runs.small_config(
                tmp_path, output=str(tmp_path / "chooses"), algorithm="degrpo", model=str(learned),
                prompts=str(questions), rewards=("by_mode(number_match)",), steps=2, eval_size=0, top_p=1.0,
                minibatches=1,
            )
        )  # fmt: skip
    batch: Any = taken[0].scored.batch
    first = np.asarray(batch.tokens)[np.arange(len(batch.group)), np.argmax(batch.action_mask, axis=1)]
    assert np.isin(first, ids).mean() > 0.8, "it begins with a mode, one token"
    worth = dict(zip(ids, MODES.values(), strict=True))
    for token, reward in zip(first.tolist(), np.asarray(batch.reward).tolist(), strict=True):
        assert reward in (-1.0, worth.get(token, -1.0))
    assert len(set(np.asarray(batch.reward).tolist())) > 1, "something to learn from"
