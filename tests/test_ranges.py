"""Ranges of numbers, and checks of them where parts are made."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, algorithms, objectives
from jaxrl_llm.core.algorithm import TurnPhases
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.outer_loop import extrapolated, outer_step
from jaxrl_llm.core.population import Population
from jaxrl_llm.objectives.preference.losses import sigmoid
from jaxrl_llm.utils.errors import InputError


@pytest.mark.parametrize("value", [0, 1.0, np.float32(0.5), np.int64(1), np.array(0.5), jnp.float32(0.5), jnp.ones(3)])
def test_numbers_pass(value: Any) -> None:
    check_number("share", value, least=0, most=1)


@pytest.mark.parametrize(
    "value", ["0.2", None, True, [0.2], {}, 1j, float("nan"), float("inf"), 1e39, 10**400, np.array("0.2"), -0.1, 1.1]
)
def test_others_are_named(value: Any) -> None:
    with pytest.raises(InputError, match=r"share is .*, but must be") as caught:
        check_number("share", value, least=0, most=1)
    assert len(str(caught.value).splitlines()) == 1


def test_none_is_off_where_that_is_said_and_counts_are_whole() -> None:
    check_number("limit", None, above=0, or_none=True)
    check_number("heads", np.int32(2), least=1, whole=True)
    with pytest.raises(InputError, match=r"heads is 2\.0, but must be a whole number"):
        check_number("heads", 2.0, least=1, whole=True)


def test_traced_numbers_pass() -> None:
    def double(x: jax.Array) -> jax.Array:
        check_number("share", x, least=0, most=1)
        return 2 * x

    assert float(jax.jit(double)(3.0)) == 6


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: objectives.clip("0.2"), "low of clip is '0.2'"),  # type: ignore[arg-type]
        (lambda: objectives.clip(0.2, float("inf")), "high of clip is inf"),
        (lambda: objectives.capped(None), "cap of capped is None"),  # type: ignore[arg-type]
        (lambda: objectives.constant([8]), r"length of constant is \[8\], but must be a number or a text or None"),  # type: ignore[arg-type]
        (lambda: objectives.constant(float("inf")), "length of constant is inf"),
        (lambda: objectives.entropy_target(float("nan")), "low of entropy_corridor is nan"),
        (lambda: objectives.ratio_variance(float("inf")), "limit of ratio_variance is inf"),
        (lambda: objectives.preference(beta=-1), "beta of preference is -1"),
        (lambda: objectives.value_loss(of="min"), "of value_loss 'min'"),
        (lambda: objectives.discriminative(None), "merit is None, but must be a function"),  # type: ignore[arg-type]
        (lambda: advantages.group_relative(epsilon=-1), "epsilon of group_relative is -1"),
        (lambda: advantages.group_relative(ddof=2), "ddof of group_relative is 2"),
        (lambda: advantages.group_relative(ddof=0.5), "ddof of group_relative is 0.5"),  # type: ignore[arg-type]
        (lambda: advantages.group_relative(weights=0.5), "weights is 0.5"),  # type: ignore[arg-type]
        (lambda: advantages.whiten_advantages(epsilon=-1), "epsilon of whiten_advantages is -1"),
        (lambda: advantages.whiten_advantages(epsilon=float("nan")), "epsilon of whiten_advantages is nan"),
        (lambda: advantages.generalised_advantages(lam="0.95"), "lam of .* is '0.95', .* a number or a function"),  # type: ignore[arg-type]
        (lambda: advantages.kl_reward(float("inf")), "coefficient of kl_reward is inf"),
        (lambda: advantages.adaptive_kl(start=float("nan")), "start of adaptive_kl is nan"),
        (lambda: advantages.tracked_baseline(prompts=10.5), "prompts of tracked_baseline is 10.5"),  # type: ignore[arg-type]
        (lambda: objectives.loss_named("discopop", tau=float("nan")), "tau of loss_named is nan, but must be a finite"),
        (lambda: objectives.weighted_losses((sigmoid, "1")), r"losses\[0\]\[1\] of weighted_losses is '1'"),  # type: ignore[arg-type]
        (lambda: objectives.distillation(1.5), "beta of distillation is 1.5, but must be at least 0 and at most 1"),
        (lambda: objectives.distillation(top_k=-1), "top_k of distillation is -1"),
        (lambda: outer_step(smaller_from=0), "smaller_from of outer_step is 0"),
        (lambda: extrapolated(momentum=1), "momentum of extrapolated is 1, but must be at least 0 and below 1"),
        (lambda: TurnPhases(1.5), "clip of TurnPhases is 1.5"),
        (
            lambda: Population(seed=2**32),
            "seed of Population is 4294967296, but must be at least 0 and at most 4294967295",
        ),
        (lambda: algorithms.get("process_reward_model", classes=1), "classes is 1, but must be at least 2"),
        (lambda: algorithms.get("ravl", heads=1), "ravl: heads is 1, but must be at least 2"),
        (lambda: algorithms.get("dars", most_samples=1), "dars: most_samples is 1, but must be at least 2"),
        (lambda: algorithms.get("epo", corridor_low=-1), "epo: corridor_low is -1, but must be at least 0"),
        (lambda: algorithms.get("fapo", overlong_share=2), "fapo: overlong_share is 2, but must be .* at most 1"),
        (lambda: advantages.revised(advantages.group_relative), "group_relative, which makes"),  # type: ignore[arg-type]
    ],
)
def test_parts_are_refused_when_they_are_made(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


def test_parts_without_a_bound_are_made() -> None:
    assert objectives.clip(0.2, 0.2, None) is not None
    assert objectives.value_loss(clip=None).needs == {"values"}
    assert advantages.generalised_advantages(lam=advantages.length_adaptive(0.05), lam_critic=None).needs == {"values"}
    assert objectives.constant("longest") is not None
    assert Population(seed=2**32 - 1).seed == 2**32 - 1
    assert advantages.whiten_advantages(ddof=0, epsilon=0.0) is not None


def test_a_signature_shows_range_and_origin_in_short() -> None:
    shown = str(inspect.signature(algorithms.constructor("grpo")).parameters["clip_low"])
    assert shown.endswith("Annotated[float, Range(least=0), Origin.CODE] = 0.2")
