"""Weights in and out: Hugging Face tensor names and layouts on one side, our pytree on the other.

`layout` says which tensors hold which weights.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.io.file_tensor import FLOATS, FileTensor, Tensors
from jaxrl_llm.models.io.layout import join_parts, parts_of, stored_shape, stored_tensors
from jaxrl_llm.models.kinds import json_object, reason, shown
from jaxrl_llm.models.parameters import parameter_shapes, put
from jaxrl_llm.models.parameters.table import TABLE
from jaxrl_llm.models.parameters.weight import Path
from jaxrl_llm.models.stacks import stacked_layers
from jaxrl_llm.utils.errors import InputError


def from_tensors(
    tensors: Tensors, config: ModelConfig, dtype: Any, where: str = "the model", shardings: Any = None, keep: Any = None
) -> dict[str, Any]:
    """Our pytree, in `dtype`, out of named tensors. where: what they come from, for messages. keep: see `load_policy`.

    shardings: of each parameter, a pytree like the parameters; this process then holds its own shards only, and of one
    tensor at a time the whole. None: whole arrays on the default device.
    InputError names a tensor that is missing, has another shape, that this architecture does not read, or that holds
    NaN or infinity.
    """
    stored, skipped = list(stored_tensors(config, tensors)), skipped_tensors(tensors, config)
    for name in sorted(set(tensors) - skipped):
        read = tensors[name]
        if isinstance(read, FileTensor) and read.dtype not in FLOATS:
            raise InputError(
                f"{read.path}: tensor {shown(read.name)} holds numbers of type {read.dtype}, which is not supported; "
                f"supported are {', '.join(FLOATS)}"
            )
    for each in stored:
        if each.name not in tensors:
            raise InputError(f"{where}: the weights lack the tensor {each.name!r}{_instead(each.name, tensors)}")
    shapes, shards = parameter_shapes(config), dict[Path, Shards]()
    left = Counter(weight.path for each in stored for weight in each.weights)
    params: dict[str, Any] = {}
    for each in stored:
        value, wanted = tensors[each.name](), stored_shape(each)
        if value.shape != wanted:
            raise InputError(f"{where}: tensor {each.name!r} has shape {value.shape}, but config.json implies {wanted}")
        for path, part in parts_of(each, value).items():
            if path not in shards:  # only now is it known that shapes are as small as the file
                shards[path] = Shards(shapes[path], jnp.dtype(dtype), shardings and reduce(getitem, path, shardings))
            for filled in shards[path].fill(each.place, part):
                if not all_finite(filled):
                    bad = f"{non_finite(filled)} in {filled.dtype.name}"
                    raise InputError(f"{where}: tensor {each.name!r} holds {bad}: the weights are damaged")
            left[path] -= 1
            if not left[path]:
                array = shards.pop(path).array()
                put(params, path, array if keep is None else keep(path[-1], array))
    if unread := set(tensors) - {each.name for each in stored} - skipped:
        some = ", ".join(map(shown, sorted(unread)[:3]))
        heads = sorted({name for name in unread if not name.startswith("model.")})
        what = f": {', '.join(heads[:3])} of a head that is no language model's" if len(heads) == len(unread) else ""
        raise InputError(
            f"{where}: {len(unread)} tensors are not part of a {config.family} model as configured{what}, e.g. "
            f"{some}{_CLASSIFIER * (SCORE in heads)}"
        )
    return params


def skipped_tensors(tensors: Iterable[str], config: ModelConfig) -> set[str]:
    """The names of tensors that the language model does without.

    They are of towers for images and sound, of layers that draft tokens, and what its layers compute themselves: rotary
    frequencies, a head that is the embedding, keys and values that are another layer's.
    """
    family = FAMILIES[config.family]
    found = {name for name in tensors if name.endswith("rotary_emb.inv_freq") or name.startswith(family.skipped)}
    if config.tie_embeddings or config.score:
        found |= {"lm_head.weight"} & set(tensors)  # some files store it twice, and some classifiers keep it
    for name in tensors:
        match = OF_LAYER.match(name)
        number = int(match[1]) if match else -1
        drafts = number >= config.num_layers and "mtp." in family.skipped
        shared = 0 <= number < config.num_layers and config.of_layer(number).keys_of
        if drafts or (shared and match and match[2].startswith(_KEYS_AND_VALUES)):
            found.add(name)
    return found


SCORE = "score.weight"
_CLASSIFIER = ": it is a reward model, which load_reward_model and --rewards model:PATH read"
OF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.*)")
_KEYS_AND_VALUES = tuple(f"self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


def without_prefix(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors by the names of a language model by itself, where the file is of a model with towers."""
    for prefix in FAMILIES[config.family].prefixes:
        if f"{prefix}embed_tokens.weight" in tensors:
            outer = prefix.removesuffix("model.")
            own = {name: f"model.{name.removeprefix(prefix)}" for name in tensors if name.startswith(prefix)}
            head = f"{outer}lm_head.weight" if f"{outer}lm_head.weight" in tensors else "lm_head.weight"
            own |= {head: "lm_head.weight"} if head in tensors else {}
            return {own.get(name, name): read for name, read in tensors.items()}
    return tensors


def _instead(name: str, tensors: Tensors) -> str:
    """What the file has in place of a tensor that it lacks, for an error."""
    if SCORE in tensors and name == "lm_head.weight":
        return _CLASSIFIER
    if longer := sorted(other for other in tensors if other.endswith(f".{name}")):
        prefix = longer[0].removesuffix(name)
        have = f", but have {longer[0]!r}: names that begin with {prefix!r} are those of a wrapper"
        return f"{have}; save the model inside"
    if name.startswith("model.") and name.removeprefix("model.") in tensors:
        return f", but have {name.removeprefix('model.')!r}: they are of a model without a head; save the causal model"
    return ", which config.json implies: the files are incomplete, or the settings are another model's"


def untied(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """The configuration, without tied embeddings where the file has another head, which transformers then takes too."""
    embed, head = (weight.huggingface for weight in TABLE if weight.name in ("embed", "unembed"))
    if not config.tie_embeddings or head not in tensors or embed not in tensors:
        return config
    first, second = tensors[embed](), tensors[head]()
    same = first.shape == second.shape and np.array_equal(first, second)
    return config if same else dataclasses.replace(config, tie_embeddings=False)


def to_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Named tensors in Hugging Face layout, as the family is published; the inverse of `from_tensors`.

    Layers may be stacked or a tuple. InputError names a parameter that holds NaN or infinity.
    """
    params, out, whole = stacked_layers(params, config), {}, dict[Path, np.ndarray]()
    for each in stored_tensors(config):
        for weight in each.weights:
            if weight.path not in whole:
                value = np.asarray(jax.device_get(reduce(getitem, weight.path, params)))
                if not all_finite(value):
                    raise InputError(
                        f"the parameter {'/'.join(weight.path)} holds {non_finite(value)}: it cannot be saved"
                    )
                whole[weight.path] = value
        parts = {weight.path: whole[weight.path][each.place] for weight in each.weights}
        out[each.name] = np.ascontiguousarray(join_parts(each, parts))
    return out


def open_folder(folder: FilePath) -> Tensors:
    """The tensors of a Hugging Face folder, one file or several; each is read when it is called for.

    InputError for a set of files that is incomplete, damaged or cut short.
    """
    out: dict[str, Callable[[], np.ndarray]] = {}
    for file in _files(folder):
        out |= open_file(folder / file)
    return out


def open_file(path: FilePath) -> Tensors:
    """The tensors of a safetensors file. InputError where there is none, or it is damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = f"{path.parent} has no {path.name}"
        raise InputError(f"{what}: save or download the model's safetensors weights into it")
    try:
        opened = safe_open(path, framework="np")
        return {name: FileTensor(opened, path, name, opened.get_slice(name).get_dtype()) for name in [*opened.keys()]}
    except SafetensorError as error:
        raise InputError(f"{path} is damaged or cut short ({reason(error)}): download it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None


def _files(folder: FilePath) -> list[str]:
    """The safetensors files of a folder: those that its index names, or the usual one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    places = json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{index} is damaged (no weight_map): download it again")
    for name, file in places.items():
        is_name = isinstance(file, str) and file.isprintable() and file.endswith(".safetensors")
        if not is_name or file != FilePath(file).name:
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


Region = tuple[tuple[int, int], ...]  # first and last index + 1 along each axis


class Shards:
    """The host's copies of an array's shards; of all of it without a sharding."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None = None) -> None:
        self.shape, self.sharding = shape, sharding
        indices: list[Any] = [tuple(slice(None) for _ in shape)]
        if sharding is not None:
            indices = list(sharding.addressable_devices_indices_map(shape).values())
        regions = dict.fromkeys(_region(index, shape) for index in indices)
        sizes = {region: [end - start for start, end in region] for region in regions}
        self.parts: dict[Region, Any] = {region: np.empty(size, dtype) for region, size in sizes.items()}

    def fill(self, index: tuple[int, ...], piece: np.ndarray) -> Iterator[np.ndarray]:
        """Set array[index] = piece where it is kept. index: into the first axes. Yields what was written."""
        for region, part in self.parts.items():
            inside = [i - start for i, (start, end) in zip(index, region, strict=False) if start <= i < end]
            if len(inside) == len(index):
                own, rest = part[(*inside, ...)], tuple(slice(start, end) for start, end in region[len(index) :])
                with np.errstate(over="ignore", invalid="ignore"):
                    own[...] = piece[rest]
                yield own

    def array(self) -> jax.Array:
        """The array on its devices."""
        if self.sharding is None:
            # `jnp.asarray` compiles a program for each shape; what is donated later must be a copy.
            return jax.device_put(next(iter(self.parts.values())), may_alias=False)

        def part(index: Any) -> np.ndarray:
            return self.parts[_region(index or (), self.shape)]

        return jax.make_array_from_callback(self.shape, self.sharding, part)


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
