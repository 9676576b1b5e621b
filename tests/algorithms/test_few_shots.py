"""FSPO: its loss against a loop and the card's example, and the rows that it makes of users' pairs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from batches import random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.preferences.fspo_few_shot import few_shot_rows
from jaxrl_llm.objectives.preference.by_name import loss_named
from jaxrl_llm.objectives.preference.losses import Pairs, of_sums
from jaxrl_llm.utils.errors import InputError


def test_fspo_few_shot_by_loop() -> None:
    batch, logp = random_batch(5, (2, 2, 2))
    x = arrays(batch)
    chosen, rejected = np.flatnonzero(x.reward == 1), np.flatnonzero(x.reward == 0)

    def loss(logp: np.ndarray) -> float:
        u = ((logp - x.reference) * x.mask).sum(1)
        return float(((u[chosen] - u[rejected] - 1 / 0.4) ** 2).mean())

    assert_matches_loop(learn(algorithms.get("fspo_few_shot", beta=0.2), batch, logp), loss, logp)


def test_the_worked_example() -> None:
    zero = jnp.zeros(1)
    found = of_sums(loss_named("ipo"))(Pairs(zero + 1.5, zero, zero, zero, zero + 3, zero + 2, 0.0, zero == 0), 0.01)
    assert float(found[0]) == pytest.approx(2352.25)


def test_shots_are_of_the_same_user_and_of_other_questions() -> None:
    rows = [
        {"prompt": f"question {n % 5}", "chosen": f"{who} likes {n}", "rejected": f"{who} dislikes {n}", "user": who}
        for n in range(12)
        for who in ("ada", "ben")
    ]
    made = few_shot_rows(rows, shots=3, seed=1)
    assert made == few_shot_rows(rows, shots=3, seed=1) != few_shot_rows(rows, shots=3, seed=2)
    for row, new in zip(rows, made, strict=True):
        shots, _, task = new["prompt"].rpartition("# Task\n## Question\n")
        assert task == row["prompt"]
        assert shots.count("# Example") == 3
        assert f"## Question\n{row['prompt']}\n" not in shots
        assert ("ben" if row["user"] == "ada" else "ada") not in shots
        assert {name: x for name, x in new.items() if name != "prompt"} == {
            name: x for name, x in row.items() if name != "prompt"
        }
    assert all(one["prompt"].count("# Example") == 4 for one in few_shot_rows(rows, shots=9))  # as many as there are


def test_rows_without_users_or_examples_are_refused() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(InputError, match="row 0 has no text in the column 'user'"):
        few_shot_rows([row])
    with pytest.raises(InputError, match="no user has two questions"):
        few_shot_rows([row | {"user": 1}, row | {"user": 2}])
