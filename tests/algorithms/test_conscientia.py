"""CONSCIENTIA: who learns when and against whom, the estimate of the KL, and the loss against a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import batch_of, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.agents.conscientia_iterative_kto import conscientia_iterative_kto, sides_by_turns
from jaxrl_llm.core.population import League
from jaxrl_llm.objectives.preference.verdicts import kto_loss
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.utils.errors import InputError


def test_sides_learn_by_turns_against_earlier_ones() -> None:
    """Three sides, rounds of two updates, three snapshots: seats and members of the step after each update."""
    transform = sides_by_turns(League(4, every=2), 3)
    state, batch = transform.init(), random_batch(0, (2, 2))[0]
    seats, members = [], []
    for _ in range(9):
        state, ready = transform.apply(state, batch)
        said: Any = ready.controls
        seats.append(float(said["league/seat"]))
        members.append([float(said[f"league/{k}"]) for k in range(4)])
    assert seats == [0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert members[0] == [1, 0, 0, 0]  # nobody but the first policy
    assert members[1] == members[2] == [1, 1, 0, 0]
    assert members[5] == members[8] == [1, 1, 1, 1]  # the fourth snapshot takes the place of the first


def test_worked_example() -> None:
    u, label = np.asarray([2.0, -1.0, 3.0]), np.asarray([1, 0, 1])
    assert np.asarray(kto_loss(u, np.zeros(3), label, 0.2)) == pytest.approx([0.455121, 0.470036, 0.430454], abs=1e-6)


@pytest.mark.parametrize("gain", [1.0, -1.0])  # the mean log-ratio is above 0, or below
def test_it_is_the_loop(gain: float) -> None:
    random = np.random.default_rng(3)
    mask = np.asarray([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    old = np.where(mask, -random.gamma(2.0, 0.5, mask.shape), 0).astype(np.float32)
    reference = old - gain * np.abs(random.normal(size=mask.shape)).astype(np.float32) * mask
    reward = np.asarray([1.5, -0.5, 0.25, -2.0, 3.0])
    batch = batch_of(mask, reward, old, np.arange(5), old_logp=old, reference_logp=reference,
                     info={"league_member": np.zeros(5, np.float32)})  # fmt: skip
    method = conscientia_iterative_kto(threshold=0.25, beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
    logp = old + 0.2 * random.normal(size=mask.shape)
    x = arrays(batch)
    z = max(0.0, float(np.mean([((x.old - x.reference) * x.mask)[i].sum() for i in range(4)])))
    assert (z > 0) == (gain > 0)

    def loop(new: np.ndarray) -> float:
        total = 0.0
        for i in range(4):  # the last row has no action
            u = float(((new - x.reference) * x.mask)[i].sum())
            good = reward[i] > 0.25
            total += 1.3 / (1 + np.exp(0.4 * (u - z))) if good else 0.7 / (1 + np.exp(0.4 * (z - u)))
        return total / 4

    assert_matches_loop(learn(method, batch, logp), loop, logp)


def test_it_needs_a_game_of_several_players() -> None:
    settings: dict[str, Any] = {"algorithm": "conscientia_iterative_kto", "prompts": "x.jsonl"}
    config = TrainConfig(**settings, environment="jaxrl_llm.environments.games:advice", players=2)
    assert rollout_of(config, make_algorithm(config)).demands.league == League(8, 20)
    with pytest.raises(InputError, match="--players 2"):
        rollout_of(
            alone := TrainConfig(**settings, environment="jaxrl_llm.environments.games:advice"), make_algorithm(alone)
        )
