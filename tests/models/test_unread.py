"""What is read of published files returns bit for bit; what is not is said in a line, and kept on request."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAMILIES, VECTORS
from safetensors.numpy import load_file, save_file

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.cli.program import main
from jaxrl_llm.models.families import to_hf
from jaxrl_llm.models.io.load import read_unread
from jaxrl_llm.utils.errors import InputError

Tensors = dict[str, np.ndarray]
TODAY = sorted(path.name for path in VECTORS.iterdir() if path.is_dir() and path.name not in FAMILIES)
SOME = ("deepseek_v3", "phi3", "qwen3_5_moe")


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.heavy) for n in TODAY])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_returns_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Under its own name, also of tensors that hold several weights, in another order, or rotate neighbours."""
    original = {key: x.astype(jnp.dtype(dtype)) for key, x in load_file(VECTORS / name / "model.safetensors").items()}
    folder = copied(name, tmp_path, original)
    policy, params, _ = load_policy(folder, dtype=dtype)
    saved = load_file(save_policy(tmp_path / "saved", policy, params) / "model.safetensors")
    assert saved.keys() == original.keys()
    for key, value in original.items():
        assert saved[key].dtype == value.dtype
        assert saved[key].tobytes() == np.ascontiguousarray(value).tobytes(), key


def copied(name: str, folder: Path, tensors: Tensors, **settings: Any) -> Path:
    """A folder with a family's tokenizer, these tensors, and settings in place of the family's, if there are some."""
    for file in (VECTORS / name).iterdir():
        if file.name not in ("vectors.npz", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def multimodal(name: str, folder: Path, prefix: str, towers: Tensors, **settings: Any) -> tuple[Path, Tensors]:
    """A family's model as a part of one with towers, in bfloat16."""
    inner = json.loads((VECTORS / name / "config.json").read_text())
    own = {key: x.astype(jnp.bfloat16) for key, x in load_file(VECTORS / name / "model.safetensors").items()}
    tensors = {f"{prefix}{key.removeprefix('model.')}" if key[:6] == "model." else key: x for key, x in own.items()}
    outer = {"architectures": ["ForConditionalGeneration"], "text_config": inner, "vision_config": {"depth": 2}}
    (folder / "preprocessor_config.json").write_text('{"size": 14}')
    return copied(name, folder, tensors | towers, **(outer | settings)), tensors


TOWERS: dict[str, np.ndarray] = {
    "model.visual.blocks.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.visual.positions": np.arange(4),  # int64
    "mtp.fc.weight": np.asarray([np.nan, 1], jnp.float8_e4m3fn),
}


def test_towers_are_said_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The export is the original with other weights: names, settings, towers and how images are prepared."""
    (tmp_path / "original").mkdir()
    folder, own = multimodal(
        "qwen3_5", tmp_path / "original", "model.language_model.", TOWERS, model_type="qwen3_5", image_token_id=3,
        tie_word_embeddings=False, quantization_config=None,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        policy, params, tokenizer = load_policy(folder, dtype="bfloat16")
    assert [text for text in caplog.messages if str(folder) in text] == [
        f"{folder}: 3 tensors are not read (model.visual: 2, mtp: 1)"
    ]
    newer = jax.tree.map(lambda x: 2 * x, params)
    saved = save_policy(tmp_path / "saved", policy, newer, tokenizer, unread=read_unread(folder))
    raw = json.loads((saved / "config.json").read_text())
    before = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == "qwen3_5"
    assert raw["image_token_id"] == 3
    assert raw["vision_config"] == before["vision_config"]
    assert raw["architectures"] == before["architectures"]
    assert before["text_config"].keys() <= raw["text_config"].keys()
    assert "quantization_config" not in raw
    assert (saved / "preprocessor_config.json").read_text() == '{"size": 14}'
    again, loaded, _ = load_policy(saved, dtype="bfloat16")
    assert again == policy
    jax.tree.map(np.testing.assert_array_equal, loaded, newer)
    kept = read_unread(saved)
    assert kept.tensors.keys() == TOWERS.keys()
    for name, value in TOWERS.items():
        found = kept.tensors[name]()
        assert found.dtype == value.dtype
        assert found.tobytes() == value.tobytes()
    same = save_policy(tmp_path / "same", policy, params, tokenizer, unread=read_unread(folder))
    from safetensors import safe_open

    with safe_open(same / "model.safetensors", "np") as file:
        assert set(file.keys()) == own.keys() | TOWERS.keys()
        for name, value in own.items():
            assert file.get_tensor(name).tobytes() == np.ascontiguousarray(value).tobytes()
    bare = json.loads((save_policy(tmp_path / "bare", policy, params) / "config.json").read_text())
    assert bare == to_hf(policy.config, "bfloat16")


@pytest.mark.parametrize(
    ("prefix", "head"), [("language_model.model.", "language_model."), ("model.language_model.", "")]
)
def test_older_and_newer_names_of_wrappers(prefix: str, head: str, tmp_path: Path) -> None:
    tower = {"model.vision_tower.x": np.ones(2, np.float32)} if prefix[:6] == "model." else {
        "vision_tower.x": np.ones(2, np.float32)
    }  # fmt: skip
    (tmp_path / "original").mkdir()
    folder, own = multimodal("mistral", tmp_path / "original", prefix, tower, model_type="mistral3")
    stored = {(head + name if name == "lm_head.weight" else name): x for name, x in (own | tower).items()}
    save_file(stored, folder / "model.safetensors")
    policy, params, _ = load_policy(folder, dtype="bfloat16")
    saved = save_policy(tmp_path / "saved", policy, params, unread=read_unread(folder))
    found = load_file(saved / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(found[name].tobytes() == np.ascontiguousarray(x).tobytes() for name, x in stored.items())


def test_draft_layers_are_kept_with_their_setting(tmp_path: Path) -> None:
    """And no copy of tied embeddings, which would be an old one."""
    tensors = load_file(VECTORS / "deepseek_v3" / "model.safetensors")
    more = {"model.layers.4.eh_proj.weight": np.ones((2, 2), np.float32)}
    (tmp_path / "original").mkdir()
    folder = copied("deepseek_v3", tmp_path / "original", tensors | more)
    policy, params, tokenizer = load_policy(folder)
    saved = save_policy(tmp_path / "saved", policy, params, tokenizer, unread=read_unread(folder))
    assert load_file(saved / "model.safetensors").keys() == (tensors | more).keys()
    assert json.loads((saved / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert load_policy(saved)[0].config == policy.config
    bare = json.loads((save_policy(tmp_path / "bare", policy, params) / "config.json").read_text())
    assert bare["num_nextn_predict_layers"] == 0
    tied = load_file(VECTORS / "llama_tied" / "model.safetensors")
    (tmp_path / "tied").mkdir()
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].copy()
    assert not read_unread(copied("llama_tied", tmp_path / "tied", tied)).tensors


def test_many_groups_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(VECTORS / "llama" / "model.safetensors")
    more = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for n in range(6)}
    with caplog.at_level(logging.WARNING):
        load_policy(copied("llama", tmp_path, tensors | more))
    (line,) = (text for text in caplog.messages if str(tmp_path) in text)
    assert line.endswith(
        "6 tensors are not read (" + ", ".join(f"model.layers.{n}: 1" for n in range(4)) + " and 2 more)"
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "original").mkdir()
    folder, _ = multimodal(
        "qwen3_5", tmp_path / "original", "model.language_model.", TOWERS, model_type="qwen3_5",
        tie_word_embeddings=False,
    )  # fmt: skip
    assert main(["export", str(folder), str(tmp_path / "all"), "--keep-unread"]) == 0
    assert main(["export", str(folder), str(tmp_path / "text")]) == 0
    assert main(["export", str(folder), str(tmp_path / "all"), "--keep-unread", "--overwrite"]) == 0
    assert read_unread(tmp_path / "all").tensors.keys() == TOWERS.keys()
    assert not read_unread(tmp_path / "text").tensors
    capsys.readouterr()
    with pytest.raises(InputError, match="is a GGUF file, of which all is read"):
        read_unread("smollm2-135m")
