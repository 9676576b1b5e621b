"""The weights before the last update, which some methods score their samples with: a copy that a run keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.needs import of_previous
from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params


def first_previous(needs: frozenset[str], params: Params) -> Params | None:
    """What `Learner.previous` is before the first update: a copy of the parameters, where a method needs it."""
    if not of_previous(needs):
        return None
    return jax.tree.map(jnp.copy, without_critic(params))


def replaced(previous: Params, params: Params) -> Params:
    """A copy of the parameters, without a critic, in the place of what `previous` takes, so that there is one copy."""
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(previous)):  # shapes: programs are only compiled
        return previous
    jax.tree.map(lambda x: x.delete(), previous)
    return jax.tree.map(jnp.copy, {name: params[name] for name in previous})
