"""Routing replay of a batch: which experts a mixture sees each token with, where they are given.

MiniRL (2512.01374, section 4.2): of a mixture of experts pi(y; theta) depends on the chosen experts e too, so that the
ratio pi(y; theta, e) / pi_old(y; theta_old, e_old) is far from 1 where a router chooses otherwise, be it by an update
or by rounding. With e = e_old, those of the sampler (R3) or of the weights before the update (R2), it is a function of
theta that is smooth around theta_old. Numbers of experts are small integers, k of each token and layer.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.annotations import Routing
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.utils.errors import InputError

_FACTOR = 0x9E3779B1  # odd, so that multiplication by it permutes uint32


def check_experts(policy: Policy, batch: Trajectories) -> None:
    """InputError where a batch has the experts of another model; static."""
    if batch.experts is None:
        return
    config, found = policy.config, tuple(batch.experts.shape[2:])
    if not config.num_experts:
        raise InputError("the batch has experts to replay, but the policy is no mixture of experts: leave them out")
    if found != (config.num_layers, config.experts_per_token):
        raise InputError(
            f"the batch has {found[1]} experts of each token in {found[0]} layers, but the policy has "
            f"{config.experts_per_token} in {config.num_layers}: replay those of the same model"
        )


def routing_of(routing: Routing, policy: Policy, batch: Trajectories) -> Routing:
    """The routing to replay of a batch on the host: as asked for of a mixture of experts, else "none".

    InputError for "rollout" where a batch with actions lacks the experts.
    """
    if not policy.config.num_experts:
        return "none"
    if routing == "rollout" and batch.experts is None and np.any(batch.action_mask):
        raise InputError(
            "this method replays the experts that the rollout's tokens were sampled with, which the batch lacks: "
            'sample with record_experts=True, or take routing "recompute" or "none"'
        )
    return routing


def of_all_rows(experts: jax.Array, batch: Trajectories) -> jax.Array:
    """Experts of all tokens, int[N, L, layers, k], where those of tokens that rows share are recorded in one of them.

    experts: NOT_RECORDED where another row that begins with the same tokens has them (`packed_states.packed_states`).
    Rows that begin alike are found by a hash of 32 bits of their tokens so far; should two differ in spite of it, one
    token of one of them is replayed with the experts of the other.
    """

    def one(key: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = (key ^ token) * jnp.uint32(_FACTOR)
        key ^= key >> 15
        return key, key

    tokens = batch.tokens.astype(jnp.uint32).T + 1
    _, keys = jax.lax.scan(one, jnp.full(tokens.shape[1], _FACTOR, jnp.uint32), tokens)
    missing = (experts[:, :, 0, 0] == NOT_RECORDED).T

    def holder(key: jax.Array, missing: jax.Array) -> jax.Array:
        """int32[N]: for each row one with the same key, and the experts where any has them."""
        order = jnp.lexsort((missing, key))
        return order[jnp.searchsorted(key[order], key)]

    row = jax.vmap(holder)(keys, missing).T
    return experts[row, jnp.arange(row.shape[1])]
