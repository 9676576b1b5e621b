"""Which policy the reference is: the initial one, another, an average, a mixture of models, or one that moves.

A `ReferenceRule` is a value of an `Algorithm`. Its functions are pure and take parameters, whole pytrees or the
adapters alone. Without a rule the reference is the initial policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import Count, Fraction
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.utils.errors import InputError, shown

Params = Any
Update = Callable[[Params, Params, jax.Array], Params]
REFERENCE = "reference"  # the entry of a sampler's parameters that has a reference which moves


class Snapshots(NamedTuple):
    """Several policies, of which one at a time is the reference."""

    policies: tuple[Params, ...]
    place: jax.Array  # int32[], of the one that is


class Mixture(NamedTuple):
    """Several policies as one reference: its log-probability is the weighted mean of theirs, not normalised."""

    policies: tuple[Params, ...]
    shares: tuple[float, ...]  # add up to 1


@dataclass(frozen=True, repr=False)
class ReferenceRule:
    """How the reference starts, and how it moves.

    init: (initial parameters, parameters of `models`) -> parameters, or a `Mixture`; of one that moves, or `Snapshots`.
    update: (reference, current parameters, updates so far int32[]) -> reference, after each update; None: it stays.
    """

    init: Callable[[Params, Sequence[Params]], Params | Mixture | Snapshots] = lambda initial, others: initial
    update: Update | None = None
    models: tuple[str, ...] = ()
    """Names or folders of other models, with weights of the same shapes."""
    option: str | None = None
    """The hyper-parameter that names `models`, which a run cannot do without."""
    averages: bool = False
    """Whether `update` mixes weights, so that it cannot be applied to adapters alone."""
    initial_share: float = 0.0
    """Share of the initial policy's log-probabilities in those of a reference that moves; see `with_initial`."""

    def __post_init__(self) -> None:
        if self.update is not None and self.models:
            raise InputError("a reference with other models stays as it is: leave out its update")

    __repr__ = layout


def chosen_snapshot(reference: Params | Snapshots) -> Params:
    """The parameters of a reference that moves: of the one of its snapshots that is chosen, where it has some."""
    return reference.policies[int(reference.place)] if isinstance(reference, Snapshots) else reference


def weighted_mean(trees: Sequence[Params], shares: Sequence[float]) -> Params:
    """The leafwise sum_i shares_i x_i of parameter sets of one structure, computed in float32.

    >>> weighted_mean([{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}], (0.25, 0.75))["w"].tolist()
    [0.25, 0.25]
    """

    def mean(*leaves: jax.Array) -> jax.Array:
        total = sum(share * x.astype(jnp.float32) for share, x in zip(shares, leaves, strict=True))
        return jnp.asarray(total).astype(leaves[0].dtype)

    return jax.tree.map(mean, *trees)


@part
def exponential_average(decay: Fraction = 0.99) -> ReferenceRule:
    """The moving average of the policy's weights: ref <- decay ref + (1 - decay) weights after each update.

    Raises InputError unless decay is within [0, 1].
    """

    def update(reference: Params, params: Params, updates: jax.Array) -> Params:
        return weighted_mean((reference, params), (decay, 1 - decay))

    return ReferenceRule(update=update, averages=True)


@part
def periodic_reset(every: Count = 1) -> ReferenceRule:
    """The policy of the last update whose number is a multiple of `every`; 1 is the last iterate.

    Raises InputError unless every is a whole number, at least 1.
    """

    def update(reference: Params, params: Params, updates: jax.Array) -> Params:
        return jax.tree.map(lambda old, new: jnp.where(updates % every == 0, new, old), reference, params)

    return ReferenceRule(update=update)


@part
def with_initial(rule: ReferenceRule, share: Fraction) -> ReferenceRule:
    """A reference that moves beside the initial policy, which stays: share log pi_0 + (1 - share) log pi_moved.

    Raises InputError for a rule that does not move, and unless share is within [0, 1].
    """
    if rule.update is None:
        raise InputError("with_initial mixes the initial policy with a reference that moves, but the rule's stays")
    return replace(rule, initial_share=float(share))


def model_names(models: Sequence[str]) -> tuple[str, ...]:
    """The names of models; InputError for what is none."""
    for name in models:
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"a model of the reference is {shown(name)}: give a name or a folder")
    return tuple(name.strip() for name in models)


@part
def another(model: str, option: str | None = None) -> ReferenceRule:
    """Another model, which stays as it is. option: see `ReferenceRule`."""
    return ReferenceRule(lambda initial, others: others[0], models=model_names([model]), option=option)
