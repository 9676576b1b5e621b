"""Parts of the optimiser that mind their memory: optax's, worked out in the memory of what they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def in_place(advance: Callable[[Any, jax.Array], Any], old: Any, when: jax.Array) -> Any:
    """`advance(old, 1.0)` where `when` (bool[]), else `old`, in the memory of `old` if that is donated.

    It is a loop of one turn or none. Otherwise the compiler works the new values out once more wherever they are read,
    from the old ones, which then have to be kept beside them: for Adam, up to twice the parameters. The second argument
    is a 1 that the compiler does not know: what is multiplied by it is not worked out, and kept, before the loop.
    """
    return jax.lax.fori_loop(0, when.astype(jnp.int32), lambda turn, x: advance(x, 1.0 + turn), old)


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float, max_norm: float = 0.0, first: Any = jnp.float32
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980), after clipping by global norm: `optax.chain(clip_by_global_norm,
    scale_by_adam)` in less memory, as neither clipped gradients nor old moments are kept. Its state is optax's.

    max_norm: 0 for no clipping. first: dtype of the first moment; the update is of the moment as it is kept. Gradients
    that are not finite leave the moments as they are.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        mu, nu = (jax.tree.map(lambda p, d=d: jnp.zeros_like(p, d), params) for d in (first, jnp.float32))
        return optax.ScaleByAdamState(jnp.int32(0), mu, nu)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradients)
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30)) if max_norm else jnp.float32(1)

        def average(before: jax.Array, value: jax.Array, beta: float) -> jax.Array:
            return (beta * before.astype(jnp.float32) + (1 - beta) * value).astype(before.dtype)

        def advance(state: optax.ScaleByAdamState, one: jax.Array) -> optax.ScaleByAdamState:
            scale = one * factor
            mu = jax.tree.map(lambda m, g: average(m, scale * g, beta1), state.mu, gradients)
            nu = jax.tree.map(lambda n, g: average(n, jnp.square(scale * g), beta2), state.nu, gradients)
            return optax.ScaleByAdamState(state.count + 1, mu, nu)

        state = in_place(advance, state, jnp.isfinite(norm))
        unbias = [1 - beta ** state.count.astype(jnp.float32) for beta in (beta1, beta2)]

        def change(m: jax.Array, n: jax.Array) -> jax.Array:
            return m / unbias[0] / (jnp.sqrt(n / unbias[1]) + epsilon)

        return jax.tree.map(change, state.mu, state.nu), state

    return optax.GradientTransformation(init, update)


def as_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on arrays with the axes of heads and head size made one, so that it finds rows and columns.

    Factoring looks at the two longest axes if both have 128 entries or more: the heads' alone are shorter, and the axis
    of layers is too.
    """

    def flat(tree: Any) -> Any:
        def flatten(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            name = str(getattr(path[-1], "key", path[-1]))
            if name in ("query", "key", "value"):
                return x.reshape(*x.shape[:-2], -1)
            return x.reshape(*x.shape[:-3], -1, x.shape[-1]) if name == "out" else x

        return jax.tree_util.tree_map_with_path(flatten, tree)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, state = inner.update(flat(gradients), state, flat(params))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), changes, gradients), state

    return optax.GradientTransformation(lambda params: inner.init(flat(params)), update)


class WideState(NamedTuple):
    """State of `in_float32`."""

    master: Any  # float32 where the parameter is narrower, else None
    inner: optax.OptState


def in_float32(inner: optax.GradientTransformation, master_copy: bool = True) -> optax.GradientTransformation:
    """`inner` for parameters of which some are narrower than float32: it sees parameters and gradients in float32.

    With a master copy it sees the parameters that its updates add up to in float32; the parameters are these, rounded.
    Where a parameter is not its master rounded, because something else has changed it or kept it from changing, the
    parameter counts. Without one, an update below half a unit in the last place is lost. Where every parameter is
    float32 already, it is `inner`, with the same state.
    """

    def narrow(x: Any) -> bool:
        return x.dtype.itemsize < 4

    def init(params: Any) -> Any:
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        state = inner.init(wide)
        if not (master_copy and any(map(narrow, jax.tree.leaves(params)))):
            return state
        return WideState(jax.tree.map(lambda p, w: w if narrow(p) else None, params, wide), state)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None or not any(map(narrow, jax.tree.leaves(params))):
            return inner.update(gradients, state, params)

        def wide_gradients(one: jax.Array | float) -> Any:
            return jax.tree.map(lambda g: one * g.astype(jnp.float32), gradients)

        if not master_copy:
            return inner.update(wide_gradients(1.0), state, jax.tree.map(lambda p: p.astype(jnp.float32), params))

        def widen(master: jax.Array, p: jax.Array) -> jax.Array:
            return jnp.where(master.astype(p.dtype) == p, master, p.astype(jnp.float32))

        def advance(before: tuple[Any, Any], one: jax.Array) -> tuple[Any, Any]:
            wide = jax.tree.map(widen, before[0], params)
            changes, after = inner.update(wide_gradients(one), before[1], wide)
            return jax.tree.map(jnp.add, wide, changes), after

        masters = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)
        finite = jnp.isfinite(optax.tree.norm(gradients))
        new, after = in_place(advance, (masters, state.inner), finite)
        # What, added to the parameter and rounded to its dtype, gives the master rounded to it.
        changes = jax.tree.map(lambda n, p: n.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), new, params)
        return changes, WideState(jax.tree.map(lambda p, n: n if narrow(p) else None, params, new), after)

    return optax.GradientTransformation(init, update)
