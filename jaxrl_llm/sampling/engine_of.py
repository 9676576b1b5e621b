"""The engine for a policy: by the kind of its model."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.unmasking.engine import UnmaskingEngine
from jaxrl_llm.sampling.weights import Weights


def engine_of(
    policy: Policy, weights: Weights, settings: DrawSettings, size: Size, **options: Any
) -> Engine | UnmaskingEngine:
    """The engine that completes requests with a policy. options: those of `Engine`."""
    kind = Engine if policy.config.unmasking is None else UnmaskingEngine
    return kind(policy, weights, settings, size, **options)


def renewed(engine: Engine, weights: Weights, settings: DrawSettings, policy_step: int, stats: Stats) -> Engine:
    """The engine, which goes on with new weights and with its caches: keys, values and states of the weights before.

    Nothing is computed again but prompts that come anew: one with rows in flight is shared as it is. Tokens keep the
    policy_step of the weights that drew them; their log-probabilities are those with which they were drawn, of the
    weights of that step over such caches.
    """
    if engine.tail is not None:
        engine.leave_tail()
    engine.note_drawn()
    engine.schedule.forget_unused()
    engine.weights, engine.settings, engine.policy_step, engine.stats = weights, settings, policy_step, stats
    stats.rows, stats.prompt_slots = engine.shape.rows, engine.shape.prompts
    stats.moved_bytes, stats.moved_seconds = weights.moved_bytes, weights.moved_seconds
    return engine
