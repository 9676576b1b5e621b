"""Random keys, checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError, shown


def check_key(key: Any) -> None:
    """InputError unless this is one random key of JAX, typed or of the older kind, uint32[2]."""
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not ((typed and shape == ()) or (dtype == jnp.uint32 and shape == (2,))):
        raise InputError(f"the key is {kind_of(key)}, but must be one random key: jax.random.key(0)")


def kind_of(value: Any) -> str:
    """What something that is no array is, in a few words, without its contents where these are many."""
    if isinstance(value, str | int | float | None):
        return shown(value)
    return f"a {type(value).__name__}"
