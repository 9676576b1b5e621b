"""The laboratory's task of preferences: how its pairs are drawn, and that methods of given pairs learn from them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.in_jax.rollout import evaluate_task, given_pairs
from jaxrl_llm.in_jax.tasks import preferences, sorting
from jaxrl_llm.in_jax.train import LabSettings, make_train, trains_on_pairs, warm_start
from jaxrl_llm.utils.errors import InputError

SMALL = LabSettings(iterations=150, prompts=16, group_size=4, hidden=16, layers=1, learning_rate=3e-3, exact=False)


def test_the_judge_is_bradley_and_terry_s() -> None:
    """Of a response with all symbols right and one with one of two, the right one is chosen with sigmoid(1.5 / 2)."""
    task = preferences(length=2, symbols=3, errors=0.5, sharpness=1.5)
    assert task.pairs is not None
    prompt = jnp.array([2, 0, 3])
    chosen, rejected = jax.vmap(task.pairs, (0, None))(jax.random.split(jax.random.key(0), 20_000), prompt)
    right = np.array([0, 2])
    shares = [(np.asarray(said)[:, :2] == right).mean(axis=1) for said in (chosen, rejected)]
    wins, losses = ((a == 1) & (b == 0.5) for a, b in (shares, shares[::-1]))
    count = wins.sum() + losses.sum()
    assert wins.sum() / count == pytest.approx(1 / (1 + np.exp(-0.75)), abs=4 * 0.5 / count**0.5)
    # A symbol is wrong where it was replaced by another one: 1 - 0.5 * 2 / 3.
    assert np.mean(shares) == pytest.approx(2 / 3, abs=0.01)


def test_pairs_are_rows_of_a_batch() -> None:
    task = preferences(length=2, symbols=2)
    batch = given_pairs(task, jax.random.key(1), 3, 64)
    tokens, reward = np.asarray(batch.tokens), np.asarray(batch.reward)
    np.testing.assert_array_equal(tokens[::2, :3], tokens[1::2, :3])
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(64), 2))
    np.testing.assert_array_equal(batch.action_mask, np.tile([False, False, False, True, True, True], (128, 1)))
    same = (tokens[::2] == tokens[1::2]).all(axis=1)
    assert 0 < same.sum() < 64
    assert np.isnan(reward.reshape(-1, 2)[same]).all()
    np.testing.assert_array_equal(reward.reshape(-1, 2)[~same], np.tile([1.0, 0.0], (64 - same.sum(), 1)))


def test_which_methods_take_the_pairs() -> None:
    task = preferences()
    taking = [name for name in algorithms.names() if trains_on_pairs(algorithms.get(name), task)]
    assert {"dpo", "ipo", "orpo", "cpo", "simpo"} <= {*taking}
    assert not {"grpo", "sft", "kto", "lipo", "dpo_online"} & {*taking}
    with pytest.raises(InputError, match="rollout of its own"):
        make_train(sorting(2, 3), "dpo", SMALL)(jax.random.key(0))


@pytest.mark.heavy
@pytest.mark.parametrize("minibatches", [1, 2])
def test_dpo_learns_from_pairs(minibatches: int) -> None:
    """From an imitation of all responses to what the judge likes; the reward of the metrics is the policy's own."""
    task, settings = preferences(length=2, symbols=3), dataclasses.replace(SMALL, minibatches=minibatches)
    start = warm_start(jax.random.key(0), task, settings, 60)
    run = jax.jit(make_train(task, "dpo", settings))(jax.random.key(1), {}, start)
    before, after = (
        evaluate_task(params, task, settings, jax.random.key(2))["reward"] for params in (start, run.params)
    )
    assert float(before.mean()) < 0.7
    assert float(after.mean()) > float(before.mean()) + 0.15
    reward = np.asarray(run.metrics["reward"])
    assert reward[:10].mean() == pytest.approx(float(before.mean()), abs=0.15)
    assert np.asarray(run.metrics["rewards/accuracies"])[-20:].mean() > 0.6
