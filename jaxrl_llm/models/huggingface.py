"""Weights in and out: Hugging Face tensor names and layouts on one side, our pytree on the other.

One table says, for every parameter, its Hugging Face name and shape. A projection is stored there as
[out, in]; ours is [in, out] with heads as an axis of their own, and layers (and experts) are stacked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig

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


def from_tensors(tensors: Tensors, config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Our pytree, in `dtype`, out of named tensors.

    InputError names a tensor that is missing, has another shape, or that this architecture does not read.
    """
    unread = {n for n in tensors if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        unread.discard("lm_head.weight")  # some files store the tied matrix twice
    params: dict[str, Any] = {"layers": {}}
    for path, entry in table(config).items():
        out = np.empty(_stack(entry, config) + entry.shape, jnp.dtype(dtype))
        stored = _stored_shape(entry)
        for index, name in _names(entry, config):
            if name not in tensors:
                raise InputError(f"the weights lack the tensor {name!r}: is the download complete?")
            unread.discard(name)
            value = tensors[name]()
            if value.shape != stored:
                raise InputError(f"tensor {name!r} has shape {value.shape}, but config.json implies {stored}")
            out[index] = value.T.reshape(entry.shape) if entry.inputs else value.reshape(entry.shape)
        (params["layers"] if path[0] == "layers" else params)[path[-1]] = jnp.asarray(out)
    if unread:
        some = ", ".join(sorted(unread)[:3])
        raise InputError(f"{len(unread)} tensors are not part of a {config.family} model as configured, e.g. {some}")
    return params


def _stored_shape(entry: Entry) -> tuple[int, ...]:
    size = int(np.prod(entry.shape))
    if entry.inputs:
        return (size // entry.inputs, entry.inputs)
    return entry.shape if entry.name.endswith(("embed_tokens.weight", "lm_head.weight")) else (size,)


def to_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Named tensors in Hugging Face layout; the inverse of `from_tensors`."""
    out = {}
    for path, entry in table(config).items():
        node: Any = params
        for part in path:
            node = node[part]
        stacked = np.asarray(jax.device_get(node))
        for index, name in _names(entry, config):
            value = stacked[index]
            value = value.reshape(entry.inputs, -1).T if entry.inputs else value.reshape(_stored_shape(entry))
            out[name] = np.ascontiguousarray(value)
    return out


def open_folder(folder: Path) -> Tensors:
    """The tensors of a Hugging Face folder, one file or several; each is read when it is called for.

    InputError for a missing, truncated or incomplete set of files.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{index} is damaged (no weight_map): download it again") from None
    else:
        files = ["model.safetensors"]
    out: dict[str, Callable[[], np.ndarray]] = {}
    for file in files:
        path = folder / file
        if not path.exists():
            raise InputError(f"{folder} has no {file}: save or download the model's safetensors weights into it")
        try:
            opened = safe_open(path, framework="np")
            names = list(opened.keys())
        except SafetensorError as error:
            raise InputError(f"{path} is damaged or cut short ({error}): download it again") from None
        out |= {name: (lambda opened=opened, name=name: opened.get_tensor(name)) for name in names}
    return out


def write_folder(folder: Path, tensors: dict[str, np.ndarray], raw_config: dict[str, Any], shard_bytes: int) -> None:
    """Write config.json and safetensors, split into files of at most `shard_bytes` where they are larger.

    Weights that the folder already holds are replaced.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # A reader would take an older index, or an older single file, for the weights written now.
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"):
        for stale in folder.glob(pattern):
            stale.unlink()
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, value in tensors.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + value.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = value
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(shard, file)
    total = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
