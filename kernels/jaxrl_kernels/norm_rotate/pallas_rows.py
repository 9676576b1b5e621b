"""`norm_rotate` of one token of each row as a Pallas kernel for TPU (Mosaic), with rows along the sublanes.

In a decode step the arrays are small: what takes time is that XLA makes several instructions of this, each of which
takes a microsecond or more. A head is a whole number of lanes here, so that its sum is along them, and the other half
of a pair is found by rolling the lanes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.norm_rotate.reference import Norm

Array = jax.Array

ROWS = 16  # of a tile of bfloat16
BLOCK_NUMBERS = 2**18  # of a block of rows, at most


def _kernel(x: Any, weight: Any, cos: Any, sin: Any, out: Any, *, h: int, norm: Norm, scaled: bool) -> None:
    dtype, c, s = cos.dtype, cos[...], sin[...]
    for start in range(0, x.shape[1], h):
        n = x[:, start : start + h].astype(dtype)
        if scaled:
            inverse = jax.lax.rsqrt(jnp.sum(n * n, axis=1, keepdims=True) / h + norm.epsilon)
            n = (n * inverse * (norm.offset + weight[...])).astype(out.dtype).astype(dtype)
        out[:, start : start + h] = (n * c + pltpu.roll(n, h // 2, axis=1) * s).astype(out.dtype)


def forward(x: Array, weight: Array | None, cos: Array, sin: Array, norm: Norm, interpret: bool) -> Array:
    """[N, 1, H, h]; N is a multiple of ROWS, h of 128."""
    N, _, H, h = x.shape
    most = max(BLOCK_NUMBERS // (H * h), ROWS)
    rows = max(r for r in range(ROWS, min(N, most) + 1, ROWS) if N % r == 0)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    c, s = (a[:, 0].astype(dtype) for a in (cos, sin))
    angles = [jnp.concatenate([c, c], axis=1), jnp.concatenate([-s, s], axis=1)]
    scale = jnp.zeros((1, h), dtype) if weight is None else weight.astype(dtype)[None]
    block, angle = pl.BlockSpec((rows, H * h), lambda n: (n, 0)), pl.BlockSpec((rows, h), lambda n: (n, 0))
    found = pl.pallas_call(
        partial(_kernel, h=h, norm=norm, scaled=weight is not None),
        grid=(N // rows,),
        in_specs=[block, pl.BlockSpec((1, h), lambda n: (0, 0)), angle, angle],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((N, H * h), x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=N * H,
            bytes_accessed=2 * x.nbytes + sum(a.nbytes for a in angles),
        ),
        interpret=interpret,
        name="norm_rotate_rows",
    )(x.reshape(N, H * h), scale, *angles)
    return found.reshape(x.shape)
