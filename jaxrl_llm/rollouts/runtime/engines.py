"""The engines of the standard source: of the policy that learns, of the reference policy, and of a league's."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.hooks import first_state
from jaxrl_llm.core.population import LEAGUE
from jaxrl_llm.core.reference import REFERENCE
from jaxrl_llm.distributed.mesh import on_device
from jaxrl_llm.models import lora
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rollouts.program_host import Completes, Draws, MakeEngine
from jaxrl_llm.rollouts.runtime.source_setup import Experience, ExperienceState
from jaxrl_llm.sampling.capacity import for_conversations, lasting, size_for
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.sampler import cut_at, settings_of
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import engine_of, renewed
from jaxrl_llm.sampling.two_model_decode import alone, paired_weights
from jaxrl_llm.sampling.weights import Weights, apart_from, take_weights
from jaxrl_llm.sampling.weights.adapters import of_members, replace_adapters
from jaxrl_llm.utils.errors import InputError

BESIDE = (LEAGUE, REFERENCE)  # entries of the parameters that are not of the policy that learns


def sampler_weights(setup: Experience, params: Params, before: Weights | None = None) -> Weights:
    """The sampler's weights of the policy that learns. before: those of the last step."""
    policy, own = setup.policy, {name: x for name, x in params.items() if name not in BESIDE}
    found = replace_adapters(policy, before, own) if setup.frozen and before is not None else None
    weights = found or take_weights(policy, own, setup.mesh, setup.sampling.weight_dtype)
    return apart_from(weights, lora.split(own)[1] if setup.frozen else own) if setup.beside else weights


def engines_of(
    setup: Experience, groups: int, params: Params, key: jax.Array, step: int, state: ExperienceState,
    weights: Weights | None = None,
) -> MakeEngine:  # fmt: skip
    """The function with which the driver builds its engines, which share the weights of each policy.

    groups: in flight on this unit of hosts. weights: `sampler_weights` the parameters, if they are there already. Of a
    rollout that asks for no sample there are no engines, nor their weights.
    """
    if setup.rollout.demands.given:
        return _no_engine
    policy, sampling, units = setup.policy, setup.sampling, setup.hosts.units
    moving, league = params.get(REFERENCE), params.get(LEAGUE, ())
    params = {name: x for name, x in params.items() if name not in BESIDE}
    weights = sampler_weights(setup, params) if weights is None else weights
    others: Weights | None = None
    if setup.rollout.demands.reference:
        reference = on_device(setup.reference) if moving is None else combine(params, moving)
        others = take_weights(policy, reference, setup.mesh, sampling.weight_dtype)

    @cache
    def of_snapshot(place: int) -> Weights:
        return take_weights(policy, combine(params, league[place]), setup.mesh, sampling.weight_dtype)

    devices, slots = row_shards(weights.mesh, SAMPLED_ROWS), -(-sampling.slots // units)
    shape = None
    if setup.partial is not None:
        # The number of requests differs between steps, but the loop is compiled for one shape.
        all_rows = -(-setup.prompts_per_step * setup.group_size // units)
        shape = lasting(slots or all_rows, max(groups, 1), setup.group_size, devices)
    turns, parked = setup.rollout.converses, 0
    if turns and shape is None:
        shape, parked = for_conversations(
            slots, setup.group_size, max(groups, 1), devices, setup.rollout.demands.turns == 1
        )

    def make(requests: Sequence[Request], draws: Draws, stats: Stats, before: Any = None) -> Completes:
        temperature, learns = draws.temperature, draws.learns
        usual = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        settings = settings_of(policy, key, *(usual if temperature is None else (temperature, 1.0, 0, 0.0)))
        hook = setup.rollout.hook if temperature is None and draws.snapshot is None else None
        if hook is not None and hook.opponent == learns:
            hook = None
        taken = others if draws.reference and others is not None else weights
        drawing, taken = policy, alone(taken if draws.snapshot is None else of_snapshot(draws.snapshot))
        if hook is not None and hook.opponent and others is not None:
            drawing, taken = dataclasses.replace(policy, hook=hook), paired_weights(weights, others)
        elif hook is not None:
            settings = settings._replace(state=jax.tree.map(jnp.float32, first_state(hook, state.controls)))
            drawing, taken = dataclasses.replace(policy, hook=hook), weights
        population = setup.rollout.population if draws.trained else None
        if population is not None:  # all randomness is in the weights
            settings = settings_of(policy, key, 0.0)
            drawing = dataclasses.replace(drawing, population=population)
            taken = of_members(taken, population.seed_at(step))
        if setup.rollout.thinking is not None and learns:
            drawing = dataclasses.replace(drawing, thinking=setup.rollout.thinking)
        if before is not None:
            setup.watch(stats)
            return renewed(before, taken, settings, step, stats)
        own = turns or draws.trained
        size = size_for(requests, slots, devices, shape if own else None)
        tokens = max(size.tokens, setup.rollout.room(sampling.max_new_tokens, policy.config.max_positions))
        size = size._replace(tokens=tokens, parked=parked)
        setup.watch(stats)
        return engine_of(
            drawing, taken, settings, size,
            cut=cut_at(policy.tokenizer, sampling.stop) if sampling.stop else None,
            cache_dtype=sampling.cache_dtype, policy_step=step, stats=stats,
            speculative_tokens=sampling.speculative_tokens, drafts=state.drafts.with_added(()),
            record_experts=setup.record_experts and learns, turns=turns,
            ranked=setup.rollout.demands.ranked if learns else 0,
        )  # fmt: skip

    return make


def _no_engine(*arguments: object) -> Completes:
    raise InputError("the rollout asked for a sample, but declares that all its episodes are given: leave that out")
