"""The pytrees: loss weights, totals and mapping over rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, map_rows, totals_of, with_totals
from jaxrl_llm.utils.errors import InputError


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
    found = {"tokens": 6, "sequences": 3, "rows": 3, "contrasts": 1}
    assert {k: float(v) for k, v in totals_of(batch).items()} == found
    half = batch.replace(weights=jnp.array([0.5, 0.0, 1.0, 1.0])[:, None] * jnp.ones((4, 3)))
    assert {k: float(v) for k, v in totals_of(half).items()} == found | {"tokens": 4, "sequences": 2}
    rewards = batch_of(np.ones((7, 1)), group=jnp.array([0, 0, 1, 1, 2, 2, 0]))
    rewards = rewards.replace(reward=jnp.array([1.0, 1.0, 0.5, 0.2, jnp.nan, 0.0, 0.0]))
    assert float(totals_of(rewards)["contrasts"]) == 2, "groups 0 and 1; one row of group 2 has no score"
    silent = rewards.replace(action_mask=rewards.action_mask.at[2].set(False))
    assert float(totals_of(silent)["contrasts"]) == 1, "a row without actions is no partner"


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


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tokens": jnp.zeros((2, 3))}, r"batch\.tokens has the dtype float32, but must be integers"),
        ({"tokens": jnp.zeros(3, int)}, r"batch\.tokens is int32\[3\], but must be integers \[rows, positions\]"),
        ({"action_mask": jnp.ones((2, 3), int)}, r"batch\.action_mask has the dtype int32, but must be bool"),
        ({"token_mask": jnp.ones((3, 2), bool)}, r"batch\.token_mask has the shape \[3, 2\], but must be \[2, 3\]"),
        ({"group": jnp.zeros(2)}, r"batch\.group has the dtype float32, but must be integers"),
        ({"behaviour_logp": None}, r"batch\.behaviour_logp is None, but every batch has one"),
        ({"reward": jnp.ones(1)}, r"batch\.reward has the shape \[1\], but must be \[2\], since tokens are \[2, 3\]"),
        ({"reward": jnp.float32(1)}, r"batch\.reward has the shape \[\], but must be \[2\]"),
        ({"reward": 1.0}, r"batch\.reward is of the type float, but must be an array"),
        ({"reward": [1.0, 0.0]}, r"batch\.reward is of the type list, but must be an array"),
        ({"values": jnp.zeros(2)}, r"batch\.values has the shape \[2\], but must be \[2, 3\]"),
        ({"advantages": jnp.ones((2, 3), int)}, r"batch\.advantages has the dtype int32, but must be floating point"),
        ({"rewards": {"right": jnp.ones(3)}}, r"batch\.rewards\['right'\] has the shape \[3\], but must be \[2\]"),
        ({"rewards": jnp.ones(2)}, r"batch\.rewards is float32\[2\], but must be a dict"),
        (
            {"info": {"flawed": jnp.ones(3)}},
            r"batch\.info\['flawed'\] is float32\[3\], but needs .* of 2 rows",
        ),
        ({"turn_rewards": jnp.ones(2)}, r"batch\.turn_rewards has the shape \[2\], but must be \[2, K\]"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    batch = batch_of([[0, 1, 1], [1, 0, 0]])
    check_batch(batch)
    with pytest.raises(InputError, match=message) as caught:
        check_batch(batch.replace(**fields))
    assert "\n" not in str(caught.value)


def test_only_batches_are_batches() -> None:
    for value, words in ((None, "None"), ({}, "of the type dict"), (jnp.ones(2), r"float32\[2\]")):
        with pytest.raises(InputError, match=f"the batch is {words}, but must be Trajectories"):
            check_batch(value)


def test_rewards_may_be_any_numbers_and_values_have_heads() -> None:
    batch = batch_of(np.ones((2, 3), bool))
    for reward in (jnp.array([1, 0]), jnp.array([True, False]), np.array([1.0, 0.0])):
        check_batch(batch.replace(reward=reward))
    check_batch(batch.replace(values=jnp.zeros((2, 3, 4)), weights=jnp.ones((2, 3), bool)))
    check_batch(jax.tree.map(np.asarray, batch))


def test_the_check_is_static() -> None:
    """It adds no operation to a program, looks at no value, and does not stand in the way of other pytrees."""
    batch = batch_of([[0, 1, 1]])

    def checked(batch: Trajectories) -> jax.Array:
        check_batch(batch)
        return batch.lengths

    assert str(jax.make_jaxpr(checked)(batch)) == str(jax.make_jaxpr(lambda batch: batch.lengths)(batch))
    with pytest.raises(InputError, match="reward"):
        jax.eval_shape(checked, batch.replace(reward=jnp.ones(2)))
    assert jax.tree.map(lambda x: x.shape, batch).tokens == (1, 3)


def test_a_batch_prints_in_one_line_what_it_has() -> None:
    batch = batch_of([[0, 1, 1], [1, 0, 0], [0, 0, 0]], group=jnp.array([0, 0, 1]))
    assert repr(batch) == "Trajectories(3 x 3; 9 tokens, 3 of them actions; groups: 2)"
    scored = batch.replace(
        reward=jnp.array([1.0, 0.5, 7.0]),
        rewards={"correct": jnp.ones(3), "brief": jnp.ones(3)},
        entropy=jnp.ones((3, 3)),
    )
    assert repr(scored) == (
        "Trajectories(3 x 3; 9 tokens, 3 of them actions; groups: 2; mean reward 0.75; "
        "with rewards[brief, correct], reward, entropy)"
    ), "the row without actions has no score"
    assert "no row is scored" in repr(scored.replace(reward=jnp.full(3, jnp.nan)))
    texts = []
    jax.jit(lambda b: texts.append(repr(b)) or b.reward)(scored)
    assert texts == ["Trajectories(3 x 3; with rewards[brief, correct], reward, entropy)"]
    assert repr(jax.eval_shape(lambda b: b, batch)) == "Trajectories(3 x 3)"
    assert repr(jax.tree.map(lambda x: None, batch)).startswith("Trajectories(")
    outputs = PolicyOutputs(jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    assert repr(outputs) == "PolicyOutputs(2 x 3)"
    assert repr(outputs.replace(extras={"values": jnp.zeros((2, 3))})) == "PolicyOutputs(2 x 3, extras[values])"
