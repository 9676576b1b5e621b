"""`with_sink_slots`: give a model keys and values in attention that belong to no token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.config.checks import with_slots
from jaxrl_llm.models.parameters import Params, combine, parameter_shapes, put
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.utils.errors import InputError


def with_sink_slots(policy: Policy, params: Params, slots: int) -> tuple[Policy, Params]:
    """The policy and its parameters with so many sink slots in each key-value head of each layer, all 0; see
    `layers.sink_slots`. 0 leaves both as they are.

    params: as `load_policy` gives them; they are not changed. With slots the model is another one from the start, since
    they take a share of attention's weights. Published formats have no place for them: `save_policy` refuses.

    Raises InputError for a model that has slots, or compressed keys and values (MLA), and for other parameters.
    """
    config = with_slots(policy.config, slots)
    if config == policy.config:
        return policy, params
    check_params(policy, params)
    if isinstance(params["layers"], tuple):
        raise InputError("sink slots are added to layers that are stacked: give the parameters as load_policy does")
    old, dtype = parameter_shapes(policy.config), jax.tree.leaves(params["embed"])[0].dtype
    new: Params = {}
    for path, shape in parameter_shapes(config).items():
        if path not in old:
            put(new, path, jnp.zeros(shape, dtype))
    return dataclasses.replace(policy, config=config), combine(params, new)
