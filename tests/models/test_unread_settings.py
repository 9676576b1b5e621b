"""Settings of a config.json that a family does not look at: said where they may change the model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from conftest import FAMILIES, TODAY, VECTORS

from jaxrl_llm import load_policy
from jaxrl_llm.models.families import unread_settings

PLANNED = Path(__file__).parents[2] / "experiments" / "plan"


@pytest.mark.parametrize(
    "file",
    [*(VECTORS / name / "config.json" for name in (*FAMILIES, *TODAY)), *sorted(PLANNED.glob("*.json"))],
    ids=lambda file: file.stem if file.parent == PLANNED else file.parent.name,
)
def test_files_as_they_are_published_have_none(file: Path) -> None:
    assert unread_settings(json.loads(file.read_text())) == ()


def test_another_familys_and_unknown_settings_are_found() -> None:
    """Also where a family knows them by name but has no use for them; what is off, or of training, is not."""
    raw = json.loads((VECTORS / "llama" / "config.json").read_text())
    changed = {"attn_logit_softcapping": 30.0, "qk_layernorm": True, "norm_topk_prob": True}
    neutral = {"final_logit_softcapping": None, "use_parallel_residual": False, "attention_dropout": 0.1}
    assert unread_settings(raw | changed | neutral) == ("attn_logit_softcapping", "norm_topk_prob", "qk_layernorm")
    inner = json.loads((VECTORS / "qwen3_5" / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": inner, "vision_config": {"depth": 2}}
    assert unread_settings(whole) == ()
    inner["parallel_layers"] = 2
    assert unread_settings(whole) == ("parallel_layers",)


def test_loading_says_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(VECTORS / "llama", tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"qk_layernorm": True}))
    with caplog.at_level(logging.WARNING):
        load_policy(folder)
    assert f"{file}: settings that are not read, and may change the model: qk_layernorm" in caplog.messages
