"""The optimiser as a value: warm-up, schedule and masked weight decay from optax, clipping and moments in place
(`moments`); and how much memory its state takes.

Bytes of state for each parameter, by `moments`:

    float32   8   both of Adam's moments in float32
    bfloat16  6   the first in bfloat16, which with beta1 = 0.9 settles up to 4 % beside a steady gradient; the second
                  in float32: with beta2 near 1 its steps would be lost in bfloat16
    factored  0+  Adafactor's second moment, row and column means of each matrix, in float32, and no first moment

Parameters kept in bfloat16 have 4 more with `master_copy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.training.moments import as_matrices, in_float32, scale_by_adam

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = 1e-6
    """Peak learning rate, >= 0."""
    critic_learning_rate: float | None = None
    """Peak learning rate of a critic; by default the same."""
    warmup_steps: int = 0
    """Gradient steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, until the last gradient step."""
    final_fraction: float = 0.0
    """Share of the peak learning rate at the end of a linear or cosine schedule, 0 to 1."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment; the bias-corrected average forgets gradients after about 1 / (1 - beta2) steps."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay; matrices only, not norms, biases or embeddings."""
    moments: Literal["float32", "bfloat16", "factored"] = "float32"
    """float32: AdamW, 8 bytes a parameter. bfloat16: the first moment is kept in bfloat16 and the second in float32, 6
    bytes. factored: Adafactor's row and column means in the place of the second, and no first: nearly none (beta1 is
    unused, beta2 is reached from 0)."""
    master_copy: bool = True
    """For parameters in bfloat16, another copy in float32 (4 bytes each), which the updates add up in: without it,
    those below 1/512 of a parameter are lost."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns it off."""


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Gradient step -> learning rate."""
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


def decayed(params: Any) -> Any:
    """Which parameters weight decay acts on: true for projections, false for embeddings, norms and biases."""

    def decide(path: tuple[Any, ...], _: Any) -> bool:
        name = str(getattr(path[-1], "key", path[-1]))
        return not name.endswith(("norm", "bias")) and name not in ("embed", "unembed")

    return jax.tree_util.tree_map_with_path(decide, params)


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """The optax transformation. InputError for values out of range."""
    for name in ("learning_rate", "warmup_steps", "epsilon", "weight_decay", "max_grad_norm"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise InputError(f"{name} is {getattr(config, name)}, but must be 0 or more")
    if not 0 <= config.final_fraction <= 1:
        raise InputError(f"final_fraction is {config.final_fraction}, but must be between 0 and 1")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise InputError(f"{name} is {getattr(config, name)}, but must be at least 0 and below 1")
    if config.schedule not in SCHEDULES:
        raise unknown("schedule", config.schedule, SCHEDULES)
    if config.moments not in MOMENTS:
        raise unknown("kind of moments", config.moments, MOMENTS)
    steps = [MOMENTS[config.moments](config, learning_rate(config, total_steps))]
    if config.critic_learning_rate is not None:
        # A step of Adam is proportional to the learning rate, so the critic's is a multiple of the policy's.
        if not (config.learning_rate > 0 and 0 <= config.critic_learning_rate < float("inf")):
            raise InputError(
                f"critic_learning_rate is {config.critic_learning_rate}, but must be 0 or more, with a learning_rate "
                f"above 0 (it is {config.learning_rate})"
            )
        steps.append(optax.masked(optax.scale(config.critic_learning_rate / config.learning_rate), _of_critic))
    return in_float32(optax.chain(*steps) if len(steps) > 1 else steps[0], config.master_copy)


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
    clip = [optax.clip_by_global_norm(config.max_grad_norm)] if config.max_grad_norm else []
    return optax.chain(
        *clip,
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


def _of_critic(params: Any) -> Any:
    """Which parameters are the critic's."""
    return {name: jax.tree.map(lambda _, mine=name == "critic": mine, part) for name, part in params.items()}
