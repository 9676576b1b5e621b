"""Methods with a second model: worked examples, slow loops, finite differences and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import finite_differences, outputs_of, prepared
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.turn_credit.istar import implicit_preference
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

# The card's example: sums of log-ratios of turns.
GAINS = [[0.4, -0.2, 0.6], [-0.5, 0.1], [0.2, 0.3], [-0.3, -0.1, -0.2]]
SCORE = [1.0, 0.0, 1.0, 0.0]


def judged(gains: list[list[float]], score: list[float], group: list[int] | None = None) -> Trajectories:
    """Episodes with an old policy and a reward model, whose log-ratios of turns are the gains."""
    batch = episodes([[1] * len(row) for row in gains], [[0.0] * len(row) for row in gains], score, group)
    old, turn = -1.0 - np.arange(batch.turn.size).reshape(batch.turn.shape) % 7 / 10, np.asarray(batch.turn)
    implicit = old.copy()
    for i, row in enumerate(gains):
        for k, gain in enumerate(row):
            first, second = np.flatnonzero(turn[i] == k)
            implicit[i, first] += gain / 2 + 0.125
            implicit[i, second] += gain / 2 - 0.125
    batch = batch.replace(old_logp=jnp.asarray(old, jnp.float32), behaviour_logp=jnp.asarray(old, jnp.float32))
    return batch.with_info(implicit_logp=jnp.asarray(implicit, jnp.float32))


def preference_of(batch: Trajectories, implicit: Any = None, **options: Any) -> float:
    """The loss of the reward model alone."""
    own = batch.info["implicit_logp"] if implicit is None else implicit  # type: ignore[index]
    loss = implicit_preference(**options)(outputs_of(batch.old_logp, implicit_logp=jnp.asarray(own)), batch)[0]
    return float(loss)


def test_istar_worked_example() -> None:
    batch = judged(GAINS, SCORE)
    assert preference_of(batch) == pytest.approx(0.664821, abs=2e-6)
    assert preference_of(batch, over="mean") == pytest.approx(0.681755, abs=2e-6)
    found = of_turns(batch, get("istar").transform)
    np.testing.assert_allclose(found[0], [0.687222, 0.653889, 0.698333], atol=2e-6)
    steps = of_turns(batch, get("istar", form="centred", step_weight=10 / 9).transform)
    np.testing.assert_allclose(np.asarray(steps[0]) - 0.5, [0.020556, -0.012778, 0.031667], atol=2e-6)


def credit_loop(
    gains: list[list[float]], score: list[float], group: list[int], form: str, first: bool, beta: float, weight: float
) -> list[list[float]]:
    """iStar's advantages, one turn after the other."""

    def f(x: float, others: list[float]) -> float:
        n, mean = len(others), np.mean(others)
        if n < 2:
            return 0.0
        return (x - mean) * {"rloo": n / (n - 1), "centred": 1.0, "grpo": 1 / (np.std(others, ddof=1) + 1e-6)}[form]

    out = []
    for i, row in enumerate(gains):
        mates = [j for j in range(len(gains)) if group[j] == group[i]]
        turns = [beta * x for j in mates for x in (gains[j][:1] if first else gains[j])]
        of_episode = f(score[i], [score[j] for j in mates])
        out.append([of_episode + weight * f(beta * x, turns) for x in row])
    return out


def preference_loop(
    gains: list[list[float]], score: list[float], group: list[int], mean: bool, success: float | None, beta: float
) -> float:
    """The mean over pairs, one after the other."""
    D = [beta * sum(row) / (len(row) if mean else 1) for row in gains]
    losses = []
    for i, a in enumerate(score):
        for j, b in enumerate(score):
            better = a > b if success is None else a > success >= b
            if group[i] == group[j] and better:
                losses.append(np.log1p(np.exp(D[j] - D[i])))
    return float(np.mean(losses)) if losses else 0.0


RAGGED, GRADED, GROUPS = [[0.4, 0.1], [-0.3], [0.9, -1.2, 0.2], [0.7], [0.5, 0.5], [-0.8, 0.3], [2.0]], [
    1.0, 0.25, 0.25, 0.0, 0.5, 1.0, 1.0,
], [0, 0, 0, 0, 4, 4, 6]  # fmt: skip


@pytest.mark.parametrize("form", ["rloo", "grpo", "centred"])
@pytest.mark.parametrize("first", [False, True])
def test_istar_is_the_loop(form: str, first: bool) -> None:
    method = get("istar", form=form, steps="first" if first else "all", beta=0.5, step_weight=0.75)
    found = of_turns(judged(RAGGED, GRADED, GROUPS), method.transform)
    assert_close(found, credit_loop(RAGGED, GRADED, GROUPS, form, first, 0.5, 0.75), 2e-5)


@pytest.mark.parametrize(("over", "success"), [("sum", None), ("mean", 0.25), ("sum", 0.25), ("mean", None)])
def test_preferences_are_the_loop_with_its_gradient(over: str, success: float | None) -> None:
    batch = judged(RAGGED, GRADED, GROUPS)
    wanted = preference_loop(RAGGED, GRADED, GROUPS, over == "mean", success, 0.5)
    assert preference_of(batch, over=over, success=success, beta=0.5) == pytest.approx(wanted, abs=1e-6)
    objective = implicit_preference(0.5, over, success)  # type: ignore[arg-type]

    def loss(implicit: jax.Array) -> jax.Array:
        return objective(outputs_of(batch.old_logp, implicit_logp=implicit), batch)[0]

    turn, slope = np.asarray(batch.turn), np.asarray(jax.grad(loss)(batch.need("implicit_logp")))
    assert not slope[turn < 0].any(), "observations are not judged"
    padded = np.zeros((len(RAGGED), 3))
    for i, row in enumerate(RAGGED):
        padded[i, : len(row)] = row

    def of_gains(values: np.ndarray) -> float:
        gains = [list(values[i, : len(row)]) for i, row in enumerate(RAGGED)]
        return preference_loop(gains, GRADED, GROUPS, over == "mean", success, 0.5)

    by_turn = finite_differences(of_gains, padded)
    for i, row in enumerate(RAGGED):
        for k in range(len(row)):
            np.testing.assert_allclose(slope[i][turn[i] == k], by_turn[i, k], atol=2e-6)


def test_istar_with_a_reward_model_like_the_policy_has_the_outcome_alone() -> None:
    batch = judged([[0.0] * len(row) for row in RAGGED], GRADED, GROUPS)
    batch = batch.with_info(implicit_logp=batch.old_logp)
    found = prepared(get("istar"), batch).advantages
    np.testing.assert_array_equal(found, prepared(get("istar", step_weight=0.0), batch).advantages)
    by_rows = prepared(get("rloo", kl_coefficient=0.0), batch).advantages
    np.testing.assert_allclose(found, by_rows, atol=1e-6)


def test_pairs_need_two_outcomes_and_a_score() -> None:
    equal, unscored = judged(GAINS, [1.0] * 4), judged(GAINS, [1.0, np.nan, 1.0, 0.0])
    assert preference_of(equal) == 0
    assert preference_of(unscored) == pytest.approx(
        preference_loop([GAINS[0], GAINS[2], GAINS[3]], [1.0, 1.0, 0.0], [0] * 3, False, None, 0.05), abs=1e-6
    )
    assert not np.asarray(prepared(get("istar"), unscored).advantages)[1].any()
    with pytest.raises(InputError, match="give the policy Critic"):
        implicit_preference()(outputs_of(equal.old_logp), equal)


def test_the_code_s_preset_has_its_choices() -> None:
    """Means of turns, baselines of first turns, and pairs of successes and failures."""
    batch = judged(RAGGED, GRADED, GROUPS)
    found = of_turns(batch, get("istar", preset="code").transform)
    assert_close(found, credit_loop(RAGGED, GRADED, GROUPS, "rloo", True, 0.05, 1.0), 2e-5)
    outputs = outputs_of(batch.old_logp, implicit_logp=batch.need("implicit_logp"))
    ready = prepared(get("istar", preset="code"), batch)
    loss = get("istar", preset="code").objective(outputs, ready)[1]["reward_model"]
    assert float(loss) == pytest.approx(preference_loop(RAGGED, GRADED, GROUPS, True, 0.0, 0.05), abs=1e-6)


def valued(
    rewards: list[list[float]],
    score: list[float],
    seed: int = 0,
    replayed: list[int] | None = None,
    anew: list[int] | None = None,
) -> tuple[Trajectories, np.ndarray, np.ndarray, np.ndarray]:
    """Episodes with values, and of each turn [N, K]: Q and V of the critic and of its target [N, K, 4], places."""
    batch = episodes([[1] * len(row) for row in rewards], rewards, score)
    random, N, K = np.random.default_rng(seed), *batch.turn_rewards.shape
    own, target = random.normal(size=(2, N, K, 4))
    everywhere = random.normal(size=(2, *batch.tokens.shape, 4))
    first = 1 + 3 * np.arange(K)  # each turn has two tokens, and then there is one of an observation
    for full, of_turn in zip(everywhere, (own, target), strict=True):
        full[:, first + 1, :2], full[:, first, 2:] = of_turn[..., :2], of_turn[..., 2:]
    batch = batch.replace(values=jnp.asarray(everywhere[0], jnp.float32))
    batch = batch.with_info(target_values=jnp.asarray(everywhere[1], jnp.float32))
    marks = jnp.asarray(replayed or [0] * N, jnp.float32)
    resampled = jnp.asarray(anew or [0] * N, jnp.float32)
    return batch.with_info(replayed=marks, resampled=resampled), own, target, first


def test_archer_worked_example() -> None:
    """The card's: a turn that goes on, with Vbar(o') = 0.6, and one that ends with the reward 1."""
    batch = episodes([[1, 1]], [[0.0, 0.0]], [1.0])
    values, target = np.full((2, 1, batch.tokens.shape[1], 4), 9.0)
    values[0, [2, 5], :2], values[0, [1, 4], 2:] = [0.7, 0.6], [0.5, 0.55]
    target[0, 4, 2:] = 0.6
    batch = batch.replace(values=jnp.asarray(values, jnp.float32))
    batch = batch.with_info(target_values=jnp.asarray(target, jnp.float32))
    method = get("archer", critic_updates=0, value_coefficient=0.0)
    ready = prepared(method, batch)
    np.testing.assert_allclose(ready.info["head_returns"][0, [2, 5], :2], [[0.57] * 2, [1.0] * 2], atol=1e-6)
    np.testing.assert_allclose(ready.advantages[0, [1, 2, 4, 5]], 0.1, atol=1e-6)
    logp = np.zeros(batch.tokens.shape)
    logp[0, [1, 2, 4, 5]] = [-3.0, -0.2, -1.2, -2.0]
    assert float(method.objective(outputs_of(logp), ready)[0]) == pytest.approx(0.32, abs=1e-6)


REWARDS = [[0.1, 0.0, 0.3], [0.2], [0.0, -0.5], [0.4, 0.1, 0.0], [0.0], [0.0, 0.0]]
# The third is replayed, the fifth a new reply at an old state, and the last has no score.
WON, OLD, ANEW = [1.0, 0.0, 0.5, 1.0, np.nan, np.nan], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]


def archer_loop(own: Any, target: Any, logp: Any, now: Any, gamma: float, coefficient: float) -> float:
    """The loss, turn by turn. own, target: of `valued`; logp [N, K]: of replies; now [N, K, 4]: the critic's values."""
    policy, squares = [], [[], [], [], []]  # type: ignore[var-annotated]
    for i, row in enumerate(REWARDS):
        for k, r in enumerate(row):
            last = k == len(row) - 1
            for head in (0, 1):
                y = r + (WON[i] if last else gamma * target[i, k + 1, 2 + head])
                if not np.isnan(WON[i]):
                    squares[head].append((now[i, k, head] - y) ** 2)
                if (not np.isnan(WON[i]) and not OLD[i]) or ANEW[i]:
                    squares[2 + head].append((now[i, k, 2 + head] - target[i, k, head]) ** 2)
            if (not np.isnan(WON[i]) and not OLD[i]) or ANEW[i]:
                policy.append(-(own[i, k, :2].min() - own[i, k, 2:].min()) * logp[i, k])
    return float(np.mean(policy) + coefficient / 2 * sum(np.mean(one) for one in squares))


def test_archer_is_the_loop_with_its_gradients() -> None:
    batch, own, target, first = valued(REWARDS, WON, 1, OLD, ANEW)
    method = get("archer", gamma=0.9, critic_updates=0, value_coefficient=1.5)
    ready, random = prepared(method, batch), np.random.default_rng(2)
    logp, values = -random.random(batch.tokens.shape), random.normal(size=(*batch.tokens.shape, 4))

    def loss(logp: jax.Array, values: jax.Array) -> jax.Array:
        return method.objective(outputs_of(logp, values=values), ready)[0]

    given = jnp.asarray(logp, jnp.float32), jnp.asarray(values, jnp.float32)
    of_turn = logp[:, first] + logp[:, first + 1]
    now = np.concatenate([values[:, first + 1, :2], values[:, first, 2:]], axis=-1)

    def slow(logp: Any, now: Any) -> float:
        return archer_loop(own, target, logp, now, 0.9, 1.5)

    assert float(loss(*given)) == pytest.approx(slow(of_turn, now), abs=2e-5)
    by_logp, by_values = (np.asarray(x) for x in jax.grad(loss, (0, 1))(*given))
    wanted = finite_differences(lambda x: slow(x, now), of_turn)
    for place in (first, first + 1):
        np.testing.assert_allclose(by_logp[:, place], wanted, atol=2e-6)
    heads = finite_differences(lambda x: slow(of_turn, x), now)
    np.testing.assert_allclose(by_values[:, first + 1, :2], heads[..., :2], atol=2e-6)
    np.testing.assert_allclose(by_values[:, first, 2:], heads[..., 2:], atol=2e-6)
    assert np.count_nonzero(by_values) == np.count_nonzero(heads), "and of no other place"


def test_archer_s_policy_waits_for_the_critic() -> None:
    batch = valued(REWARDS, WON)[0]
    method = get("archer", critic_updates=2)
    memory, seen = method.transform.init(), []
    for _ in range(4):
        memory, ready = method.transform.apply(memory, batch)

        def loss(logp: jax.Array, ready: Trajectories = ready) -> jax.Array:
            return method.objective(outputs_of(logp, values=batch.values), ready)[0]

        seen.append(bool(np.asarray(jax.grad(loss)(batch.behaviour_logp)).any()))
    assert seen == [False, False, True, True]


def test_archer_of_one_turn_learns_scores() -> None:
    """Nothing follows, so that Q learns the reward whatever the target says, and V what the target's Q says."""
    batch, _, target, first = valued([[0.0], [0.25]], [1.0, 0.5])
    told = np.asarray(prepared(get("archer"), batch).info["head_returns"])
    np.testing.assert_allclose(told[:, first[0] + 1, :2], [[1.0] * 2, [0.75] * 2], atol=1e-6)
    np.testing.assert_allclose(told[:, first[0], 2:], target[:, 0, :2], atol=1e-6)
    assert np.isfinite(told).sum() == 8


def test_a_target_critic_is_needed_and_moves_or_neither() -> None:
    for wrong in ({"target": None}, {"target": replace(get("archer").target, update=None)}):  # type: ignore[type-var]
        with pytest.raises(InputError, match="or neither"):
            replace(get("archer"), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="or neither"):
        replace(get("grpo"), target=get("archer").target)
