"""Choice of the implementation, sharding over a mesh, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_kernels.decode_attention.tiles import LANES
from jaxrl_kernels.implementations import by_platform, check_implementation
from jaxrl_kernels.partition import AnyMesh, Axis, dividing, mesh_of, vary_together

Result = TypeVar("Result")


def on_mesh(
    reference: Callable[..., Result],
    kernel: Callable[..., Result],
    implementation: str | None,
    mesh: AnyMesh | None,
    row_axis: Axis,
    head_axis: Axis,
    operands: tuple[Any, ...],
    dimensions: tuple[str, ...],
) -> Result:
    """Run the reference or the kernel, sharded over rows (or prompt slots) and heads on a mesh.

    operands: the queries first. dimensions: the leading dimensions of each operand (a pytree): "NK" for rows or slots
    and then heads, "N" for rows or slots, or "".
    """
    if implementation == "reference":
        return reference(*operands)

    def pallas(*operands: Any, interpret: bool) -> Result:
        # A Pallas kernel has no differentiation rule.
        return kernel(*jax.lax.stop_gradient(vary_together(*operands)), interpret=interpret)

    empty = 0 in operands[0].shape
    run = partial(by_platform, reference, pallas, "xla" if empty else implementation)
    mesh = mesh_of(mesh, operands)
    if mesh is None or empty:
        return run(*operands)
    rows, heads = operands[0].shape[:2]
    axes = {"N": dividing(mesh, row_axis, rows), "K": dividing(mesh, head_axis, heads)}
    specs = tuple(jax.P(*(axes[name] for name in names)) for names in dimensions)
    # Interpret mode does not track varying axes.
    track = implementation != "pallas"
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=track)(*operands)


def check_numbers(softcap: float, window: int, implementation: str | None, tile: int | None) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    check_implementation(implementation)
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    if window < 0:
        raise ValueError(f"window must be 0 (none) or above, found {window}")
    if tile is not None and (tile < 1 or tile % LANES):
        raise ValueError(f"tile must be a multiple of {LANES}, found {tile}")


def check_cache(
    shape: tuple[int, int, int],
    keys: jax.Array,
    values: jax.Array,
    key_scale: jax.Array | None,
    value_scale: jax.Array | None,
) -> None:
    """As `check_numbers`, for a cache; shape: (slots or rows, heads, head size) of the queries."""
    found = lambda x: f"found {x.dtype}{list(x.shape)}"  # noqa: E731
    N, K, h = shape
    floating = jnp.issubdtype(keys.dtype, jnp.floating)
    if keys.ndim != 4 or keys.shape[:3] != shape or keys.shape[3] < 1 or not (floating or keys.dtype == jnp.int8):
        raise ValueError(f"keys must be floating or int8 [{N}, {K}, {h}, S], {found(keys)}")
    S = keys.shape[3]
    if values.shape != (N, K, S, h) or values.dtype != keys.dtype:
        raise ValueError(f"values must be {keys.dtype}[{N}, {K}, {S}, {h}], as the keys are, {found(values)}")
    if (key_scale is None) != (value_scale is None):
        raise ValueError("pass both key_scale and value_scale, or neither")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and scale.shape != (N, K, S):
            raise ValueError(f"{name} must be float32[{N}, {K}, {S}], {found(scale)}")
