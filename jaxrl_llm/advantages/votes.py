"""Rewards without labels: majority voting among the samples of a prompt."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import AtLeastOne, Ties
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, counted_part
from jaxrl_llm.selection.rows import mix, ranks_within, row_noise


def answer_keys(batch: Trajectories) -> jax.Array:
    """int32[N]: rows with the same answer have the same key; -1 for no answer.

    `info["answer_key"]` if the batch has it, else a hash of the row's action tokens. A row without actions has no
    answer.
    """
    acted = jnp.any(batch.action_mask, axis=1)
    given = (batch.info or {}).get("answer_key")
    if given is not None:
        return jnp.where(acted, given, -1).astype(jnp.int32)
    token = mix(mix(batch.tokens.astype(jnp.uint32)) + batch.action_index.astype(jnp.uint32))
    total = mix(jnp.sum(jnp.where(batch.action_mask, token, 0), axis=1, dtype=jnp.uint32))
    return jnp.where(acted, total >> 1, jnp.uint32(0xFFFFFFFF)).astype(jnp.int32)


def majority(keys: jax.Array, group: jax.Array, priority: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Agreement f32[N] with the group's most frequent answer (1 or 0), and that answer's share of the group f32[N].

    keys int32[N], -1 for no answer (agreement 0, but counted in the share's denominator). Ties go to the answer with
    the highest priority f32[N] on any of its rows. Both are 0 for a group without any answer.

    >>> keys = jnp.array([12, 7, 12, -1, 7, 12, 3, 12])
    >>> print(*majority(keys, jnp.zeros(8, jnp.int32), -jnp.arange(8.0)))
    [1. 0. 1. 0. 0. 1. 0. 1.] [0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5]
    """
    N = keys.shape[0]
    answered = keys >= 0
    _, of_group = jnp.unique(group, return_inverse=True, size=N)
    _, of_key = jnp.unique(keys, return_inverse=True, size=N)
    (count,) = bucket_sums(of_group * N + of_key, answered.astype(jnp.float32))
    (size,) = bucket_sums(group, jnp.ones(N))

    def best(values: jax.Array, among: jax.Array) -> jax.Array:
        lowest = jnp.asarray(-jnp.inf if values.dtype == jnp.float32 else -1, values.dtype)
        return jax.ops.segment_max(jnp.where(among, values, lowest), of_group, num_segments=N)[of_group]

    leading = answered & (count == best(count, answered))
    leading &= priority == best(priority, leading)
    agree = (answered & (keys == best(keys, leading))).astype(jnp.float32)
    (votes,) = bucket_sums(group, agree)
    return agree, votes / size


@counted_part({"answer_key"})
def vote(step: jax.Array, batch: Trajectories, keep: AtLeastOne | None = None, ties: Ties = "content") -> Trajectories:
    """Replace the reward by agreement with the group's majority answer (TTRL, 2504.16084).

    keep: number of samples per group to train on, drawn at random after the vote; the others become unscored and get
    weight 0. None: all. ties: "first" picks the answer of the earliest row, "content" breaks ties by the answer itself,
    independent of the order of rows. If the batch has rewards, rows without one do not vote. Writes info["majority"]
    f32[N], the share of the majority answer.
    """
    keys = answer_keys(batch)
    voters = jnp.any(batch.action_mask, axis=1) if batch.reward is None else ~jnp.isnan(batch.scores)
    N = keys.shape[0]
    by_content = (mix(keys.astype(jnp.uint32)) >> 8).astype(jnp.float32)
    priority = by_content if ties == "content" else -jnp.arange(N, dtype=jnp.float32)
    # Rows that do not vote get groups of their own, so that no denominator counts them.
    _, group = jnp.unique(batch.group, return_inverse=True, size=N)
    group = jnp.where(voters, group, N + jnp.arange(N))
    reward, share = majority(jnp.where(voters, keys, -1), group, priority)
    reward = jnp.where(voters, reward, jnp.nan)
    if keep is not None:
        noise = row_noise(batch, step)
        kept = ranks_within(group, noise, noise, voters) < keep
        reward = jnp.where(kept, reward, jnp.nan)
        batch = batch.replace(weights=batch.loss_weights * kept[:, None])
    return batch.replace(reward=reward).with_info(majority=share)
