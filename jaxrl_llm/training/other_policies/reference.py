"""The policies of a run beside the one that learns: its reference, and those that move."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.needs import of_previous, of_reference
from jaxrl_llm.core.population import LEAGUE, League
from jaxrl_llm.core.reference import REFERENCE, Mixture, ReferenceRule, Update, chosen_snapshot
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.models import lora
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of, strategy_of
from jaxrl_llm.utils.errors import InputError, gather
from jaxrl_llm.utils.settings import raise_error


def wants_reference(config: TrainConfig, algorithm: Algorithm) -> bool:
    """Whether the run has a reference policy: the method needs it, or the rollout draws from it."""
    return of_reference(algorithm.needs, config.teacher is not None) or rollout_of(config, algorithm).demands.reference


def check_reference(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError, before a model is loaded, if the run cannot have the method's reference."""
    rule = algorithm.reference
    if rule is None or not wants_reference(config, algorithm):
        return

    problems: list[str] = []
    rollout = rollout_of(config, algorithm)
    moves = rule.update is not None
    if rule.option is not None and not rule.models:
        problems.append(f"the reference of {config.algorithm} needs other models: give --algorithm.{rule.option} PATH")
    if moves and rollout.demands.reference and rule.initial_share:
        problems.append(
            f"the rollout {rollout.name} draws from the reference, but that of {config.algorithm} mixes "
            "log-probabilities, from which nothing is drawn: use another rollout"
        )
    elif moves and rollout.demands.reference and (config.max_staleness or strategy_of(config, algorithm) is not None):
        problems.append(
            f"the rollout {rollout.name} draws from the reference of one step, which moves, but max_staleness, "
            "oversample and segment_tokens continue samples in others: leave them out"
        )
    if moves and config.reference_memory == "host":
        problems.append(
            f"reference_memory is host, but the reference of {config.algorithm} moves, so it must stay on the device: "
            "leave it out"
        )
    elif rule.averages and config.adapts:
        problems.append(
            f"the reference of {config.algorithm} is an average of weights, but with {config.adapts} only adapters "
            "are trained, whose average is not that of their products: train all weights"
        )
    gather(*(functools.partial(raise_error, InputError(text)) for text in problems))


def check_kept(config: TrainConfig, algorithm: Algorithm, own_source: bool = False) -> None:
    """InputError unless all that is read of the reference can be computed before the first step: log-probabilities of
    responses that are given, under one that stays the initial policy."""
    if config.reference_memory != "disk":
        return
    if own_source:
        raise InputError("reference_memory is disk, but a source gives rows that are not known before: leave it out")
    rollout = rollout_of(config, algorithm)
    if not rollout.demands.given or rollout.demands.meets:
        what = "makes rows of other rows of a step" if rollout.demands.given else "samples"
        raise InputError(
            f"reference_memory is disk, but the rollout {rollout.name} {what}, so that not all responses are known "
            "before: leave it out"
        )
    read = {need for need in algorithm.needs if of_reference({need})}
    if read - {"reference_logp"} or algorithm.reference is not None:
        raise InputError(
            f"reference_memory is disk, but {config.algorithm} reads more of a reference than log-probabilities under "
            "the initial policy: leave it out"
        )


def fixed_reference(
    config: TrainConfig, rule: ReferenceRule | None, policy: Policy, frozen: Params | None, params: Params,
    others: Sequence[Params],
) -> Any:  # fmt: skip
    """The reference that stays, in buffers that no update donates; None where all of it moves.

    frozen: the weights that do not learn, if only adapters do. others: the parameters of the rule's models.
    Raises InputError for models of other shapes.
    """
    own = without_critic(params)
    if rule is not None and rule.update is not None:
        return _kept(config, frozen, own) if rule.initial_share else None
    if rule is None:
        return _kept(config, frozen, own)
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
    return found if found is frozen else _kept(config, None, found)


def _kept(config: TrainConfig, frozen: Params | None, own: Any) -> Any:
    if frozen is not None:  # new adapters add nothing
        return combine(frozen, jax.tree.map(jnp.copy, own)) if config.adapter else frozen
    copy = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, own)
    if config.reference_memory != "host":
        return copy
    return Mixture(to_host(copy.policies), copy.shares) if isinstance(copy, Mixture) else to_host(copy)


def reference_now(fixed: Any, moving: Any, frozen: Params | None, initial_share: float = 0.0) -> Any:
    """The reference policy's parameters: those that stay, those that move with the frozen weights, or a `Mixture`."""
    if moving is None:
        return fixed
    own = combine(frozen, chosen_snapshot(moving))
    return Mixture((fixed, own), (initial_share, 1 - initial_share)) if initial_share else own


def first_policies(
    config: TrainConfig, algorithm: Algorithm, hook: Hook | None, params: Params, league: League | None = None
) -> dict[str, Params]:
    """The policies that move beside the one that learns, before the first update, in buffers that no update donates.

    reference: where its rule has an update. previous: the policy before the last update, where the method needs it.
    other: the second policy that the hook reads. target: the target critic. league: those of each place, as a tuple.
    Their structure is that of `params` without a critic, or of the critic: with adapters, the frozen weights are added
    as they are read.
    """
    rule, own = algorithm.reference, without_critic(params)
    moves = rule is not None and rule.update is not None and wants_reference(config, algorithm)
    wanted = {
        REFERENCE: jax.jit(rule.init, static_argnums=1)(own, ()) if rule is not None and moves else None,
        "previous": own if of_previous(algorithm.needs) else None,
        "other": None if hook is None or hook.other is None else own,
        "target": None if algorithm.target is None else params["critic"],
        LEAGUE: None if league is None else (own,) * league.size,
    }
    return {name: jax.tree.map(jnp.copy, tree) for name, tree in wanted.items() if tree is not None}


def drawn_from(config: TrainConfig, algorithm: Algorithm, policies: Mapping[str, Any]) -> dict[str, Any]:
    """The policies that a rollout draws from beside those that stay, as entries of the sampler's parameters."""
    found = {name: tree for name, tree in policies.items() if name == LEAGUE}
    if REFERENCE in policies and rollout_of(config, algorithm).demands.reference:
        found[REFERENCE] = chosen_snapshot(policies[REFERENCE])
    return found


def with_second_policy(moving: Any, frozen: Params | None) -> Params | None:
    """The parameters that do not learn in a step: the frozen ones, and params["other"] of the policy's hook."""
    return frozen if moving is None else {**(frozen or {}), "other": combine(frozen, moving)}


def update_rules(algorithm: Algorithm, hook: Hook | None, league: League | None = None) -> dict[str, Update]:
    """How the policies of `first_policies` move after an update, by name."""
    rules: dict[str, ReferenceRule | League | None] = {
        REFERENCE: algorithm.reference, "other": None if hook is None else hook.other, "target": algorithm.target,
        LEAGUE: league,
    }  # fmt: skip
    return {name: rule.update for name, rule in rules.items() if rule is not None and rule.update is not None}


def moved(
    rules: Mapping[str, Update], policies: Mapping[str, Params], params: Params, updates: int
) -> dict[str, Params]:
    """The policies after an update, see `first_policies`; they are donated. The previous one is the learner's to move.

    rules: see `update_rules`. updates: so far.
    """
    out = dict(policies)
    for name, update in rules.items():
        if name in policies:
            now = params["critic"] if name == "target" else without_critic(params)
            out[name] = _program(update)(policies[name], now, jnp.int32(updates))
    return out


@functools.lru_cache(maxsize=4)
def _program(update: Update) -> Any:
    return jax.jit(update, donate_argnums=0)


def _shapes(tree: Any) -> Any:
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]
