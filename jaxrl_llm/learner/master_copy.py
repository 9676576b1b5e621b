"""Optimisers of parameters that are narrower than float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.learner.moments import in_place


class MasterState(NamedTuple):
    """State of `in_float32`."""

    master: Any  # float32 where the parameter is narrower, else None
    inner: optax.OptState


def in_float32(inner: optax.GradientTransformation, master_copy: bool = True) -> optax.GradientTransformationExtraArgs:
    """`inner` for parameters of which some are narrower than float32: it sees parameters and gradients in float32.

    With a master copy, updates add up in float32, and the parameters are the masters, rounded. Where a parameter is not
    its master rounded, because something else has changed it or kept it from changing, the parameter counts. Without
    one, an update below half a unit in the last place is lost. Where every parameter is float32 already, it is `inner`,
    with the same state.
    """

    inner = optax.with_extra_args_support(inner)

    def narrow(x: Any) -> bool:
        return x.dtype.itemsize < 4

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        state = inner.init(masters)
        if not (master_copy and any(map(narrow, jax.tree.leaves(params)))):
            return state
        return MasterState(jax.tree.map(lambda p, m: m if narrow(p) else None, params, masters), state)

    def update(gradients: Any, state: Any, params: Any = None, *, dry: bool = False, **others: Any) -> tuple[Any, Any]:
        extra = {"dry": dry, **others}
        if params is None or not any(map(narrow, jax.tree.leaves(params))):
            return inner.update(gradients, state, params, **extra)

        def gradients32(one: jax.Array | float) -> Any:
            return jax.tree.map(lambda g: one * g.astype(jnp.float32), gradients)

        if not master_copy:
            params32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            return inner.update(gradients32(1.0), state, params32, **extra)

        def params32_of(master: jax.Array, p: jax.Array) -> jax.Array:
            return jnp.where(master.astype(p.dtype) == p, master, p.astype(jnp.float32))

        def advance(before: tuple[Any, Any], one: jax.Array | float) -> tuple[Any, Any]:
            params32 = jax.tree.map(params32_of, before[0], params)
            updates, after = inner.update(gradients32(one), before[1], params32, **extra)
            return jax.tree.map(jnp.add, params32, updates), after

        masters = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)
        finite = jnp.isfinite(optax.tree.norm(gradients))
        new, after = in_place(advance, (masters, state.inner), finite, dry)
        # What, added to the parameter and rounded to its dtype, gives the master rounded to it.
        updates = jax.tree.map(lambda n, p: n.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), new, params)
        return updates, MasterState(jax.tree.map(lambda p, n: n if narrow(p) else None, params, new), after)

    return optax.GradientTransformationExtraArgs(init, update)
