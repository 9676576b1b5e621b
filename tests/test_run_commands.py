"""jaxrl eval and jaxrl sample know the run: its template, system prompt, stop strings and lengths."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.cli.eval_and_sample import filled_prompts, prompts_of
from jaxrl_llm.cli.program import main
from jaxrl_llm.sampling import live, sampler
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.notes import accuracy_line
from jaxrl_llm.utils.errors import InputError

FIGURES = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "prompts": 8, "length": 4.0}


@pytest.mark.parametrize(
    "typed, said",
    [
        ("sample", "jaxrl sample needs a run's folder, or a model as for jaxrl train ("),
        ("sample runs/none", "jaxrl sample needs a prompt after the model, such as: jaxrl sample RUN"),
        ("export runs/none", "jaxrl export needs the folder to write, new or empty ("),
        ("eval runs/none --size", "Missing value for argument '--size' (jaxrl eval --help"),
        ("eval runs/none --sampels 2", "unknown option --sampels: did you mean --samples? ("),
        ("eval none", "'none' is no folder, .gguf file or 'smollm2-135m', nor a hub name of the form owner/model"),
        ("demo --lr 1", "unknown option --lr ("),
        ("algorithms GPRO", "unknown algorithm 'GPRO': did you mean 'grpo'?"),
    ],
)
def test_a_slip_is_told_in_a_plain_line(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_commands_are_there_before_what_takes_long_to_import() -> None:
    program = (
        "import sys, jaxrl_llm.cli.commands; print(sorted({'jax', 'numpy', 'transformers', 'yaml'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_prompts_are_held_out_only_where_a_run_kept_them_from_training() -> None:
    config = TrainConfig(prompts="/data/train.jsonl")
    assert prompts_of(config, None, True) == "held-out prompts"
    assert prompts_of(config, "/data/test.jsonl", True) == "prompts of /data/test.jsonl"
    assert prompts_of(config, "/data/train.jsonl", True) == "training prompts of /data/train.jsonl"
    assert prompts_of(TrainConfig(environment="a.py:A"), None, False) == "games"
    assert "on 8 training prompts of a, 4.0 tokens" in accuracy_line(FIGURES, "training prompts of a")


def test_a_relative_name_of_the_training_prompts_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(prompts=str(tmp_path / "train.jsonl"))
    assert prompts_of(config, "train.jsonl", True) == "training prompts of train.jsonl"


def test_prompts_are_filled_into_the_template() -> None:
    assert filled_prompts(("a", "b {c}"), "{prompt}") == ["a", "b {c}"]
    assert filled_prompts(("a", "b {c}"), "Q: {prompt}\nA:") == ["Q: a\nA:", "Q: b {c}\nA:"]
    with pytest.raises(InputError, match=r"prompt_template has \{unit\}, a column of the training data"):
        filled_prompts(("a",), "{prompt} in {unit}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    config = dataclasses.replace(
        TrainConfig(), prompt_template="Q: {prompt}", system_prompt="Be brief.", stop=("\n",), max_new_tokens=7
    )
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the sampler is asked for."""
    found: list[dict[str, Any]] = []

    def requests_of(policy: Any, prompts: Any, key: Any, **how: Any) -> None:
        found.append({"prompts": list(prompts), **how})

    monkeypatch.setattr(sampler, "requests_of", requests_of)
    monkeypatch.setattr(live, "write_completions", lambda *_, **__: None)
    monkeypatch.setattr("jaxrl_llm.training.folder.load_run.load_run", lambda *_, **__: (None, None, None, None))
    return found


def test_sample_takes_the_settings_of_the_run(run: Path, asked: list[dict[str, Any]]) -> None:
    assert main(["sample", str(run), "1 + 1?"]) == 0
    (own,) = asked
    assert own["prompts"] == ["Q: 1 + 1?"]
    assert own["system_prompt"] == "Be brief."
    assert own["stop"] == ("\n",)
    assert own["max_new_tokens"] == 7
    more = ["--stop", "x", "--system-prompt", "", "--max-new-tokens", "9", "--prompt-template", "{prompt}!"]
    assert main(["sample", str(run), "1 + 1?", *more]) == 0
    assert asked[1]["prompts"] == ["1 + 1?!"]
    assert asked[1]["system_prompt"] is None
    assert asked[1]["stop"] == ("x",)
    assert asked[1]["max_new_tokens"] == 9


def test_sample_of_a_model_has_none(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert main(["sample", str(tmp_path), "1 + 1?"]) == 0
    (own,) = asked
    assert (own["prompts"], own["system_prompt"], own["stop"], own["max_new_tokens"]) == (["1 + 1?"], None, (), 128)
    shutil.rmtree(tmp_path)
