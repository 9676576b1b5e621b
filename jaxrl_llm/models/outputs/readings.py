"""What else can be read of sampled tokens while a policy's states are at hand: one function for each name.

M tokens are chosen, of a batch [N, L]; D is the width of the model, K a number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.critic import implicit_logp, values_at
from jaxrl_llm.models.outputs.adam_step import adam_step
from jaxrl_llm.models.outputs.divergence import divergence
from jaxrl_llm.models.outputs.wanted import Wanted
from jaxrl_llm.models.packed_states import View, logp_at, view_of
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.stacks import inner_policy
from jaxrl_llm.models.vocabulary import Distribution, logp_of_tokens, most_probable, vocabulary_sum
from jaxrl_llm.utils.errors import InputError


class Seen(NamedTuple):
    """What there is to read from."""

    policy: Policy
    params: Params
    batch: Trajectories
    packing: Packing | None
    wanted: Wanted
    view: View
    whole: Distribution  # that tokens were drawn from, without truncation
    source: Distribution  # the same, under stop-gradient

    def at(self, name: str) -> Array:
        """What the batch has at the chosen tokens, [M, ...]."""
        return self.batch.need(name).at[self.view.row, self.view.column].get(mode="clip")


def distribution_at(policy: Policy, params: Params, view: View) -> Distribution:
    """The distributions that a view's tokens were drawn from, without truncation."""
    states, head, config = policy.head_states(params, view.states), policy.unembedding(params), policy.config
    return Distribution(states, head, view.temperature, config.logit_softcap, config.known_tokens)


def stopped(whole: Distribution) -> Distribution:
    """The distributions without gradients."""
    stop = jax.lax.stop_gradient
    return whole._replace(hidden=stop(whole.hidden), unembedding=stop(whole.unembedding))


def tempered_logp(seen: Seen, times: float) -> Array:
    """f32[M]: log-probability at a multiple of the sampling temperature, without truncation; differentiable."""
    tempered = seen.view._replace(temperature=times * seen.view.temperature, floor=None)
    return logp_at(seen.policy, seen.params, tempered)[0]


def _internal_logp(seen: Seen) -> Array:
    inner, weights = inner_policy(seen.policy, seen.params, seen.wanted.layer)
    states = view_of(inner, weights, seen.batch, seen.packing)._replace(floor=None)
    return logp_at(inner, weights, states)[0]


def _greedy(seen: Seen) -> Array:
    return (most_probable(seen.source, 1)[0][:, 0] == seen.view.targets).astype(jnp.float32)


def _top_tokens(seen: Seen) -> dict[str, Array]:
    tokens, logp = most_probable(seen.source, seen.wanted.top)
    return {"top_tokens": tokens.astype(jnp.float32), "top_logp": logp}  # exact: vocabularies are far below 2^24


def _top_logp(seen: Seen) -> Array | dict[str, Array]:
    if "top_tokens" in seen.wanted.names:
        return {}  # `_top_tokens` has them
    return logp_of_tokens(seen.whole, seen.at("top_tokens").astype(jnp.int32))


def _most_probable(seen: Seen) -> Array:
    ids, logs = most_probable(seen.source, seen.wanted.top)
    return jnp.stack([ids.astype(logs.dtype), logs], axis=1)


def _teacher_top_logp(seen: Seen) -> Array:
    return logp_of_tokens(seen.whole, seen.at("teacher_top")[:, 0].astype(jnp.int32))


def _teacher_divergence(seen: Seen) -> Array:
    """InputError where the teacher's unembedding is not at hand."""
    if seen.policy.teacher is None or "teacher" not in seen.params:
        raise InputError("a divergence from the whole distribution of a teacher needs its unembedding: train by a run")
    head = seen.params["teacher"]["unembedding"]
    states = seen.at("teacher_states").astype(head.dtype)
    teacher = Distribution(states, head, seen.view.temperature, *seen.policy.teacher)  # at the same temperatures
    return divergence(seen.whole, teacher, seen.wanted.beta)


ADAM = ("beta1", "beta2", "epsilon")  # controls that "adam_step" reads


def _adam_step(seen: Seen) -> Array:
    """f32[M, 2]. InputError where Adam's moments are not at hand, or what the transform says of it."""
    if "moments" not in seen.params:
        raise InputError("a step of Adam needs its moments, which only an update has: give the objective to update")
    said = seen.batch.controls or {}
    if missing := [name for name in ADAM if name not in said]:
        raise InputError(f"a step of Adam needs the control {missing[0]}: a transform gives it, by with_controls")
    b1, b2, epsilon = (said[name] for name in ADAM)
    advantages = jax.lax.stop_gradient(seen.at("advantages"))
    return adam_step(seen.source, seen.view.targets, advantages, seen.params["moments"], (b1, b2, epsilon))


def _sum_over_vocabulary(of_logp: Callable[[Array], Array], seen: Seen) -> Array:
    return vocabulary_sum(of_logp, seen.source)


# Sums over the vocabulary of what is made of its log-probabilities, f32[M].
MEASURES: dict[str, Callable[[Seen], Array]] = {
    "squared_probability": partial(_sum_over_vocabulary, lambda logp: jnp.exp(2 * logp)),
    "cubed_probability": partial(_sum_over_vocabulary, lambda logp: jnp.exp(3 * logp)),
    "mean_logp": lambda seen: vocabulary_sum(lambda logp: logp, seen.source) * (1 / seen.policy.config.known_tokens),
}
# What is found under a name, or under several, [M, ...].
READINGS: dict[str, Callable[[Seen], Array | dict[str, Array]]] = {
    **MEASURES,
    "values": lambda seen: values_at(seen.policy, seen.params, seen.view, seen.batch, seen.packing),
    "implicit_logp": lambda seen: implicit_logp(seen.policy, seen.params, seen.batch, seen.packing),
    "internal_logp": _internal_logp,
    "heated_logp": lambda seen: tempered_logp(seen, seen.wanted.heat),
    "hidden": lambda seen: jax.lax.stop_gradient(seen.view.states),
    "head_states": lambda seen: seen.source.hidden,
    "greedy": _greedy,
    "top_tokens": _top_tokens,
    "top_logp": _top_logp,
    "most_probable": _most_probable,
    "teacher_top_logp": _teacher_top_logp,
    "teacher_divergence": _teacher_divergence,
    "adam_step": _adam_step,
}
