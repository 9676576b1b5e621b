"""Files of settings use the names of the options, and those of TRL where they mean the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.utils.errors import InputError


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.learning_rate: 2.0e-6\nalgorithm.clip_high: 0.3\nalgorithm: dapo\n",
        "optimizer.learning-rate: 2.0e-6\nalgorithm.clip-high: 0.3\nalgorithm: DAPO\n",
        "learning_rate: 2.0e-6\nepsilon_high: 0.3\nalgorithm: dapo\n",
        "algorithm: dapo\nhyperparameters: {clip_high: 0.3}\noptimizer: {learning_rate: 2.0e-6}\n",
        "algorithm: dapo\nalgorithm.clip_high: 0.3\nhyperparameters: {}\noptimizer: {learning_rate: 2.0e-6}\n",
    ],
)
def test_a_setting_has_the_name_of_its_option(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    options = ["--optimizer.learning-rate", "2e-6", "--algorithm", "dapo", "--algorithm.clip-high", "0.3"]
    assert parse_config(["--config", str(tmp_path / "a.yaml")]) == parse_config(options)


def test_a_file_of_trl_is_read(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(
        "model_name_or_path: a/b\nreward_funcs: accuracy_reward\nbf16: true\ngradient_checkpointing: false\n"
        "lr_scheduler_type: cosine\noutput_dir: runs/x\n"
    )
    found = parse_config(["--config", str(tmp_path / "trl.yaml")])
    default = parse_config([])
    assert found == dataclasses.replace(
        default, model="a/b", rewards=("math_verify",), dtype="bfloat16", remat=False, output="runs/x",
        optimizer=dataclasses.replace(default.optimizer, schedule="cosine"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.beta1: 0.5\noptimizer: {beta1: 0.6}\n", "optimizer.beta1 is set twice"),
        ("optimizer: {beta1: 0.6}\noptimizer.beta1: 0.5\n", "optimizer.beta1 is set twice"),
        ("learning_rate: 1.0\noptimizer.learning_rate: 2.0\n", "optimizer.learning_rate is set|learning_rate is opt"),
        ("optimizer: 3\noptimizer.beta1: 0.5\n", "optimizer must hold settings by name, found 3"),
        ("optimizer.beta3: 0.5\n", "unknown optimizer setting 'beta3': did you mean 'beta"),
        ("algorithm.clip_hihg: 0.5\n", "hyper-parameter of grpo 'clip_hihg': did you mean 'clip_high'"),
        ("num_train_epochs: 3\nfp16: true\n", "TRL's fp16 has no counterpart"),
        ("algorithm: dapo\nbeta: 0.1\n", "TRL's beta is algorithm.kl_coefficient here, which this method does not"),
        ("sampling.temperature: 1\n", "unknown setting 'sampling.temperature'"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        parse_config(["--config", str(tmp_path / "a.yaml")])
    assert "a.yaml: " in str(caught.value)
