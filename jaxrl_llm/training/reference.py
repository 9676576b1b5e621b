"""The reference policy of a run: where it comes from, and how it moves; and other copies that move like it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.needs import of_reference
from jaxrl_llm.core.reference import Mixture, ReferenceRule, Update
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.models import lora
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.utils.errors import InputError, gather


def wants_reference(config: TrainConfig, algorithm: Algorithm) -> bool:
    """Whether the run has a reference policy: the method needs it, or the rollout draws from it."""
    return of_reference(algorithm.needs) or rollout_of(config, algorithm).demands.reference


def check_reference(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError, before a model is loaded, if the run cannot have the method's reference."""
    rule = algorithm.reference
    if rule is None or not wants_reference(config, algorithm):
        return

    def complete() -> None:
        if rule.option is not None and not rule.models:
            raise InputError(
                f"the reference of {config.algorithm} needs other models: give --algorithm.{rule.option} PATH"
            )

    def fixed() -> None:
        if rule.update is not None and (rollout := rollout_of(config, algorithm)).demands.reference:
            raise InputError(
                f"the rollout {rollout.name} draws from a reference that stays, but that of {config.algorithm} moves: "
                "use another rollout"
            )

    def movable() -> None:
        if rule.update is not None and config.reference_memory == "host":
            raise InputError(
                f"reference_memory is host, but the reference of {config.algorithm} moves, so it must stay on the "
                "device: leave it out"
            )
        if rule.averages and config.adapts:
            raise InputError(
                f"the reference of {config.algorithm} is an average of weights, but with {config.adapts} only adapters "
                "are trained, whose average is not that of their products: train all weights"
            )

    gather(complete, fixed, movable)


def first_reference(
    config: TrainConfig, rule: ReferenceRule | None, policy: Policy, frozen: Params | None, params: Params,
    others: Sequence[Params],
) -> tuple[Any, Any]:  # fmt: skip
    """(reference that stays or None, what moves of one or None), in buffers that no update donates.

    frozen: the weights that do not learn, if only adapters do. others: the parameters of the rule's models. What moves
    has the structure of `params` without a critic: with adapters, `reference_now` adds the frozen weights.
    Raises InputError for models of other shapes.
    """
    own = without_critic(params)
    if rule is not None and rule.update is not None:
        return None, jax.tree.map(jnp.copy, own)
    if rule is None:
        return _kept(config, frozen, own), None
    initial = own if frozen is None else lora.merge(combine(frozen, own)) if config.adapter else frozen
    for name, other in zip(rule.models, others, strict=True):
        try:
            check_params(policy, other)
            same = _shapes(other) == _shapes(initial)
        except InputError:
            same = False
        if not same:
            raise InputError(
                f"the reference's model {name} has weights of other names or shapes than {config.model}: name a model "
                "of the same architecture"
            )
    found = rule.init(initial, others)
    return (found if found is frozen else _kept(config, None, found)), None


def _kept(config: TrainConfig, frozen: Params | None, own: Any) -> Any:
    if frozen is not None:  # new adapters add nothing
        return combine(frozen, jax.tree.map(jnp.copy, own)) if config.adapter else frozen
    copy = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, own)
    if config.reference_memory != "host":
        return copy
    return Mixture(to_host(copy.policies), copy.shares) if isinstance(copy, Mixture) else to_host(copy)


def reference_now(fixed: Any, moving: Any, frozen: Params | None) -> Any:
    """The reference policy's parameters: those that stay, or those that move with the frozen weights."""
    return fixed if moving is None else combine(frozen, moving)


def first_second_policy(hook: Hook | None, params: Params) -> Any:
    """What moves of the second policy that a hook reads, in buffers that no update donates; None without one.

    Its structure is that of `params` without a critic, as that of a moving reference.
    """
    if hook is None or hook.other is None:
        return None
    return jax.tree.map(jnp.copy, without_critic(params))


def first_target(algorithm: Algorithm, params: Params) -> Any:
    """The target critic before the first update: a copy of the critic, where the method has one."""
    return None if algorithm.target is None else jax.tree.map(jnp.copy, params["critic"])


def with_second_policy(moving: Any, frozen: Params | None) -> Params | None:
    """The parameters that do not learn in a step: the frozen ones, and params["other"] of the policy's hook."""
    return frozen if moving is None else {**(frozen or {}), "other": combine(frozen, moving)}


def moved(rule: ReferenceRule | None, moving: Any, params: Params, updates: int) -> Any:
    """What moves of the reference after an update. moving is donated; None where nothing moves."""
    if moving is None or rule is None or rule.update is None:
        return None
    return _program(rule.update)(moving, without_critic(params), jnp.int32(updates))


@functools.lru_cache(maxsize=4)
def _program(update: Update) -> Any:
    return jax.jit(update, donate_argnums=0)


def _shapes(tree: Any) -> Any:
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]
