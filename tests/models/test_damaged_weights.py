"""Weights and tokenizers that are damaged are named in one line, without much memory or time."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.models.io.huggingface import all_finite, non_finite
from jaxrl_llm.utils.errors import InputError

NORM, QUERY = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"


def copied(vectors: Any, folder: Path) -> Path:
    for file in vectors("llama").folder.iterdir():
        if file.name != "vectors.npz":
            shutil.copyfile(file, folder / file.name)
    return folder


def changed(vectors: Any, folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copied(vectors, folder) / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_policy(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16, np.float64])
@pytest.mark.parametrize("name", [NORM, QUERY, "model.embed_tokens.weight"])
def test_numbers_that_are_not_finite_are_named(
    name: str, stored: Any, dtype: str, vectors: Any, tmp_path: Path
) -> None:
    for value, words in ((math.nan, "NaN at 1 of"), (math.inf, "infinity at 1 of"), (-math.inf, "infinity at 1 of")):

        def damage(tensors: dict[str, np.ndarray], value: float = value) -> None:
            tensors[name] = tensors[name].astype(stored)
            tensors[name].reshape(-1)[-1] = value

        text = refusal(changed(vectors, tmp_path, damage), dtype=dtype)
        assert f"tensor '{name}' holds {words}" in text
        assert str(tmp_path) in text


def test_numbers_that_the_kept_dtype_cannot_hold(vectors: Any, tmp_path: Path) -> None:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        tensors[NORM] = tensors[NORM].astype(np.float64)
        tensors[NORM][3] = 1e200

    assert f"tensor '{NORM}' holds infinity at 1 of 64 places in float32" in refusal(changed(vectors, tmp_path, damage))


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_all_finite_at_every_place(dtype: Any) -> None:
    x = np.linspace(-3, 3, 50).astype(dtype)
    assert all_finite(x)
    # Large numbers whose sum is none, and the largest of all.
    assert all_finite(np.full(7, jnp.finfo(dtype).max, dtype))
    for place in range(50):
        for value in (math.nan, math.inf, -math.inf):
            bad = x.copy()
            bad[place] = value
            assert not all_finite(bad)
            assert not all_finite(bad.reshape(5, 10).T)
    both = x.copy()
    both[:2], both[3] = math.nan, math.inf
    assert non_finite(both) == "NaN at 2 of 50 places and infinity at 1 of 50 places"


def test_all_finite_beyond_the_first_chunk() -> None:
    x = np.zeros(2**20 + 5, jnp.bfloat16)
    assert all_finite(x)
    x[-1] = math.nan
    assert not all_finite(x)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.bool_, np.uint16, np.complex64])
def test_tensors_that_are_no_floats(dtype: Any, vectors: Any, tmp_path: Path) -> None:
    folder = changed(vectors, tmp_path, lambda t: t.update({NORM: t[NORM].astype(dtype)}))
    text = refusal(folder)
    assert f"tensor '{NORM}' holds numbers of type" in text
    assert "F16, BF16, F32, F64" in text


def raw_safetensors(path: Path, **header: Any) -> None:
    blob = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + b"\0" * 64)


def test_float8(vectors: Any, tmp_path: Path) -> None:
    copied(vectors, tmp_path)
    raw_safetensors(tmp_path / "model.safetensors", x={"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]})
    assert "tensor 'x' holds numbers of type F8_E4M3, which is not supported" in refusal(tmp_path)


@pytest.mark.parametrize(
    "places",
    [
        {}, [], None, 3, "x", {"x": 3}, {"x": None}, {"x": ["model.safetensors"]}, {"x": "../model.safetensors"},
        {"x": "/etc/passwd"}, {"x": "sub/model.safetensors"}, {"x": ""}, {"x": "."}, {"x": "config.json"},
        {"x": "\0.safetensors"}, {"x": "absent.safetensors"}, {"x": "folder.safetensors"},
    ],
)  # fmt: skip
def test_weight_maps(places: Any, vectors: Any, tmp_path: Path) -> None:
    copied(vectors, tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    text = refusal(tmp_path)
    assert "weight_map" in text or "has no absent.safetensors" in text or "has no folder.safetensors" in text


def test_weights_that_are_a_folder_or_unreadable_bytes(vectors: Any, tmp_path: Path) -> None:
    copied(vectors, tmp_path)
    good = (tmp_path / "model.safetensors").read_bytes()
    for content in (
        b"",
        b"\xff" * 100,
        struct.pack("<Q", 2**60) + good[8:],
        struct.pack("<Q", 0) + good[8:],
        good[:-1],
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert "damaged or cut short" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    assert "has no model.safetensors" in refusal(tmp_path)


def with_tokenizer(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    change(raw)
    (folder / "tokenizer.json").write_text(json.dumps(raw))


TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda f: (f / "tokenizer.json").write_text(""),
    "text": lambda f: (f / "tokenizer.json").write_text('"x"'),
    "list": lambda f: (f / "tokenizer.json").write_text("[1]"),
    "nothing in it": lambda f: (f / "tokenizer.json").write_text("{}"),
    "cut short": lambda f: (f / "tokenizer.json").write_bytes((f / "tokenizer.json").read_bytes()[:1000]),
    "no UTF-8": lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe{}"),
    "deep": lambda f: (f / "tokenizer.json").write_text('{"model": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    "no model": lambda f: with_tokenizer(f, lambda raw: raw.pop("model")),
    "model of null": lambda f: with_tokenizer(f, lambda raw: raw.update(model=None)),
    "vocabulary of a list": lambda f: with_tokenizer(f, lambda raw: raw["model"].update(vocab=[1, 2])),
    "vocabulary of texts": lambda f: with_tokenizer(f, lambda raw: raw["model"].update(vocab={"a": "b"})),
    "merges of numbers": lambda f: with_tokenizer(f, lambda raw: raw["model"].update(merges=[1, 2])),
    "merges of unknown tokens": lambda f: with_tokenizer(f, lambda raw: raw["model"].update(merges=[["\u2603", "q"]])),
    "unknown pre-tokenizer": lambda f: with_tokenizer(f, lambda raw: raw.update(pre_tokenizer={"type": "None"})),
    "added tokens of text": lambda f: with_tokenizer(f, lambda raw: raw.update(added_tokens="x")),
    "settings of a list": lambda f: (f / "tokenizer_config.json").write_text("[]"),
    "settings cut short": lambda f: (f / "tokenizer_config.json").write_text("{"),
    "settings deep": lambda f: (f / "tokenizer_config.json").write_text('{"a":' * 100_000),
    "template of a number": lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": 5}'),
    "end of a list": lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": [1]}'),
    "absent": lambda f: (f / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("damage", TOKENIZERS.values(), ids=TOKENIZERS)
def test_damaged_tokenizers(damage: Callable[[Path], Any], vectors: Any, tmp_path: Path) -> None:
    damage(copied(vectors, tmp_path))
    text = refusal(tmp_path)
    assert str(tmp_path) in text
    assert "tokenizer" in text


def test_code_of_a_tokenizer_is_neither_run_nor_asked_about(
    vectors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> str:
        raise AssertionError("the user was asked")

    monkeypatch.setattr("builtins.input", asked)
    raw = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (copied(vectors, tmp_path) / "tokenizer_config.json").write_text(json.dumps(raw))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with contextlib.suppress(InputError):
        load_policy(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_end_that_is_not_in_the_vocabulary(vectors: Any, tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model is fine, but not one that ends at a token which the model lacks."""
    copied(vectors, tmp_path)
    raw = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(raw | {"eos_token": "<another>"}))
    assert "the tokenizer: eos_token_id 257 is not in the vocabulary of 257 tokens" in refusal(tmp_path)
