"""How the tensors of a model's files hold its weights: which of them each holds, and in which order.

A projection is stored as [outputs, inputs]; ours is [inputs, outputs], with heads as an axis of their own, and layers
and experts are stacked. Files may join projections, and may rotate neighbouring dimensions of a head, or only its first
dimensions; ours rotates dimensions i and i + n / 2 of the n that are rotated or left alone (`rope.frequencies`).
"""

import math
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.families.family import Tensor
from jaxrl_llm.models.parameters import weights
from jaxrl_llm.models.parameters.weight import Path, Shape, Weight

OF_LAYERS = "model.layers.{layer}."


class Stored(NamedTuple):
    """One tensor of a file: what it is called, and which part of which parameters it holds."""

    name: str
    tensor: Tensor
    weights: tuple[Weight, ...]
    config: ModelConfig  # of the layer
    place: tuple[int, ...]  # of what it holds, among the layers, and experts, of the parameters


def stored_tensors(config: ModelConfig, found: Container[str] | None = None) -> Iterator[Stored]:
    """The tensors that hold a model's weights. found: names in a file, of whose layouts the first that it has is taken;
    None for the layout in which its family is published.
    """
    family, own = FAMILIES[config.family], weights(config)
    kinds = {kind.name: config.each_kind[number] for number, kind in enumerate(config.kinds)}
    for kind in ("", *kinds):
        here = {weight.name: weight for weight in own.values() if weight.kind == kind}
        of_kind = kinds.get(kind, config)
        done = set[tuple[str, int]]()
        for weight in here.values():
            for place, layer in enumerate(weight.layers or (0,)):
                if (weight.name, place) in done:
                    continue
                options = [
                    tensor
                    for tensor in (*family.tensors, *(family.others if found is not None else ()), _usual(weight))
                    if weight.name in tensor.weights and _fits(tensor, here)
                ]
                names = [_full_name(tensor, weight).format(layer=layer, expert=0) for tensor in options]
                usual = next(i for i, tensor in enumerate(options) if tensor not in family.others)
                there = (i for i, name in enumerate(names) if found is None or name in found)
                tensor = options[next(there, usual)]
                held = tuple(here[name] for name in tensor.weights)
                done |= {(name, place) for name in tensor.weights}
                each = range(here[weight.name].shape[1]) if "{expert}" in _full_name(tensor, weight) else (None,)
                for expert in each:
                    name = _full_name(tensor, weight).format(layer=layer, expert=expert)
                    index = (place,) * ("layers" in weight.axes) + (() if expert is None else (expert,))
                    yield Stored(name, tensor, held, of_kind, index)


def _usual(weight: Weight) -> Tensor:
    return Tensor(weight.huggingface, (weight.name,))


def own_name(weight: Weight, config: ModelConfig) -> str:
    """The name of a tensor that holds one weight alone, of one layer and expert: {layer} and {expert} in it."""
    own = (
        tensor for tensor in FAMILIES[config.family].tensors
        if tensor.weights == (weight.name,) and ("{expert}" in tensor.name) == ("experts" in weight.stacked)
    )  # fmt: skip
    return _full_name(next(own, _usual(weight)), weight)


def _full_name(tensor: Tensor, weight: Weight) -> str:
    return tensor.name if "layers" not in weight.axes or tensor.name.startswith("model.") else OF_LAYERS + tensor.name


def _fits(tensor: Tensor, here: dict[str, Weight]) -> bool:
    """Whether a kind of layer has the weights of a tensor, those of experts for one of experts."""
    of_experts = ".experts." in f".{tensor.name}"
    return all(name in here and ("experts" in here[name].stacked) == of_experts for name in tensor.weights)


def stored_shape(stored: Stored) -> Shape:
    """The shape of the tensor in the file."""
    sizes = [_sizes(weight, stored) for weight in stored.weights]
    lead, inputs = sizes[0][0], sizes[0][1]
    outputs = sum(outputs for _, _, outputs in sizes)
    if "vocabulary" in stored.weights[0].axes:
        return stored.weights[0].shape
    if not stored.weights[0].inputs:
        return (*lead, outputs)
    if "taps" in stored.weights[0].axes:
        return (outputs, 1, inputs)
    return (*lead, outputs, inputs) if stored.tensor.outputs_first else (*lead, inputs, outputs)


def _sizes(weight: Weight, stored: Stored) -> tuple[Shape, int, int]:
    """Of what one tensor holds of a weight: the axis of experts, if it has one, inputs and outputs."""
    shape = weight.shape[len(stored.place) :]
    lead = shape[: len(weight.stacked) - len(stored.place)]
    own = shape[len(lead) :]
    return lead, math.prod(own[: weight.inputs]), math.prod(own[weight.inputs :])


def parts_of(stored: Stored, value: np.ndarray) -> dict[Path, np.ndarray]:
    """What a tensor holds: path of the parameter -> its part at `stored.place`."""
    if "vocabulary" in stored.weights[0].axes:
        return {stored.weights[0].path: value}
    sizes = [_sizes(weight, stored) for weight in stored.weights]
    lead, inputs, _ = sizes[0]
    outputs = [size[2] for size in sizes]
    matrix = bool(stored.weights[0].inputs)
    value = value[:, 0] if "taps" in stored.weights[0].axes else value
    x = value if matrix else value[..., None]  # [experts, outputs, inputs]
    x = x.swapaxes(-1, -2) if matrix and not stored.tensor.outputs_first else x
    groups, widths = _groups(stored, outputs)
    x = x.reshape(*lead, groups, -1, x.shape[-1])
    ends = np.cumsum(widths)[:-1]
    found = {}
    for weight, part in zip(stored.weights, np.split(x, ends, axis=-2), strict=True):
        part = part.reshape(*lead, -1, inputs if matrix else 1).swapaxes(-1, -2)
        part = part.reshape(weight.shape[len(stored.place) :])
        order = _order(stored.config, part.shape[-1]) if weight.rotated else None
        found[weight.path] = part if order is None else part[..., order]
    return found


def join_parts(stored: Stored, parts: dict[Path, np.ndarray]) -> np.ndarray:
    """The tensor that holds these parts; the inverse of `parts_of`."""
    if "vocabulary" in stored.weights[0].axes:
        return parts[stored.weights[0].path]
    sizes = [_sizes(weight, stored) for weight in stored.weights]
    lead, inputs, _ = sizes[0]
    groups, widths = _groups(stored, [size[2] for size in sizes])
    matrix, cut = bool(stored.weights[0].inputs), []
    for weight, width in zip(stored.weights, widths, strict=True):
        part = parts[weight.path]
        order = _order(stored.config, part.shape[-1]) if weight.rotated else None
        part = part if order is None else part[..., np.argsort(order)]
        part = part.reshape(*lead, inputs if matrix else 1, -1).swapaxes(-1, -2)
        cut.append(part.reshape(*lead, groups, width, part.shape[-1]))
    x = np.concatenate(cut, axis=-2)
    x = x.reshape(*lead, -1, x.shape[-1])
    x = x.swapaxes(-1, -2) if matrix and not stored.tensor.outputs_first else x
    return x.reshape(stored_shape(stored))


def _groups(stored: Stored, outputs: list[int]) -> tuple[int, list[int]]:
    """How outputs of several weights alternate: the number of rounds, and outputs of each weight in a round."""
    groups = stored.config.num_heads if stored.tensor.by_head else outputs[0] if stored.tensor.alternate else 1
    return groups, [number // groups for number in outputs]


@lru_cache(maxsize=64)
def _order(config: ModelConfig, size: int) -> tuple[int, ...] | None:
    """For each of the last dimensions that are rotated, ours, its number in the file; None where they are the same."""
    turned = config.rotated_size
    fractions = {rope.fraction for rope in config.ropes if rope.kind not in ("proportional", "none")}
    rotated = int(turned * max(fractions, default=1.0))
    half, alone = rotated // 2, range(rotated, turned)
    pairs = (range(0, rotated, 2), range(1, rotated, 2)) if config.interleaved_rotation else (
        range(half), range(half, rotated)
    )  # fmt: skip
    rest = len(alone) // 2
    order = [*pairs[0], *alone[:rest], *pairs[1], *alone[rest:]]
    before = size - turned
    found = (*range(before), *(before + i for i in order))
    return None if found == tuple(range(size)) else found
