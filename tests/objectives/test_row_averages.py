"""Separate averages for kinds of rows in one objective, against loops over plain numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.objectives import (
    Average,
    by_rows,
    clip,
    constant,
    entropy,
    kl,
    policy_gradient,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_ratio,
)
from jaxrl_llm.utils.errors import InputError

MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]], bool)
VALUES = np.arange(1.0, 19).reshape(6, 3)
GUIDED = np.array([1, 0, 1, 0, 1, 0], bool)


def batch_of(**info: Any) -> Trajectories:
    zeros, row = jnp.zeros(MASK.shape, jnp.int32), jnp.asarray([0, 0, 0, 1, 1, 1], jnp.int32)
    mask = jnp.asarray(MASK)
    batch = Trajectories(zeros, mask, mask, jnp.zeros(MASK.shape), zeros, zeros, row, row, row > 9)
    return batch.replace(advantages=jnp.where(batch.action_mask, 1.0, 0.0)).with_info(
        **{name: jnp.asarray(x) for name, x in info.items()}
    )


def mean_of(values: Any) -> Objective:
    """The average of fixed values as an objective: by the entropies."""
    return entropy(values)


def found(average: Average, batch: Trajectories) -> float:
    outputs = PolicyOutputs(jnp.zeros(MASK.shape), jnp.asarray(VALUES, jnp.float32))
    loss, _ = jax.jit(mean_of(average))(outputs, batch)
    return float(loss)


def by_sequence(rows: Any) -> float:
    means = [VALUES[i][MASK[i]].mean() for i in rows if MASK[i].any()]
    return float(np.mean(means)) if means else 0.0


def by_token(rows: Any) -> float:
    values = [x for i in rows for x in VALUES[i][MASK[i]]]
    return float(np.mean(values)) if values else 0.0


def test_each_kind_has_its_own_mean() -> None:
    average = by_rows(guided=sequence_mean(), otherwise=token_mean())
    assert found(average, batch_of(guided=GUIDED)) == pytest.approx(by_sequence([0, 2]) + by_token([1, 3, 5]))
    assert found(average, batch_of(guided=~GUIDED)) == pytest.approx(by_sequence([1, 3, 5]) + by_token([0, 2]))
    scaled = by_rows(guided=0.5 * sequence_mean(), otherwise=2 * token_mean())
    assert found(scaled, batch_of(guided=GUIDED)) == pytest.approx(by_sequence([0, 2]) / 2 + 2 * by_token([1, 3, 5]))


def test_without_a_kind_the_rest_is_all() -> None:
    average = by_rows(guided=sequence_mean(), otherwise=token_mean())
    for batch in (batch_of(), batch_of(guided=np.zeros(6, bool)), batch_of(guided=np.zeros((6, 3), bool))):
        assert found(average, batch) == pytest.approx(by_token(range(6)))
    assert found(average, batch_of(guided=np.ones(6, bool))) == pytest.approx(by_sequence(range(6)))


def test_a_token_of_two_kinds_is_of_the_first_and_kinds_may_split_a_row() -> None:
    tokens = np.zeros((6, 3), bool)
    tokens[:, 0] = True
    average = by_rows(taught=token_mean(), guided=token_mean(), otherwise=token_mean())
    taught = VALUES[:, 0][MASK[:, 0]].mean()
    guided = VALUES[:, 1:][MASK[:, 1:] & GUIDED[:, None]].mean()
    rest = VALUES[:, 1:][MASK[:, 1:] & ~GUIDED[:, None]].mean()
    assert found(average, batch_of(taught=tokens, guided=GUIDED)) == pytest.approx(taught + guided + rest)


def test_what_an_average_finds_in_the_whole_batch_it_finds_in_its_kind() -> None:
    """The longest row, and the tokens of a prompt: of the kind's rows alone."""
    average = by_rows(guided=prompt_mean(), otherwise=constant(None))
    rows = [1, 3, 5]  # the longest has 3 actions
    constant_part = sum(VALUES[i][MASK[i]].sum() for i in rows) / (3 * 3)
    assert found(average, batch_of(guided=GUIDED)) == pytest.approx(by_token([0, 2]) + constant_part)
    both = by_rows(guided=constant(None), otherwise=constant(None))
    only_short = np.array([0, 1, 0, 0, 0, 1], bool)
    short = (4 + 5 + 16 + 17) / (2 * 2)
    rest = sum(VALUES[i][MASK[i]].sum() for i in (0, 2, 3)) / (3 * 3)
    assert found(both, batch_of(guided=only_short)) == pytest.approx(short + rest)


def test_slices_add_up_to_the_whole_in_loss_and_gradient() -> None:
    average = by_rows(guided=prompt_mean(), otherwise=sequence_mean())
    objective = policy_gradient(token_ratio(), clip(), average) + 0.5 * kl("behaviour", average=average)
    batch = with_totals(batch_of(guided=GUIDED))
    logp = jnp.asarray(np.random.default_rng(0).normal(size=MASK.shape), jnp.float32)

    def loss(logp: jax.Array, parts: int) -> jax.Array:
        outputs = PolicyOutputs(logp, jnp.zeros(MASK.shape))
        whole = objective.refreshed(outputs, batch)
        total = jnp.float32(0)
        for i in range(0, 6, 6 // parts):
            rows = slice(i, i + 6 // parts)
            part, out = (map_rows(lambda x, r=rows: x[r], whole), jax.tree.map(lambda x, r=rows: x[r], outputs))
            total += objective.function(out, part)[0]
        return total

    one, many = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(logp, parts) for parts in (1, 3))
    np.testing.assert_allclose(one[0], many[0], rtol=1e-6)
    np.testing.assert_allclose(one[1], many[1], atol=1e-7)
    assert np.count_nonzero(one[1]) == MASK.sum()


def test_a_split_batch_that_was_not_refreshed_is_refused() -> None:
    average = by_rows(guided=sequence_mean(), otherwise=token_mean())
    batch = with_totals(batch_of(guided=GUIDED))
    with pytest.raises(InputError, match="refresh it before it is split"):
        average(jnp.asarray(VALUES), batch)


def test_it_needs_what_its_parts_need() -> None:
    needy = Average(lambda values, batch: jnp.sum(values), frozenset({"old_logp"}))
    assert by_rows(guided=needy, otherwise=token_mean()).needs == {"old_logp"}
    assert kl("behaviour", average=by_rows(needy)).needs == {"old_logp"}
    assert policy_gradient(token_ratio(), clip(), needy).needs == {"old_logp"}


def test_terms_with_other_kinds_keep_their_own_counts() -> None:
    """`otherwise` of one term is not that of another, whichever comes last."""
    guided, old = by_rows(otherwise=token_mean(), guided=0.0 * token_mean()), by_rows(token_mean(), old=token_mean())
    batch = batch_of(guided=GUIDED, old=np.array([1, 0, 0, 0, 0, 0], bool))
    outputs = PolicyOutputs(jnp.zeros(MASK.shape), jnp.asarray(VALUES, jnp.float32))
    alone = [float(entropy(one)(outputs, batch)[0]) for one in (guided, old)]
    assert float((entropy(guided) + entropy(old))(outputs, batch)[0]) == pytest.approx(sum(alone))
    assert alone[0] == pytest.approx(VALUES[MASK & ~GUIDED[:, None]].mean())
