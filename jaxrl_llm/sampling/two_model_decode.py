"""A second policy of the same architecture beside the first, token by token, for hooks that read its logits.

The engine runs both as one model with twice the layers: the caches have the layers of the first and then those of the
second, hidden states are those of both side by side, [..., 2 D]. So whatever the engine does with a row (share a
prompt, continue, restore, speculate) it does for both. params["other"] are the weights of the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.layers.attention import Attend
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.kv_cache import Layers, empty
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.sampling.weights import Weights


def is_pair(policy: Policy) -> bool:
    """Whether the policy's hook reads the logits of a second policy."""
    return policy.hook is not None and policy.hook.other is not None


def width(policy: Policy) -> int:
    """Numbers of a hidden state: D, or 2 D."""
    return policy.config.hidden_size * (2 if is_pair(policy) else 1)


def empty_layers(policy: Policy, rows: int, most: int, dtype: Any) -> Layers:
    """Empty caches of all layers, see `kv_cache.empty`."""
    first = empty(policy.config, rows, most, dtype)
    return first + empty(policy.config, rows, most, dtype) if is_pair(policy) else first


def run_both(
    policy: Policy, params: Params, tokens: Array, positions: Array, attend: Attend, memory: Any = None,
    record: bool = False, **options: Any,
) -> tuple[Array, Any]:  # fmt: skip
    """`Policy.run`, of both policies where there are two. InputError if their experts are to be recorded."""
    options = {"absorbed": True, **options}
    if not is_pair(policy):
        return policy.run(params, tokens, positions, attend, memory, record=record, **options)
    if record:
        raise InputError(
            'experts are not recorded beside a second policy, which the hook reads: set routing_replay to "none"'
        )
    n = policy.config.num_layers
    first, second = (None, None) if memory is None else (memory[:n], memory[n:])
    hidden, layers = policy.run(params, tokens, positions, attend, first, **options)
    other, others = policy.run(params["other"], tokens, positions, attend, second, **options)
    if isinstance(params["layers"], tuple) or policy.config.kinds:
        layers += others
    else:  # stacked along their first axis
        layers = jax.tree.map(lambda *x: jnp.concatenate(x), layers, others)
    return jnp.concatenate([hidden, other], axis=-1), layers


def of_both(policy: Policy, params: Params, hidden: Array) -> list[tuple[Params, Array]]:
    """The weights of each policy with its hidden states [N, D], from those of both [N, 2 D]."""
    if not is_pair(policy):
        return [(params, hidden)]
    D = policy.config.hidden_size
    return [(params, hidden[:, :D]), (params["other"], hidden[:, D:])]


def paired_weights(first: Weights, second: Weights) -> Weights:
    """The weights of the engine for both policies."""
    return first._replace(
        prompts=first.prompts | {"other": second.prompts},
        loop=first.loop | {"other": second.loop},
        moved_bytes=first.moved_bytes + second.moved_bytes,
        moved_seconds=first.moved_seconds + second.moved_seconds,
    )


def alone(weights: Weights) -> Weights:
    """These weights without those of a second policy."""

    def first(params: Params) -> Params:
        return {name: x for name, x in params.items() if name != "other"}

    return weights._replace(prompts=first(weights.prompts), loop=first(weights.loop))
