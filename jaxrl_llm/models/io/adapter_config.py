"""adapter_config.json of PEFT's LoRA adapters: which modules have adapters, of which rank and scale."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.models import kinds
from jaxrl_llm.models.kinds import FLAG, SECTION, TEXT, Kind, check, either, list_of, one_of, or_null, shown, whole
from jaxrl_llm.utils.errors import InputError

FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
_RANK, _ALPHA, _TEXTS = whole(1, 2**16), kinds.number(above=0), list_of(TEXT)


def _pattern(kind: Kind) -> Kind:
    return or_null(
        Kind(f"an object of names, each {kind.words}", lambda x: SECTION.test(x) and all(map(kind.test, x.values())))
    )


_KINDS = {
    "peft_type": one_of("LORA"),
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "rank_pattern": _pattern(_RANK),
    "alpha_pattern": _pattern(_ALPHA),
    "target_modules": or_null(either(TEXT, _TEXTS)),
    "exclude_modules": or_null(either(TEXT, _TEXTS)),
    "target_parameters": or_null(_TEXTS),
    "modules_to_save": or_null(_TEXTS),
    "layers_to_transform": or_null(either(whole(0), list_of(whole(0)))),
    "layers_pattern": or_null(either(TEXT, _TEXTS)),
    "use_rslora": or_null(FLAG),
    "ensure_weight_tying": or_null(FLAG),
}
# Of how adapters were made and are trained: no part of what they compute.
_IGNORED = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "eva_config",
}  # fmt: skip
# Ways to make them that keep the model's weights; PiSSA, OLoRA, CorDA, LoftQ and others change these.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


class AdapterConfig(NamedTuple):
    """What adapter_config.json says. Modules are named as transformers does, such as model.layers.0.mlp.up_proj."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]  # a regular expression or ALL_LINEAR; ends of names
    excluded: str | tuple[str, ...]
    parameters: tuple[str, ...]  # ends of the names of tensors that are none of a linear module, as those of experts
    saved: tuple[str, ...]  # ends of the names of modules that are there whole
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...]  # the only ones that have adapters; none for all
    layers_pattern: tuple[str, ...]  # what their list is called; none for anything
    square_root: bool  # scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)
    tied: bool  # what is saved of embeddings is of the output projection too

    def is_target(self, module: str) -> bool:
        """Whether a module has an adapter."""
        if _is_named(module, self.excluded) or self.is_saved(module):
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == ALL_LINEAR:
                return not module.endswith(("lm_head", "embed_tokens"))
            return re.fullmatch(self.targets, module) is not None
        if module in self.targets:
            return True
        return _is_named(module, self.targets) and (not self.layers or self._layer(module) in self.layers)

    def is_parameter(self, tensor: str) -> bool:
        """Whether a tensor has an adapter by its own name."""
        return bool(self.parameters) and _is_named(tensor, self.parameters)

    def is_saved(self, module: str) -> bool:
        """Whether a module, or one that it is in, is there whole."""
        return any(f".{name}." in f".{module}." for name in self.saved)

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's adapter is multiplied by."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (rank**0.5 if self.square_root else rank)

    def _layer(self, module: str) -> int:
        for pattern in self.layers_pattern or (r"[^.]*",):
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(match[1])
        return -1


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The file in a folder. InputError, in one line, for settings that are missing, wrong, or not read, as DoRA's."""
    where = str(folder / FILE)
    raw = kinds.json_object(folder / FILE)
    check(raw, _KINDS, where)
    for name, value in raw.items():
        if name not in _KINDS and name not in _IGNORED:
            _check_unused(name, value, where)
    for name in ("peft_type", "r"):
        if name not in raw:
            raise InputError(f"{where} lacks {name!r}")
    targets = _names(raw, "target_modules")
    for pattern in filter(None, (raw.get("target_modules"), raw.get("exclude_modules"))):
        if isinstance(pattern, str):
            _check_pattern(pattern, where)
    for pattern in (*(raw.get("rank_pattern") or ()), *(raw.get("alpha_pattern") or ()), *_list(raw, "layers_pattern")):
        _check_pattern(pattern, where)
    layers = raw.get("layers_to_transform")
    return AdapterConfig(
        raw["r"], float(raw.get("lora_alpha", 8)), targets, _names(raw, "exclude_modules"),
        tuple(raw.get("target_parameters") or ()), tuple(raw.get("modules_to_save") or ()),
        raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {},
        (layers,) if isinstance(layers, int) else tuple(layers or ()), _list(raw, "layers_pattern"),
        bool(raw.get("use_rslora")), bool(raw.get("ensure_weight_tying")),
    )  # fmt: skip


def _check_unused(name: str, value: Any, where: str) -> None:
    """InputError for a setting that would change what adapters compute."""
    if name == "init_lora_weights":
        wrong = isinstance(value, str) and value not in _INITIAL
        why = ", which changes the model's weights: save the adapter as a plain one first"
    else:
        wrong, why = bool(value) and not (name == "bias" and value == "none"), ", which is not supported"
    if wrong:
        raise InputError(f"{where}: {name} is {shown(value)}{why}")


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{where}: {shown(pattern)} is no regular expression ({error})") from None


def _names(raw: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    value = raw.get(name) or ()
    return value if isinstance(value, str) else tuple(value)


def _list(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = _names(raw, name)
    return (value,) if isinstance(value, str) else value


def _is_named(module: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)
