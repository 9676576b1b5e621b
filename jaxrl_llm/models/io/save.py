"""`save_policy` and `save_adapter`: a model as a Hugging Face folder, adapters as one of PEFT's, written atomically."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.checks import check_params, check_policy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import to_hf
from jaxrl_llm.models.io.adapter_config import FILE
from jaxrl_llm.models.io.adapters import OUTER, WEIGHTS, outputs_of
from jaxrl_llm.models.io.folders import check_output, write_json, written_whole
from jaxrl_llm.models.io.huggingface import all_finite, to_tensors
from jaxrl_llm.models.io.layout import Stored, joined, stored_tensors
from jaxrl_llm.models.io.unread import EMBED, Unread
from jaxrl_llm.models.kinds import read_json, reason, shown
from jaxrl_llm.models.lora import adapters_of, merge, own_adapters
from jaxrl_llm.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE
from jaxrl_llm.models.parameters.weight import Weight
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.stacks import stacked_layers
from jaxrl_llm.utils.errors import InputError


def save_policy(
    directory: str | Path,
    policy: Policy,
    params: Params,
    tokenizer: Any = None,
    *,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    unread: Unread | None = None,
) -> Path:
    """Write a Hugging Face folder: config.json, safetensors in the dtype of the parameters, the tokenizer.

    transformers loads it, and `load_policy` or `load_reward_model` reads back equal parameters. Files of more than
    `shard_bytes` are split. Adapters (`lora`) are merged into the weights. unread: what `load_policy` did not read of
    the model's files, as `io.load.read_unread` gives it, which is written unchanged, beside weights with the names that
    they have there.

    The folder must be new or empty; with `overwrite` a model in it is replaced. A run's folder never is, nor are files
    that are not of a model. It is written beside its place and then renamed: a process that is killed leaves what was
    there, or the new model. Raises InputError for a folder that may not be written, a full disk, parameters that are
    not this policy's or hold NaN, and arguments of other types; what was there then stays.
    """
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise InputError(f"shard_bytes is {shown(shard_bytes)}, but must be a whole number of at least 1")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise InputError(f"the tokenizer is {shown(tokenizer)}, but must be a transformers tokenizer, or None")
    check_policy(policy)
    check_params(policy, params)
    folder = check_output(directory, overwrite)
    raw, merged = to_hf(policy.config, jax.tree.leaves(params["embed"])[0].dtype.name), merge(params)
    tensors = to_tensors(merged, policy.config)
    if unread is not None:
        raw = unread.settings_of(raw)
        tensors = {unread.name_of(name): value for name, value in tensors.items()}
        tensors |= {name: read() for name, read in unread.tensors.items()}
    ends = list(policy.config.eos_token_ids)
    generation = {
        "bos_token_id": policy.config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    with _written(folder, overwrite, "model") as new:
        write_json(new / "config.json", raw)
        write_json(new / "generation_config.json", generation)
        _write_weights(new, tensors, shard_bytes)
        for file in () if unread is None else unread.files:
            shutil.copyfile(file, new / file.name)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
            _name_known_class(new / "tokenizer_config.json")
        for file in new.glob("*.safetensors"):  # safetensors makes them readable by the owner alone
            shutil.copymode(new / "config.json", file)
    return folder


@contextmanager
def _written(folder: Path, overwrite: bool, what: str) -> Iterator[Path]:
    """`written_whole`, in which any error is an InputError."""
    try:
        with written_whole(folder, overwrite) as new:
            yield new
    except InputError:
        raise
    except Exception as error:  # safetensors, tokenizers and transformers each have errors of their own for a full disk
        raise InputError(
            f"the {what} cannot be written to {folder} ({reason(error)}); nothing there was changed: "
            "free some space, or choose another folder"
        ) from error


def _name_known_class(path: Path) -> None:
    """Name a tokenizer's class as readers before transformers 5 know it, which newer ones know too."""
    raw = read_json(path) if path.exists() else {}
    if raw.get("tokenizer_class") == "TokenizersBackend":
        write_json(path, raw | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_weights(folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int) -> None:
    """Write safetensors, split into files of at most `shard_bytes` where they are larger, with an index."""
    from safetensors.numpy import save_file

    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, value in tensors.items():
        if shards[-1] and size + value.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(shard, file)
    total = sum(x.nbytes for x in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": place})


Module = tuple[np.ndarray, np.ndarray, float]  # A [rank, inputs], B [outputs, rank], scale


def save_adapter(
    directory: str | Path, policy: Policy, params: Params, *, base: str = "", overwrite: bool = False
) -> Path:
    """Write the adapters of parameters as PEFT does: adapter_config.json and adapter_model.safetensors.

    base: the name or folder of the model that they are adapters of. The folder is written as by `save_policy`.
    A module that holds several weights, whose adapters have no A in common, gets one of the sum of their ranks.
    InputError for parameters without adapters, or that hold NaN, for adapters of experts that are no modules because
    the family's files have one tensor for all, and as `save_policy`.
    """
    check_policy(policy)
    check_params(policy, params)
    folder = check_output(directory, overwrite)
    modules = adapter_modules(params, policy.config)
    if not modules:
        raise InputError("the parameters have no adapters (LoRA): save the model instead")
    tensors = {}
    for name, (a, b, _) in modules.items():
        for half, value in (("A", a), ("B", b)):
            if not all_finite(value):
                raise InputError(f"the adapter of {name} holds NaN or infinity: it cannot be saved")
            end = f"lora_embedding_{half}" if f"{name}.weight" == EMBED else f"lora_{half}.weight"
            tensors[f"{OUTER}{name}.{end}"] = np.ascontiguousarray(value)
    from safetensors.numpy import save_file

    with _written(folder, overwrite, "adapters") as new:
        write_json(new / FILE, adapter_settings(modules, policy.config, base))
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(new / FILE, new / WEIGHTS)  # safetensors makes it readable by the owner alone
    return folder


def adapter_modules(params: Params, config: ModelConfig) -> dict[str, Module]:
    """The adapters by names of modules, such as model.layers.0.mlp.up_proj; ranks of zeros are left out."""
    adapters = {**own_adapters(params), "layers": adapters_of(stacked_layers(params, config))}
    adapters = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.device_get(adapters))
    found: dict[str, Module] = {}
    for stored in stored_tensors(config):
        if (module := _module(stored, adapters)) is not None:
            found[stored.name.removesuffix(".weight")] = module
    return found


def _module(stored: Stored, layers: Params) -> Module | None:
    """The adapter of a tensor, of one or several weights; None where none has one that is not zero."""
    parts = {weight: part for weight in stored.weights if (part := _part(stored, weight, layers)) is not None}
    if not parts:
        return None
    if any(len(weight.stacked) > len(stored.place) for weight in stored.weights):
        raise InputError(
            f"all experts of a layer are one tensor in files of {stored.config.family}, {stored.name}, and adapters of "
            "single experts are no modules of PEFT's: export the model, adapters merged"
        )
    if not stored.place:
        ((a, b),) = parts.values()
        return a, b.T, float(layers.get(LORA_SCALE, 1.0))
    all_a = [a for a, _ in parts.values()]
    shared = len(parts) == len(stored.weights) and all(np.array_equal(a, all_a[0]) for a in all_a)
    a = all_a[0] if shared else np.concatenate(all_a)
    place, outputs = 0, {}
    for weight in stored.weights:
        start = len(weight.stacked)
        b = np.zeros((len(a), *weight.shape[start + weight.inputs :]), np.float32)
        if weight in parts:
            own = parts[weight][1]
            b[place : place + len(own)] = own
            place += 0 if shared else len(own)
        outputs[weight.path] = b
    entry = reduce(getitem, stored.weights[0].path[:-1], layers)
    scale = float(entry[LORA_SCALE][stored.place[0]]) if LORA_SCALE in entry else 1.0
    return a, joined(outputs_of(stored, len(a)), outputs), scale


def _part(stored: Stored, weight: Weight, layers: Params) -> tuple[np.ndarray, np.ndarray] | None:
    """A [rank, inputs] and B [rank, outputs ...] of one weight."""
    entry: Any = layers
    for name in weight.path[:-1]:
        entry = entry.get(name, {})
    if weight.name + LORA_IN not in entry:
        return None
    a, b = (entry[weight.name + end][stored.place] for end in (LORA_IN, LORA_OUT))
    if len(weight.stacked) > len(stored.place):
        return a, b  # which `_module` refuses
    a = a.reshape(-1, len(b)).T
    kept = np.any(a != 0, axis=1) | np.any(b.reshape(len(b), -1) != 0, axis=1)
    return (a[kept], b[kept]) if kept.any() else None


def adapter_settings(modules: Mapping[str, Module], config: ModelConfig, base: str) -> dict[str, Any]:
    """adapter_config.json for these modules."""
    of_module = {name: (len(a), _alpha(scale, len(a))) for name, (a, _, scale) in modules.items()}
    (rank, alpha), _ = Counter(of_module.values()).most_common(1)[0]
    known = {stored.name.removesuffix(".weight") for stored in stored_tensors(config)}
    others = [name for name, found in of_module.items() if found != (rank, alpha)]
    alike = {found: {name for name in of_module if of_module[name] == found} for found in set(of_module.values())}
    ends = {found: _ends(known - names) for found, names in alike.items()}
    short = {name: _suffix(name, ends[of_module[name]]) for name in others}
    foreign = _ends(known - of_module.keys())
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None, "revision": None,
        "auto_mapping": None, "inference_mode": True, "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "target_modules": sorted({_suffix(name, foreign) for name in of_module}), "exclude_modules": None,
        "rank_pattern": {short[name]: of_module[name][0] for name in others},
        "alpha_pattern": {short[name]: of_module[name][1] for name in others}, "use_rslora": False,
        "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None, "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "use_dora": False,
    }  # fmt: skip


def _ends(names: Iterable[str]) -> set[str]:
    """All ends of some names of modules, from a dot on, and the names."""
    return {".".join(parts[at:]) for name in names for parts in [name.split(".")] for at in range(len(parts))}


def _suffix(name: str, foreign: set[str]) -> str:
    """The shortest end of a module's name that is not among those of other modules."""
    parts = name.split(".")
    for count in (1, len(parts) - 3):
        if (end := ".".join(parts[-count:])) not in foreign:
            return end
    return name


def _alpha(scale: float, rank: int) -> float | int:
    """The number of fewest digits that, over the rank, is the scale in float32."""
    for digits in (6, 9):
        alpha = float(f"{scale * rank:.{digits}g}")
        if np.float32(alpha / rank) == np.float32(scale):
            return int(alpha) if alpha == int(alpha) else alpha
    return scale * rank
