"""Importance ratio, clipped surrogate, its gradient and clip statistics, in one pass over [N, L]."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform, check_implementation, found
from jaxrl_kernels.partition import ROWS, AnyMesh, Axis, dividing, mesh_of, vary_together
from jaxrl_kernels.ratio_clip.rows import LONGEST, Bounds, Clipped, Rows, of_rows, pallas_rows, reference_rows

__all__ = ["Clipped", "ratio_clip"]

Array = jax.Array
Number = float | jax.Array


def ratio_clip(
    logp: Array,
    other: Array,
    advantages: Array,
    weights: Array,
    *,
    low: Number = 0.2,
    high: Number = 0.2,
    dual: Number | None = None,
    whole_row: bool = False,
    mean: bool = True,
    value_weights: Array | None = None,
    implementation: str | None = None,
    row_block: int | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ROWS,
) -> Clipped:
    """Sum of the clipped surrogate over each row (PPO, 1707.06347), differentiable in `logp`, with statistics.

    Let d_t = logp_t - other_t on the tokens that count (weight not 0), clipped to +-20. The ratio is rho_t = exp(d_t),
    or with `whole_row`, for all tokens of a row, the exp of the clipped mean (or sum) of d (GSPO, 2507.18071):

        v_t = min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t),    at least dual A_t where A_t < 0 (1912.09729)
        value = sum_t value_weights_t v_t

    The forward pass saves one array for the backward pass, d value_n / d logp_nt, f32[N, L], so that the backward pass
    is one product. At a kink the derivative is JAX's: the mean of both sides for each minimum, maximum and clip.

    Args:
      logp, other: f32[N, L], log-probabilities under the policy and under the denominator of the ratio. With
        `jax_enable_x64` all arrays can be float64, and the result is too; the Pallas kernel does not support float64.
      advantages: f32[N, L].
      weights: f32[N, L], weight of each token in the statistics. Where it is 0, the token's other entries are ignored,
        even NaN.
      low, high, dual: clip range, a number or a traced scalar each; low in [0, 1], high >= 0, dual > 1 or None.
      whole_row: one ratio per row instead of one per token. Static.
      mean: average a row's log-ratios (the geometric mean of ratios) instead of summing them. Static.
      value_weights: f32[N, L], weight of each token in the value, if different from `weights`.
      implementation: "pallas", "xla", "reference" (the formula, differentiated by JAX) or None, see `implementations`.
        None is xla for rows of more than 16384 tokens; float64 is always xla.
      row_block: rows per block of the kernel, a multiple of 8; None for as many as fit, up to 256. Static.
      mesh: the devices, if the types of the arrays do not contain them (`partition.mesh_of`).
      row_axis: mesh axis over which rows are sharded, if the mesh has it and it divides N evenly.

    Returns:
      `Clipped`: value, and statistics without gradient, f32[N] each.
      Gradients with respect to anything but `logp` are 0. Only the reference has a forward-mode derivative.

    Raises:
      ValueError: shapes or dtypes do not match, a number is out of range, or the implementation is unknown.

    >>> logp, other = jnp.log(jnp.array([[0.3, 0.5]])), jnp.log(jnp.array([[0.2, 0.5]]))
    >>> found = ratio_clip(logp, other, jnp.array([[1.0, -1.0]]), jnp.ones((1, 2)))  # ratios 1.5, cut at 1.2, and 1
    >>> print(f"{found.value[0]:.4f} {found.cut_high[0]:.0f} {found.max_ratio[0]:.4f}")
    0.2000 1 1.5000
    """
    _check(Rows(logp, other, advantages, weights, value_weights), low, high, dual, row_block)
    check_implementation(implementation)
    # The bounds are computed as in the formula, so that they round identically.
    bounds = Bounds(*(None if x is None else jnp.asarray(x, logp.dtype) for x in (1 - low, 1 + high, dual)))
    arrays, bounds = jax.lax.stop_gradient(((other, advantages, weights, value_weights), bounds))
    varying = vary_together(logp, *arrays, *bounds)
    operands = Rows(*varying[:5]), Bounds(*varying[5:])
    if implementation == "reference":
        result = reference_rows(*operands, whole_row=whole_row, mean=mean)
    else:
        on_device = partial(_clipped, (whole_row, mean, implementation, row_block))
        mesh = mesh_of(mesh, operands)
        if mesh is not None:
            rows = jax.P(dividing(mesh, row_axis, len(logp)))
            on_device = jax.shard_map(on_device, mesh=mesh, in_specs=(rows, jax.P()), out_specs=rows, check_vma=False)
        result = on_device(*operands)
    return Clipped(*(x[:, 0] for x in jax.lax.stop_gradient(result)._replace(value=result.value)))


Settings = tuple[bool, bool, str | None, int | None]  # whole_row, mean, implementation and row_block


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clipped(settings: Settings, *operands: Any) -> Clipped:
    """f32[N, 1] each."""
    return _forward(settings, *operands)[0]


def _forward(settings: Settings, *operands: Any) -> tuple[Clipped, Array]:
    whole_row, mean, implementation, row_block = settings
    xla = partial(of_rows, whole_row=whole_row, mean=mean)
    pallas = partial(pallas_rows, whole_row=whole_row, mean=mean, row_block=row_block)
    (rows, length), dtype = operands[0].logp.shape, operands[0].logp.dtype
    too_long = implementation is None and length > LONGEST
    no_kernel = not rows or not length or too_long or dtype != jnp.float32
    slope, result = by_platform(xla, pallas, "xla" if no_kernel else implementation, *operands)
    return result, slope


def _backward(settings: Settings, slope: Array, cotangents: Clipped) -> tuple[Any, ...]:
    nothing: Any = None
    return Rows(cotangents.value * slope, nothing, nothing, nothing, nothing), nothing


_clipped.defvjp(_forward, _backward)


def _check(rows: Rows, low: Number, high: Number, dual: Number | None, row_block: int | None) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    logp = rows.logp
    if logp.ndim != 2 or logp.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"logp must be a float32 matrix, {found(logp)}")
    for name, array in rows._asdict().items():
        if array is not None and (array.shape != logp.shape or array.dtype != logp.dtype):
            raise ValueError(f"{name} must be {logp.dtype}{list(logp.shape)} as logp is, {found(array)}")
    for name, number in (("low", low), ("high", high), ("dual", dual)):
        if number is not None and jnp.shape(number) != ():
            raise ValueError(f"{name} must be a number, found shape {list(jnp.shape(number))}")
    if isinstance(low, float | int) and not 0 <= low <= 1:
        raise ValueError(f"low must be at least 0 and at most 1, found {low}")
    if isinstance(high, float | int) and not high >= 0:
        raise ValueError(f"high must be at least 0, found {high}")
    if isinstance(dual, float | int) and not dual > 1:
        raise ValueError(f"dual must be above 1, found {dual}")
    if row_block is not None and (row_block < 1 or row_block % 8):
        raise ValueError(f"row_block must be a multiple of 8, found {row_block}")
