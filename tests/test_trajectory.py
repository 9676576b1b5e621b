"""The pytrees: loss weights, totals and mapping over rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, map_rows, totals_of, with_totals


def batch_of(action_mask: Any, **fields: Any) -> Trajectories:
    """Trajectories with the given actions; all else is plain."""
    mask = jnp.asarray(action_mask, bool)
    N, L = mask.shape
    plain: dict[str, Any] = {
        "tokens": jnp.zeros((N, L), jnp.int32),
        "token_mask": jnp.ones((N, L), bool),
        "behaviour_logp": jnp.zeros((N, L)),
        "policy_step": jnp.zeros((N, L), jnp.int32),
        "turn": jnp.where(mask, 0, -1),
        "group": jnp.zeros(N, jnp.int32),
        "prompt_id": jnp.zeros(N, jnp.int32),
        "truncated": jnp.zeros(N, bool),
    }
    return Trajectories(action_mask=mask, **{**plain, **fields})


def test_loss_weights_are_the_selection_on_actions() -> None:
    batch = batch_of([[0, 1, 1], [1, 0, 0]])
    assert batch.loss_weights.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.loss_weights.dtype == jnp.float32
    chosen = batch.replace(weights=jnp.array([[9.0, 0.5, 0.0], [2.0, jnp.nan, jnp.inf]]))
    assert chosen.loss_weights.tolist() == [[0, 0.5, 0], [2, 0, 0]], "what is masked may be anything"


def test_totals_by_hand() -> None:
    batch = batch_of([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    assert {k: float(v) for k, v in totals_of(batch).items()} == {"tokens": 6, "sequences": 3, "rows": 3}
    half = batch.replace(weights=jnp.array([0.5, 0.0, 1.0, 1.0])[:, None] * jnp.ones((4, 3)))
    assert {k: float(v) for k, v in totals_of(half).items()} == {"tokens": 4, "sequences": 2, "rows": 3}


def test_totals_of_nothing_can_be_divided_by() -> None:
    for value in totals_of(batch_of(np.zeros((2, 3)))).values():
        assert float(value) > 0
    for value in totals_of(batch_of(np.ones((2, 0)))).values():
        assert float(value) > 0


def test_totals_that_are_written_down_are_used_until_written_anew() -> None:
    batch = with_totals(batch_of([[1, 1], [1, 0]]))
    first = jax.tree.map(lambda x: x[:1], batch.replace(totals=None)).replace(totals=batch.totals)
    assert float(totals_of(first)["tokens"]) == 3
    assert float(with_totals(first).totals["tokens"]) == 2  # type: ignore[index]


def test_map_rows_leaves_totals_and_unknown_fields_alone() -> None:
    batch = with_totals(batch_of([[1, 1], [1, 0]], rewards={"a": jnp.array([1.0, 2.0])}))
    turned = map_rows(lambda x: x[::-1], batch)
    assert turned.action_mask.tolist() == [[True, False], [True, True]]
    assert turned.rewards["a"].tolist() == [2.0, 1.0]
    assert turned.totals is batch.totals
    assert turned.reward is None


def test_both_are_pytrees_that_pass_through_jit_and_vmap() -> None:
    batch = batch_of([[1, 1], [1, 0]])
    assert jax.jit(lambda b: b)(batch).action_mask.tolist() == batch.action_mask.tolist()
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
    assert jax.vmap(lambda b: totals_of(b)["tokens"])(stacked).tolist() == [3.0, 3.0]
    outputs = PolicyOutputs(logp=jnp.zeros((2, 2)), entropy=jnp.zeros((2, 2)), extras={"values": jnp.ones(2)})
    assert len(jax.tree.leaves(outputs)) == 3
