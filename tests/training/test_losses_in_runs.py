"""Every method of the run's own samples, by its name and at its own settings, for two steps of a tiny run.

Others have runs in the tests of their kind: with a rollout, a curriculum, a replay or a reference of their own
(test_experience_by_name.py), with an environment (test_turn_runs.py), a judge (test_judged_runs.py), given responses
(test_preference_runs.py) or a masked-diffusion model (test_diffusion_runs.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import by_name
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.parts import missing

ELSEWHERE = {*by_name.experience_methods()}
NAMES = [
    name for name in algorithms.names()
    if name not in ELSEWHERE and not missing(name) and algorithms.families()[name] != "diffusion"
    and algorithms.get(name).rollout is None
]  # fmt: skip
TEACHER = str(runs.MODEL.parent / "gemma2")  # of the same words
# What a tiny run needs beside the method's own settings: layers that it has, limits of the size of its gradients, a
# teacher, and steps until completions that are cut into windows are finished.
SETTINGS: dict[str, dict[str, Any]] = {
    "bupo": {"hyperparameters": {"layer": 1}},
    "capo_curvature": {"hyperparameters": {"change_limit": 0.5, "kl_limit": 0.05}},
    **{name: {"teacher": TEACHER} for name in ("gkd", "iw_opd", "minillm")},
    "relic": {"hyperparameters": {"segments": 2}, "steps": 3},
    "t_ppo": {"steps": 4},
}
TWO_REWARDS = ("gdpo", "dvao")


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_by_name(name: str, tmp_path: Path) -> None:
    """Losses are finite, and in one step at least there is a gradient."""
    usual: dict[str, Any] = {"steps": 2, "eval_size": 0, "checkpoint_every": 0, "log_completions_every": 0}
    if name in TWO_REWARDS:
        rewards = runs.write_rewards(tmp_path)
        usual["rewards"] = (f"{rewards}:even", f"{rewards}:starts_even*0.5")
    config = runs.small_config(tmp_path, algorithm=name, **{**usual, **SETTINGS.get(name, {})})
    runs.train(config)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert len(lines) == config.steps
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert max(line["grad_norm"] for line in lines) > 0, "a signal"
