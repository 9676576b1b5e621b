"""Direct Advantage Policy Optimization: its loss by the worked example, and its states, lines and values."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, outputs_of, prepared

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.credit.dapo_direct_advantage import soft_value_loss, squared_to_advantage
from jaxrl_llm.core.trajectory import Trajectories

sys.path += [str(Path(__file__).resolve().parents[1] / "rollouts")]

import fake_engine
from fake_engine import Ran, begin

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.sampling.requests import Tokens

U = np.array([0.1, 0.0, -0.4])


def logit(p: Any) -> Any:
    return np.log(p) - np.log1p(-np.asarray(p))


def lines_of(V: Any, means: Any, length: int, old: float = -1.0, group: Any = None, ends: Any = ()) -> Trajectories:
    """Rows of lines of `length` tokens and one more, before which the critic says V; those in `ends` end there."""
    rows = len(V)
    mask, values = np.ones((rows, length + 1), bool), np.full((rows, length + 1), 7.0)
    values[:, length] = logit(V)
    lines = np.full(rows, float(length))
    for row in ends:
        mask[row, length], lines[row] = False, 0.0
    batch = batch_of(mask, means, np.where(mask, old, 0.0), group, values=values)
    return batch.with_info(line_tokens=jnp.asarray(lines, jnp.float32))


@pytest.mark.parametrize(("beta", "expected"), [(0.5, 0.048333), (0.02, 72.528333)])
@pytest.mark.parametrize("length", [1, 4])
def test_direct_advantage_against_its_worked_example(beta: float, expected: float, length: int) -> None:
    """The critic's V = 0.8, 0.5, 0.2, so A = 0.3, 0, -0.3, whatever the means are; u is a sum over the tokens of the
    line, not their mean, and without the token after it."""
    algorithm = get("dapo_direct_advantage", beta=beta, critic_alone=0)
    batch = prepared(algorithm, lines_of([0.8, 0.5, 0.2], [0.0, 1.0, 0.5], length))
    np.testing.assert_allclose(batch.advantages[:, 0], [0.3, 0.0, -0.3], atol=1e-6)
    logp = -1.0 + np.concatenate([np.repeat(U[:, None] / length, length, 1), np.full((3, 1), 9.0)], 1)
    loss, metrics = squared_to_advantage(beta)(outputs_of(logp), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    whole, found = algorithm.objective(outputs_of(logp, values=batch.values), batch)
    np.testing.assert_allclose(whole, expected + found["value/loss"], rtol=1e-5)
    assert metrics["log_ratio/sum"] == pytest.approx(-0.1)


def test_the_critic_learns_the_means_by_cross_entropy() -> None:
    """Against a loop over rows, with one that ends, one without a score and two groups; its gradient by differences."""
    V, m = [0.8, 0.5, 0.2, 0.6, 0.3], [1.0, 0.25, 0.75, float("nan"), 0.0]
    algorithm = get("dapo_direct_advantage", critic_alone=0, gap=0.0)
    batch = prepared(algorithm, lines_of(V, m, 2, group=[0, 0, 1, 1, 1], ends=[2]))
    np.testing.assert_allclose(batch.advantages[:, 0], [0.15, -0.15, 0.225, 0.0, -0.225], atol=1e-6)
    new = np.array([0.4, -0.3, 0.0, 1.0, -1.5])

    def by_loop(new: Any) -> float:
        terms = []
        for row in (0, 1, 4):
            p = 1 / (1 + math.exp(-new[row]))
            terms.append(-(m[row] * math.log(p) + (1 - m[row]) * math.log(1 - p)))
        return sum(terms) / 3

    def loss(new: Any) -> Any:
        values = jnp.full((5, 3), 5.0).at[:, 2].set(jnp.asarray(new, jnp.float32))
        return soft_value_loss()(outputs_of(np.zeros((5, 3)), values=values), batch)[0]

    np.testing.assert_allclose(loss(new), by_loop(new), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(new)), finite_differences(by_loop, new), atol=1e-5)


def test_the_critic_learns_where_the_policy_does_not() -> None:
    """In the first steps, and of states whose values differ little."""
    algorithm = get("dapo_direct_advantage", critic_alone=2)
    state, lines = algorithm.transform.init(), lines_of([0.8, 0.5, 0.2], [0.0, 1.0, 0.5], 2)
    for step in range(4):
        state, batch = algorithm.transform.apply(state, lines)
        assert bool((np.asarray(batch.loss_weights)[:, :2] > 0).all()) is (step >= 2)
        assert not np.asarray(batch.loss_weights)[:, 2].any(), "the token after the line"
        assert batch.controls["valued_rows"] == 3
    close = prepared(algorithm, lines_of([0.5, 0.5, 0.5], [0.0, 1.0, 0.5], 2), state)
    assert not np.asarray(close.loss_weights).any()
    outputs = outputs_of(np.full((3, 3), -2.0), values=close.values)
    np.testing.assert_allclose(algorithm.objective(outputs, close)[0], math.log(2), rtol=1e-5)


def test_a_critic_says_more_than_the_means_that_it_learns_from() -> None:
    """States with features, each with 4 completions: fitted to their means, it is nearer to the truth on other states
    than means of 4 completions are, and ranks candidates better."""
    random = np.random.default_rng(0)
    features, truth = random.normal(size=(400, 6)), np.array([1.5, -1.0, 0.5, 0, 0, 0])
    p = 1 / (1 + np.exp(-(features @ truth)))
    means = random.binomial(4, p) / 4
    learnt, other = np.arange(200), np.arange(200, 400)
    batch = prepared(get("dapo_direct_advantage"), lines_of(np.full(200, 0.5), means[learnt], 1))

    def loss(head: Any) -> Any:
        values = jnp.zeros((200, 2)).at[:, 1].set(features[learnt] @ head)
        return soft_value_loss()(outputs_of(np.zeros((200, 2)), values=values), batch)[0]

    head = jnp.zeros(6)
    for _ in range(200):
        head = head - 1.0 * jax.grad(loss)(head)
    V = 1 / (1 + np.exp(-(features[other] @ np.asarray(head))))
    assert np.abs(V - p[other]).mean() < 0.5 * np.abs(means[other] - p[other]).mean()
    pairs = random.integers(0, 200, (500, 2))
    right = [
        (x[pairs[:, 0]] - x[pairs[:, 1]]) * (p[other][pairs[:, 0]] - p[other][pairs[:, 1]]) for x in (V, means[other])
    ]
    assert np.mean(right[0] > 0) > np.mean(right[1] > 0) + 0.1


@pytest.mark.parametrize(("values", "kept"), [([0.5, 0.6, 0.5], True), ([0.5, 0.55, 0.5], False), ([1.0], False)])
def test_a_state_counts_if_its_values_differ_enough(values: Sequence[float], kept: bool) -> None:
    """Of lines that end the solution, whose values are their rewards."""
    rows = len(values)
    batch = batch_of(np.ones((rows, 2)), values, -np.ones((rows, 2)), values=np.zeros((rows, 2)))
    batch = batch.with_info(line_tokens=jnp.zeros(rows))
    batch = prepared(get("dapo_direct_advantage", critic_alone=0), batch)
    assert bool((np.asarray(batch.loss_weights) > 0).all()) is kept
    assert bool((np.asarray(batch.loss_weights) == 0).all()) is not kept


class Lines(fake_engine.Words):
    """Every third place is a line break."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("\n" if one % 3 == 2 else "x" for one in ids)


def drawn(prompt: int, sample: int, first: int, last: int, step: int) -> Tokens:
    """Samples 1 and 2 write the same; places of a token count from the beginning of the response."""
    ids = np.asarray([300 * (1 if sample == 2 else sample) + place for place in range(first, last)], np.int32)
    zeros = np.zeros(len(ids), np.float32)
    return Tokens(ids, zeros, zeros, zeros, zeros, np.full(len(ids), step, np.int32))


@pytest.mark.parametrize("length", [8, 2])
def test_next_lines_of_a_state_with_the_mean_rewards_of_their_completions(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Lines of three tokens, or completions shorter than a line, whose value is their own reward."""
    seen: list[Episode] = []

    async def score(task: Any, episodes: Sequence[Episode]) -> list[Episode]:
        seen.extend(episodes)
        return [one.scored(float(one.sample % 2)) for one in episodes]

    monkeypatch.setattr(fake_engine, "score", score)
    monkeypatch.setattr(fake_engine, "Words", Lines)
    monkeypatch.setattr(fake_engine, "tokens_of", drawn)
    monkeypatch.setattr(fake_engine, "length_of", lambda prompt, sample: length)
    rollout = get("dapo_direct_advantage", continuations=3).rollout
    assert rollout is not None
    places = set()
    for prompt in range(1, 9):
        seen.clear()
        found = Ran(begin([prompt], 4), Rule(), rollout, limit=8).found.groups[0]
        assert not found.failed
        assert [one.sample for one in found.episodes] == [1, 3, 4], "the second is the first again"
        (place,) = {int((~one.actions).sum()) for one in found.episodes}
        places.add(place)
        for one in found.episodes:
            assert one.actions.tolist() == [False] * place + [True] * (one.size - place)
            assert one.own.token[:place].tolist() == list(range(place)), "of the solution, sample 0"
            ends = place + 3 >= length
            assert one.size == (length if ends else place + 4), "a line, and a token for the critic"
            assert one.info["line_tokens"] == (0 if ends else 3)
            line = one.tokens if ends else one.tokens[:-1]
            whole = [e for e in seen if e.tokens[: len(line)] == line]
            assert len(whole) == (1 if ends else 3)
            assert all(bool(e.actions.all()) for e in whole), "rewards read the whole response"
            assert one.reward == pytest.approx(np.mean([e.sample % 2 for e in whole]))
    assert places == ({0} if length == 2 else {0, 3, 6})
