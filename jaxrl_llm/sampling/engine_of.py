"""The engine for a policy: by the kind of its model."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.unmasking.engine import UnmaskingEngine
from jaxrl_llm.sampling.weights import Weights


def engine_of(
    policy: Policy, weights: Weights, settings: DrawSettings, size: Size, **options: Any
) -> Engine | UnmaskingEngine:
    """The engine that completes requests with a policy. options: those of `Engine`."""
    kind = Engine if policy.config.unmasking is None else UnmaskingEngine
    return kind(policy, weights, settings, size, **options)
