"""Methods with a second model: worked examples, slow loops, finite differences and limits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import finite_differences, outputs_of, prepared
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.algorithms import get
from jaxrl_llm.errors import InputError
from jaxrl_llm.objectives.implicit import implicit_preference
from jaxrl_llm.trajectory import Trajectories

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
