"""DaSLaM: its reward by hand, and PPO of that reward."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from batches import gradient_of, loss_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.guidance.daslam import Terms, of_vectors, operators_of, step_gain, terms_of


def test_daslam_is_ppo_of_its_reward() -> None:
    """The score and the four terms are the reward; 0 leaves the score alone."""
    random = np.random.default_rng(0)
    values = random.normal(size=(11, 6))
    batch, logp = random_batch(4, values=values)
    terms = random.normal(size=(11, 4)).round(2)
    told = batch.with_info(decomposition=jnp.asarray(terms, jnp.float32))
    total = batch.replace(reward=jnp.asarray(np.asarray(batch.reward) + 0.5 * terms.sum(axis=1), jnp.float32))
    options = {"kl_coefficient": 0.01, "kl_target": 0.1, "value_coefficient": 0.1}
    ppo = get("ppo", **options)
    for shaping, wanted in ((0.5, total), (0.0, batch)):
        mine = get("daslam", shaping=shaping)
        np.testing.assert_allclose(prepared(mine, told).reward, wanted.reward, atol=1e-6)
        loss = loss_of(mine, told, logp, values=values)
        assert loss == pytest.approx(loss_of(ppo, wanted, logp, values=values), abs=1e-6)
        np.testing.assert_allclose(
            gradient_of(mine, told, logp, values=values), gradient_of(ppo, wanted, logp, values=values), atol=1e-6
        )
    # What is not scored stays so.
    unscored = told.replace(reward=told.need("reward").at[0].set(jnp.nan))
    assert np.isnan(prepared(get("daslam"), unscored).reward[0])


def test_the_terms_by_hand() -> None:
    """Nouns: {tom, apples, pears, costs} against {apples, cost, fruit}; cosines of counts of words."""
    question = "Tom has 3 apples and 4 pears. What are the costs?"
    asked, answers = ["How many apples?", "What does fruit cost?"], ["many apples", "two"]
    solution = "3 + 4 = 7 fruit\n7 * 2 = 14"
    before, after = "3 apples\n7 + 2 = 9", "fruit: 3 + 4 = 7\n7 + 2 = 9\n1 - 1"
    found = terms_of(question, asked, answers, solution, before, after)
    assert found.coverage == pytest.approx(1 - len({"tom", "pears", "costs", "cost", "fruit"}) / 4)
    assert found.relevance == pytest.approx(0.25 * (2 / math.sqrt(3 * 2)))
    # "fruit" was not in the first step and is now; the second step has no words: c1 = c2 = 0.
    assert found.steps == pytest.approx(0.5 * 0.0 + (-1 - 0.5 * 0.0))
    assert operators_of(solution) == ["+", "*"]
    assert operators_of(after) == ["+", "+", "-"]
    assert found.operators == pytest.approx(0.5 - 0.5)
    assert terms_of("3 + 4?", [], [], "", before, after) == Terms(1.0, 0.0, 0.0, 0.0)


def test_steps_that_come_nearer_gain() -> None:
    near = {("g", "a"): 0.4, ("g", "b"): 0.9, ("h", "a"): 0.6, ("h", "b"): 0.6}

    def similarity(one: str, other: str) -> float:
        return near[one, other]

    assert step_gain(["g", "h", "g"], ["a", "a"], ["b", "b"], similarity) == pytest.approx(0.2 - 1.3)
    cosine = of_vectors(lambda text: [len(text), text.count("x")])
    assert cosine("xx", "abx") == pytest.approx((2 * 3 + 2 * 1) / math.sqrt(8 * 10))
    assert cosine("", "abx") == 0.0
