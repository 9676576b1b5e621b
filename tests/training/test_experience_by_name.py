"""Every method whose experience is not plain groups, or whose rewards are not a number, by name on a real model."""

from __future__ import annotations

import math
from pathlib import Path

import by_name
import numpy as np
import pytest
from compiling import optimised
from heavy import is_in_share

from jaxrl_llm import algorithms
from jaxrl_llm.core.needs import NEEDS, need_of, value_of
from jaxrl_llm.distributed import mesh_of
from jaxrl_llm.training.inputs import read_inputs
from jaxrl_llm.training.method import check_method
from jaxrl_llm.training.rollout import check_columns

NAMES = by_name.experience_methods()
# Tokens of texts, or drawn at another temperature, whose log-probability is not the sampler's.
OTHERS_DRAW = ("otr", "aepo_arbitrary_entropy", "seppo")


def test_each_test_is_in_one_share() -> None:
    for name in NAMES:
        assert [is_in_share(name, f"{k}/3") for k in range(3)].count(True) == 1
        assert is_in_share(name, "")


def test_the_table_names_such_methods() -> None:
    assert set(by_name.METHODS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_its_run_has_all_that_the_method_needs(name: str, tmp_path: Path) -> None:
    config = by_name.config_of(tmp_path, name)
    assert "without" not in config.hyperparameters, "a method runs whole"
    with read_inputs(config) as inputs:
        check_columns(config, check_method(config, mesh_of("")), inputs.prompts.training)


@optimised  # or a step takes minutes
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_by_name(name: str, tmp_path: Path) -> None:
    """The whole method: the losses are finite, sampler and trainer agree, and what it adds to GRPO happens."""
    case, algorithm = by_name.METHODS.get(name, by_name.Case()), algorithms.get(name)
    lines, taken = by_name.trained(tmp_path, name)
    assert len(lines) == len(taken) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert "rollout/failed_groups" not in line
        assert all(metric in line for metric in (*case.metrics, *case.logged))
    if name not in OTHERS_DRAW:
        assert lines[0]["mismatch"] < 1e-3  # later ones may have replayed rows
    for metric in case.metrics:
        assert max(line[metric] for line in lines) > 0, metric
    if algorithm.prompts is not None:
        assert any(metric.startswith("curriculum/") for metric in lines[-1])
    if algorithm.replay is not None:
        assert "replay/share" in lines[-1]
    for one in taken:
        batch, config = one.scored.batch, by_name.config_of(tmp_path, name)
        assert np.isfinite(np.asarray(batch.reward)).all()
        assert set(case.info) <= set(batch.info or {})
        for text in algorithm.needs:  # of what rollouts and rewards provide
            need, (_, carried) = need_of(text), value_of(text)
            if need.provider is not None and need in NEEDS.values():
                assert need.of(batch, carried) is not None, text
    sizes = [len(one.scored.batch.reward) for one in taken]
    assert (max(sizes) > config.prompts_per_step * config.group_size) or not case.more
