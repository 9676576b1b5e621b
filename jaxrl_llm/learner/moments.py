"""Adam that saves memory: it computes its new state in the buffers of the old one.

Its update takes a keyword that optax's chains and masks pass on: with `dry=True` it is a plain function, for checking
the result of a step before it is taken (`stays_finite`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


class Bounded(optax.GradientTransformationExtraArgs):
    """An optimiser whose settings guarantee finite steps, so that they need no check.

    That is: where parameters, their gradients and the norm of these are finite, in float32 or bfloat16, and its state
    is the result of such steps, all parameters and the state are finite after one more.
    """


def advanced(advance: Callable[[Any, jax.Array | float], Any], old: Any, when: jax.Array, dry: bool = False) -> Any:
    """`advance(old, 1.0)` where `when` (bool[]), else `old`, in the memory of `old` if that is donated.

    dry: `advance(old, 1.0)` as it is.

    It is a loop of one iteration or none. Otherwise the compiler recomputes the new values wherever they are read, from
    the old ones, which then have to be kept beside them: for Adam, up to twice the parameters. The second argument is a
    1 that the compiler does not know: what is multiplied by it is not hoisted out of the loop, and kept.
    """
    if dry:
        return advance(old, 1.0)
    return jax.lax.fori_loop(0, when.astype(jnp.int32), lambda turn, x: advance(x, 1.0 + turn), old)


def bounded(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """Whether an optimiser's step from any finite parameters of these dtypes and any finite gradient is finite."""
    dtypes = {x.dtype for x in jax.tree.leaves(params)}
    return isinstance(optimizer, Bounded) and dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}


def stays_finite(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, only: str | None = None
) -> tuple[Any, Any]:
    """Whether each parameter and each moment would be finite after a step: trees of bool[], as of params and state.

    Works with any optax optimiser; no step is taken. only: the one entry of the parameters that changes. Integers count
    as finite, and so do moments that were not finite before, such as the lowest loss so far.
    """
    updates, moments = optax.with_extra_args_support(optimizer).update(gradients, state, params, dry=True)
    new = optax.apply_updates(params, updates)

    def good(new: Any, old: Any = 0.0) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(new), jnp.floating):
            return jnp.bool_(True)
        return jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))

    return jax.tree.map(good, new if only is None else {only: new[only]}), jax.tree.map(good, moments, state)


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float, max_norm: float = 0.0, first: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980), after clipping by global norm: `optax.chain(clip_by_global_norm,
    scale_by_adam)` in less memory, as neither clipped gradients nor old moments are kept. Its state is optax's.

    max_norm: 0 for no clipping. first: dtype of the first moment; the update is of the moment as it is kept. Gradients
    that are not finite leave the moments as they are.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        mu, nu = (jax.tree.map(lambda p, d=d: jnp.zeros_like(p, d), params) for d in (first, jnp.float32))
        return optax.ScaleByAdamState(jnp.int32(0), mu, nu)

    def update(gradients: Any, state: Any, params: Any = None, *, dry: bool = False, **_: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradients)
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30)) if max_norm else jnp.float32(1)

        def average(before: jax.Array, value: jax.Array, beta: float) -> jax.Array:
            return (beta * before.astype(jnp.float32) + (1 - beta) * value).astype(before.dtype)

        def advance(state: optax.ScaleByAdamState, one: jax.Array | float) -> optax.ScaleByAdamState:
            scale = one * factor
            mu = jax.tree.map(lambda m, g: average(m, scale * g, beta1), state.mu, gradients)
            nu = jax.tree.map(lambda n, g: average(n, jnp.square(scale * g), beta2), state.nu, gradients)
            return optax.ScaleByAdamState(state.count + 1, mu, nu)

        state = advanced(advance, state, jnp.isfinite(norm), dry)
        unbias = [1 - beta ** state.count.astype(jnp.float32) for beta in (beta1, beta2)]

        return jax.tree.map(lambda m, n: m / unbias[0] / (jnp.sqrt(n / unbias[1]) + epsilon), state.mu, state.nu), state

    return optax.GradientTransformationExtraArgs(init, update)


def with_moments(policy: Policy, needs: Iterable[str], frozen: Params | None, state: Any) -> Params | None:
    """The parameters that do not learn, with Adam's moments of the unembedding where an objective needs "adam_step".

    state: the optimiser's. InputError where Adam is not among it, or the unembedding does not learn as a whole.
    """
    if "adam_step" not in needs:
        return frozen
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    adam = [x for x in found if isinstance(x, optax.ScaleByAdamState)]
    if not adam:
        raise InputError(
            "this method models a step of Adam, but the optimiser has no moments of Adam: take float32 or bfloat16 ones"
        )
    name = "embed" if policy.config.tie_embeddings else "unembed"
    if name not in adam[0].mu:
        raise InputError(
            "this method models Adam's step of the unembedding, which does not learn here: train all weights, without "
            "adapters"
        )
    moments = {"first": adam[0].mu[name], "second": adam[0].nu[name], "count": adam[0].count}
    return {**(frozen or {}), "moments": jax.lax.stop_gradient(moments)}
