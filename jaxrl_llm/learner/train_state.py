"""What an update changes: parameters, the optimiser's state and the number of steps."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.learner.checks import check_alive, check_optimizer_kind
from jaxrl_llm.models.policy import Params
from jaxrl_llm.utils.errors import InputError


class TrainState(NamedTuple):
    """What the update changes."""

    params: Params  # those that learn; see `frozen` of `update` for the others
    optimizer: optax.OptState
    step: jax.Array  # int32[]: gradient steps taken


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A state that has taken no step. It shares the parameters' buffers.

    Raises InputError for parameters that are not floats or were donated, and for what is not an optimiser.
    """
    check_optimizer_kind(optimizer)
    if not isinstance(params, Mapping):
        raise InputError(f"the parameters are {in_words(params)}, but must be the dictionary that load_policy gives")
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(getattr(x, "dtype", None) or type(x), jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise InputError(f"the parameter {name} is {in_words(x)}, but must be an array of floats")
    check_alive("a parameter", params, "Keep a copy of parameters that are needed after it")
    return TrainState(params, optimizer.init(params), jnp.int32(0))
