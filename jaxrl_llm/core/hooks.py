"""Hooks of the sampler: pure functions `(logits, state, context) -> logits` between the policy and its filters.

A `Hook` is a static part of a `Policy` (`Policy.hook`). The sampler draws from the distribution that it gives, and the
update computes log-probabilities and entropies of the same one, through the same function (`models.hooked`). Its
numbers (`state`) are arrays, so that they can change at each step without recompilation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.reference import ReferenceRule
from jaxrl_llm.core.repr import layout
from jaxrl_llm.utils.errors import InputError

State = Mapping[str, jax.Array]  # f32[] each in the sampler, f32[N] each in the update


class Context(NamedTuple):
    """What a hook may read beside the logits: arrays of the same N places."""

    other: jax.Array | None = None  # f32[N, V], logits of the second policy after the same tokens; see `Hook.other`
    remembered: jax.Array | None = None  # f32[N], what `Hook.remember` gave when the token was drawn
    token: jax.Array | None = None  # int32[N], the token that was drawn; None while it is being drawn


@dataclass(frozen=True, repr=False)
class Hook:
    """A function of next-token logits that the sampler applies before its filters, and the update as well.

    apply: (logits f32[N, V], state, context) -> f32[N, V], -inf for tokens that may not be drawn. All logits are
    divided by the sampling temperature; the sampler's may have columns of -inf beyond the vocabulary. It acts on each
    of the N places alone, and must leave the drawn token (`Context.token`) finite.
    """

    apply: Callable[[jax.Array, State, Context], jax.Array]
    name: str = "hook"
    state: tuple[tuple[str, float], ...] = ()
    """Names and first values of its numbers. A step's values are the controls of these names that the last update
    wrote; each row of the batch has those that it was sampled with in info."""
    factor: Callable[[jax.Array, State], jax.Array] | None = None
    """(entropy f32[N], state) -> f32[N], where `apply` does nothing but multiply temperatures by a factor of the
    entropy: the update then needs no array of logits. See `by_temperature`."""
    remember: Callable[[jax.Array, State, Context], jax.Array] | None = None
    """(logits, state, context) -> f32[N], computed when a token is drawn and given to `apply`, then and in the update,
    as `Context.remembered`. It is `support_floor` of the batch, so the run must have no filters."""
    other: ReferenceRule | None = None
    """How the second policy moves whose logits are `Context.other`; it begins as the initial one. None: there is no
    second policy."""
    opponent: bool = False
    """Whether it makes an opponent: draws from the reference (`tools.sample(reference=True)`) go through it, with the
    logits of the policy, and those of the reference as `Context.other`. Other draws, and the update, do not."""
    truncates: bool = False
    """Whether it only forbids tokens, as filters do: then `untruncated_logp`, log-probabilities at another temperature,
    and those of the reference policy do not go through it."""

    def __post_init__(self) -> None:
        if self.remember is not None and self.factor is not None:
            raise InputError("a hook of temperatures remembers nothing: give either factor or remember")
        if self.opponent and (self.other is None or self.other.update is not None or self.state or self.remember):
            raise InputError("a hook of an opponent reads the reference, which stays: give other=ReferenceRule() alone")

    __repr__ = layout

    @property
    def lasting(self) -> bool:
        """Whether it is the same at every step, so that a completion may be continued at another."""
        return not self.state and self.other is None


def entropy_of(logits: jax.Array) -> jax.Array:
    """f32[N]: of softmax(logits), in nats; logits f32[N, V] may be -inf."""
    logp = jax.nn.log_softmax(logits, axis=1)
    possible = logp > -jnp.inf
    logp = jnp.where(possible, logp, 0.0)  # else its gradient would be NaN
    return -jnp.sum(jnp.where(possible, jnp.exp(logp) * logp, 0.0), axis=1)


def first_state(hook: Hook, controls: Mapping[str, float] | None = None) -> dict[str, float]:
    """The numbers of a hook before a step: those of the last update's controls, else the first ones."""
    found = {} if controls is None else controls
    return {name: float(found.get(name, value)) for name, value in hook.state}


def state_in(hook: Hook, info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The numbers of a hook that the rows of a batch were sampled with, f32[N] each; InputError where they are not."""
    missing = [name for name, _ in hook.state if name not in (info or {})]
    if missing:
        raise InputError(
            f"the update goes through the hook {hook.name}, but the batch has no info[{missing[0]!r}]: sample it with "
            "rollouts.programs.hooked(ROLLOUT, HOOK)"
        )
    return {name: (info or {})[name] for name, _ in hook.state}
