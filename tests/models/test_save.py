"""Models survive being written and read, and damaged folders are told apart in one line."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.models.parameters import parameter_shapes
from jaxrl_llm.utils.errors import InputError


def assert_equal(first: Any, second: Any) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_round_trip(family: str, vectors: Any, tmp_path: Path) -> None:
    model = vectors(family)
    assert save_policy(tmp_path, model.policy, model.params, model.tokenizer) == tmp_path
    policy, params, tokenizer = load_policy(tmp_path)
    assert policy == model.policy
    assert_equal(params, model.params)
    text = "a +  b\n"
    assert tokenizer.encode(text) == model.tokenizer.encode(text) == list(text.encode())
    assert tokenizer.eos_token_id == policy.config.eos_token_ids[0] == 256
    shapes = {path: x.shape for path, x in _leaves(params).items()}
    assert shapes == parameter_shapes(policy.config)


def test_the_token_of_padding_is_the_tokenizers(vectors: Any, tmp_path: Path) -> None:
    """Without it transformers takes the family's, which the vocabulary may lack."""
    model = vectors("glm4")
    assert model.tokenizer.pad_token_id == 256
    save_policy(tmp_path / "with", model.policy, model.params, model.tokenizer)
    save_policy(tmp_path / "without", model.policy, model.params)
    written = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("with", "without")]
    assert [raw["pad_token_id"] for raw in written] == [256, None]


def _leaves(params: Any) -> dict[tuple[str, ...], Any]:
    return {tuple(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


def test_tensors_are_those_of_the_original_file(family: str, vectors: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = vectors(family)
    save_policy(tmp_path, model.policy, model.params)
    ours, original = load_file(tmp_path / "model.safetensors"), load_file(model.folder / "model.safetensors")
    assert ours.keys() == original.keys()
    for name, value in original.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_shards(family: str, vectors: Any, tmp_path: Path) -> None:
    model = vectors(family)
    save_policy(tmp_path, model.policy, model.params, model.tokenizer, shard_bytes=100_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert max(file.stat().st_size for file in files) < 110_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert_equal(load_policy(tmp_path)[1], model.params)


@pytest.mark.parametrize("first, second", [(100_000, 10**9), (10**9, 100_000), (60_000, 100_000)])
def test_saving_over_an_older_model(first: int, second: int, vectors: Any, tmp_path: Path) -> None:
    model = vectors("llama")
    save_policy(tmp_path, model.policy, model.params, model.tokenizer, shard_bytes=first)
    newer = jax.tree.map(lambda x: x + 1, model.params)
    save_policy(tmp_path, model.policy, newer, model.tokenizer, shard_bytes=second, overwrite=True)
    assert_equal(load_policy(tmp_path)[1], newer)
    names = {file.name for file in tmp_path.glob("model*")}
    assert ("model.safetensors" in names) == (second == 10**9)
    assert len({name.split("-of-")[1] for name in names if "-of-" in name}) == (second != 10**9)


def test_bfloat16(vectors: Any, tmp_path: Path) -> None:
    model = vectors("llama_tied")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    save_policy(tmp_path, model.policy, half, model.tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    policy, params, _ = load_policy(tmp_path, dtype=jnp.bfloat16)
    assert policy.dtype == jnp.bfloat16
    assert_equal(params, half)
    # Kept in one dtype and computed in another.
    policy, params, _ = load_policy(tmp_path, param_dtype="bfloat16")
    assert policy.dtype == jnp.float32
    assert_equal(params, half)
    _, wide, _ = load_policy(tmp_path)
    assert_equal(wide, jax.tree.map(lambda x: x.astype(jnp.float32), half))


def test_ends_come_from_every_file(vectors: Any, tmp_path: Path) -> None:
    """config.json, generation_config.json and the tokenizer may each name tokens that end a text."""
    model = vectors("llama")
    _copy(model, tmp_path)
    _edit(tmp_path, lambda raw: raw.update(eos_token_id=3))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    policy, params, tokenizer = load_policy(tmp_path)
    assert policy.config.eos_token_ids == (3, 7, 256)
    save_policy(tmp_path / "again", policy, params, tokenizer)
    assert load_policy(tmp_path / "again")[0].config.eos_token_ids == (3, 7, 256)


def _copy(model: Any, folder: Path) -> None:
    for file in model.folder.iterdir():
        if file.name != "vectors.npz":
            shutil.copyfile(file, folder / file.name)


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def _rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _truncate(folder: Path, size: int) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:size] if size >= 0 else data[: len(data) + size])


NORM = "model.layers.1.input_layernorm.weight"
DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), "no config.json"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    ("end cut off", lambda f: _truncate(f, -1000), "damaged or cut short"),
    ("header cut off", lambda f: _truncate(f, 100), "damaged or cut short"),
    ("empty file", lambda f: _truncate(f, 0), "damaged or cut short"),
    (
        "no safetensors file",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope"),
        "damaged or cut short",
    ),
    ("missing tensor", lambda f: _rewrite(f, lambda t: t.pop(NORM)), f"lack the tensor '{NORM}'"),
    ("wrong shape", lambda f: _edit(f, lambda raw: raw.update(intermediate_size=96)), r"has shape \(112, 64\)"),
    ("another vocabulary", lambda f: _edit(f, lambda raw: raw.update(vocab_size=300)), r"implies \(300, 64\)"),
    (
        "extra tensor",
        lambda f: _rewrite(f, lambda t: t.update({"model.adapter.weight": np.zeros(2, np.float32)})),
        "1 tensors are not part of a llama model.*model.adapter.weight",
    ),
    ("fewer layers", lambda f: _edit(f, lambda raw: raw.update(num_hidden_layers=1)), "not part of a llama model"),
    ("broken config", lambda f: (f / "config.json").write_text('{"model_type": '), "is not a JSON object: not JSON"),
    ("config of a list", lambda f: (f / "config.json").write_text("[]"), "is not a JSON object: a list"),
    ("broken generation", lambda f: (f / "generation_config.json").write_text("{"), "is not a JSON object: not JSON"),
    ("broken index", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    (
        "missing shard",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-2.safetensors"}}'),
        "has no model-2.safetensors",
    ),
    ("unsupported", lambda f: _edit(f, lambda raw: raw.update(model_type="gpt_neox")), "supported model types are"),
]


@pytest.mark.parametrize("damage, message", [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_damaged_folders(damage: Callable[[Path], Any], message: str, vectors: Any, tmp_path: Path) -> None:
    _copy(vectors("llama"), tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_tokenizer(vectors: Any, tmp_path: Path) -> None:
    model = vectors("llama")
    save_policy(tmp_path, model.policy, model.params)
    with pytest.raises(InputError, match="no usable tokenizer") as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tied_head_that_is_stored_twice(vectors: Any, tmp_path: Path) -> None:
    model = vectors("llama_tied")
    _copy(model, tmp_path)
    _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_equal(load_policy(tmp_path)[1], model.params)


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "./no/such", "/no/such/folder", "~/no such folder", "a/b/c", "owner/bad name", "missing.gguf"],
)
def test_bad_names(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of these asks the network."""
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(InputError) as caught:
        load_policy(name)
    assert name.split("/")[-1] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("cannot reach the hub\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(InputError, match=r"'owner/model' is no folder.*cannot reach the hub$"):
        load_policy("owner/model")


@pytest.mark.parametrize("dtype", ["float16", "int8", "float33"])
def test_dtypes(dtype: str, vectors: Any) -> None:
    with pytest.raises(InputError, match="choose float32 or bfloat16"):
        load_policy(vectors("llama").folder, dtype=dtype)
