"""PEFT's LoRA adapters as parameters: an A and a B of each weight of a module, stacked over layers and experts.

Adapters of a weight have one rank and one scale a layer: smaller ones are padded with zeros, which stay zero in
training, and another scale than most of the layer's have is a factor of B.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.io.adapters import WEIGHTS, Adapter, check_pair
from jaxrl_llm.models.io.layout import Stored, parts_of, stored_shape
from jaxrl_llm.models.lora import adapter_shapes
from jaxrl_llm.models.parameters import LORA_SCALE, Params, adapter_axes, put
from jaxrl_llm.models.parameters.weight import Weight
from jaxrl_llm.utils.errors import InputError

Place = tuple[int, ...]  # of a layer and an expert, see `layout.Stored`


class _Part(NamedTuple):
    """The adapter of one weight of one layer, or of one of its experts."""

    a: np.ndarray  # [inputs, rank]
    b: np.ndarray  # [rank, outputs]
    scale: float


def adapter_params(adapter: Adapter) -> Params:
    """The adapters as parameters, {"layers": {...}} and those of embeddings, in float32 on the host, with their scales.

    InputError for matrices of other shapes than the model's, and for NaN and infinity.
    """
    found = {weight: of_places for weight, of_places in _parts(adapter).values()}
    scales: dict[tuple[str, Place], list[float]] = defaultdict(list)
    for weight, of_places in found.items():
        for place, part in of_places.items():
            scales[weight.kind, place[:1]].append(part.scale)
    usual = {at: Counter(values).most_common(1)[0][0] for at, values in scales.items()}
    params: Params = {"layers": {}}
    for weight, of_places in found.items():
        rank, (*at, _) = max(len(part.b) for part in of_places.values()), weight.path
        if not rank:
            continue  # nothing is added to this weight of a module
        all_a, all_b = (np.zeros(shape, np.float32) for shape in adapter_shapes(weight, rank).values())
        for place, part in of_places.items():
            all_a[place][..., : part.a.shape[-1]] = part.a
            all_b[place][: len(part.b)] = part.b * np.float32(part.scale / usual[weight.kind, place[:1]])
        for name, value in zip(adapter_axes(weight), (all_a, all_b), strict=True):
            put(params, (*at, name), value)
        each = [usual.get((weight.kind, (place,)), 1.0) for place in range(len(weight.layers))]
        put(params, (*at, LORA_SCALE), np.asarray(each if weight.layers else usual["", ()], np.float32))
    return params


def _parts(adapter: Adapter) -> dict[tuple[str, ...], tuple[Weight, dict[Place, _Part]]]:
    """Path of a weight -> it, and its adapters by places among the layers of its kind, and experts."""
    found: dict[tuple[str, ...], tuple[Weight, dict[Place, _Part]]] = {}
    where = adapter.folder / WEIGHTS
    for name, stored in adapter.trained.items():
        read_a, read_b, embedding = adapter.pairs[name]
        a, b = (read().astype(np.float32) for read in (read_a, read_b))
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InputError(f"{where}: the adapter of {name!r} holds NaN or infinity: the weights are damaged")
        for expert in range(stored.config.num_experts) if stored.weights[0].stacked[len(stored.place) :] else (None,):
            one = stored if expert is None else stored._replace(place=(*stored.place, expert))
            own_a, own_b = (a, b) if expert is None or a.ndim < 3 or b.ndim < 3 else (a[expert], b[expert])
            shape = stored_shape(one)
            check_pair(own_a, own_b, shape[::-1] if embedding or not one.tensor.outputs_first else shape, name, where)
            for weight, part in _of_weights(one, own_a, own_b, adapter.scales[name]):
                found.setdefault(weight.path, (weight, {}))[1][one.place] = part
    return found


def _of_weights(stored: Stored, a: np.ndarray, b: np.ndarray, scale: float) -> Iterator[tuple[Weight, _Part]]:
    """Each weight of a module with its part of the module's adapter, A [rank, inputs] and B [outputs, rank]."""
    if not stored.place:  # a matrix of embeddings
        yield stored.weights[0], _Part(a.T, b.T, scale)
        return
    of_b = parts_of(adapter_outputs(stored, len(a)), b if stored.tensor.outputs_first else b.T)
    used = {path: np.any(part.reshape(len(a), -1) != 0, axis=1) for path, part in of_b.items()}
    anywhere = np.any(list(used.values()), axis=0)
    for weight in stored.weights:
        # What adds to other weights of the module alone was an adapter of theirs.
        kept, start = used[weight.path] | ~anywhere, len(weight.stacked)
        inputs = weight.shape[start : start + weight.inputs]
        yield weight, _Part(a[kept].T.reshape(*inputs, -1), of_b[weight.path][kept], scale)


def adapter_outputs(stored: Stored, rank: int) -> Stored:
    """The tensor B [outputs, rank] of a module's adapter, which holds parts of its weights as the module does."""

    def narrow(weight: Weight) -> Weight:
        start = len(weight.stacked)
        axes = (*weight.axes[:start], "rank", *weight.axes[start + weight.inputs :])
        shape = (*weight.shape[:start], rank, *weight.shape[start + weight.inputs :])
        return weight._replace(axes=axes, shape=shape, inputs=1)

    return stored._replace(weights=tuple(map(narrow, stored.weights)))
