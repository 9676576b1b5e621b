"""`quantization_config` of a config.json: how a model's files store weights in fewer bits than floats have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.kinds import Kind, check, list_of, one_of, or_null, shown, whole
from jaxrl_llm.utils.errors import InputError

FP8, MXFP4 = "fp8", "mxfp4"
_SIZES = list_of(whole(1))
_BLOCK = or_null(Kind("two whole numbers of at least 1", lambda x: _SIZES.test(x) and len(x) == 2))
_SETTINGS = {
    "weight_block_size": _BLOCK,
    "fmt": or_null(one_of("e4m3")),
    "expert_dtype": or_null(one_of("fp8")),
    "scale_fmt": or_null(one_of("float", "ue8m0")),
}


class Quantisation(NamedTuple):
    """How quantised tensors are stored; which ones are is seen in the files."""

    method: str  # FP8 or MXFP4
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: all of a matrix

    def __str__(self) -> str:
        return f"{self.method}, blocks of {self.block[0]} x {self.block[1]}" if self.block else self.method


def quantisation_of(raw: Mapping[str, Any], where: str) -> Quantisation | None:
    """What the settings of a language model say of its weights; None for floats.

    Read are "mxfp4" (gpt-oss) and "fp8" (E4M3 with a scale for each block, as of DeepSeek-V3 and Qwen's FP8 models, or
    for each matrix). InputError, in one line, for others. Source: transformers' `Mxfp4Config` and
    `FineGrainedFP8Config`.
    """
    found = raw.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method", "unknown")
    if method == MXFP4:
        return Quantisation(MXFP4)
    if method != FP8:
        raise InputError(
            f"{where}: weights that are quantised ({shown(method)}) are not read, but only {FP8} and {MXFP4}: give the "
            "original model"
        )
    check(found, _SETTINGS, where, "quantization_config.")
    block = found.get("weight_block_size", (128, 128))
    return Quantisation(FP8, None if block is None else (block[0], block[1]))
