"""Weights in and out: Hugging Face tensor names and layouts on one side, our pytree on the other.

`parameters` has the name and the shape of each. A projection is stored there as [out, in]; ours is [in, out] with heads
as an axis of their own, and layers (and experts) are stacked.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.io.shards import Shards
from jaxrl_llm.models.kinds import read_json, reason, shown
from jaxrl_llm.models.parameters import TABLE, Weight, shape_of, weights
from jaxrl_llm.utils.errors import InputError

FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors calls them
Tensors = Mapping[str, Callable[[], np.ndarray]]  # name -> a function that reads it


def tensor_names(weight: Weight, config: ModelConfig) -> Iterator[tuple[tuple[int, ...], str]]:
    """The Hugging Face tensors that make up one parameter, with the index of each among layers and experts."""
    for index in np.ndindex(*shape_of(weight.stacked, config)):
        place = dict(zip(("layer", "expert"), index, strict=False))
        yield index, weight.huggingface.format(**place)


def _own_shape(weight: Weight, config: ModelConfig) -> tuple[int, ...]:
    """The shape here of what is one tensor there."""
    return shape_of(weight.axes[len(weight.stacked) :], config)


def from_tensors(
    tensors: Tensors, config: ModelConfig, dtype: Any, where: str = "the model", shardings: Any = None
) -> dict[str, Any]:
    """Our pytree, in `dtype`, out of named tensors. where: what they come from, for messages.

    shardings: of each parameter, a pytree like the parameters; this process then holds its own shards only, and of one
    tensor at a time the whole. None: whole arrays on the default device.
    InputError names a tensor that is missing, has another shape, that this architecture does not read, or that holds
    NaN or infinity.
    """
    unread = {n for n in tensors if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        unread -= {weight.huggingface for weight in TABLE if weight.name == "unembed"}  # some files store it twice
    for weight in weights(config).values():
        for _, name in tensor_names(weight, config):
            if name not in tensors:
                raise InputError(f"{where}: the weights lack the tensor {name!r}{_instead(name, tensors)}")
            unread.discard(name)
    params: dict[str, Any] = {"layers": {}}
    for path, weight in weights(config).items():
        shape, stored = _own_shape(weight, config), _stored_shape(weight, config)
        shards: Shards | None = None
        for index, name in tensor_names(weight, config):
            value = tensors[name]()
            if value.shape != stored:
                raise InputError(f"{where}: tensor {name!r} has shape {value.shape}, but config.json implies {stored}")
            if shards is None:  # only now is it known that shapes are as small as the file
                sharding = shardings and (shardings["layers"] if path[0] == "layers" else shardings)[path[-1]]
                shards = Shards(shape_of(weight.axes, config), jnp.dtype(dtype), sharding)
            for part in shards.fill(index, (value.T if weight.inputs else value).reshape(shape)):
                if not all_finite(part):
                    found = f"{non_finite(part)} in {part.dtype.name}"
                    raise InputError(f"{where}: tensor {name!r} holds {found}: the weights are damaged")
        assert shards is not None
        (params["layers"] if path[0] == "layers" else params)[path[-1]] = shards.array()
    if unread:
        some = ", ".join(map(shown, sorted(unread)[:3]))
        heads = sorted({name for name in unread if not name.startswith("model.")})
        what = f": {', '.join(heads[:3])} of a head that is no language model's" if len(heads) == len(unread) else ""
        raise InputError(
            f"{where}: {len(unread)} tensors are not part of a {config.family} model as configured{what}, e.g. {some}"
        )
    return params


def _instead(name: str, tensors: Tensors) -> str:
    """What the file has in place of a tensor that it lacks, for an error."""
    layer = re.sub(r"\.(experts\.\d+|block_sparse_moe|mlp)\..*", "", name)
    fused = sorted(other for other in tensors if other.startswith(f"{layer}.") and ".experts.gate_up_proj" in other)
    if fused:
        return f", but have {fused[0]!r}: experts that are fused into one tensor are not read; save them one by one"
    longer = sorted(other for other in tensors if other.endswith(f".{name}"))
    if longer:
        prefix = longer[0].removesuffix(name)
        return (
            f", but have {longer[0]!r}: names that begin with {prefix!r} are those of a wrapper; save the model inside"
        )
    if name.startswith("model.") and name.removeprefix("model.") in tensors:
        return f", but have {name.removeprefix('model.')!r}: they are of a model without a head; save the causal model"
    return ": is the download complete?"


def untied(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """The configuration, without tied embeddings where the file has another head, which transformers then takes too."""
    embed, head = (weight.huggingface for weight in TABLE if weight.name in ("embed", "unembed"))
    if not config.tie_embeddings or head not in tensors or embed not in tensors:
        return config
    first, second = tensors[embed](), tensors[head]()
    same = first.shape == second.shape and np.array_equal(first, second)
    return config if same else dataclasses.replace(config, tie_embeddings=False)


def _stored_shape(weight: Weight, config: ModelConfig) -> tuple[int, ...]:
    """The shape there: [out, in] of projections, [V, D] of embeddings, and of all others one axis."""
    shape = _own_shape(weight, config)
    if "vocabulary" in weight.axes:
        return shape
    inputs = math.prod(shape[: weight.inputs])
    return (math.prod(shape) // inputs, inputs) if weight.inputs else (math.prod(shape),)


def to_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Named tensors in Hugging Face layout; the inverse of `from_tensors`. Layers may be stacked or a tuple.

    InputError names a parameter that holds NaN or infinity.
    """
    out = {}
    for path, weight in weights(config).items():
        layers, stored = params["layers"], _stored_shape(weight, config)
        if path[0] == "layers" and isinstance(layers, tuple):
            stacked = np.stack([np.asarray(jax.device_get(layer[path[1]])) for layer in layers])
        else:
            stacked = np.asarray(jax.device_get((layers if path[0] == "layers" else params)[path[-1]]))
        if not all_finite(stacked):
            raise InputError(f"the parameter {'/'.join(path)} holds {non_finite(stacked)}: it cannot be saved")
        for index, name in tensor_names(weight, config):
            value = stacked[index]
            value = value.reshape(stored[::-1]).T if weight.inputs else value.reshape(stored)
            out[name] = np.ascontiguousarray(value)
    return out


def open_folder(folder: Path) -> Tensors:
    """The tensors of a Hugging Face folder, one file or several; each is read when it is called for.

    InputError for a set of files that is incomplete, damaged, cut short, or in which a tensor is no floats.
    """
    from safetensors import SafetensorError, safe_open

    out: dict[str, Callable[[], np.ndarray]] = {}
    for file in _files(folder):
        path = folder / file
        if not path.is_file():
            raise InputError(f"{folder} has no {file}: save or download the model's safetensors weights into it")
        try:
            opened = safe_open(path, framework="np")
            names = list(opened.keys())
            dtypes = {name: opened.get_slice(name).get_dtype() for name in names}
        except SafetensorError as error:
            raise InputError(f"{path} is damaged or cut short ({reason(error)}): download it again") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {reason(error)}") from None
        for name, dtype in dtypes.items():
            if dtype not in FLOATS:
                raise InputError(
                    f"{path}: tensor {shown(name)} holds numbers of type {dtype}, which is not supported; "
                    f"supported are {', '.join(FLOATS)}"
                )
            out[name] = partial(_tensor, opened, path, name)
    return out


def _tensor(opened: Any, path: Path, name: str) -> np.ndarray:
    from safetensors import SafetensorError

    try:
        return np.asarray(opened.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: tensor {shown(name)} cannot be read ({reason(error)}): download it again") from None


def _files(folder: Path) -> list[str]:
    """The safetensors files of a folder: those that its index names, or the usual one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{index} is damaged (no weight_map): download it again")
    for name, file in places.items():
        if (
            not isinstance(file, str)
            or file != Path(file).name
            or not (file.isprintable() and file.endswith(".safetensors"))
        ):
            raise InputError(
                f"{index}: weight_map places {shown(name)} in {shown(file)}, which is no file of the folder"
            )
    return sorted(set(places.values()))


_CHUNK = 2**20  # numbers tested at a time where that takes copies


def all_finite(x: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity. Copies at most a few MB at a time."""
    flat = x.reshape(-1) if x.flags.c_contiguous else x.flatten()
    if x.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum of finite numbers may overflow: only then look at each.
            if np.isfinite(np.sum(flat)):
                return True
    parts = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    if x.dtype.itemsize == 2:
        # A float's exponent is all ones where it is not finite; numpy converts each bfloat16 to find that out.
        least = np.uint16(0x7C00 if x.dtype == np.float16 else 0x7F80)
        return all(int(np.max(part.view(np.uint16) & 0x7FFF)) < least for part in parts)
    return all(bool(np.isfinite(part).all()) for part in parts)


def non_finite(x: np.ndarray) -> str:
    """What is not finite in an array: "NaN" or "infinity", and at how many places."""
    values = x.astype(np.float32)
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    kinds = [f"{name} at {count} of {x.size} places" for name, count in (("NaN", nan), ("infinity", infinite)) if count]
    return " and ".join(kinds)
