"""Runs with sink slots: they are trained and kept in checkpoints, and what cannot have them is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.cli.program import main
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.utils.errors import InputError


@pytest.mark.heavy
def test_a_run_trains_slots_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampler and trainer agree after the first update too, when slots are not 0; the run's folder gives them back, and
    a model's folder has no place for them."""
    config = runs.small_config(tmp_path, algorithm="relic", hyperparameters={"segments": 2}, sink_slots=2, steps=3)
    runs.train(config)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert len(lines) == 3
    assert max(line["mismatch"] for line in lines) < 1e-5
    _, policy, params, _ = load_run(config.output)
    assert policy.config.sink_slots == 2
    for name in ("sink_keys", "sink_values"):
        assert np.all(np.any(params["layers"][name], axis=(2, 3))), "those of each head have learned"
    assert main(["export", config.output, str(tmp_path / "model")]) == 2
    assert "no place for sink slots: load the model from the run's own folder" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_slots_are_not_trained_beside_frozen_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sink_slots are weights that are trained, but with lora_rank the weights are"):
        runs.small_config(tmp_path, sink_slots=1, lora_rank=2)
