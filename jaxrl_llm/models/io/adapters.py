"""PEFT's LoRA adapters, read: those of matrices that can learn as adapters (`lora`), all else merged into the weights.

A file has A [r, inputs] and B [outputs, r] of a module, whose output is W x + scale B A x. A module that holds several
weights, such as Phi's qkv_proj, has one A: each weight gets it, with its own part of B. Each expert is a module of its
own, or all are one tensor, named by `target_parameters`: their adapters are then one A and one B, expert after expert
in A and rank after rank in B, and those of several tensors of a module are named as wrapped around each other. What has
no adapters here is merged in float32 as the model's tensors are read: adapters of routers and of tied embeddings, and
modules that are there whole (`modules_to_save`).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.io.adapter_config import AdapterConfig, read_adapter_config
from jaxrl_llm.models.io.file_tensor import FLOATS, Tensors, dtype_of
from jaxrl_llm.models.io.huggingface import open_file
from jaxrl_llm.models.io.layout import OF_LAYERS, Stored, stored_tensors
from jaxrl_llm.models.io.unread import EMBED, HEAD, skipped_line
from jaxrl_llm.models.kinds import shown
from jaxrl_llm.models.parameters import adapted_by_default, adapted_weights
from jaxrl_llm.utils.errors import InputError

WEIGHTS = "adapter_model.safetensors"
STACKED = (".experts.gate_up_proj", ".experts.down_proj")  # in the order in which a module has them
OUTER = "base_model.model."
_LORA = re.compile(r"(.*)\.lora_(?:([AB])\.weight|embedding_([AB]))")
Read = Callable[[], np.ndarray]
Place = tuple[int, ...]  # of a layer and an expert, see `layout.Stored`


class Adapter(NamedTuple):
    """An adapter's folder. Names are those of the tensors of a language model by itself."""

    folder: Path
    config: AdapterConfig
    model: ModelConfig
    pairs: Mapping[str, tuple[Read, Read, bool]]  # of a weight's tensor: A, B, and whether it is an embedding
    whole: Mapping[str, Read]  # tensors that are there themselves
    scales: Mapping[str, float]
    skipped: frozenset[str]  # of what is no part of the language model

    @property
    def trained(self) -> dict[str, Stored]:
        """The tensors with adapters that learn."""
        possible = adapted_weights(self.model)
        return {
            each.name: each
            for each in stored_tensors(self.model, self.pairs)
            if each.name in self.pairs and all(weight.path in possible for weight in each.weights)
        }

    def requires(self, stored: Stored) -> bool:
        """Whether a module that the settings name must be in the file.

        Experts are modules in some versions of transformers, and one tensor in others, which no name of modules means.
        """
        possible = adapted_weights(self.model)
        by_expert = len(stored.place) > 1 and any(".experts." in name for name in self.pairs)
        return all(x.path in possible and (adapted_by_default(x) or by_expert) for x in stored.weights)

    @property
    def merged(self) -> set[str]:
        """The tensors of a model that are changed."""
        return ({*self.pairs} - self.trained.keys()) | {*self.whole}


def open_adapter(folder: Path, model: ModelConfig) -> Adapter:
    """The adapter in a folder, for a model; tensors are read when they are called for.

    InputError, in one line, for files that are missing, damaged or incomplete, for settings that are not read, and for
    tensors of modules that the model has not, or that the settings do not name.
    """
    config, path = read_adapter_config(folder), folder / WEIGHTS
    tensors = open_file(path)
    names: dict[str, str] = {}
    for name in tensors:
        if not name.startswith(OUTER):
            raise InputError(f"{path}: tensor {shown(name)} is none of PEFT's, whose names begin with {OUTER}")
        if dtype_of(tensors[name]) not in FLOATS:
            raise InputError(f"{path}: tensor {shown(name)} holds numbers of type {dtype_of(tensors[name])}")
        names[name] = name.removeprefix(OUTER)
    family = FAMILIES[model.family]
    skipped = {name for name in names if names[name].startswith(family.skipped)}
    prefix = next((p for p in family.prefixes if any(name.startswith(p) for name in names.values())), "")
    halves: dict[str, dict[str, Read]] = defaultdict(dict)
    whole: dict[str, Read] = {}
    scales: dict[str, float] = {}
    for name in sorted(names.keys() - skipped):
        found, read = _LORA.fullmatch(names[name]), tensors[name]
        if found is None:
            whole[_own(names[name].replace(".base_layer.", "."), prefix)] = read
            continue
        module, half = found[1], found[2] or f"embedding {found[3]}"
        tensor = _own(f"{module}.weight", prefix)
        if own := _parameter(_own(module, prefix), config):
            module, tensor, read = own, own, partial(_by_expert, read, half, model.num_experts)
        elif not (config.is_target(module) or config.is_parameter(tensor)):
            raise InputError(f"{path}: {shown(module)} has an adapter, but target_modules of {folder} do not name it")
        halves[tensor][half] = read
        scales[tensor] = config.scale_of(tensor if config.is_parameter(tensor) else module)
    pairs = {}
    for tensor, parts in halves.items():
        embedding = "embedding " if "embedding A" in parts or "embedding B" in parts else ""
        if len(parts) != 2 or f"{embedding}A" not in parts or f"{embedding}B" not in parts:
            raise InputError(f"{path}: the adapter of {tensor!r} has no A or no B: the file is incomplete")
        pairs[tensor] = parts[f"{embedding}A"], parts[f"{embedding}B"], bool(embedding)
    adapter = Adapter(folder, config, model, pairs, whole, scales, frozenset(names[name] for name in skipped))
    _check_complete(adapter, prefix)
    return adapter


def as_modules(model: ModelConfig, found: Iterable[str] = ()) -> list[Stored]:
    """The tensors of a model as transformers 5 has them: published names, but all experts of a layer in one tensor.

    found: names to take instead, where they are those of another version.
    """
    family, layers = FAMILIES[model.family], range(model.num_layers)
    ends = [tensor.name for tensor in (*family.tensors, *family.others) if f".{tensor.name}".endswith(STACKED)]
    return list(stored_tensors(model, {*found, *(OF_LAYERS.format(layer=n) + end for n in layers for end in ends)}))


def _parameter(module: str, config: AdapterConfig) -> str | None:
    """The tensor of all experts that a module's adapter is of, as PEFT wraps them; None of other modules."""
    outer, count = module, 0
    while outer.endswith(".base_layer"):
        outer, count = outer.removesuffix(".base_layer"), count + 1
    if not config.parameters or not outer.endswith(".experts"):
        return None
    own = [outer.removesuffix(".experts") + name for name in STACKED]
    wrapped = [tensor for tensor in own if config.is_parameter(tensor)]
    return wrapped[::-1][count] if count < len(wrapped) else None


def _by_expert(read: Read, half: str, experts: int) -> np.ndarray:
    """A [experts * rank, inputs] with an axis of experts first, and B [outputs, rank * experts]."""
    x = read()
    if x.shape[half == "B"] % experts:
        return x  # which fits no tensor
    return x.reshape(experts, -1, x.shape[1]) if half == "A" else np.moveaxis(x.reshape(len(x), -1, experts), 2, 0)


def _own(name: str, prefix: str) -> str:
    """The name of a language model's tensor by itself."""
    if prefix and name.startswith(prefix):
        return f"model.{name.removeprefix(prefix)}"
    outer = prefix.removesuffix("model.")
    return name.removeprefix(outer) if name.removeprefix(outer) == HEAD else name


def _check_complete(adapter: Adapter, prefix: str) -> None:
    """InputError where a module that the settings name is not in the file, or one in the file not in the model."""
    where, config = adapter.folder / WEIGHTS, adapter.config
    known = set[str]()
    for each in stored_tensors(adapter.model, adapter.pairs):
        known.add(each.name)
        module = each.name.removesuffix(".weight")
        spelled = prefix + module.removeprefix("model.") if prefix else module
        if each.name not in adapter.pairs and config.is_target(spelled) and adapter.requires(each):
            raise InputError(f"{where} lacks the adapter of {spelled}, which target_modules name")
    if adapter.model.tie_embeddings:
        known.add(HEAD)
    if strange := sorted(adapter.pairs.keys() - known):
        raise InputError(f"{where}: {strange[0]!r} is no tensor of a {adapter.model.family} model as configured")
    for name in (each.name for each in as_modules(adapter.model, adapter.pairs)):
        if name not in adapter.pairs and config.is_parameter(name):
            raise InputError(f"{where} lacks the adapter of {name}, which target_parameters name")
    for name in config.parameters:
        if not any(f".{tensor}".endswith(f".{name}") for tensor in adapter.pairs):
            raise InputError(f"{where} has no adapter of {shown(name)}, which target_parameters name")
    for name in config.saved:
        if not any(f".{name}." in f".{tensor}" for tensor in (*adapter.whole, *adapter.skipped)):
            raise InputError(f"{where} has no tensor of {shown(name)}, which modules_to_save name")


def merged_tensors(tensors: Tensors, adapter: Adapter) -> Tensors:
    """The tensors of a model with those that the adapter changes and that have no adapters here, in float32.

    Of tied embeddings of which only one is changed the other stays, as in PEFT, unless `ensure_weight_tying` is set:
    `huggingface.untied` sees that. InputError for tensors that the model has not, or convolutions.
    """
    out, where = dict(tensors), adapter.folder / WEIGHTS
    tied, changed = adapter.model.tie_embeddings and HEAD not in tensors, adapter.merged
    embed = EMBED in adapter.pairs or adapter.config.is_saved(EMBED.removesuffix(".weight"))
    if tied and (HEAD in changed or (EMBED in changed and embed and not adapter.config.tied)):
        out[HEAD] = tensors[EMBED]
    # What the adapter may call as another version of the family does.
    held = {(each.weights, each.place): each.name for each in stored_tensors(adapter.model, tensors)}
    for name in sorted(changed):
        own = (held.get((x.weights, x.place)) for x in stored_tensors(adapter.model, {name}) if x.name == name)
        in_files = name if name in out else next(own, None)
        if in_files not in out:
            raise InputError(f"{where}: {name!r} cannot be merged: the model's files have no such tensor")
        read = adapter.whole.get(name, out[in_files])
        if name in adapter.whole:
            read = partial(_of_shape, read, out[in_files], name, where)
        if name in adapter.pairs:
            read = partial(_merged, read, *adapter.pairs[name], adapter.scales[name], name, where)
        out[in_files] = read
    return out


def _of_shape(read: Read, instead_of: Read, name: str, where: Path) -> np.ndarray:
    value, wanted = read(), instead_of().shape
    if value.shape != wanted:
        raise InputError(f"{where}: tensor {name!r} has shape {value.shape}, but the model's has {wanted}")
    return value


def _merged(
    read: Read, read_a: Read, read_b: Read, embedding: bool, scale: float, name: str, where: Path
) -> np.ndarray:  # fmt: skip
    weight, a, b = read(), read_a(), read_b()
    weight = weight.astype(np.float64 if weight.dtype == np.float64 else np.float32)
    check_pair(a, b, weight.shape[::-1] if embedding else weight.shape, name, where)
    product = np.float32(scale) * (b.astype(np.float32) @ a.astype(np.float32))
    return weight + (product.T if embedding else product)


def check_pair(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...], name: str, where: Path) -> None:
    """InputError for matrices that are no A and B of a matrix of this shape, [outputs, inputs]."""
    if not (a.ndim == b.ndim == len(shape) == 2 and (b.shape[0], a.shape[1]) == shape and a.shape[0] == b.shape[1]):
        raise InputError(f"{where}: A {a.shape} and B {b.shape} of {name!r} are no adapter of a matrix {shape}")


def adapter_line(adapter: Adapter) -> str:
    """What of an adapter does not learn, or is not read, in a line; nothing where all does."""
    changed, parts = sorted(adapter.merged), list[str]()
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        parts.append(f"merged into the weights, where they stay: {', '.join(changed[:3])}{more}")
    if adapter.skipped:
        parts.append(skipped_line(adapter.skipped, adapter.model))
    return "; ".join(parts)


def check_only_adapters(folder: str | None, model: ModelConfig) -> None:
    """InputError for the folder of an adapter, with which a run began, that changes weights without adapters here."""
    changed = sorted(open_adapter(Path(folder).expanduser(), model).merged) if folder else ()
    if changed:
        raise InputError(
            f"{folder}, with which the run began, changes {changed[0]}, which has no adapter here, so that adapters "
            "alone would not be the run's model: export the model"
        )
