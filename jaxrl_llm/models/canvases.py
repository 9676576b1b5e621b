"""What a masked-diffusion model sees of a batch: rows with masks in place of actions (LLaDA, 2502.09992).

A response is written in blocks (`config.Unmasking`), of which the last is whole: the places after the response's end
are masks. The model sees a row and these places, its canvas, in which all tokens see each other. A token is predicted
from the state of its own place.

The log-probability of a response that is used wherever an algorithm reads one is that of all its tokens at once, each
without the others: one forward pass over the prompt and nothing but masks (d1, 2504.12216). It is the same in the
sampler, which gives it as the behaviour's, and in the update. What is known besides of the response's likelihood is the
bound on it, `elbo_terms`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.config import Unmasking
from jaxrl_llm.models.packing import PackedRows, Packing

MASKED = "masked"  # of a batch's info: 1 at the actions in whose place is a mask, f32[N, L]; without it at all
LEAST = 1e-3  # of the share of tokens that are masked


def canvases(batch: Trajectories, unmasking: Unmasking) -> tuple[Array, Packing]:
    """The tokens int32[N, W] of canvases, W = L + block - 1, and the packing in which each is a row.

    A row's canvas ends with the block of its last action. Its masks are where info["masked"] says, and after its end.
    """
    N, L = batch.tokens.shape
    block, W = unmasking.block, L + unmasking.block - 1

    def widened(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, W - L)))

    tokens, known, action = map(widened, (batch.tokens, batch.token_mask, batch.action_mask))
    column = jnp.arange(W)
    acts = jnp.any(action, axis=1)
    first = jnp.argmax(action, axis=1)
    last = W - 1 - jnp.argmax(action[:, ::-1], axis=1)
    end = jnp.where(acts, first + block * (-(-(last + 1 - first) // block)), 0)
    masked = action & (widened(batch.need(MASKED)) > 0) if MASKED in (batch.info or {}) else action
    filled = (column > last[:, None]) & (column < end[:, None])
    tokens = jnp.where(masked | filled, unmasking.mask_token, tokens)
    real = known | filled
    # Equal numbers: every token of a row attends to every other.
    enter = jnp.where(real, jnp.arange(1, N + 1)[:, None], 0)
    source = jnp.arange(N * W, dtype=jnp.int32).reshape(N, W)
    rows = PackedRows(source, enter, enter + real, jnp.broadcast_to(column, (N, W)).astype(jnp.int32))
    row, place = jnp.divmod(jnp.arange(N * L, dtype=jnp.int32), L)
    return tokens, Packing(rows, None, None, row, place, row * W + place)


def draw_masks(batch: Trajectories, number: Array) -> tuple[Array, Array]:
    """Masks of actions bool[N, L], each with probability t, and t f32[N], uniform between LEAST and 1.

    They depend on the number, and on the row's prompt, tokens and training step alone: the old and the new policy, and
    any order of rows, have the same.
    """
    place = jnp.arange(1, batch.tokens.shape[1] + 1, dtype=jnp.uint32)
    text = jnp.where(batch.token_mask, batch.tokens, 0).astype(jnp.uint32)
    digest = jnp.sum(text * (place * jnp.uint32(2654435761)), axis=1, dtype=jnp.uint32)
    step = jnp.max(jnp.where(batch.action_mask, batch.policy_step, 0), axis=1).astype(jnp.uint32)

    def of_row(digest: Array, step: Array, prompt: Array) -> tuple[Array, Array]:
        key = jax.random.key(digest)
        for more in (step, prompt.astype(jnp.uint32), number.astype(jnp.uint32)):
            key = jax.random.fold_in(key, more)
        share, masks = jax.random.split(key)
        t = LEAST + (1 - LEAST) * jax.random.uniform(share)
        return jax.random.uniform(masks, (batch.tokens.shape[1],)) < t, t

    masks, t = jax.vmap(of_row)(digest, step, batch.prompt_id)
    return masks & batch.action_mask, t
