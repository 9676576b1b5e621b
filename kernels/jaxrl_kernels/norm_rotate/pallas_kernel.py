"""`norm_rotate` as a formula, and it and its backward pass as Pallas kernels for TPU (Mosaic).

Tokens are along the lanes: arrays are [N, heads x h, tokens], as `packed_attention` reads them. A step of the grid
takes some heads of a block of tokens; the sums of a head, and the pairs that are rotated, are along the sublanes.

`forward_of_rows`, of one token of each row, has rows along the sublanes. In a decode step the arrays are small: what
takes time is that XLA makes several instructions of this, each of which takes a microsecond or more. A head is a whole
number of lanes there, so that its sum is along them, and the other half of a pair is found by rolling the lanes.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Norm(NamedTuple):
    """Static numbers of the norm."""

    epsilon: float
    offset: float


def reference(x: Array, weight: Array | None, cos: Array, sin: Array, norm: Norm) -> Array:
    """The formula. x [N, L, H, h]; cos, sin [N, L, h / 2]."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    n = x.astype(dtype)
    if weight is not None:
        inverse = jax.lax.rsqrt(jnp.mean(n * n, axis=-1, keepdims=True) + norm.epsilon)
        n = (n * inverse * (norm.offset + weight.astype(dtype))).astype(x.dtype).astype(dtype)
    first, second = jnp.split(n, 2, axis=-1)
    cos, sin = cos[:, :, None].astype(dtype), sin[:, :, None].astype(dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


Array = jax.Array

LANES = 128
MAX_TOKENS = 1024  # of a block
BLOCK_NUMBERS = 2**19  # of a block of heads and tokens, at most
MIB = 2**20


class _Sizes(NamedTuple):
    N: int
    L: int
    H: int
    h: int
    heads: int  # of a block
    tokens: int  # of a block
    norm: Norm
    interpret: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """Sequences, blocks of heads, blocks of tokens."""
        return self.N, self.H // self.heads, self.L // self.tokens


def _sizes(x: Array, norm: Norm, interpret: bool) -> _Sizes:
    N, L, H, h = x.shape
    tokens = max(t for t in range(LANES, min(L, MAX_TOKENS) + 1, LANES) if L % t == 0)
    heads = max(n for n in range(1, H + 1) if H % n == 0 and (n == 1 or n * h * tokens <= BLOCK_NUMBERS))
    return _Sizes(N, L, H, h, heads, tokens, norm, interpret)


def _normalised(x: Array, weight: Array | None, of: _Sizes, dtype: Any) -> tuple[Array, Array, Array]:
    """x / rms(x), the inverse of the rms, and offset + weight, of a head [h, tokens]."""
    assert weight is not None
    x = x.astype(dtype)
    inverse = jax.lax.rsqrt(jnp.sum(x * x, axis=0, keepdims=True) / of.h + of.norm.epsilon)
    return x * inverse, inverse, of.norm.offset + weight


def _forward_kernel(x: Any, weight: Any, cos: Any, sin: Any, out: Any, *, of: _Sizes, scaled: bool) -> None:
    dtype, half = cos.dtype, of.h // 2
    c, s, w = cos[...], sin[...], weight[...] if scaled else None
    for head in range(of.heads):
        place = head * of.h
        n = x[place : place + of.h, :]
        if scaled:
            unit, _, factor = _normalised(n, w, of, dtype)
            n = (unit * factor).astype(out.dtype)
        n = n.astype(dtype)
        first, second = n[:half], n[half:]
        out[place : place + half, :] = (first * c - second * s).astype(out.dtype)
        out[place + half : place + of.h, :] = (second * c + first * s).astype(out.dtype)


def _backward_kernel(
    x: Any, weight: Any, cos: Any, sin: Any, dy: Any, dx: Any, *rest: Any, of: _Sizes, scaled: bool
) -> None:
    dtype, half = cos.dtype, of.h // 2
    c, s, w = cos[...], sin[...], weight[...] if scaled else None
    sums = jnp.zeros((of.h, LANES), dtype)
    for head in range(of.heads):
        place = head * of.h
        d = dy[place : place + of.h, :].astype(dtype)
        first, second = d[:half], d[half:]
        dn = jnp.concatenate([first * c + second * s, second * c - first * s], axis=0)
        if scaled:
            unit, inverse, factor = _normalised(x[place : place + of.h, :], w, of, dtype)
            p = dn * unit
            sums += reduce(jnp.add, [p[:, i : i + LANES] for i in range(0, of.tokens, LANES)])
            dn = (dn * factor - unit * (jnp.sum(p * factor, axis=0, keepdims=True) / of.h)) * inverse
        dx[place : place + of.h, :] = dn.astype(dx.dtype)
    if scaled:
        (dweight,) = rest

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            dweight[...] = jnp.zeros_like(dweight)

        dweight[...] += sums


def _call(
    kernel: Any, name: str, of: _Sizes, arrays: list[Array], weight: Array | None, cos: Array, sin: Array,
    results: list[Any], out_specs: list[Any],
) -> Any:  # fmt: skip
    dtype = jnp.promote_types(arrays[0].dtype, jnp.float32)
    block = pl.BlockSpec((None, of.heads * of.h, of.tokens), lambda n, k, t: (n, k, t))
    angle = pl.BlockSpec((None, of.h // 2, of.tokens), lambda n, k, t: (n, 0, t))
    scale = jnp.zeros((of.h, 1), dtype) if weight is None else weight.astype(dtype)[:, None]
    angles = [a.astype(dtype).swapaxes(1, 2) for a in (cos, sin)]
    axes = jax.typeof(arrays[0]).manual_axis_type
    size = of.heads * of.h * of.tokens * 4
    return pl.pallas_call(
        partial(kernel, of=of, scaled=weight is not None),
        grid=of.grid,
        in_specs=[block, pl.BlockSpec((of.h, 1), lambda n, k, t: (0, 0)), angle, angle, *[block] * (len(arrays) - 1)],
        out_specs=[block, *out_specs],
        out_shape=[jax.ShapeDtypeStruct(r.shape, r.dtype, manual_axis_type=axes) for r in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=max(16 * MIB, 8 * size + 4 * MIB),
        ),
        cost_estimate=pl.CostEstimate(
            flops=12 * len(arrays) * arrays[0].size,
            transcendentals=of.N * of.H * of.L,
            bytes_accessed=sum(a.nbytes for a in (*arrays, *angles)) + arrays[0].nbytes,
        ),
        interpret=of.interpret,
        name=name,
    )(arrays[0], scale, *angles, *arrays[1:])


def _tokens_last(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)


def forward(x: Array, weight: Array | None, cos: Array, sin: Array, norm: Norm, interpret: bool) -> Array:
    """[N, L, H, h]; L is a multiple of 128."""
    of, array = _sizes(x, norm, interpret), _tokens_last(x)
    (out,) = _call(_forward_kernel, "norm_rotate", of, [array], weight, cos, sin, [array], [])
    return out.swapaxes(1, 2).reshape(x.shape)


def backward(
    x: Array, weight: Array | None, cos: Array, sin: Array, dy: Array, norm: Norm, interpret: bool
) -> tuple[Array, Array | None]:
    """The derivatives of x and weight."""
    of, arrays = _sizes(x, norm, interpret), [_tokens_last(x), _tokens_last(dy.astype(x.dtype))]
    results: list[Any] = [arrays[0]]
    out_specs: list[Any] = []
    if weight is not None:
        results.append(jax.ShapeDtypeStruct((*of.grid[:2], of.h, LANES), jnp.promote_types(x.dtype, jnp.float32)))
        out_specs.append(pl.BlockSpec((None, None, of.h, LANES), lambda n, k, t: (n, k, 0, 0)))
    dx, *sums = _call(_backward_kernel, "norm_rotate_back", of, arrays, weight, cos, sin, results, out_specs)
    dx = dx.swapaxes(1, 2).reshape(x.shape)
    return dx, None if weight is None else jnp.sum(sums[0], axis=(0, 1, 3)).astype(weight.dtype)


ROWS = 16  # of a tile of bfloat16
ROW_NUMBERS = 2**18  # of a block of rows, at most


def _rows_kernel(x: Any, weight: Any, cos: Any, sin: Any, out: Any, *, h: int, norm: Norm, scaled: bool) -> None:
    dtype, c, s = cos.dtype, cos[...], sin[...]
    for start in range(0, x.shape[1], h):
        n = x[:, start : start + h].astype(dtype)
        if scaled:
            inverse = jax.lax.rsqrt(jnp.sum(n * n, axis=1, keepdims=True) / h + norm.epsilon)
            n = (n * inverse * (norm.offset + weight[...])).astype(out.dtype).astype(dtype)
        out[:, start : start + h] = (n * c + pltpu.roll(n, h // 2, axis=1) * s).astype(out.dtype)


def forward_of_rows(x: Array, weight: Array | None, cos: Array, sin: Array, norm: Norm, interpret: bool) -> Array:
    """[N, 1, H, h]; N is a multiple of ROWS, h of 128."""
    N, _, H, h = x.shape
    most = max(ROW_NUMBERS // (H * h), ROWS)
    rows = max(r for r in range(ROWS, min(N, most) + 1, ROWS) if N % r == 0)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    c, s = (a[:, 0].astype(dtype) for a in (cos, sin))
    angles = [jnp.concatenate([c, c], axis=1), jnp.concatenate([-s, s], axis=1)]
    scale = jnp.zeros((1, h), dtype) if weight is None else weight.astype(dtype)[None]
    block, angle = pl.BlockSpec((rows, H * h), lambda n: (n, 0)), pl.BlockSpec((rows, h), lambda n: (n, 0))
    found = pl.pallas_call(
        partial(_rows_kernel, h=h, norm=norm, scaled=weight is not None),
        grid=(N // rows,),
        in_specs=[block, pl.BlockSpec((1, h), lambda n: (0, 0)), angle, angle],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((N, H * h), x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size, transcendentals=N * H, bytes_accessed=2 * x.nbytes + sum(a.nbytes for a in angles)
        ),
        interpret=interpret,
        name="norm_rotate_rows",
    )(x.reshape(N, H * h), scale, *angles)
    return found.reshape(x.shape)
