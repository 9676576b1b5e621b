"""Tensors of safetensors files, each read when it is called for; also of types that numpy has not.

Quantised ones, MXFP4 and FP8 with scales, are read as floats, one tensor at a time.

MXFP4 (OCP Microscaling Formats 1.0; gpt-oss): 32 numbers of an output share a scale, a power of two whose exponent is a
byte, 127 for 2^0. A number has four bits, E2M1, two in a byte, the lower half first. `X_blocks` uint8 [experts,
outputs, inputs / 32, 16] and `X_scales` uint8 [experts, outputs, inputs / 32] are X [experts, inputs, outputs]. All of
its numbers are numbers of bfloat16 too.

FP8 (DeepSeek-V3, arXiv 2412.19437, section 3.3; Qwen): `X` of E4M3 [..., outputs, inputs] and `X_scale_inv`, a factor
for each block of, mostly, 128 x 128, of which the last of a row or column may be smaller; or one for all of a matrix. A
factor is a float, or, as a byte, the exponent of a power of two. Products are rounded to float32. Scales of activations
are left out: activations are not rounded here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.families.family import MXFP4, Quantisation
from jaxrl_llm.models.kinds import reason, shown
from jaxrl_llm.utils.errors import InputError

Tensors = Mapping[str, Callable[[], np.ndarray]]  # name -> a function that reads it
FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors calls them
# Floats of eight bits, which safetensors does not give to numpy.
_EIGHT_BITS = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "F8_E8M0": jnp.float8_e8m0fnu}
EIGHT_BITS = {name: jnp.dtype(dtype) for name, dtype in _EIGHT_BITS.items()}
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.asarray([*_HALF, *(-x for x in _HALF)], np.float32)
E4M3 = np.arange(256, dtype=np.uint8).view(EIGHT_BITS["F8_E4M3"]).astype(np.float32)
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
with np.errstate(over="ignore"):
    # The two numbers of a byte at each scale, [scale, byte, 2], as bits: they are looked up together.
    _SCALED = E8M0[:, None, None] * np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=-1)
    _PAIRS = _SCALED.astype(jnp.bfloat16).view(np.uint32).reshape(-1)
SCALE, ACTIVATIONS = "_scale_inv", "activation_scale"
Read = Callable[[], np.ndarray]


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: calling it reads it."""

    opened: Any  # by safetensors
    path: Path
    name: str  # in the file
    dtype: str  # as safetensors calls it

    def __call__(self) -> np.ndarray:
        """The tensor as it is stored. InputError where the file cannot be read."""
        from safetensors import SafetensorError

        try:
            if self.dtype in EIGHT_BITS:
                return self._bytes().view(EIGHT_BITS[self.dtype])
            return np.asarray(self.opened.get_tensor(self.name))
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.path}: tensor {shown(self.name)} cannot be read ({reason(error)}): download it again"
            ) from None

    def _bytes(self) -> np.ndarray:
        """The bytes of a tensor whose numbers have one each: the header says where they are."""
        with self.path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))[self.name]
            start, end = entry["data_offsets"]
            file.seek(8 + size + start)
            return np.frombuffer(file.read(end - start), np.uint8).reshape(entry["shape"])


def dtype_of(read: Callable[[], np.ndarray]) -> str:
    """The type of a tensor's numbers as it is stored; one that is computed is of floats."""
    return read.dtype if isinstance(read, FileTensor) else "F32"


def dequantised(tensors: Tensors, quantisation: Quantisation, where: str) -> Tensors:
    """The tensors of a folder, those that are quantised as floats; each is computed when it is called for.

    Which ones these are is seen by the names of their scales: modules that were not converted have none. InputError, at
    once where a tensor has no scales or is not of its type, when it is read where shapes do not fit.
    """
    if quantisation.method == MXFP4:
        out = dict(tensors)
        for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
            blocks, scales = (_part(out, f"{name}{end}", ("U8",), where) for end in ("_blocks", "_scales"))
            out[name] = partial(_mxfp4, name, blocks, scales, where)
        return out
    out = {name: read for name, read in tensors.items() if not name.endswith(ACTIVATIONS)}
    for name in [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]:
        scales = _part(out, name + SCALE, (*FLOATS, "U8", "F8_E8M0"), where)
        out[name] = partial(_fp8, name, _part(out, name, ("F8_E4M3",), where), scales, quantisation.block, where)
    return out


def quantised_count(tensors: Tensors, quantisation: Quantisation) -> int:
    """How many tensors of a folder are quantised."""
    end = "_blocks" if quantisation.method == MXFP4 else SCALE
    return sum(name.endswith(end) for name in tensors)


def _mxfp4(name: str, read_blocks: Read, read_scales: Read, where: str) -> np.ndarray:
    blocks, scales = read_blocks(), read_scales()
    if blocks.ndim != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
        raise InputError(
            f"{where}: tensor {name + '_blocks'!r} has shape {blocks.shape} and its scales {scales.shape}, but must be "
            "[experts, outputs, blocks, 16], and its scales [experts, outputs, blocks]"
        )
    experts, outputs, count, _ = blocks.shape
    out = np.empty((experts, outputs, count * 32), jnp.bfloat16)
    for expert in range(experts):
        index = scales[expert].astype(np.uint16)[..., None] << 8 | blocks[expert]
        # Numpy looks up fastest where it clips.
        np.take(_PAIRS, index, mode="clip", out=out[expert].view(np.uint32).reshape(index.shape))
    return out.swapaxes(1, 2)


def _fp8(name: str, read: Read, read_scales: Read, block: tuple[int, int] | None, where: str) -> np.ndarray:
    values, scales = np.take(E4M3, read().view(np.uint8), mode="clip"), read_scales()
    whole = values.shape[-2:]
    if len(whole) != 2:
        raise InputError(f"{where}: tensor {name!r} has shape {values.shape}, but must be a matrix, or several")
    rows, columns = block or whole
    wanted = (*values.shape[:-2], -(-whole[0] // rows), -(-whole[1] // columns))
    if block is None and scales.size == 1:
        scales = scales.reshape(1, 1)
    elif scales.shape != wanted:
        raise InputError(
            f"{where}: tensor {name + SCALE!r} has shape {scales.shape}, but blocks of {rows} x {columns} of "
            f"{values.shape} imply {wanted}"
        )
    scales = E8M0[scales.view(np.uint8)] if scales.dtype.itemsize == 1 else scales.astype(np.float32)
    factors = np.repeat(scales, columns, axis=-1)[..., : whole[1]]
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(scales.shape[-2]):
            values[..., number * rows : (number + 1) * rows, :] *= factors[..., number, None, :]
    return values


def _part(tensors: dict[str, Read], name: str, dtypes: tuple[str, ...], where: str) -> Read:
    """Take one of the tensors that a quantised one is stored as. InputError where it is missing, or of another type."""
    if name not in tensors:
        raise InputError(f"{where}: the weights lack the tensor {name!r} of a quantised one: the files are incomplete")
    if (dtype := dtype_of(tensors[name])) not in dtypes:
        raise InputError(
            f"{where}: tensor {name!r} holds numbers of type {dtype}, but must be of {' or '.join(dtypes)}"
        )
    return tensors.pop(name)
