"""The day of a run, which templates that print a date take for today: that of its start, on every later day."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs

from jaxrl_llm.training import begin, inputs
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder, run_config
from jaxrl_llm.training.loop import train
from jaxrl_llm.utils.errors import InputError

TEMPLATE = (
    "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}{{ ':' if add_generation_prompt }}"
)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """A run with a template that prints the day."""
    shutil.copytree(runs.MODEL, folder / "model", dirs_exist_ok=True)
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return dataclasses.replace(runs.small_config(folder), model=str(folder / "model"), **changes)


@pytest.mark.heavy
def test_a_run_keeps_the_day_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    sets = inputs.prompt_sets

    def noted(*arguments: Any) -> Any:
        found = sets(*arguments)
        seen.append(found[0].ids)
        return found

    monkeypatch.setattr("jaxrl_llm.training.setup.prompt_sets", noted)
    monkeypatch.setattr(begin, "today", lambda: "2031-01-31")
    config = config_of(tmp_path, steps=1, checkpoint_every=1)
    train(config)
    folder = RunFolder(config.output)
    assert json.loads(folder.config.read_text())["started_on"] == "2031-01-31"
    assert folder.read_config() == config
    assert run_config(config.output).date == "2031-01-31", "an evaluation is on that day, too"
    monkeypatch.setattr(begin, "today", lambda: "2031-02-01")
    train(dataclasses.replace(config, steps=2), resume=True)
    assert seen[0] == seen[1]
    tokens = runs.load_policy(config.model)[2].decode(seen[0][0])
    assert tokens.startswith("31")
    with pytest.raises(InputError, match=r"date was '2031-01-31', and is now '2031-02-01'"):
        train(dataclasses.replace(config, steps=2, date="2031-02-01"), resume=True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"date": "31 Jan"}, "date is '31 Jan', but must be a day, such as 2031-01-31"),
        ({"template_options": "[1]"}, r"template_options is '\[1\]', but must be a JSON object"),
        ({"template_options": "{oh}"}, "must be a JSON object"),
        ({"prompt_format": "plain", "template_options": '{"a": 1}'}, "template_options are given, but prompt_format"),
        ({"prompt_format": "rendered", "earlier_thoughts": "as-template"}, "earlier_thoughts is given, but prompt_"),
        ({"prompt_format": "rendered", "tools": ("a.py:f",)}, "prompt_format is rendered, but an environment or tools"),
        ({"prompt_format": "rendered", "system_prompt": "be"}, "system_prompt is given, but prompt_format is rendered"),
        ({"prompt_format": "html"}, "prompt_format"),
    ],
)  # fmt: skip
def test_settings_of_the_format_that_do_not_fit(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        TrainConfig(**changes)


def test_options_may_be_a_mapping() -> None:
    config = TrainConfig(template_options={"enable_thinking": False})  # type: ignore[arg-type]
    assert config.template_options == '{"enable_thinking": false}'
    assert config.format.options == {"enable_thinking": False}
