"""References that move, and the policy before the last update, in the laboratory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.policy_loss.remix import reset_at
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.in_jax.tasks import sequence_lock
from jaxrl_llm.in_jax.train import LabSettings, make_train
from jaxrl_llm.utils.errors import InputError

TINY = LabSettings(iterations=3, prompts=2, group_size=4, hidden=16, layers=1, exact=False)
TASK = sequence_lock(1, 2)  # fresh weights may earn nothing: the entropy bonus moves them


def metrics_of(algorithm: Any, without: str = "", **given: Any) -> dict[str, np.ndarray]:
    train = make_train(TASK, algorithm, TINY, without=without)
    run = jax.jit(lambda key: train(key, {"learning_rate": 0.03, **given}))(jax.random.key(0))
    return {name: np.asarray(x) for name, x in run.metrics.items()}


@pytest.mark.heavy
@pytest.mark.parametrize(("rule", "zero"), [(None, [0]), (periodic_reset(1), [0, 1, 2]), (reset_at(2), [0, 2])])
def test_the_divergence_is_zero_where_the_reference_is_the_policy(rule: Any, zero: list[int]) -> None:
    found = metrics_of(dataclasses.replace(get("grpo", kl_coefficient=0.5, entropy_coefficient=0.1), reference=rule))[
        "kl"
    ]
    for iteration, kl in enumerate(found):
        assert (abs(kl) < 1e-7) == (iteration in zero)


@pytest.mark.heavy
def test_remix_has_both_anchors() -> None:
    """Before the second update both are the initial policy; the third is anchored to the policy of the switch."""
    found = metrics_of("remix", without="replay", switch=2, kl_coefficient=0.5, entropy_coefficient=0.1)
    assert found["kl/previous"][0] == found["kl/reference"][0] == 0
    np.testing.assert_allclose(found["kl/previous"][1], found["kl/reference"][1], rtol=1e-6)
    assert found["kl/reference"][2] < 1e-7 < found["kl/previous"][2]


def test_a_reference_of_several_models_is_refused() -> None:
    with pytest.raises(InputError, match="the laboratory has one model"):
        make_train(TASK, "salsa", TINY)(jax.random.key(0), {"other": "folder"})
    with pytest.raises(InputError, match="the laboratory has one model"):
        make_train(TASK, "seppo", TINY, without="rollout")(jax.random.key(0), {})
