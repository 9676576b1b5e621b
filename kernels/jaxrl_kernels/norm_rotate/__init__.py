"""Normalising and rotating the heads of queries and keys in one pass over memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform, check_implementation, found
from jaxrl_kernels.norm_rotate.pallas_kernel import LANES, ROWS, Norm, backward, forward, forward_of_rows, reference
from jaxrl_kernels.partition import AnyMesh, Axis, dividing, mesh_of, vary_together

__all__ = ["norm_rotate"]


def norm_rotate(
    x: jax.Array,
    weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ("data", "fsdp", "expert"),
    token_axis: Axis = "sequence",
    head_axis: Axis = "tensor",
) -> jax.Array:
    """RMS norm of each head (Qwen3, Gemma 3), and rotary position embedding; differentiable in x and weight.

    With n = x / rms(x) * (offset + weight) over a head, rounded to the dtype of x (n = x without a weight), dimensions
    i and i + h / 2 are a pair that is rotated: (n_i cos_i - n_j sin_i, n_j cos_i + n_i sin_i) for j = i + h / 2.

    Args:
      x: [N, L, H, h], floating; h is even.
      weight: [h], or None for no norm.
      cos, sin: f32[N, L, h / 2], of each token's position.
      epsilon, offset: of the norm. Static.
      implementation: "pallas", "xla", "reference" or None, see `implementations`; "xla" and "reference" are the same.
        The kernel needs L to be a multiple of 128 and h of 16; or one token of each row, L = 1, where N must be a
        multiple of 16 and h of 128, and derivatives take "xla". Other shapes take "xla".
      mesh: the devices, if the types of the arrays do not contain them (`partition.mesh_of`).
      row_axis, token_axis, head_axis: mesh axes over which N, L and H are sharded, if the mesh has them and they divide
        these evenly.

    Returns:
      [N, L, H, h] in the dtype of x.

    Raises:
      ValueError: shapes or dtypes do not match, or the implementation is unknown.

    >>> x, quarter = jnp.array([3.0, 4.0]).reshape(1, 1, 1, 2), jnp.ones((1, 1, 1))
    >>> print(norm_rotate(x, None, 0 * quarter, quarter).ravel())  # a turn of 90 degrees
    [-4.  3.]
    """
    check_implementation(implementation)
    if x.ndim != 4 or x.shape[3] % 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating [N, L, H, h] with an even h, {found(x)}")
    N, L, H, h = x.shape
    for name, a in (("cos", cos), ("sin", sin)):
        if a.shape != (N, L, h // 2):
            raise ValueError(f"{name} must be float32[{N}, {L}, {h // 2}], {found(a)}")
    if weight is not None and weight.shape != (h,):
        raise ValueError(f"weight must be [{h}], {found(weight)}")
    single = L == 1
    fits = N % ROWS == h % LANES == 0 if single else L % LANES == h % 16 == 0
    norm = Norm(float(epsilon), float(offset))
    implementation = implementation if fits and x.size > 0 and implementation != "reference" else "xla"
    mesh = mesh_of(mesh, x, cos, sin)
    if mesh is None or implementation == "xla":
        return _rotated(norm, implementation, x, weight, cos, sin)
    rows, heads = dividing(mesh, row_axis, N // ROWS if single else N), dividing(mesh, head_axis, H)
    tokens = None if single else dividing(mesh, token_axis, L // LANES)

    def run(x: jax.Array, weight: jax.Array | None, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x, weight, cos, sin = vary_together(x, weight, cos, sin)
        out = _rotated(norm, implementation, x.reshape(*x.shape[:2], -1, h), weight, cos, sin)
        return out.reshape(*out.shape[:2], -1)

    flat, of_tokens = jax.P(rows, tokens, heads), jax.P(rows, tokens)
    specs = (flat, None if weight is None else jax.P(), of_tokens, of_tokens)
    track = implementation != "pallas"  # interpret mode does not track varying axes
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=flat, check_vma=track)
    return sharded(x.reshape(N, L, -1), weight, cos, sin).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rotated(norm: Norm, implementation: str | None, x: jax.Array, *rest: Any) -> jax.Array:
    kernel = forward_of_rows if x.shape[1] == 1 else forward
    return by_platform(partial(reference, norm=norm), partial(kernel, norm=norm), implementation, x, *rest)


def _backward(norm: Norm, implementation: str | None, given: Any, dy: jax.Array) -> tuple[Any, ...]:
    *_, cos, sin = given

    def in_jax(x: jax.Array, weight: jax.Array | None, cos: jax.Array, sin: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(lambda x, weight: reference(x, weight, cos, sin, norm), x, weight)[1](dy)

    implementation = "xla" if dy.shape[1] == 1 else implementation
    dx, dweight = by_platform(in_jax, partial(backward, norm=norm), implementation, *given, dy)
    return dx, dweight, jnp.zeros_like(cos), jnp.zeros_like(sin)


_rotated.defvjp(lambda *given: (_rotated(*given), given[2:]), _backward)
