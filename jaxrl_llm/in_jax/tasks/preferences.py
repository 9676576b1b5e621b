"""A task whose data are preferences: pairs of responses, of which a noisy judge likes one better."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.sequences import sorting
from jaxrl_llm.in_jax.tasks.task import Task


def preferences(length: int = 4, symbols: int = 6, errors: float = 0.5, sharpness: float = 8.0) -> Task:
    """`sorting` with pairs of responses to each prompt, for methods that learn from given ones (`Task.pairs`).

    A response is the right one, each symbol of which is replaced with the probability `errors` by a random one. Of two
    responses with the shares s and s' of symbols in their place, the first is chosen with the probability
    sigmoid(sharpness (s - s')), as Bradley and Terry have it. The policy begins as an imitation of such responses, the
    reference of these methods. Other methods sample, and learn from the reward.
    """
    check_number("errors", errors, above=0, most=1)
    check_number("sharpness", sharpness, above=0)
    task = sorting(length, symbols)

    def response(key: Array, prompt: Array) -> Array:
        wrong = jax.random.uniform(key, (length,)) < errors
        other = jax.random.randint(jax.random.fold_in(key, 1), (length,), 0, symbols)
        right = task.answer(prompt)
        return jnp.where(jnp.append(wrong, False), jnp.append(other, task.end), right).astype(jnp.int32)

    def pairs(key: Array, prompt: Array) -> tuple[Array, Array]:
        *each, for_judge = jax.random.split(key, 3)
        first, second = (response(one, prompt) for one in each)
        share, other = (jnp.mean((said == task.answer(prompt))[:-1], dtype=jnp.float32) for said in (first, second))
        wins = jax.random.bernoulli(for_judge, jax.nn.sigmoid(sharpness * (share - other)))
        return jnp.where(wins, first, second), jnp.where(wins, second, first)

    return task._replace(name="preferences", pairs=pairs, example=response)
