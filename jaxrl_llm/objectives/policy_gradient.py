"""The policy-gradient objective: -average(surrogate(ratio, advantages)), and its usual regularisers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxrl_kernels import ratio_clip

from jaxrl_llm.core.arguments.checks import expect, names_of
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, part
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.transform import Refresh
from jaxrl_llm.objectives.averages import Average, Mean, as_average, averaged, token_mean
from jaxrl_llm.objectives.fused import Kernel, in_one_pass
from jaxrl_llm.objectives.penalties import entropy, kl
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.utils.errors import InputError


@part
def policy_gradient(
    ratio: Ratio,
    surrogate: Surrogate,
    average: Average | Mean,
    *,
    needs: Iterable[str] = (),
    refresh: Refresh | None = None,
    kernel: Kernel | None = ratio_clip,
) -> Objective:
    """-average(surrogate(ratio, advantages)).

    needs, refresh: what the surrogate needs beyond the ratio and the average, which declare their own; see `Objective`.
    kernel: fuses a plain ratio with a plain clip (see `fused`); None always composes the parts.
    Metrics are token means over the batch: "ratio/mean", and the statistics of the surrogate.
    Raises InputError for parts in the wrong order, and for factories of parts that were not called.
    """
    expect("the ratio of policy_gradient", ratio, Ratio)
    _expect_function("surrogate", surrogate, "Surrogate", 3)
    _expect_function("average", average, "Average", 2)
    mean = as_average(average)

    def composed(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        rho = ratio(outputs, batch)
        gain, statistics = surrogate(rho, outputs, _with_masked_advantages(batch))
        metrics = {name: token_mean()(x, batch) for name, x in {"ratio/mean": rho, **statistics}.items()}
        return -mean(gain, batch), metrics

    objective = in_one_pass(composed, ratio, surrogate, mean, kernel)
    return averaged(objective, mean, ratio.needs | names_of(needs), refresh)


def _with_masked_advantages(batch: Trajectories) -> Trajectories:
    """Set advantages to 0 on tokens with weight 0, which may hold NaN: a product with it would leak into gradients."""
    if batch.advantages is None:
        raise InputError("the batch has no advantages: apply the algorithm's transform before its objective")
    return batch.replace(advantages=jnp.where(batch.loss_weights != 0, batch.advantages, 0.0))


def _expect_function(role: str, part: Any, made: str, count: int) -> None:
    """InputError unless the part is a function of `count` arguments; also for a factory, which returns a `made`."""
    name = getattr(part, "__name__", in_words(part))
    if getattr(part, "__annotations__", {}).get("return") == made:
        raise InputError(f"the {role} of policy_gradient is the function {name}, which makes one: call it, {name}(...)")
    try:
        inspect.signature(part).bind(*range(count))
    except TypeError:
        raise InputError(
            f"the {role} of policy_gradient is {name}, but must be a function of {count} arguments: the order is "
            "policy_gradient(ratio, surrogate, average)"
        ) from None
    except ValueError:  # Python cannot inspect the function's signature
        return


def regularised(
    objective: Objective,
    average: Average | Mean | None = None,
    *,
    kl_coefficient: float | jax.Array = 0.0,
    entropy_coefficient: float | jax.Array = 0.0,
) -> Objective:
    """objective + kl_coefficient * mean k3 to the reference - entropy_coefficient * mean entropy.

    Terms with a static coefficient of 0 are left out, so that without the KL no reference policy is needed.
    """
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=average)
    objective -= entropy_coefficient * entropy(average)
    return objective
