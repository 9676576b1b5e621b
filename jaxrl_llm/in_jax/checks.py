"""Checks of a run in the laboratory that are not of its settings alone: that its method can learn, and that it did."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import Metrics
from jaxrl_llm.reporting.lone import compares_samples
from jaxrl_llm.utils.errors import InputError


def check_lone(method: Algorithm) -> None:
    """InputError for a method that compares the samples of a prompt, which has only one."""
    if "turns" not in method.needs and compares_samples(method):
        raise InputError(
            "group_size is 1, but must be at least 2: the method compares the completions of a prompt with each other, "
            "and has nothing to learn from one"
        )


def check_losses(metrics: Metrics) -> None:
    """InputError where a loss at hand is infinite or NaN; those of traced runs pass."""
    loss = metrics.get("loss")
    if loss is None or isinstance(loss, jax.core.Tracer) or not loss.is_fully_addressable:
        return
    wrong = ~np.isfinite(np.asarray(loss))
    if loss.ndim == 1 and wrong.any():
        raise InputError(
            f"the loss is not finite from iteration {int(np.argmax(wrong))} on: look for advantages that are infinite "
            "or NaN, such as a division by 0 in the transform, and for the learning rate"
        )
