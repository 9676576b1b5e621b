"""Drawing the next token of each row from hidden states."""

import jax
import jax.numpy as jnp
from jaxrl_kernels import fused_sample

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.draw.logits import Drawn, DrawSettings, draw_from_logits, unembedding

__all__ = ["DrawSettings", "Drawn", "draw", "seed_of", "unembedding"]


@jax.jit
def seed_of(key: Array) -> Array:
    """uint32[]: the seed of a random key. With prompt id, sample number and position it keys a token's noise."""
    return jax.random.bits(key, dtype=jnp.uint32)


@jax.named_scope("draw")
def draw(
    policy: Policy,
    params: Params,
    hidden: Array,
    counters: Array,
    settings: DrawSettings,
    thinking: Array | None = None,
    ranked: int = 0,
) -> Drawn:
    """Draw a token for each row from hidden states [N, D], or [N, 2 D] of two policies (`pairs`).

    counters: uint32[N, 4], seed, prompt id, sample number and position; the noise is keyed on nothing else. Temperature
    0 takes the most probable token, with its log-probability under the untempered distribution. Without filters and
    `allowed`, accelerators allocate no [N, V] array; with them, or with a hook of the policy, the logits are one.

    thinking: bool[N], of a policy with `thinking`: the rows that draw a soft token (`core.soft_thinking`), whose `logp`
    is the log-density of its scores, and `entropy` that of the renormalised distribution over its K tokens.
    ranked: how many of the most probable tokens to record; 0: none.
    """
    whole = settings.filters, settings.allowed, policy.hook, thinking  # what needs the logits of all tokens
    if not ranked and all(each is None for each in whole):
        with jax.named_scope("head"):
            head, hidden = unembedding(policy, params, hidden)
            known = policy.config.known_tokens
            token, logp, entropy = fused_sample(
                hidden, head, counters, temperature=settings.temperature, softcap=policy.config.logit_softcap,
                vocab_size=known if known < head.shape[0] else None,
            )  # fmt: skip
        return Drawn(token, logp, entropy, jnp.full(hidden.shape[0], -jnp.inf), logp)
    return draw_from_logits(policy, params, hidden, counters, settings, thinking, ranked)
