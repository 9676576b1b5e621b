"""Keyword arguments that there are not: what they are called here, where they belong, or the nearest name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import jaxrl_llm
from jaxrl_llm import InputError, OptimizerConfig, TrainConfig
from jaxrl_llm.training.config import inside
from jaxrl_llm.utils.keywords import unknown_keyword
from jaxrl_llm.utils.peer_names import TRL_FLAGS, TRL_OTHER, TRL_SAME


@pytest.mark.parametrize("name", sorted({*TRL_SAME, *TRL_FLAGS, *TRL_OTHER}))
def test_every_name_of_trl_is_told_in_python(name: str) -> None:
    """Without the dashes of options, and as a setting that there is, or with the section that has it."""
    if name in TrainConfig.__dataclass_fields__:
        return
    with pytest.raises(InputError) as error:
        TrainConfig(**{name: 1})
    said = str(error.value)
    assert "did you mean" not in said
    assert "--" not in said
    assert "\n" not in said
    if name in TRL_SAME and (own := TRL_SAME[name].option.removeprefix("--").replace("-", "_")) != "resume":
        assert own.rpartition(".")[2] in said


def test_names_of_methods_and_optimisers_are_told_with_their_place() -> None:
    assert inside("beta1") == "optimizer=OptimizerConfig(beta1=...)"
    assert inside("clip_high") == "hyperparameters={'clip_high': ...}"
    assert inside("nothing") == ""


def test_a_dict_of_settings_is_checked_like_the_settings() -> None:
    assert TrainConfig(optimizer={"beta1": 0.8}).optimizer == OptimizerConfig(beta1=0.8)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"optimizer\.beta1 is 1, but must be at least 0 and below 1"):
        TrainConfig(optimizer={"beta1": 1})  # type: ignore[arg-type]


def test_signatures_stay_what_they_are() -> None:
    assert "config" in inspect.signature(jaxrl_llm.train).parameters
    assert list(inspect.signature(TrainConfig).parameters) == [one.name for one in dataclasses.fields(TrainConfig)]
    assert dataclasses.replace(TrainConfig(), steps=3).steps == 3


def test_a_name_that_is_here_too_is_not_told_as_trl_s() -> None:
    said = str(unknown_keyword("gamma", ["steps"], "setting", inside))
    assert said == "unknown setting 'gamma': it belongs to hyperparameters={'gamma': ...}"
