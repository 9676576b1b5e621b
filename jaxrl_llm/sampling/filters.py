"""Which tokens may be drawn: top-k, top-p and min-p without sorting the vocabulary, and hooks that forbid tokens.

Such a hook (`support`) gives the policy's distribution on a set of tokens, renormalised: those with a log-probability
of at least a floor, under the policy or under a second one. The floor of each drawn token is remembered, as that of
top-p is, so that the update finds the same set even where its logits differ by rounding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import Positive
from jaxrl_llm.core.hooks import Context, Hook, State
from jaxrl_llm.core.reference import ReferenceRule
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array


class Filters(NamedTuple):
    """Which tokens may be drawn. Applied in this order, each to what the previous one kept, as transformers does."""

    top_k: jax.Array | int = 0  # the k most probable tokens; 0 keeps all
    top_p: jax.Array | float = 1.0  # the smallest set of most probable tokens with at least this mass; 1 keeps all
    min_p: jax.Array | float = 0.0  # tokens with at least this fraction of the largest probability; 0 keeps all


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the same order as the float32 x: bits of non-negative floats sort as they are, of negative reversed."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0.0 equals 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _floor_of_mass(logits: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """int32[N, 1]: the largest ordered logit c such that the tokens with logits >= c have mass >= target.

    Bisection over the 32 bits of a float: exact, 32 passes over [N, V] without a sort. Equal logits are kept together.
    """
    order = _ordered(logits)
    low = jnp.full((logits.shape[0], 1), jnp.iinfo(jnp.int32).min)
    high = jnp.full((logits.shape[0], 1), jnp.iinfo(jnp.int32).max)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The mean rounded up, without overflow.
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        enough = jnp.sum(jnp.where(order >= middle, mass, 0.0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]


@jax.named_scope("filters")
def kept_tokens(logits: jax.Array, filters: Filters) -> jax.Array:
    """bool[N, V]: which tokens the filters keep. logits: f32[N, V], already divided by the temperature."""
    order = _ordered(logits)
    count = jnp.where(filters.top_k > 0, filters.top_k, logits.shape[-1]).astype(jnp.float32)
    kept = order >= _floor_of_mass(logits, jnp.ones_like(logits), jnp.minimum(count, logits.shape[-1]))
    probability = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    # Rounding can leave the total mass just below 1, so top_p 1 skips the search.
    nucleus = order >= _floor_of_mass(logits, probability, jnp.asarray(filters.top_p, jnp.float32))
    kept = kept & (nucleus | (jnp.asarray(filters.top_p) >= 1.0))
    # With min_p 0 the threshold is -inf, which keeps every token.
    return kept & (logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.asarray(filters.min_p, jnp.float32)))


def support_floor(logits: jax.Array, kept: jax.Array) -> jax.Array:
    """f32[N]: a log-probability between those of kept and dropped tokens; -inf where all are kept.

    It is midway between the smallest kept and the largest dropped one, so that recomputed log-probabilities that differ
    by rounding give the same support.
    """
    least = jnp.min(jnp.where(kept, logits, jnp.inf), axis=-1)
    dropped = jnp.max(jnp.where(kept, -jnp.inf, logits), axis=-1)
    return 0.5 * least + 0.5 * dropped - jax.nn.logsumexp(logits, axis=-1)


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
