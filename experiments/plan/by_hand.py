"""Bytes of parameters and of the optimiser on a device, from a model's config.json alone, in plain Python.

What a plan is held against: nothing of the library is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

BYTES = {"float32": 4, "bfloat16": 2}
LEAST = 128  # entries of both axes of a matrix whose second moment is factored
COUNTERS = 64  # bytes at most: of the steps of Adam or Adafactor, of the schedule and of the state


class Array(NamedTuple):
    """An array of the model; split: its axis -> the axis of the mesh that it is split over, where that divides."""

    shape: tuple[int, ...]
    split: dict[int, str]
    divided: dict[str, int]  # axis of the mesh -> what it must divide
    layers: bool = True  # the first axis is that of layers


class Bytes(NamedTuple):
    """On a device."""

    parameters: int  # that learn
    frozen: int
    optimiser: int  # without counters


def by_hand(config: Path, changes: Mapping[str, Any], mesh: Mapping[str, int]) -> Bytes:
    """For a run with Adam's moments in float32 and all else in float32, but for what `changes` has."""
    raw = json.loads(config.read_text())
    arrays, rank = arrays_of(raw), changes.get("lora_rank", 0)
    width = BYTES[changes.get("param_dtype", "float32")]
    whole = sum(on_a_device(array, mesh) for array in arrays.values())
    frozen = 0
    if rank:
        arrays, frozen, width = adapters_of(raw, rank), whole * width + 4 * raw["num_hidden_layers"], 4
        whole = sum(on_a_device(array, mesh) for array in arrays.values())
    masters = 4 * whole if width < 4 else 0
    kind = changes.get("optimizer.moments", "float32")
    if kind == "factored":
        moments = sum(factored(name, array, mesh) for name, array in arrays.items())
    else:
        moments = whole * (4 + BYTES[kind])
    return Bytes(whole * width, frozen, moments + masters)


def on_a_device(array: Array, mesh: Mapping[str, int]) -> int:
    """Numbers: the split axes first, then "fsdp" along the longest other one that it divides; vectors are whole."""
    return math.prod(array.shape) // _parts(array.shape, array.split, array.divided, mesh, array.layers)


def _parts(
    shape: tuple[int, ...], split: Mapping[int, str], divided: Mapping[str, int], mesh: Mapping[str, int], layers: bool
) -> int:
    taken = {at: mesh.get(axis, 1) for at, axis in split.items() if divided[axis] % mesh.get(axis, 1) == 0}
    fsdp = mesh.get("fsdp", 1)
    first = 1 if layers and len(shape) > 2 else 0
    free = [n for at, n in enumerate(shape) if at >= first and taken.get(at, 1) == 1 and n % fsdp == 0]
    return math.prod(taken.values()) * (fsdp if free and len(shape) > 1 else 1)


def factored(name: str, array: Array, mesh: Mapping[str, int]) -> int:
    """Bytes of Adafactor's second moment: means over the longest axis and over the second longest.

    Heads and head size are one axis. What is not factored has a whole one; an array of one number stands for each part
    that there is not.
    """
    shape = _merged(name, array)
    *_, second, longest = sorted(range(len(shape)), key=lambda at: shape[at]) if len(shape) > 1 else (0, 0)
    if len(shape) < 2 or shape[second] < LEAST:
        return 4 * (on_a_device(array, mesh) + 2)
    total = 1
    for left_out in (longest, second):
        rest = shape[:left_out] + shape[left_out + 1 :]
        # Of the axes that the array is split over only the last stays in its place, counted from the end.
        last = len(array.shape) - 1
        kept = last in array.split and rest[-1] == array.shape[-1] and left_out != len(shape) - 1
        split = {len(rest) - 1: array.split[last]} if kept else {}
        total += math.prod(rest) // _parts(rest, split, array.divided, mesh, array.layers)
    return 4 * total


def _merged(name: str, array: Array) -> tuple[int, ...]:
    shape = array.shape
    if name == "out":
        return (shape[0], shape[1] * shape[2], shape[3])
    return (*shape[:2], shape[2] * shape[3]) if name in ("query", "key", "value") else shape


def arrays_of(raw: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of a Llama, Qwen3 or Qwen3 mixture by name."""
    D, V, n = raw["hidden_size"], raw["vocab_size"], raw["num_hidden_layers"]
    H, K = raw["num_attention_heads"], raw["num_key_value_heads"]
    h, E = raw.get("head_dim", D // H), raw.get("num_experts", 0)
    F = raw.get("moe_intermediate_size", raw["intermediate_size"])
    heads, inner = {"tensor": K}, {"tensor": F} | ({"expert": E} if E else {})
    e = (E,) if E else ()
    by_expert = {1: "expert"} if E else {}
    found = {
        "embed": Array((V, D), {0: "tensor"}, {"tensor": V}, False),
        "final_norm": Array((D,), {}, {}, False),
        "query": Array((n, D, H, h), {2: "tensor"}, heads),
        "key": Array((n, D, K, h), {2: "tensor"}, heads),
        "value": Array((n, D, K, h), {2: "tensor"}, heads),
        "out": Array((n, H, h, D), {1: "tensor"}, heads),
        "gate": Array((n, *e, D, F), by_expert | {2 + len(e): "tensor"}, inner),
        "up": Array((n, *e, D, F), by_expert | {2 + len(e): "tensor"}, inner),
        "down": Array((n, *e, F, D), by_expert | {1 + len(e): "tensor"}, inner),
        "attention_norm": Array((n, D), {}, {}),
        "mlp_norm": Array((n, D), {}, {}),
    }
    if not raw["tie_word_embeddings"]:
        found["unembed"] = found["embed"]
    if E:
        found["router"] = Array((n, D, E), {}, {})
    if "qwen3" in raw["model_type"]:
        found |= {name: Array((n, h), {}, {}) for name in ("query_norm", "key_norm")}
    return found


def adapters_of(raw: Mapping[str, Any], rank: int) -> dict[str, Array]:
    """The two matrices of each projection's adapter; experts have none."""
    arrays, found = arrays_of(raw), {}
    experts = raw.get("num_experts", 0) > 0
    for name, outputs in (("query", 2), ("key", 2), ("value", 2), ("out", 1), ("gate", 1), ("up", 1), ("down", 1)):
        shape, split, divided, _ = arrays[name]
        if experts and name in ("gate", "up", "down"):
            continue
        at = len(shape) - outputs  # the first axis of outputs
        before = {axis: over for axis, over in split.items() if axis < at}
        after = {axis - at + 2: over for axis, over in split.items() if axis >= at}
        found[f"{name}_lora_in"] = Array((*shape[:at], rank), before, divided)
        found[f"{name}_lora_out"] = Array((shape[0], rank, *shape[at:]), after, divided)
    return found
