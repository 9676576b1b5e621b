"""Settings of rotary position embeddings, and how a config.json spells them.

Long-context models rescale the frequencies in several ways (`Rope`). There are two spellings: `rope_theta` with
`rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.models.config_checks import LAYER_TYPES, check_rope
from jaxrl_llm.models.kinds import given, shown
from jaxrl_llm.utils.errors import InputError

KINDS = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True)
class Rope:
    """Which rotation frequencies a layer uses. `kind` decides which of the other fields matter.

    default: theta^(-2i/d).   linear: those divided by `factor` (position interpolation, arXiv 2306.15595).
    llama3: low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
    yarn: ramp between interpolation and extrapolation, and scaled attention (arXiv 2309.00071).
    factors: frequency i divided by `factors[i]` (how GGUF files store llama3 scaling).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0  # >= 1: by how much the context was stretched
    original_length: int = 0  # tokens; context length before stretching (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a frequency is kept
    beta_slow: float = 1.0  # yarn: rotations below which it is interpolated
    attention_factor: float = 0.0  # yarn: scale of cos and sin; 0 means 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    factors: tuple[float, ...] = ()


def _rope(theta: float, scaling: dict[str, Any] | None, raw: dict[str, Any], where: str, section: str) -> Rope:
    scaling = scaling or {}
    check_rope(scaling, where, section)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "frequency_factors":
        kind = "factors"
    if kind not in KINDS:
        raise InputError(f"{where}: rope scaling {shown(kind)} is not supported; supported are {', '.join(KINDS)}")
    if given(scaling, "partial_rotary_factor", given(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise InputError(
            f"{where}: rotary embeddings of only a part of each head (partial_rotary_factor) are not supported"
        )
    maximum = int(raw.get("max_position_embeddings", 0))
    original = int(scaling.get("original_max_position_embeddings") or maximum)
    attention = scaling.get("attention_factor") or 0.0
    if kind == "yarn" and not attention and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        factor = float(scaling["factor"])
        attention = _mscale(factor, scaling["mscale"]) / _mscale(factor, scaling["mscale_all_dim"])
    # Only what the kind uses, so that equal rotations are equal.
    out: dict[str, Any] = {"theta": float(given(scaling, "rope_theta", theta)), "kind": kind}
    if kind in ("linear", "llama3", "yarn"):
        out["factor"] = float(scaling["factor"])
    if kind in ("llama3", "yarn"):
        out["original_length"] = original
    if kind == "llama3":
        out |= {name: float(scaling[name]) for name in ("low_freq_factor", "high_freq_factor") if name in scaling}
    if kind == "yarn":
        out |= {name: float(scaling[name]) for name in ("beta_fast", "beta_slow") if scaling.get(name) is not None}
        out |= {"attention_factor": float(attention), "truncate": scaling.get("truncate", True)}
    if kind == "factors":
        out["factors"] = tuple(float(x) for x in scaling.get("factors", ()))
    return Rope(**out)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def ropes_of(
    raw: dict[str, Any], family: str, types: list[str], where: str
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The kinds of rotation of a model, and which of them each layer has.

    raw: the file's settings, and what transformers takes for those that it leaves out. types: of the layers, of
    LAYER_TYPES. Where a file has both spellings, `rope_scaling` wins, as in transformers.
    """
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    theta = float(given(raw, "rope_theta", 10_000.0))
    by_layer = any(name in parameters for name in LAYER_TYPES)
    if family != "gemma3_text":
        if by_layer and not scaling:
            raise InputError(f"{where}: rope_parameters by kind of layer are of gemma3_text only")
        section = "rope_scaling" if scaling else "rope_parameters"
        return (_rope(theta, scaling or parameters, raw, where, section),), (0,) * len(types)
    if parameters and not all(isinstance(parameters.get(name), dict | None) for name in LAYER_TYPES):
        raise InputError(f"{where}: rope_parameters.full_attention and .sliding_attention must be objects of settings")
    if parameters and not by_layer:
        raise InputError(
            f"{where}: rope_parameters of gemma3_text are by kind of layer, full_attention and sliding_attention"
        )
    of_kind = {name: dict(parameters.get(name) or {}) for name in LAYER_TYPES}
    of_kind["full_attention"] |= scaling
    thetas = theta, float(given(raw, "rope_local_base_freq", 10_000.0))
    ropes = [
        _rope(one, of_kind[name], raw, where, f"rope_parameters.{name}")
        for name, one in zip(LAYER_TYPES, thetas, strict=True)
    ]
    return tuple(ropes), tuple(LAYER_TYPES.index(t) for t in types)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The dictionary of one kind of rotation; InputError where Hugging Face has no words for it."""
    out: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind in ("linear", "llama3", "yarn"):
        out["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor:
            out["attention_factor"] = rope.attention_factor
    if rope.kind == "factors":
        raise InputError(
            "this model's rotary frequencies came as a table (GGUF), which a Hugging Face config.json cannot express; "
            "load the model from its Hugging Face folder to save it"
        )
    return out
