"""The optimiser as a value: warm-up, schedule and masked weight decay from optax, clipping and moments in place
(`moments`); and how much memory its state takes.

Bytes of state for each parameter, by `moments`:

    float32   8   both of Adam's moments in float32
    bfloat16  6   the first in bfloat16, which with beta1 = 0.9 settles up to 4 % beside a steady gradient; the second
                  in float32: with beta2 near 1 its steps would be lost in bfloat16
    factored  0+  Adafactor's second moment, row and column means of each matrix, in float32, and no first moment

Parameters kept in bfloat16 have 4 more with `master_copy`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.learner.moments import Bounded, advanced, scale_by_adam
from jaxrl_llm.learner.optimizer_config import OptimizerConfig, check_optimizer
from jaxrl_llm.models.parameters import PROJECTIONS
from jaxrl_llm.models.parameters.table import HEAD, HEAD_MLP, TABLE
from jaxrl_llm.models.parameters.weight import Shape
from jaxrl_llm.utils.errors import InputError, require


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Gradient step -> learning rate. InputError for values out of range."""
    if not isinstance(config, OptimizerConfig):
        raise InputError(f"the optimiser's settings must be an OptimizerConfig, found {type(config).__name__}")
    if isinstance(total_steps, bool) or not isinstance(total_steps, int | np.integer):
        raise InputError(f"total_steps is {total_steps!r}, but must be a whole number of gradient steps, at least 1")
    require("total_steps", int(total_steps), least=1)
    check_optimizer(config)
    after = max(total_steps - config.warmup_steps, 1)
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    if config.schedule == "linear":
        main = optax.linear_schedule(peak, end, after)
    elif config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, after, config.final_fraction)
    else:
        main = optax.constant_schedule(peak)
    if not config.warmup_steps:
        return main
    # The first step is taken at 1/(warmup + 1) of the peak: a step at rate 0 would be wasted.
    first = peak / (config.warmup_steps + 1)
    return optax.join_schedules([optax.linear_schedule(first, peak, config.warmup_steps), main], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """The optax transformation. InputError for values out of range.

    total_steps: gradient steps of the whole run, at least 1, at the end of which the schedule ends.
    """
    rate = learning_rate(config, total_steps)
    steps = [MOMENTS[config.moments](config, rate)]
    if config.critic_learning_rate is not None:
        # A step of Adam is proportional to the learning rate, so the critic's is a multiple of the policy's.
        steps.append(optax.masked(optax.scale(config.critic_learning_rate / config.learning_rate), of_critic))
    optimizer = in_float32(optax.chain(*steps) if len(steps) > 1 else steps[0], config.master_copy)
    return Bounded(*optimizer) if largest_step(config) < ROOM else optimizer


ROOM = 2.0**100  # what is less, added to the largest float32 or bfloat16, is lost in rounding: the sum is no infinity


def largest_step(config: OptimizerConfig) -> float:
    """A bound of any parameter's update before weight decay, and on the way to it; infinity where there may be none.

    Gradients have a finite norm, so their squares do not overflow, and moments are averages of them.
    """
    rates = config.learning_rate, config.critic_learning_rate or 0.0
    left = [1 - float(np.float32(beta)) for beta in (config.beta1, config.beta2)]
    # With these a parameter is not made larger by its own decay. A bias correction divides by what is left of 1.
    if max(*rates, config.weight_decay) > 0.5 or min(left) < 1e-6 or (rates[1] and rates[1] > ROOM * rates[0]):
        return np.inf
    norm = config.max_grad_norm or np.inf
    if config.moments != "factored":
        return 4 * min(norm, 2.0**64) / (left[0] * config.epsilon)  # 4: sums of rounded shares of 1
    floor = max(config.epsilon**2, 1e-30)
    return norm * (norm**2 + floor) ** 0.5 / floor  # of a row that had nothing but this one gradient


def _adamw(config: OptimizerConfig, rate: optax.Schedule, first: Any = jnp.float32) -> optax.GradientTransformation:
    """AdamW with its first moment in the dtype `first`."""
    return optax.chain(
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.max_grad_norm, first),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(rate),
    )


def _adafactor(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) without a first moment; steps are as large as Adam's.

    An update is the gradient over the root of the factored second moment, scaled down to a root mean square of 1 in
    each array. The decay is 1 - t^-0.8 up to beta2 (Zhai et al. 2021, arXiv 2106.04560).
    """

    def decay(step: Any, exponent: Any) -> jax.Array:
        return jnp.minimum(1.0 - (jnp.asarray(step, jnp.float32) + 1.0) ** -exponent, config.beta2)

    second = optax.scale_by_factored_rms(epsilon=max(config.epsilon**2, 1e-30), decay_rate_fn=decay)
    return optax.chain(
        *([optax.clip_by_global_norm(config.max_grad_norm)] if config.max_grad_norm else []),
        as_matrices(second),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(rate),
    )


MOMENTS: dict[str, Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]] = {
    "float32": _adamw,
    "bfloat16": partial(_adamw, first=jnp.bfloat16),
    "factored": _adafactor,
}


def of_critic(params: Any) -> Any:
    """Which parameters are the critic's."""
    return {name: jax.tree.map(lambda _, mine=name == "critic": mine, part) for name, part in params.items()}


def as_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` on arrays with the axes of heads and head size merged, so that it finds rows and columns.

    Factoring looks at the two longest axes if both have 128 entries or more: the heads' alone are shorter, and the axis
    of layers is too.
    """

    inner = optax.with_extra_args_support(inner)

    def flat(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, x: x.reshape(merge_heads(_last(path), x.shape)), tree)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(flat(gradients), state, flat(params), **extra)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), updates, gradients), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(flat(params)), update)


def merge_heads(name: str, shape: Shape) -> Shape:
    """The shape of a projection of heads with the axes of heads and head size as one; of anything else as it is.

    >>> merge_heads("query", (2, 64, 4, 16)), merge_heads("out", (4, 16, 64)), merge_heads("up", (64, 128))
    ((2, 64, 64), (64, 64), (64, 128))
    """
    axes = PROJECTIONS[name].axes if name in PROJECTIONS else ()
    size = next((axis for axis in ("head_size", "value_size", "plain") if axis in axes), None)
    if size is None:
        return shape
    at = len(shape) - len(axes) + axes.index(size)
    return (*shape[: at - 1], shape[at - 1] * shape[at], *shape[at + 1 :])


NOT_DECAYED = frozenset(weight.name for weight in (*TABLE, *HEAD_MLP, *HEAD) if not weight.inputs)


def decayed(params: Any) -> Any:
    """Which parameters weight decay acts on: true for projections, false for embeddings, norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _last(path) not in NOT_DECAYED, params)


def _last(path: tuple[Any, ...]) -> str:
    return str(getattr(path[-1], "key", path[-1]))


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

        def gradients32(factor: jax.Array | float) -> Any:
            return jax.tree.map(lambda g: factor * g.astype(jnp.float32), gradients)

        if not master_copy:
            params32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            return inner.update(gradients32(1.0), state, params32, **extra)

        def advance(before: tuple[Any, Any], one: jax.Array | float) -> tuple[Any, Any]:
            def current(master: jax.Array, p: jax.Array) -> jax.Array:
                """The master, or p where that is no longer the master rounded."""
                return jnp.where(master.astype(p.dtype) == p, master, p.astype(jnp.float32))

            params32 = jax.tree.map(current, before[0], params)
            updates, after = inner.update(gradients32(one), before[1], params32, **extra)
            return jax.tree.map(jnp.add, params32, updates), after

        masters = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)
        new, after = advanced(advance, (masters, state.inner), jnp.isfinite(optax.tree.norm(gradients)), dry)
        # What, added to the parameter and rounded to its dtype, gives the master rounded to it.
        updates = jax.tree.map(lambda n, p: n.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), new, params)
        return updates, MasterState(jax.tree.map(lambda p, n: n if narrow(p) else None, params, new), after)

    return optax.GradientTransformationExtraArgs(init, update)
