"""Log-probabilities and entropies of the distribution that a hook of the sampler makes of the policy's logits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.hooks import Context, Hook, State, entropy_of
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError

BLOCK = 256  # places whose logits are in memory at a time, on each shard of the rows


class Places(NamedTuple):
    """M places of a batch at which tokens were drawn."""

    states: Array  # [M, D], hidden states that they were drawn from
    targets: Array  # int32[M], the tokens
    temperature: Array  # f32[M]
    remembered: Array | None  # f32[M], the batch's `support_floor`: of `Hook.remember`, or else of filters
    state: State  # f32[M] each, the hook's numbers
    others: Array | None  # [M, D], hidden states of the second policy


def of_a_reference(policy: Policy, batch: Trajectories) -> tuple[Policy, Trajectories]:
    """The policy and the batch as a reference sees them: without a hook that forbids tokens, and its floors.

    The reference has the temperatures of a hook too. InputError for a hook that changes logits in another way.
    """
    if (hook := policy.hook) is None or hook.factor is not None:
        return policy, batch
    if not hook.truncates:
        raise InputError(
            f"reference_logp is not defined: the hook {hook.name} changes the policy's logits, not those of a reference"
        )
    return dataclasses.replace(policy, hook=None), batch.replace(support_floor=None)


@jax.named_scope("head")
def hooked_logp(policy: Policy, hook: Hook, params: Params, places: Places) -> tuple[Array, Array]:
    """Log-probabilities of the tokens and entropies of their distributions, f32[M] each, through the hook.

    Differentiable with respect to params and states; the second policy, params["other"], is constant. The logits of a
    few places are in memory at a time, in the backward pass as well, where they are computed again.
    """
    M, shards = places.targets.shape[0], row_shards(policy.mesh)
    shards = shards if M % shards == 0 else 1
    each = min(BLOCK, -(-M // shards))
    missing = -(M // shards) % each

    def split(x: Array) -> Array:
        """[M, ...] -> [blocks, shards * each, ...]: every block has places of all shards."""
        x = x.reshape(shards, M // shards, *x.shape[1:])
        x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        x = x.reshape(shards, -1, each, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def joined(x: Array) -> Array:
        x = x.reshape(x.shape[0], shards, each).swapaxes(0, 1).reshape(shards, -1)
        return x[:, : M // shards].reshape(M)

    of_block = jax.checkpoint(lambda block: _of_block(policy, hook, params, block))
    found = jax.lax.map(of_block, jax.tree.map(split, places))
    return joined(found[0]), joined(found[1])


def _of_block(policy: Policy, hook: Hook, params: Params, places: Places) -> tuple[Array, Array]:
    def logits(weights: Params, states: Array) -> Array:
        raw = policy.without_unknown(policy.logits_of(weights, states))
        return raw.astype(accumulation_dtype(policy.dtype)) / places.temperature[:, None]

    other = places.others
    others = None if other is None else jax.lax.stop_gradient(logits(params["other"], other))
    z = hook.apply(logits(params, places.states), places.state, Context(others, places.remembered, places.targets))
    if places.remembered is not None and hook.remember is None:  # of the run's filters, after the hook
        drawn = jnp.arange(z.shape[1]) == places.targets[:, None]
        constant = jax.lax.stop_gradient(jax.nn.log_softmax(z, axis=1))
        z = jnp.where((constant >= places.remembered[:, None]) | drawn, z, -jnp.inf)
    return jnp.take_along_axis(jax.nn.log_softmax(z, axis=1), places.targets[:, None], axis=1)[:, 0], entropy_of(z)
