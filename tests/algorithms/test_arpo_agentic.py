"""Methods of episodes that fork: worked examples, and the limit in which they are GRPO."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from batches import gradient_of, prepared, random_batch
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.algorithms import get

BATCH, LOGP = random_batch(3)


def test_arpo_worked_example() -> None:
    """Rewards 1, 0, 1, 0; the first turn of the first two is one, and so is that of all but the last."""
    batch = episodes([[1, 2]] * 4, [[0.0, 0.0]] * 4, score=[1.0, 0.0, 1.0, 0.0])
    x = 0.866024
    transform = get("arpo_agentic").transform
    assert_close(of_turns(batch, transform), [[x, x], [-x, -x], [x, x], [-x, -x]])
    own = np.arange(4)[:, None] + 10.0
    hard = get("arpo_agentic", credit="hard").transform
    for first, wanted in [([0, 0, 2, 3], [0, 0, x, -x]), ([0, 0, 0, 3], [x / 3, x / 3, x / 3, -x])]:
        node = np.where(np.asarray(batch.turn) == 0, np.asarray(first)[:, None], own)
        found = of_turns(batch.with_info(node=jnp.asarray(node, jnp.float32)), hard)
        assert_close(found, [[a, b] for a, b in zip(wanted, [x, -x, x, -x], strict=True)])


def test_arpo_pays_a_success_with_several_calls_that_worked() -> None:
    info = {"calls": np.array([2.0, 3, 2, 2]), "failed_calls": np.array([0.0, 2, 0, 0])}
    batch = episodes([[1]] * 4, [[0.0]] * 4, score=[1.0, 1.0, 0.0, -1.0])
    batch = batch.with_info(**{name: jnp.asarray(x, jnp.float32) for name, x in info.items()})
    np.testing.assert_allclose(prepared(get("arpo_agentic"), batch).reward, [1.1, 1.0, 0.0, -1.0], rtol=1e-6)


def test_arpo_is_grpo_on_whole_paths() -> None:
    grpo = get("grpo", kl_coefficient=0.0)
    np.testing.assert_array_equal(gradient_of(get("arpo_agentic"), BATCH, LOGP), gradient_of(grpo, BATCH, LOGP))
