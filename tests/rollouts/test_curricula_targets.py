"""Prompts drawn near a target difficulty that is predicted from reference prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from choosing import near_predicted, rows_of, step_of
from stored_rows import all_facts, facts, scored_of

from jaxrl_llm.core.source import ONLY_MEASURED, Curriculum, Step
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.rules import SuccessModel
from jaxrl_llm.curriculum.scores import near_target
from jaxrl_llm.rollouts.runtime.sources import without_references
from jaxrl_llm.utils.errors import InputError

N = 40
ANGLE = np.arange(N) / N * np.pi / 2
EMBEDDED = rows_of(N, vector=[[float(f(k * a)) for k in (1, 2, 3, 4) for f in (np.cos, np.sin)] for a in ANGLE])


SIZES: dict[str, Any] = {"units": 16, "layers": 2, "rate": 0.01, "passes": 20}


def references(curriculum: Curriculum, state: Any, ids: Any) -> np.ndarray:
    assert curriculum.columns is not None
    return np.array([row[ONLY_MEASURED] for row in curriculum.columns(state, ids)])


def test_rounds_of_references() -> None:
    """In steps 0, 2, 4 ... 8 references beside the 3 prompts, uniformly; no prompt is drawn twice in two steps, and
    once there are rates, the prompts are those in the middle, whose rate is near the target."""
    curriculum: Curriculum = choose_prompts(*near_predicted(references=8, column="vector", **SIZES))(EMBEDDED, 1)
    state, asked, errors, round_ = curriculum.init(), list[list[int]](), list[float](), list[int]()
    far = list[float]()
    for step in range(12):
        ids, state = curriculum.select(state, 3)
        measured = references(curriculum, state, ids)
        assert measured.sum() == (8 if step % 2 == 0 else 0)
        assert len(set(ids.tolist())) == len(ids) == 3 + measured.sum()
        own = ids[~measured].tolist()
        round_ = own if step % 2 == 0 else round_ + own
        assert len(set(round_)) == len(round_)
        if step % 2 == 0:
            asked.append(ids[measured].tolist())
        if step > 5:
            far += np.abs(np.asarray(own) / N - 0.5).tolist()
        state = curriculum.observe(state, step_of(ids, np.asarray(ids) / N))
        np.testing.assert_allclose(state["rule1_rates"][-1], state["rule1_ids"][-1] / N, rtol=1e-6)
        assert sorted(state["rule1_ids"][-1].tolist()) == sorted(asked[-1])
        errors.append(curriculum.metrics(state)["curriculum/prediction_error"])
    assert len({tuple(one) for one in asked}) == len(asked)
    assert np.bincount(np.concatenate(asked), minlength=N).max() <= 5, "uniform"
    assert np.mean(far) < 0.125, "half of what uniform draws have"
    assert errors[:2] == [0.0, 0.0]
    assert 0 < errors[-1] < 0.02


def test_draws_are_in_proportion_to_nearness() -> None:
    """The example of the method: predicted rates 0.1, 0.45, 0.5, 0.56 and 0.9."""
    rates = np.array([0.1, 0.45, 0.5, 0.56, 0.9])
    model = SuccessModel(lambda state, prompts, random: rates[prompts.ids])
    curriculum = choose_prompts(near_target(0.5, 0.05, lambda facts: model))(rows_of(5), 0)
    found = np.zeros(5)
    for draw in range(1500):
        (first,), _ = curriculum.select({**curriculum.init(), "draws": draw}, 1)
        found[first] += 1
    np.testing.assert_allclose(found / 1500, [0.000201, 0.220321, 0.598894, 0.180383, 0.000201], atol=0.04)


def test_references_are_half_the_prompts_at_most() -> None:
    for size, most in ((5, 2), (1, 0)):
        rows = rows_of(size, vector=[[float(i), 1.0] for i in range(size)])
        curriculum = choose_prompts(*near_predicted(every=1, column="vector"))(rows, 0)
        ids, state = curriculum.select(curriculum.init(), 2)
        assert references(curriculum, state, np.arange(size)).sum() == most
        assert len(ids) == 2 + most


@pytest.mark.parametrize(
    ("second", "message"),
    [("0.5", "must be an embedding: a list of 2 numbers"), ([1.0], "a list of 2 numbers, as that of the first"),
     ([1.0, float("nan")], "a list of 2 numbers"), ([], "a list of 2 numbers")],
)  # fmt: skip
def test_a_column_without_embeddings(second: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_prompts(*near_predicted(column="vector"))(rows_of(2, vector=[[0.0, 1.0], second]), 0)


def test_groups_that_are_left_out() -> None:
    scored = scored_of([[1.0, 0.0], [0.5], [0.0, 1.0, 1.0]], [4, 2, 7], 0)
    step = Step(scored, [{"prompt": str(i), ONLY_MEASURED: i == 2} for i in (4, 2, 7)], {"a": 1.0})
    found = without_references(step)
    assert all_facts(found.scored) == [facts(scored, i) for i in (0, 1, 3, 4, 5)]
    assert found.scored.batch.group.tolist() == [0, 0, 1, 1, 1]
    assert [row["prompt"] for row in found.rows] == ["4", "7"]
    ((rest, why),) = found.others
    assert all_facts(rest) == [facts(scored, 2)]
    assert why == "reference"
    assert found.sampled is None
    assert found.scored.batch.tokens.shape[1] == scored.batch.tokens.shape[1]
    for given in ({}, {ONLY_MEASURED: False}, {ONLY_MEASURED: True}):
        alike = step._replace(rows=[{"prompt": str(i), **given} for i in (4, 2, 7)])
        assert without_references(alike) is alike
