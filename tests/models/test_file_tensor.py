"""Published files of fewer bits: MXFP4 and FP8 with scales are the floats that slow loops find, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.models import from_hf, init_params
from jaxrl_llm.models.families.family import Quantisation, quantisation_of
from jaxrl_llm.models.io.file_tensor import dequantised
from jaxrl_llm.models.io.huggingface import to_tensors
from jaxrl_llm.utils.errors import InputError

Tensors = dict[str, np.ndarray]
NUMBERS = {"U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "F32": np.float32, "BF16": jnp.bfloat16}


def e2m1(bits: int) -> float:
    """A number of four bits: sign, two of the exponent, one of the fraction."""
    sign, exponent, fraction = bits >> 3, bits >> 1 & 3, bits & 1
    size = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
    return -size if sign else size


def e4m3(bits: int) -> float:
    """A number of eight bits: sign, four of the exponent, three of the fraction."""
    sign, exponent, fraction = bits >> 7, bits >> 3 & 15, bits & 7
    size = fraction * 2.0**-9 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8)
    return -size if sign else size


def slow_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[experts, inputs, outputs], one number after another."""
    experts, outputs, count, _ = blocks.shape
    out = np.zeros((experts, count * 32, outputs))
    for e, o, b, i in itertools.product(range(experts), range(outputs), range(count), range(16)):
        factor = 2.0 ** (int(scales[e, o, b]) - 127)
        byte = int(blocks[e, o, b, i])
        out[e, 32 * b + 2 * i, o] = e2m1(byte & 15) * factor
        out[e, 32 * b + 2 * i + 1, o] = e2m1(byte >> 4) * factor
    return out


def slow_fp8(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The products of a matrix, each rounded to float32."""
    out = np.zeros(values.shape, np.float32)
    for row, column in itertools.product(*map(range, values.shape)):
        factor = scales[row // block[0], column // block[1]]
        out[row, column] = np.float32(e4m3(int(values[row, column]))) * np.float32(factor)
    return out


def write_file(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file with tensors of any type: a header, and the bytes."""
    header, parts, start = {}, [], 0
    for name, (dtype, value) in tensors.items():
        data = np.ascontiguousarray(value.astype(NUMBERS[dtype])).tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, start + len(data)]}
        parts.append(data)
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write_folder(
    vectors: Any, family: str, folder: Path, change: Callable[[str, np.ndarray], dict[str, tuple[str, np.ndarray]]],
    quantization: dict[str, Any], **settings: Any,
) -> tuple[Tensors, Any]:  # fmt: skip
    """A folder of the family with random weights, in which `change` gives what each tensor is stored as.

    Returns the tensors as they were, and the configuration.
    """
    for file in vectors(family).folder.iterdir():
        if file.name not in ("vectors.npz", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    raw = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    config = from_hf(raw)
    tensors = to_tensors(init_params(jax.random.key(0), config), config)
    stored: dict[str, tuple[str, np.ndarray]] = {}
    for name, value in tensors.items():
        stored |= change(name, value)
    write_file(folder / "model.safetensors", stored)
    return tensors, config


def said(caplog: pytest.LogCaptureFixture, folder: Path) -> list[str]:
    """What the log says of a folder."""
    return [text for text in caplog.messages if str(folder) in text]


def unchanged(name: str, value: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    return {name: ("F32", value)}


def mxfp4_folder(vectors: Any, folder: Path) -> tuple[Tensors, Any]:
    """As gpt-oss is published; returns the expected tensors."""
    rng, expected = np.random.default_rng(0), dict[str, np.ndarray]()

    def change(name: str, value: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return unchanged(name, value)
        experts, inputs, outputs = value.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(110, 132, blocks.shape[:-1]).astype(np.uint8)
        expected[name] = slow_mxfp4(blocks, scales)
        return {f"{name}_blocks": ("U8", blocks), f"{name}_scales": ("U8", scales)}

    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    shape = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2}
    tensors, config = write_folder(vectors, "gpt_oss", folder, change, settings, intermediate_size=32, **shape)
    return tensors | expected, config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_of_gpt_oss(dtype: str, vectors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected, config = mxfp4_folder(vectors, tmp_path)
    with caplog.at_level(logging.WARNING):
        policy, params, tokenizer = load_policy(tmp_path, dtype=dtype)
    assert said(caplog, tmp_path) == [f"{tmp_path}: 4 quantised tensors (mxfp4) read into {dtype}"]
    assert dataclasses.replace(policy.config, eos_token_ids=(), num_tokens=0) == dataclasses.replace(
        config, eos_token_ids=(), num_tokens=0
    )
    found = to_tensors(params, policy.config)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(found[name], value.astype(found[name].dtype), err_msg=name)
        if name.endswith("_proj"):  # whose numbers have few bits
            np.testing.assert_array_equal(found[name].astype(np.float64), value)
    save_policy(tmp_path / "saved", policy, params, tokenizer)
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in raw
    assert raw["dtype"] == dtype
    again = load_policy(tmp_path / "saved", dtype=dtype)[1]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_the_numbers_of_the_format() -> None:
    """Every byte and every exponent, also those that are no finite numbers; the tables of OCP's specification."""
    assert [e2m1(bits) for bits in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(256, axis=1)
    scales = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(16, axis=2)
    tensors = {"x_blocks": lambda: blocks, "x_scales": lambda: scales}
    with pytest.raises(InputError, match="'x_blocks' holds numbers of type F32, but must be of U8"):
        dequantised(tensors, Quantisation("mxfp4"), "here")
    from jaxrl_llm.models.io import file_tensor

    found = file_tensor._mxfp4("x", lambda: blocks, lambda: scales, "here")[0].astype(np.float64)
    nibbles = np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1).reshape(-1)
    values = np.asarray([e2m1(int(bits)) for bits in nibbles])
    for exponent in (0, 1, 100, 127, 200, 252):  # below and at the smallest normal number too
        np.testing.assert_array_equal(found[:, exponent], values * 2.0 ** (exponent - 127))
    assert np.isinf(found[:, 254]).any()  # bfloat16 has no 6 x 2^127
    assert np.isnan(found[:, 255]).all()
    for bits in range(256):
        assert file_tensor.E4M3[bits] == e4m3(bits) or bits & 127 == 127
    assert np.isnan(file_tensor.E4M3[[127, 255]]).all()


def fp8_change(
    block: tuple[int, int] | None, scale: str, expected: Tensors, plain: tuple[str, ...], prefix: str = ""
) -> Callable[[str, np.ndarray], dict[str, tuple[str, np.ndarray]]]:
    """Projections as E4M3 with scales, but those of `plain`; `expected` gets what they are."""
    rng = np.random.default_rng(1)

    def change(name: str, value: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        stored = prefix + name.removeprefix("model.") if prefix else name
        if value.ndim != 2 or any(part in name for part in plain):
            return unchanged(stored, value)
        bits = (
            rng.integers(0, 127, value.shape).astype(np.uint8) | rng.integers(0, 2, value.shape).astype(np.uint8) << 7
        )
        rows, columns = block or value.shape
        shape = (-(-value.shape[0] // rows), -(-value.shape[1] // columns))
        if scale in ("U8", "F8_E8M0"):
            factors = rng.integers(110, 130, shape).astype(np.uint8)
            as_numbers = 2.0 ** (factors.astype(np.float64) - 127)
        else:
            factors = rng.uniform(1e-4, 1e-2, shape).astype(NUMBERS[scale])
            as_numbers = factors
        expected[name] = slow_fp8(bits, as_numbers, (rows, columns))
        factors = factors if block else factors.reshape(())
        found = {stored: ("F8_E4M3", bits), f"{stored}_scale_inv": (scale, factors)}
        if block is None:
            found[stored.removesuffix("weight") + "activation_scale"] = ("BF16", np.ones(()))
        return found

    return change


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "block", "scale", "dtype"),
    [
        ("deepseek_v3", (16, 24), "F32", "float32"),  # 24 divides neither 64 nor 32
        ("deepseek_v3", (128, 128), "F32", "bfloat16"),
        pytest.param("qwen3_5_moe", (32, 32), "BF16", "float32", marks=pytest.mark.heavy),
        pytest.param("qwen3", (1, 32), "U8", "bfloat16", marks=pytest.mark.heavy),
        ("qwen3", (1, 32), "F8_E8M0", "float32"),
        ("ministral3", None, "BF16", "bfloat16"),
    ],
)
def test_fp8_with_scales(
    family: str, block: Any, scale: str, dtype: str, vectors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
    plain, expected = ("embed_tokens", "lm_head", "gate.weight", "norm"), dict[str, np.ndarray]()
    prefix = "language_model.model." if family == "ministral3" else ""
    change = fp8_change(block, scale, expected, plain, prefix)
    tensors, _ = write_folder(vectors, family, tmp_path, change, quantization)
    with caplog.at_level(logging.WARNING):
        policy, params, tokenizer = load_policy(tmp_path, dtype=dtype)
    how = f"fp8, blocks of {block[0]} x {block[1]}" if block else "fp8"
    assert said(caplog, tmp_path) == [f"{tmp_path}: {len(expected)} quantised tensors ({how}) read into {dtype}"]
    found = to_tensors(params, policy.config)
    for name, value in (tensors | expected).items():
        np.testing.assert_array_equal(found[name], value.astype(dtype), err_msg=name)
    raw = json.loads((save_policy(tmp_path / "saved", policy, params, tokenizer) / "config.json").read_text())
    assert "quantization_config" not in raw


def test_experts_in_one_tensor(vectors: Any) -> None:
    """Scales have the axis of experts too."""
    rng = np.random.default_rng(2)
    bits, scales = rng.integers(0, 127, (3, 20, 10)).astype(np.uint8), rng.uniform(size=(3, 3, 2)).astype(np.float32)
    from jaxrl_llm.models.io import file_tensor

    found = file_tensor._fp8("x", lambda: bits, lambda: scales, (8, 8), "here")
    for expert in range(3):
        np.testing.assert_array_equal(found[expert], slow_fp8(bits[expert], scales[expert], (8, 8)))


def test_tensors_are_read_one_at_a_time_and_only_when_called(tmp_path: Path) -> None:
    from jaxrl_llm.models.io.huggingface import open_folder

    bits = np.arange(64, dtype=np.uint8).reshape(8, 8)
    one = {"weight": ("F8_E4M3", bits), "weight_scale_inv": ("F32", np.ones((1, 1)))}
    write_file(tmp_path / "model.safetensors", {f"{n}.{k}": v for n in "ab" for k, v in one.items()})
    opened = open_folder(tmp_path)
    calls: list[str] = []

    class Watched(type(opened["a.weight"])):  # type: ignore[misc]
        def __call__(self) -> np.ndarray:
            calls.append(self.name)
            return super().__call__()

    found = dequantised(
        {name: Watched(read.opened, read.path, read.name, read.dtype) for name, read in opened.items()},
        Quantisation("fp8", (8, 8)),
        "here",
    )
    assert not calls
    assert sorted(found) == ["a.weight", "b.weight"]
    assert found["b.weight"]()[7, 7] == e4m3(63)
    assert sorted(calls) == ["b.weight", "b.weight_scale_inv"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4}, r"quantised \('gptq'\) are not read, but only fp8 and mxfp4"),
    ({"quant_method": "compressed-tensors"}, "quantised .'compressed-tensors'. are not read"),
    ({"bits": 4}, "quantised .'unknown'. are not read"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2', but must be one of e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128., but must be two whole numbers"),
    ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size is .0, 1., but must be two whole"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "quantization_config.expert_dtype is 'fp4'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_other_quantisations_are_refused_by_name(settings: dict[str, Any], message: str, vectors: Any) -> None:
    raw = json.loads((vectors("llama").folder / "config.json").read_text()) | {"quantization_config": settings}
    with pytest.raises(InputError, match=message) as caught:
        from_hf(raw)
    assert "\n" not in str(caught.value)


def test_what_a_config_says(vectors: Any) -> None:
    assert quantisation_of({}, "here") is None
    assert quantisation_of({"quantization_config": None}, "here") is None
    assert quantisation_of({"quantization_config": {"quant_method": "fp8"}}, "here") == Quantisation("fp8", (128, 128))
    raw = json.loads((vectors("llama").folder / "config.json").read_text())
    assert from_hf(raw | {"quantization_config": {"quant_method": "mxfp4"}}) == from_hf(raw)


QUERY = "model.layers.0.self_attn.q_proj.weight"
DAMAGES: list[tuple[Callable[[dict[str, tuple[str, np.ndarray]]], Any], str]] = [
    (lambda t: t.pop(f"{QUERY}_scale_inv"), "q_proj.weight' holds numbers of type F8_E4M3, which is not supported"),
    (lambda t: t.pop(QUERY), "lack the tensor .*q_proj.weight' of a quantised one"),
    (
        lambda t: t.update({f"{QUERY}_scale_inv": ("F32", np.ones((2, 2)))}),
        r"q_proj.weight_scale_inv' has shape .*, but blocks of 32 x 32 of",
    ),
    (lambda t: t.update({QUERY: ("U8", t[QUERY][1])}), "holds numbers of type U8, but must be of F8_E4M3"),
    (lambda t: t.update({QUERY: ("F8_E4M3", t[QUERY][1] | 127)}), "q_proj.weight' holds NaN at 8192 of"),
    (lambda t: t.update({f"{QUERY}_scale_inv": ("F8_E8M0", np.full((4, 4), 255))}), "blocks of|NaN"),
]


def _tensors(vectors: Any, folder: Path) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    stored: dict[str, tuple[str, np.ndarray]] = {}
    change = fp8_change((32, 32), "F32", {}, ("embed_tokens", "lm_head", "mlp"))
    write_folder(vectors, "qwen3", folder, lambda n, v: stored.update(found := change(n, v)) or found, quantization)
    yield from stored.items()


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damaged_files_are_named_in_one_line(number: int, vectors: Any, tmp_path: Path) -> None:
    damage, message = DAMAGES[number]
    stored = dict(_tensors(vectors, tmp_path))
    damage(stored)
    write_file(tmp_path / "model.safetensors", stored)
    with pytest.raises(InputError, match=message) as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_eight_bits_without_a_quantisation_are_refused(vectors: Any, tmp_path: Path) -> None:
    stored = dict(_tensors(vectors, tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_file(tmp_path / "model.safetensors", stored)
    with pytest.raises(InputError, match="holds numbers of type F8_E4M3, which is not supported"):
        load_policy(tmp_path)
