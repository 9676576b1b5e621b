"""Steps of an update, drawn under jit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.checks import check_count
from jaxrl_llm.learner.microbatches import Steps, take_rows
from jaxrl_llm.models.checks import check_key
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.utils.errors import InputError


def draw_steps(
    key: jax.Array,
    batch: Trajectories,
    *,
    epochs: int = 1,
    minibatches: int = 1,
    group_size: int = 1,
    packing: Callable[[Trajectories], Packing] | None = None,
) -> Steps:
    """The gradient steps of a batch, drawn with `key`; pure, so it can be called under jit. Micro-batches are not cut.

    Each epoch deals the groups, `group_size` rows that stand next to each other, to `minibatches` in an order of its
    own; one minibatch is the batch as it is. packing: of a minibatch, such as `partial(shared_prompts, ...)`; None:
    every row as it is. Raises InputError where the groups do not split evenly, and for counts below 1.
    """
    check_key(key)
    check_batch(batch)
    counts = {"epochs": epochs, "minibatches": minibatches, "group_size": group_size}
    for name, count in counts.items():
        check_count(name, count)
    N = batch.tokens.shape[0]
    if N % (group_size * minibatches):
        raise InputError(
            f"{N} rows in groups of {group_size} do not split evenly into {minibatches} minibatches: change one of them"
        )
    rows = jnp.arange(N, dtype=jnp.int32)
    if minibatches == 1:
        rows = jnp.broadcast_to(rows, (epochs, N))
    else:
        units = rows.reshape(-1, group_size)
        rows = jax.vmap(lambda key: jax.random.permutation(key, units))(jax.random.split(key, epochs))
    rows = rows.reshape(epochs * minibatches, -1)
    packings = None if packing is None else jax.vmap(lambda chosen: packing(take_rows(batch, chosen)))(rows)
    return jax.tree.map(lambda x: x.reshape(epochs, minibatches, 1, *x.shape[1:]), Steps(rows, packings))
