"""Runs of the laboratory: the same alone, together and on several devices; grids; what a method refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import with_devices

sys.path.insert(0, str(Path(__file__).parent))

import lab_on_devices as program
from jax.sharding import Mesh

from jaxrl_llm.in_jax.lab.config import parse_grid, points
from jaxrl_llm.in_jax.lab.laboratory import RUNS, Ran, evaluate_runs, run_method
from jaxrl_llm.in_jax.lab.outcome import Measuring, RunOutcome
from jaxrl_llm.in_jax.rollout import evaluate_task
from jaxrl_llm.utils.errors import InputError

HOW = Measuring(program.TASK, threshold=0.5, window=2)


@cache
def six() -> Ran:
    return program.runs(jax.devices()[:1])


def outcomes(method: str, seeds: int = 2, first_seed: int = 0, **grid: tuple[float, ...]) -> list[RunOutcome]:
    mesh = Mesh(np.array(jax.devices()[:1]), (RUNS,))
    return run_method(method, HOW, program.TINY, program.start(), seeds, grid, mesh, first_seed)


@pytest.mark.heavy
def test_runs_are_the_same_alone_and_together() -> None:
    """Rewards exactly, parameters to 1e-5, whatever other seeds and learning rates are in the program."""
    for i in (1, 4):
        alone = program.runs(jax.devices()[:1], (i,))
        np.testing.assert_array_equal(alone.metrics["reward"][0], six().metrics["reward"][i])
        for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(six().params), strict=True):
            np.testing.assert_allclose(a[0], b[i], rtol=0, atol=1e-5)
    assert len(np.unique(six().metrics["entropy"], axis=0)) == 6


@pytest.mark.heavy
def test_seeds_begin_with_the_first() -> None:
    """Seed 1 alone is the second of the seeds 0 and 1."""
    (both,), (second,) = (outcomes("grpo", *seeds, kl_coefficient=(0.0,)) for seeds in ((2,), (1, 1)))
    np.testing.assert_allclose(second.measures["area"], both.measures["area"][1:], rtol=1e-6)
    assert both.measures["area"][0] != both.measures["area"][1]


@pytest.mark.heavy
def test_runs_spread_over_four_devices_are_the_same(tmp_path: Path) -> None:
    """Six runs on four simulated devices: two each, and two of them twice."""
    environment = {**os.environ, "XLA_FLAGS": with_devices(4), "JAX_PLATFORMS": "cpu"}
    file = tmp_path / "runs.npz"
    subprocess.run([sys.executable, program.__file__, str(file)], check=True, env=environment, timeout=300)
    found = np.load(file)
    assert int(found["devices"]) == 4
    for name, values in six().metrics.items():
        assert values.shape == (6, 4)
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["reward"], six().metrics["reward"])
    for i, x in enumerate(jax.tree.leaves(six().params)):
        np.testing.assert_allclose(found[f"params{i}"], x, rtol=0, atol=1e-5)


@pytest.mark.heavy
def test_a_learning_rate_of_zero_changes_nothing() -> None:
    for x, begun in zip(jax.tree.leaves(six().params), jax.tree.leaves(program.start()), strict=True):
        np.testing.assert_array_equal(x[5], begun)
        assert (x[4] != np.asarray(begun)).any()


def test_final_rewards_are_those_of_the_trained_policies() -> None:
    rewards, right = evaluate_runs(six().params, program.TASK, program.TINY, prompts=8, samples=4)
    assert rewards.shape == right.shape == (6, 8, 4)
    last = jax.tree.map(lambda x: jnp.asarray(x[5]), six().params)
    expected = evaluate_task(last, program.TASK, program.TINY, jax.random.key(2), prompts=8, samples=4)
    np.testing.assert_array_equal(rewards[5].reshape(-1), expected["reward"])
    np.testing.assert_array_equal(right[5].reshape(-1), expected["open"])


@pytest.mark.heavy
def test_a_grid_gives_an_outcome_for_each_point() -> None:
    """Two points in one program; a hyper-parameter with one value is no axis, and one of other methods is left out."""
    grid = {"learning_rate": (1e-2, 0.0), "kl_coefficient": (0.0,), "tau": (1.0, 2.0)}
    found = outcomes("grpo", **grid)
    assert [o.label for o in found] == [
        "grpo learning_rate=0.01 kl_coefficient=0", "grpo learning_rate=0 kl_coefficient=0",
    ]  # fmt: skip
    first, second = found
    assert set(first.measures) == {
        "final", "pass@1", "pass@2", "pass@4", "pass@8", "pass@16", "entropy", "length", "area", "steps", "collapsed",
    }  # fmt: skip
    assert all(values.shape == (2,) for values in first.measures.values())
    np.testing.assert_array_equal(first.measures["pass@1"], first.measures["final"])  # the lock's reward is 0 or 1
    assert second.measures["final"][0] == second.measures["final"][1]  # what has not learned is one policy
    assert first.curves["reward"]["iteration"] == [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_allclose(first.curves["reward"]["mean"], six().metrics["reward"][:2].mean(axis=0), atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("method, name, values", [
    ("passk_grpo", "k", (2, 4)),  # a count
    ("dcpo_distribution_centric", "hot", (1.2, 1.5)),  # a part of a need's name, which cannot be traced
])  # fmt: skip
def test_points_that_shape_the_program_are_run_one_by_one(method: str, name: str, values: tuple[float, ...]) -> None:
    found = outcomes(method, seeds=1, **{name: values})
    assert [o.point for o in found] == [{name: value} for value in values]
    assert not any(o.error for o in found)
    assert found[0].seconds != found[1].seconds


def test_what_a_method_refuses_is_its_outcome() -> None:
    (found,) = outcomes("grpo", clip_low=(2.0,))
    assert "low of clip is 2.0" in found.error
    assert found.measures == {}
    (found,) = outcomes("rloo", learning_rate=(-1.0,))
    assert "learning_rate" in found.error


def test_a_method_says_what_it_goes_without() -> None:
    (found,) = outcomes("symphony_fading_replay", learning_rate=(-1.0,))
    assert found.note == "without replay"
    assert found.error


@pytest.mark.parametrize("text", ["clip_low", "clip_low=", "=1", "clip_low=0.1,x", "clip_low=0.1,0.1"])
def test_a_grid_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--grid"):
        parse_grid([text])


def test_a_grid_has_every_combination() -> None:
    grid = parse_grid(["a=1,2.5", "b-c=3,4", "other=5,6"])
    assert points(grid, {"a", "b_c"}) == [
        {"a": 1, "b_c": 3}, {"a": 1, "b_c": 4}, {"a": 2.5, "b_c": 3}, {"a": 2.5, "b_c": 4},
    ]  # fmt: skip
    assert points(grid, set()) == [{}]
    with pytest.raises(InputError, match="twice"):
        parse_grid(["a=1", "a=2"])
