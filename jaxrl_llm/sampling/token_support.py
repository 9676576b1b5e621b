"""Hooks that forbid tokens: the policy's distribution on a set of tokens, renormalised.

The set is that of the tokens with a log-probability of at least a floor, under the policy or under a second one. The
floor of each drawn token is remembered, as that of top-p is, so that the update finds the same set even where its
logits differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.hooks import Context, Hook, State
from jaxrl_llm.core.ranges import Positive
from jaxrl_llm.core.reference import ReferenceRule
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.sampling.filters import support_floor


def support(kept: Callable[[Array], Array], name: str, other: ReferenceRule | None = None) -> Hook:
    """The hook that allows what `kept` of the logits keeps, f32[N, V] -> bool[N, V].

    kept: the tokens whose logits are at least some number. other: the logits are those of a second policy, which moves
    by this rule; by default the policy's own. In the update the drawn token is always allowed.
    """

    def source(logits: Array, context: Context) -> Array:
        if other is None:
            return jax.lax.stop_gradient(logits)
        assert context.other is not None
        return context.other

    def remember(logits: Array, state: State, context: Context) -> Array:
        found = source(logits, context)
        return support_floor(found, kept(found))

    def apply(logits: Array, state: State, context: Context) -> Array:
        assert context.remembered is not None
        allowed = jax.nn.log_softmax(source(logits, context), axis=1) >= context.remembered[:, None]
        if context.token is not None:
            allowed |= jnp.arange(logits.shape[1]) == context.token[:, None]
        return jnp.where(allowed, logits, -jnp.inf)

    return Hook(apply, name, remember=remember, other=other, truncates=True)


@part
def top_nsigma(n: Positive = 1.0) -> Hook:
    """The policy on the tokens whose logits are at most n standard deviations below the largest one (2411.07641).

    The deviation is that of the vocabulary's logits, all with the same weight, so that the set does not depend on the
    temperature. Raises InputError unless n is above 0.
    """

    def kept(logits: Array) -> Array:
        deviation = jnp.std(logits, axis=1, keepdims=True, where=logits > -jnp.inf)
        return logits >= jnp.max(logits, axis=1, keepdims=True) - n * deviation

    return support(kept, "top_nsigma")
