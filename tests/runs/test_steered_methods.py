"""Methods that steer the sampler or take labels from the data, trained by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Taken, lines_of, small_config, train, watched


def trained(folder: Path, name: str, **changes: Any) -> list[Taken]:
    """What the source of a run of two steps gave."""
    taken: list[Taken] = []
    with watched(taken):
        train(small_config(folder, algorithm=name, **{"steps": 2, **changes}))
    assert len(lines_of(folder / "run" / "metrics.jsonl")) == len(taken)
    return taken


@pytest.mark.heavy
def test_arbitrary_entropy_samples_again_at_the_temperature_that_it_chose(tmp_path: Path) -> None:
    given = {"tempered_share": 1.0, "target_entropy": 0.0, "hot": 1.5, "cold": 0.5}
    first, second = trained(tmp_path, "aepo_arbitrary_entropy", hyperparameters=given)
    for taken in (first, second):
        tempered = np.asarray(taken.scored.batch.info["tempered"])
        assert tempered.tolist() == ([0.0] * 4 + [1.0] * 4) * 4
    # Before the first update the temperature is hot; then the entropy is above the target of 0.
    assert dict(first.before.controls) == {}
    assert second.before.controls["temperature"] == pytest.approx(1.5)
    assert second.after.controls == second.before.controls  # until the update tells it
