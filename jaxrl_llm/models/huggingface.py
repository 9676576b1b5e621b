"""Weights in and out: Hugging Face tensor names and layouts on one side, our pytree on the other.

One table says, for every parameter, its Hugging Face name and shape. A projection is stored there as
[out, in]; ours is [in, out] with heads as an axis of their own, and layers (and experts) are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.finite import all_finite, worst
from jaxrl_llm.models.settings import read_json, reason, shown

FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors calls them
Tensors = Mapping[str, Callable[[], np.ndarray]]  # name -> a function that reads it


class Entry(NamedTuple):
    """One parameter: its name there (with {layer} and {expert}) and its shape here, for one layer and expert."""

    name: str
    shape: tuple[int, ...]
    inputs: int = 0  # size of the input side of a projection; 0 for what is stored as it is
    per_layer: bool = True
    per_expert: bool = False


def table(config: ModelConfig) -> dict[tuple[str, ...], Entry]:
    """Path in our pytree -> where it is in a Hugging Face checkpoint of this family."""
    D, H, K, h, F = (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
    )
    layer = "model.layers.{layer}."
    attn, ffn = layer + "self_attn.", layer + "mlp."
    entries = {
        "attention_norm": Entry(layer + "input_layernorm.weight", (D,)),
        "query": Entry(attn + "q_proj.weight", (D, H, h), D),
        "key": Entry(attn + "k_proj.weight", (D, K, h), D),
        "value": Entry(attn + "v_proj.weight", (D, K, h), D),
        "out": Entry(attn + "o_proj.weight", (H, h, D), H * h),
        "mlp_norm": Entry(layer + "post_attention_layernorm.weight", (D,)),
    }
    if config.attention_bias:
        for ours, theirs, heads in (("query", "q", H), ("key", "k", K), ("value", "v", K)):
            entries[ours + "_bias"] = Entry(f"{attn}{theirs}_proj.bias", (heads, h))
    if config.output_bias:
        entries["out_bias"] = Entry(attn + "o_proj.bias", (D,))
    if config.qk_norm:
        entries["query_norm"] = Entry(attn + "q_norm.weight", (h,))
        entries["key_norm"] = Entry(attn + "k_norm.weight", (h,))
    if config.post_norms:
        entries["attention_post_norm"] = Entry(layer + "post_attention_layernorm.weight", (D,))
        entries["mlp_norm"] = Entry(layer + "pre_feedforward_layernorm.weight", (D,))
        entries["mlp_post_norm"] = Entry(layer + "post_feedforward_layernorm.weight", (D,))
    if config.num_experts:
        mixtral = config.family == "mixtral"
        moe = layer + ("block_sparse_moe." if mixtral else "mlp.")
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        entries["router"] = Entry(moe + "gate.weight", (D, config.num_experts), D)
        for ours, theirs, shape in zip(("gate", "up", "down"), names, ((D, F), (D, F), (F, D)), strict=True):
            expert = moe + "experts.{expert}." + theirs + ".weight"
            entries[ours] = Entry(expert, shape, shape[0], per_expert=True)
    else:
        for name, shape in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D))):
            entries[name] = Entry(f"{ffn}{name}_proj.weight", shape, shape[0])
            if config.mlp_bias:
                entries[name + "_bias"] = Entry(f"{ffn}{name}_proj.bias", shape[1:])
    out = {
        ("embed",): Entry("model.embed_tokens.weight", (config.vocab_size, D), per_layer=False),
        ("final_norm",): Entry("model.norm.weight", (D,), per_layer=False),
    }
    if not config.tie_embeddings:
        out[("unembed",)] = Entry("lm_head.weight", (config.vocab_size, D), per_layer=False)
    return out | {("layers", name): entry for name, entry in entries.items()}


def _stack(entry: Entry, config: ModelConfig) -> tuple[int, ...]:
    return ((config.num_layers,) if entry.per_layer else ()) + ((config.num_experts,) if entry.per_expert else ())


def parameter_shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of the stacked parameter."""
    return {path: _stack(entry, config) + entry.shape for path, entry in table(config).items()}


def _names(entry: Entry, config: ModelConfig) -> Iterator[tuple[tuple[int, ...], str]]:
    """The Hugging Face tensors that make up one parameter, with the index of each in our stack."""
    for index in np.ndindex(*_stack(entry, config)):
        place = dict(zip(("layer", "expert"), index, strict=False))
        yield index, entry.name.format(**place)


def from_tensors(tensors: Tensors, config: ModelConfig, dtype: Any, where: str = "the model") -> dict[str, Any]:
    """Our pytree, in `dtype`, out of named tensors. where: what they come from, for messages.

    InputError names a tensor that is missing, has another shape, that this architecture does not read, or that holds
    NaN or infinity.
    """
    unread = {n for n in tensors if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        unread.discard("lm_head.weight")  # some files store the tied matrix twice
    for entry in table(config).values():
        for _, name in _names(entry, config):
            if name not in tensors:
                raise InputError(f"{where}: the weights lack the tensor {name!r}: is the download complete?")
            unread.discard(name)
    params: dict[str, Any] = {"layers": {}}
    for path, entry in table(config).items():
        out, stored = np.empty(0), _stored_shape(entry)
        for index, name in _names(entry, config):
            value = tensors[name]()
            if value.shape != stored:
                raise InputError(f"{where}: tensor {name!r} has shape {value.shape}, but config.json implies {stored}")
            if not out.size:  # only now is it known that shapes are as small as the file
                out = np.empty(_stack(entry, config) + entry.shape, jnp.dtype(dtype))
            with np.errstate(over="ignore", invalid="ignore"):
                out[index] = value.T.reshape(entry.shape) if entry.inputs else value.reshape(entry.shape)
            if not all_finite(out[index]):
                raise InputError(
                    f"{where}: tensor {name!r} holds {worst(out[index])} in {out.dtype.name}: the weights are damaged"
                )
        (params["layers"] if path[0] == "layers" else params)[path[-1]] = jnp.asarray(out)
    if unread:
        some = ", ".join(map(shown, sorted(unread)[:3]))
        raise InputError(
            f"{where}: {len(unread)} tensors are not part of a {config.family} model as configured, e.g. {some}"
        )
    return params


def _stored_shape(entry: Entry) -> tuple[int, ...]:
    size = int(np.prod(entry.shape))
    if entry.inputs:
        return (size // entry.inputs, entry.inputs)
    return entry.shape if entry.name.endswith(("embed_tokens.weight", "lm_head.weight")) else (size,)


def to_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Named tensors in Hugging Face layout; the inverse of `from_tensors`. Layers may be stacked or a tuple.

    InputError names a parameter that holds NaN or infinity.
    """
    out = {}
    for path, entry in table(config).items():
        layers = params["layers"]
        if path[0] == "layers" and isinstance(layers, tuple):
            stacked = np.stack([np.asarray(jax.device_get(layer[path[1]])) for layer in layers])
        else:
            stacked = np.asarray(jax.device_get((layers if path[0] == "layers" else params)[path[-1]]))
        if not all_finite(stacked):
            raise InputError(f"the parameter {'/'.join(path)} holds {worst(stacked)}: it cannot be saved")
        for index, name in _names(entry, config):
            value = stacked[index]
            value = value.reshape(entry.inputs, -1).T if entry.inputs else value.reshape(_stored_shape(entry))
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
