"""What Adam's step on one token alone would do to the logits at that token, in the last layer.

h is the token's last hidden state f32[D], pi its distribution f32[V], a the action, A its advantage and v = onehot(a) -
pi. The unembedding's gradient of A log pi(a) is g = A v h^T, and Adam's next step from it alone, after n steps,

    G = (b1 P + (1 - b1) g) / (1 - b1^(n+1)) / (sqrt((b2 Q + (1 - b2) g^2) / (1 - b2^(n+1))) + epsilon)

with its moments P and Q of the unembedding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.models.vocabulary import Distribution, logits_of_block, unembedding_blocks

BLOCK = 1024  # of the vocabulary
TOKENS = 16  # at once
Array = jax.Array


@jax.named_scope("adam_step")
def adam_step(
    source: Distribution,
    actions: Array,
    advantages: Array,
    moments: dict[str, Array],
    betas: tuple[Array, Array, Array],
    block: int = BLOCK,
) -> Array:
    """Of u = G h at each token: v.u and the variance of u under pi, f32[M, 2].

    source: of M tokens, whose unembedding is what Adam steps on. actions: int[M]. advantages: f32[M]. moments: "first"
    and "second" f32[V, D], "count" int32[], the steps that they are of. betas: b1, b2, epsilon. A block of the
    vocabulary at a time, with some ten elementwise operations for each token and number of the unembedding.
    """
    V = source.unembedding.shape[0]
    block = min(block, V)
    rows, starts = unembedding_blocks(source, block)
    parts = tuple(
        jnp.pad(moments[name].astype(jnp.float32), ((0, len(rows) * block - V), (0, 0))).reshape(rows.shape)
        for name in ("first", "second")
    )
    b1, b2, epsilon = betas
    after = moments["count"].astype(jnp.float32) + 1
    hidden = source.hidden.astype(jnp.float32)

    def normaliser(total: Array, each: tuple[Array, Array]) -> tuple[Array, None]:
        return jnp.logaddexp(total, jax.nn.logsumexp(logits_of_block(source, *each), axis=1)), None

    M = hidden.shape[0]
    total, _ = jax.lax.scan(normaliser, jnp.full(M, -jnp.inf), (rows, starts))

    def add(sums: Array, each: tuple[Array, ...]) -> tuple[Array, None]:
        some, start, P, Q = each
        pi = jnp.exp(logits_of_block(source, some, start) - total[:, None])
        own = jax.nn.one_hot(actions - start, block)

        def logits_step(token: tuple[Array, ...]) -> Array:
            scale, h = token  # A v f32[block] and f32[D]
            g = scale[:, None] * h
            first = (b1 * P + (1 - b1) * g) / (1 - b1**after)
            second = (b2 * Q + (1 - b2) * g**2) / (1 - b2**after)
            return jnp.sum(first / (jnp.sqrt(second) + epsilon) * h, axis=1)

        u = jax.lax.map(logits_step, (advantages[:, None] * (own - pi), hidden), batch_size=TOKENS)
        found = jnp.sum(own * u, axis=1), jnp.sum(pi * u, axis=1), jnp.sum(pi * u**2, axis=1)
        return sums + jnp.stack(found, axis=1), None

    at_action, mean, square = jax.lax.scan(add, jnp.zeros((M, 3)), (rows, starts, *parts))[0].T
    return jnp.stack([at_action - mean, square - mean**2], axis=1)
