"""Settings of rotary position embeddings, their frequencies, and how a config.json spells them.

Long-context models rescale the frequencies in several ways (`Rope`). There are two spellings: `rope_theta` with
`rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.models.config.checks import LAYER_TYPES, check_rope
from jaxrl_llm.models.kinds import given, shown
from jaxrl_llm.utils.errors import InputError

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "none", "factors")
STRETCHED = ("linear", "llama3", "yarn")  # by a factor
OF_ORIGINAL = ("llama3", "yarn", "longrope")  # which depend on the context length before stretching


@dataclass(frozen=True)
class Rope:
    """Which rotation frequencies a layer uses. `kind` decides which of the other fields matter.

    default: theta^(-2i/d).   linear: those divided by `factor` (position interpolation, arXiv 2306.15595).
    llama3: low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
    yarn: ramp between interpolation and extrapolation, and scaled attention (arXiv 2309.00071).
    longrope: frequency i divided by `factors[i]`, and scaled attention (arXiv 2402.13753). Published models have two
    lists, of which transformers takes that for short contexts until a sequence is longer than the original context,
    and then, for all its tokens, that for long ones. Here a token's rotation does not depend on those after it, so
    that sampler and trainer agree: the longest sequence decides for all (`within`), by default the model's context.
    proportional: only the first `fraction` of the frequencies, the others are 0 (Gemma 4).
    factors: frequency i divided by `factors[i]` (how GGUF files store llama3 scaling).   none: no rotation (NoPE).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0  # >= 1: by how much the context was stretched
    original_length: int = 0  # tokens; context length before stretching (llama3, yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a frequency is kept
    beta_slow: float = 1.0  # yarn: rotations below which it is interpolated
    attention_factor: float = 0.0  # yarn, longrope: scale of cos and sin; 0 means 0.1 ln(factor) + 1 (yarn)
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()  # longrope: the file's two lists, of which `factors` is one
    long_factors: tuple[float, ...] = ()
    fraction: float = 1.0  # of a head's dimensions that are rotated; but see proportional
    query_growth: float = 0.0  # queries at position p times 1 + this * ln(1 + floor(p / original_length)) (Llama 4)

    def within(self, tokens: int) -> Rope:
        """The rotation of a model that sees at most this many tokens at once: another list of factors in longrope."""
        if self.kind != "longrope":
            return self
        return replace(self, factors=self.long_factors if tokens > self.original_length else self.short_factors)


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Rotation per position, f32[head_dim / 2] in radians, and the factor on cos and sin, f64[head_dim / 2].

    Dimensions i and i + head_dim / 2 of a head are a pair. Those that are not rotated are the last pairs, of rate 0 and
    factor 1: files that leave the last dimensions of a head alone are read and written with another order
    (`io.layout`).
    """
    rates, scale = _rates(rope, head_dim)
    missing = (0, head_dim // 2 - rates.size)
    return np.pad(rates, missing).astype(np.float32), np.pad(np.full(rates.size, scale), missing, constant_values=1.0)


def _rates(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """f64[pairs that are rotated], and the factor on cos and sin."""
    if rope.kind == "none":
        return np.zeros(0), 1.0
    if rope.kind == "proportional":
        pairs = int(rope.fraction * head_dim // 2)
        return rope.theta ** -(np.arange(0, 2 * pairs, 2, dtype=np.float64) / head_dim) / rope.factor, 1.0
    rotated = int(head_dim * rope.fraction)
    base = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.kind in ("factors", "longrope"):
        return base / np.asarray(rope.factors), rope.attention_factor or 1.0
    if rope.kind == "llama3":
        turns = rope.original_length / (2 * np.pi / base)
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return keep * base + (1 - keep) * base / rope.factor, 1.0
    if rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            """The (fractional) dimension that makes this many rotations over the original context."""
            turns = rope.original_length / (rotations * 2 * math.pi)
            return rotated * math.log(turns) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        ramp = np.clip((np.arange(rotated // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
        return (1 - ramp) * base + ramp * base / rope.factor, scale
    return base / rope.factor if rope.kind == "linear" else base, 1.0


def _rope(theta: float, scaling: dict[str, Any] | None, raw: dict[str, Any], where: str, section: str) -> Rope:
    scaling = scaling or {}
    check_rope(scaling, where, section)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "frequency_factors":
        kind = "factors"
    if kind not in KINDS:
        raise InputError(f"{where}: rope scaling {shown(kind)} is not supported; supported are {', '.join(KINDS[:-2])}")
    maximum = int(raw.get("max_position_embeddings", 0))
    original = int(scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or 0)
    fraction = float(given(scaling, "partial_rotary_factor", given(raw, "partial_rotary_factor", 1.0)))
    if not 0 < fraction <= 1:
        raise InputError(f"{where}: partial_rotary_factor is {fraction:g}, but must be above 0 and at most 1")
    # Only what the kind uses, so that equal rotations are equal.
    out: dict[str, Any] = {"theta": float(given(scaling, "rope_theta", theta)), "kind": kind, "fraction": fraction}
    if kind in STRETCHED:
        out["factor"] = float(scaling["factor"])
    if kind in OF_ORIGINAL:
        out["original_length"] = original or maximum
    if kind == "llama3":
        out |= {name: float(scaling[name]) for name in ("low_freq_factor", "high_freq_factor") if name in scaling}
    if kind == "yarn":
        attention = scaling.get("attention_factor") or 0.0
        own, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if not attention and own and of_all:
            attention = mscale(out["factor"], own) / mscale(out["factor"], of_all)
        out |= {name: float(scaling[name]) for name in ("beta_fast", "beta_slow") if scaling.get(name) is not None}
        out |= {"attention_factor": float(attention), "truncate": scaling.get("truncate", True)}
        out["query_growth"] = float(scaling.get("llama_4_scaling_beta") or 0.0)
    if kind == "longrope":
        stretched = float(scaling.get("factor") or maximum / out["original_length"])
        usual = math.sqrt(1 + math.log(stretched) / math.log(out["original_length"])) if stretched > 1 else 1.0
        short, long = (tuple(float(x) for x in scaling[name]) for name in ("short_factor", "long_factor"))
        out |= {"short_factors": short, "long_factors": long}
        out["attention_factor"] = float(scaling.get("attention_factor") or usual)
    if kind == "factors":
        out["factors"] = tuple(float(x) for x in scaling.get("factors", ()))
    return Rope(**out).within(maximum)


def mscale(factor: float, scale: float) -> float:
    """Yarn's growth of attention with the factor by which the context was stretched."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def ropes_of(
    raw: dict[str, Any], types: Sequence[str], where: str, thetas: Mapping[str, float] | None = None
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The kinds of rotation of a model, and which of them each layer has.

    raw: the file's settings, and what transformers takes for those that it leaves out. types: of the layers, of
    LAYER_TYPES. thetas: of each type, where the family has rotations of its own for each; None where all layers have
    the same. Where a file has both spellings, `rope_scaling` wins, as in transformers.
    """
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    family, by_layer = raw.get("model_type"), any(name in parameters for name in LAYER_TYPES)
    if thetas is None:
        theta = float(given(raw, "rope_theta", 10_000.0))
        if by_layer and not scaling:
            raise InputError(f"{where}: {family} has no rope_parameters by kind of layer: give those of all layers")
        section = "rope_scaling" if scaling else "rope_parameters"
        return (_rope(theta, scaling or parameters, raw, where, section),), (0,) * len(types)
    if parameters and not all(isinstance(parameters.get(name), dict | None) for name in LAYER_TYPES):
        raise InputError(f"{where}: rope_parameters.full_attention and .sliding_attention must be objects of settings")
    if parameters and not by_layer:
        raise InputError(
            f"{where}: rope_parameters of {family} are by kind of layer, full_attention and sliding_attention"
        )
    of_type = {name: dict(parameters.get(name) or {}) for name in LAYER_TYPES}
    of_type["full_attention"] |= scaling
    ropes = [_rope(thetas[name], of_type[name], raw, where, f"rope_parameters.{name}") for name in LAYER_TYPES]
    return tuple(ropes), tuple(LAYER_TYPES.index(t) for t in types)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The dictionary of one kind of rotation; InputError where Hugging Face has no words for it."""
    out: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind in STRETCHED:
        out["factor"] = rope.factor
    if rope.kind in OF_ORIGINAL:
        out["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.kind == "longrope":
        out |= {"long_factor": list(rope.long_factors), "short_factor": list(rope.short_factors)}
    if rope.attention_factor:
        out["attention_factor"] = rope.attention_factor
    if rope.fraction != 1:
        out["partial_rotary_factor"] = rope.fraction
    if rope.query_growth:
        out["llama_4_scaling_beta"] = rope.query_growth
    if rope.kind == "factors":
        raise InputError(
            "this model's rotary frequencies came as a table (GGUF), which a Hugging Face config.json cannot express; "
            "load the model from its Hugging Face folder to save it"
        )
    return out
