"""`save_adapter`: LoRA adapters as a folder of PEFT's."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_llm.models.checks import check_params, check_policy
from jaxrl_llm.models.io.adapter_config import FILE
from jaxrl_llm.models.io.adapter_params import adapter_outputs
from jaxrl_llm.models.io.adapters import OUTER, STACKED, WEIGHTS, as_modules
from jaxrl_llm.models.io.folders import check_output, write_json
from jaxrl_llm.models.io.huggingface import all_finite
from jaxrl_llm.models.io.layout import Stored, join_parts
from jaxrl_llm.models.io.save import written
from jaxrl_llm.models.io.unread import EMBED
from jaxrl_llm.models.lora import adapters_of, own_adapters
from jaxrl_llm.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE
from jaxrl_llm.models.parameters.weight import Weight
from jaxrl_llm.models.stacks import stacked_layers
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.policy import Params, Policy

Module = tuple[np.ndarray, np.ndarray, float]  # A [rank, inputs], B [outputs, rank], scale


def save_adapter(
    directory: str | Path, policy: Policy, params: Params, *, base: str = "", overwrite: bool = False
) -> Path:
    """Write the adapters of parameters as PEFT does: adapter_config.json and adapter_model.safetensors.

    base: the name or folder of the model that they are adapters of. The folder is written as by `save_policy`.
    A module that holds several weights, whose adapters have no A in common, gets one of the sum of their ranks. Experts
    are in one tensor, as in transformers 5, and named by `target_parameters` (since PEFT 0.17).
    InputError for parameters without adapters, or that hold NaN, and as `save_policy`.
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
            tensors[f"{OUTER}{_wrapped(name, modules)}.{end}"] = np.ascontiguousarray(value)
    from safetensors.numpy import save_file

    with written(folder, overwrite, "adapters") as new:
        write_json(new / FILE, adapter_settings(modules, policy.config, base))
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(new / FILE, new / WEIGHTS)  # safetensors makes it readable by the owner alone
    return folder


def adapter_modules(params: Params, config: ModelConfig) -> dict[str, Module]:
    """The adapters by names of modules, such as model.layers.0.mlp.up_proj; ranks of zeros are left out."""
    adapters = {**own_adapters(params), "layers": adapters_of(stacked_layers(params, config))}
    adapters = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.device_get(adapters))
    found: dict[str, Module] = {}
    for stored in as_modules(config):
        if (module := _module(stored, adapters)) is not None:
            found[stored.name.removesuffix(".weight")] = module
    return found


def _module(stored: Stored, layers: Params) -> Module | None:
    """The adapter of a tensor, of one or several weights; None where none has one that is not zero."""
    if any(len(weight.stacked) > len(stored.place) for weight in stored.weights):
        return _of_experts(stored, layers)
    parts = {weight: part for weight in stored.weights if (part := _part(stored, weight, layers)) is not None}
    if not parts:
        return None
    if not stored.place:
        ((a, b),) = parts.values()
        return a, b.T, float(layers.get(LORA_SCALE, 1.0))
    all_a = [a for a, _ in parts.values()]
    shared = len(parts) == len(stored.weights) and all(np.array_equal(a, all_a[0]) for a in all_a)
    a = all_a[0] if shared else np.concatenate(all_a)
    place, outputs = 0, {}
    for weight in stored.weights:
        b = np.zeros((len(a), *weight.shape[len(weight.stacked) + weight.inputs :]), np.float32)
        if weight in parts:
            own = parts[weight][1]
            b[place : place + len(own)] = own
            place += 0 if shared else len(own)
        outputs[weight.path] = b
    entry = reduce(getitem, stored.weights[0].path[:-1], layers)
    scale = float(entry[LORA_SCALE][stored.place[0]]) if LORA_SCALE in entry else 1.0
    b = join_parts(adapter_outputs(stored, len(a)), outputs)
    return a, b if stored.tensor.outputs_first else b.T, scale


def _of_experts(stored: Stored, layers: Params) -> Module | None:
    """The adapter of a tensor of all experts, A [experts * rank, inputs] and B [outputs, rank * experts]."""
    places = [(*stored.place, expert) for expert in range(stored.config.num_experts)]
    each = [_module(stored._replace(place=place), layers) for place in places]
    ranks = [0 if one is None else len(one[0]) for one in each]
    first = next((one for one in each if one is not None), None)
    if first is None:
        return None
    all_a = np.zeros((len(each), max(ranks), first[0].shape[1]), np.float32)
    all_b = np.zeros((len(first[1]), max(ranks), len(each)), np.float32)
    for expert, one in enumerate(each):
        if one is not None:
            all_a[expert, : ranks[expert]], all_b[:, : ranks[expert], expert] = one[:2]
    return all_a.reshape(-1, all_a.shape[-1]), all_b.reshape(len(all_b), -1), first[2]


def _wrapped(name: str, modules: Iterable[str]) -> str:
    """What PEFT calls the adapter of a module, or of a tensor of experts: the first of several is wrapped by others."""
    own = next((end for end in STACKED if name.endswith(end)), None)
    if own is None:
        return name
    outer, later = name.removesuffix(own) + ".experts", STACKED[STACKED.index(own) + 1 :]
    return outer + ".base_layer" * sum(name.removesuffix(own) + end in modules for end in later)


def _part(stored: Stored, weight: Weight, layers: Params) -> tuple[np.ndarray, np.ndarray] | None:
    """A [rank, inputs] and B [rank, outputs ...] of one weight."""
    entry: Any = layers
    for name in weight.path[:-1]:
        entry = entry.get(name, {})
    if weight.name + LORA_IN not in entry:
        return None
    a, b = (entry[weight.name + end][stored.place] for end in (LORA_IN, LORA_OUT))
    a = a.reshape(-1, len(b)).T
    kept = np.any(a != 0, axis=1) | np.any(b.reshape(len(b), -1) != 0, axis=1)
    return (a[kept], b[kept]) if kept.any() else None


def adapter_settings(modules: Mapping[str, Module], config: ModelConfig, base: str) -> dict[str, Any]:
    """adapter_config.json for these modules."""
    mixture = any(kind.num_experts for kind in config.each_kind)

    def named(module: str) -> str:
        """PEFT's name of a module; beside experts the tensor's, as it takes such modules for the experts."""
        beside = mixture and module.endswith(("gate_proj", "up_proj", "down_proj")) and not module.endswith(STACKED)
        return f"{module}.weight" if beside else module

    of_module: dict[str, tuple[int, float]] = {}
    for name, (a, _, scale) in modules.items():
        rank = len(a) // (config.num_experts if name.endswith(STACKED) else 1)
        of_module[named(name)] = rank, _alpha(scale, rank)
    (rank, alpha), _ = Counter(of_module.values()).most_common(1)[0]
    known = {named(stored.name.removesuffix(".weight")) for stored in as_modules(config)}
    others = [name for name, found in of_module.items() if found != (rank, alpha)]
    alike = {found: {name for name in of_module if of_module[name] == found} for found in set(of_module.values())}
    ends = {found: _ends(known - names) for found, names in alike.items()}
    short = {name: _suffix(name, ends[of_module[name]]) for name in others}
    foreign = _ends(known - of_module.keys())
    targets = {name: _suffix(name, foreign) for name in of_module}
    tensors = {name for name in of_module if name.endswith((*STACKED, ".weight"))}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None, "revision": None,
        "auto_mapping": None, "inference_mode": True, "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "target_modules": sorted({end for name, end in targets.items() if name not in tensors}),
        "target_parameters": sorted({targets[name] for name in tensors}) or None, "exclude_modules": None,
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
    for count in (1 + name.endswith(".weight"), len(parts) - 3):
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
