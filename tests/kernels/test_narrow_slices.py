"""Slices written into narrow arrays: as `dynamic_update_slice_in_dim`, bit by bit and without a wide copy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxrl_kernels.half_products import put_slice


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("start", [0, 3, 9])
def test_slices_are_written_as_by_dynamic_update_slice(dtype: Any, axis: int, start: int) -> None:
    old = jnp.asarray(np.arange(48).reshape(6, 8) - 20, dtype)
    new = jnp.asarray(np.arange(6).reshape(2, 3) + 31, dtype)
    wanted = jax.lax.dynamic_update_slice_in_dim(old, new if axis == 0 else new.T, start, axis)
    found = jax.jit(put_slice, static_argnums=3)(old, new if axis == 0 else new.T, start, axis)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others write slices of bfloat16 themselves")
def test_cpus_write_the_bits() -> None:
    old, new = jnp.zeros((64, 32), jnp.bfloat16), jnp.full((1, 32), jnp.nan, jnp.bfloat16)
    text = jax.jit(put_slice, static_argnums=3).lower(old, new, 5, 0).compile().as_text()
    assert "u16[64,32]" in text
    assert "f32[64,32]" not in text


def test_other_platforms_get_the_plain_operation() -> None:
    old, new = jnp.zeros((64, 32), jnp.bfloat16), jnp.ones((1, 32), jnp.bfloat16)
    for platform in ("tpu", "cuda"):
        traced = jax.jit(put_slice, static_argnums=3).trace(old, new, 5, 0)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "bitcast_convert" not in text
