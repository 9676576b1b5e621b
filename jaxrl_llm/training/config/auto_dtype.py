"""The dtype of a run that leaves it to the devices: bfloat16 where they multiply it faster than float32."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from jaxrl_llm.training.config import TrainConfig

AUTO = "auto"
HALF_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # of x86 processors, by their names in /proc/cpuinfo, the fastest first


def with_dtype(config: TrainConfig, resumed: bool) -> tuple[TrainConfig, str]:
    """The configuration with a dtype where it has "auto", and a line that says which; unchanged elsewhere.

    A resumed run keeps its dtype. On several hosts all must call this; it is bfloat16 where all are fast at it.
    """
    from jaxrl_llm.distributed.hosts import all_hosts  # here: `with_kept_dtype` is for those that do not import JAX

    if config.dtype != AUTO:
        return config, ""
    if resumed:
        before = with_kept_dtype(config)
        return before, f"dtype {before.dtype}, as before"
    import jax

    platform, own = jax.default_backend(), half_instructions()
    found = all_hosts().gather(platform != "cpu" or bool(own))
    return dataclasses.replace(config, dtype=dtype_for(platform, all(found))), _line(platform, own, all(found))


def with_kept_dtype(config: TrainConfig) -> TrainConfig:
    """The configuration, for "auto" with the dtype of the run that is in its output."""
    from jaxrl_llm.training.folder.files import RunFolder  # here: that module imports this one

    if config.dtype != AUTO:
        return config
    return dataclasses.replace(config, dtype=RunFolder(config.output).read_config().dtype)


def dtype_for(platform: str, fast: bool = False) -> Literal["float32", "bfloat16"]:
    """The dtype that "auto" is on "tpu", "gpu", or "cpu". fast: whether the processors have instructions for bfloat16.

    >>> dtype_for("tpu"), dtype_for("cpu"), dtype_for("cpu", fast=True)
    ('bfloat16', 'float32', 'bfloat16')
    """
    return "bfloat16" if platform != "cpu" or fast else "float32"


def half_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's instructions for products of bfloat16, of HALF_INSTRUCTIONS; "" where none are known."""
    try:
        text = cpuinfo.read_text()
    except OSError:  # not Linux
        return ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    there = set(flags.group(1).split()) if flags else set()
    return next((name for name in HALF_INSTRUCTIONS if name in there), "")


def _line(platform: str, own: str, fast: bool) -> str:
    if platform != "cpu":
        return "dtype bfloat16, as --dtype auto is on accelerators"
    if fast:
        return f"dtype bfloat16: the processor has instructions for it ({own}); --dtype float32 sets the other"
    where = "some host's processor" if own else "the processor"
    return f"dtype float32: {where} has no instructions for bfloat16 that are known; --dtype bfloat16 sets the other"
