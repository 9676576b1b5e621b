"""Quantised tensors of published files, MXFP4 and FP8 with scales, read as floats one tensor at a time.

MXFP4 (OCP Microscaling Formats 1.0; gpt-oss): 32 numbers of an output share a scale, a power of two whose exponent is a
byte, 127 for 2^0. A number has four bits, E2M1, two in a byte, the lower half first. `X_blocks` uint8 [experts,
outputs, inputs / 32, 16] and `X_scales` uint8 [experts, outputs, inputs / 32] are X [experts, inputs, outputs]. All of
its numbers are numbers of bfloat16 too.

FP8 (DeepSeek-V3, arXiv 2412.19437, section 3.3; Qwen): `X` of E4M3 [..., outputs, inputs] and `X_scale_inv`, a factor
for each block of, mostly, 128 x 128, of which the last of a row or column may be smaller; or one for all of a matrix. A
factor is a float, or, as a byte, the exponent of a power of two. Products are rounded to float32. Scales of activations
are left out: activations are not rounded here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.families.quantisation import MXFP4, Quantisation
from jaxrl_llm.models.io.file_tensor import EIGHT_BITS, FLOATS, Tensors, dtype_of
from jaxrl_llm.utils.errors import InputError

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


def dequantised(tensors: Tensors, quantisation: Quantisation, where: str) -> Tensors:
    """The tensors of a folder, those that are quantised as floats; each is computed when it is called for.

    Which ones these are is seen by the names of their scales: modules that were not converted have none. InputError, at
    once where a tensor has no scales or is not of its type, when it is read where shapes do not fit.
    """
    if quantisation.method == MXFP4:
        return _mxfp4_tensors(tensors, where)
    return _fp8_tensors(tensors, quantisation.block, where)


def quantised_count(tensors: Tensors, quantisation: Quantisation) -> int:
    """How many tensors of a folder are quantised."""
    end = "_blocks" if quantisation.method == MXFP4 else SCALE
    return sum(name.endswith(end) for name in tensors)


def _mxfp4_tensors(tensors: Tensors, where: str) -> Tensors:
    out = dict(tensors)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = (_part(out, f"{name}{end}", ("U8",), where) for end in ("_blocks", "_scales"))
        out[name] = partial(_mxfp4, name, blocks, scales, where)
    return out


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


def _fp8_tensors(tensors: Tensors, block: tuple[int, int] | None, where: str) -> Tensors:
    out = {name: read for name, read in tensors.items() if not name.endswith(ACTIVATIONS)}
    for name in [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]:
        scales = _part(out, name + SCALE, (*FLOATS, "U8", "F8_E8M0"), where)
        values = _part(out, name, ("F8_E4M3",), where)
        out[name] = partial(_fp8, name, values, scales, block, where)
    return out


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
        raise InputError(f"{where}: the weights lack the tensor {name!r} of a quantised one: is the download complete?")
    if (dtype := dtype_of(tensors[name])) not in dtypes:
        raise InputError(
            f"{where}: tensor {name!r} holds numbers of type {dtype}, but must be of {' or '.join(dtypes)}"
        )
    return tensors.pop(name)
