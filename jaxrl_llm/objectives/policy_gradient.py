"""The policy-gradient objective: four independent choices, each a small function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError
from jaxrl_llm.log_ratios import source
from jaxrl_llm.objectives.averages import Average, token_mean
from jaxrl_llm.objectives.penalties import entropy, kl
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Clip, Surrogate
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, totals_of
from jaxrl_llm.transform import Metrics, Objective, Refresh

Kernel = Callable[..., Any]  # as `jaxrl_kernels.ratio_clip`
Function = Callable[[PolicyOutputs, Trajectories], tuple[jax.Array, Metrics]]


def policy_gradient(
    ratio: Ratio,
    surrogate: Surrogate,
    average: Average,
    *,
    needs: Iterable[str] = (),
    refresh: Refresh | None = None,
    kernel: Kernel | None = None,
) -> Objective:
    """-average(surrogate(ratio, advantages)): minimising it raises the probability of what was better than expected.

    needs, refresh: what the surrogate wants beyond the ratio's; see `Objective`.
    kernel: e.g. `jaxrl_kernels.ratio_clip`, to find the same in one pass; see `in_one_pass`.
    Metrics are token means over the batch: "ratio/mean", and those of the surrogate.
    """

    fused = None if kernel is None else in_one_pass(kernel, ratio, surrogate, average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        if batch.advantages is None:
            raise InputError("the batch has no advantages: apply the algorithm's transform before its objective")
        if fused is not None:
            return fused(outputs, batch)
        value = ratio(outputs, batch)
        # Tokens that do not count may hold anything: a product with NaN would leak into the gradient.
        masked = batch.replace(advantages=jnp.where(batch.loss_weights != 0, batch.advantages, 0.0))
        gain, statistics = surrogate(value, outputs, masked)
        per_token = token_mean()
        metrics = {name: per_token(x, batch) for name, x in {"ratio/mean": value, **statistics}.items()}
        return -average(gain, batch), metrics

    return Objective(objective, ratio.needs | frozenset(needs), refresh)


def in_one_pass(kernel: Kernel, ratio: Ratio, surrogate: Surrogate, average: Average) -> Function | None:
    """What `policy_gradient` computes, by `kernel`: for a plain ratio of tokens or whole rows with the plain `clip`.

    None for any other ratio or surrogate, or a clip range that differs by token. The average must be linear in the
    values, as those of averages.py are, or InputError.

    It is a choice, as it pays on TPUs alone: compiled for a v5e, loss and gradient of [512, 1024] move 35 to 58 % fewer
    bytes with `ratio_clip`; on CPUs what XLA makes of the composition is about as fast or faster. It must be called
    inside `jax.shard_map` where rows are spread over chips, and has no derivatives but by log-probabilities.
    """
    extent = ratio.extent
    if extent is None or not isinstance(surrogate, Clip):
        return None
    settings = {"low": surrogate.low, "high": surrogate.high, "dual": surrogate.dual}
    if any(jnp.ndim(x) for x in settings.values() if x is not None):
        return None

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        told = kernel(
            outputs.logp,
            source(batch, extent.against),
            batch.need("advantages"),
            batch.loss_weights,
            value_weights=token_weights(average, batch),
            whole_row=extent.whole_row,
            mean=extent.mean,
            **settings,
        )
        sums = {"ratio/mean": told.ratio, "clip/low": told.cut_low, "clip/high": told.cut_high}
        return -jnp.sum(told.value), {name: jnp.sum(x) / totals_of(batch)["tokens"] for name, x in sums.items()}

    return objective


def token_weights(average: Average, batch: Trajectories) -> jax.Array:
    """What each token's value is multiplied by in an average, f32[N, L]; InputError if that depends on the values."""
    values = jax.ShapeDtypeStruct(batch.action_mask.shape, jnp.float32)
    try:
        return jax.linear_transpose(lambda x: average(x, batch), values)(jnp.float32(1))[0]
    except (NotImplementedError, AssertionError) as error:
        raise InputError("the average is not linear in the values of tokens: leave the kernel out") from error


def regularised(
    objective: Objective,
    average: Average | None = None,
    *,
    kl_coefficient: float | jax.Array = 0.0,
    entropy_coefficient: float | jax.Array = 0.0,
) -> Objective:
    """objective + kl_coefficient * mean k3 to the reference - entropy_coefficient * mean entropy.

    A term whose coefficient is known to be 0 is left out, and with it the need of a reference policy.
    """
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=average)
    objective -= entropy_coefficient * entropy(average)
    return objective
