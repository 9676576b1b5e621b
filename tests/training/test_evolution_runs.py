"""Runs by evolution: members sample, evaluations are the policy's, a resumed run repeats, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_agent_runs import config_of as agents
from tiny_runs import MODEL, Taken, lines_of, reproducible, small_config, train, watched

from jaxrl_llm.core.population import Population
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.by_row import with_members
from jaxrl_llm.models.policy import positions_of
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.plan.shapes import plan_inputs as checked_plan
from jaxrl_llm.rollouts.runtime.sample_numbers import sample_numbers
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.adapters import of_members
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import check_method
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.utils.errors import InputError

HOW: dict[str, Any] = {
    "algorithm": "eggroll", "hyperparameters": {"sigma": 0.02, "rank": 2}, "top_p": 1.0, "minibatches": 1, "seed": 3,
}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    return small_config(folder, **{**HOW, **changes})


def test_a_run_by_name_is_sampled_by_members(tmp_path: Path) -> None:
    """Row n of a step is member n's, greedy, with the step's noise; evaluations are the policy's own."""
    taken: list[Taken] = []
    with watched(taken):
        train(config_of(tmp_path, steps=3))
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["mismatch"] == 0 and line["grad_norm"] > 0 for line in lines if "grad_norm" in line)
    population, (policy, _, _) = Population(0.02, 2, seed=3), load_policy(MODEL)
    policy = dataclasses.replace(policy, population=population)
    settings = settings_of(policy, jax.random.key(0), 0.0)
    for step, one in enumerate(taken):
        batch = one.scored.batch
        info = batch.info or {}
        np.testing.assert_array_equal(info["member"], np.arange(16))
        np.testing.assert_array_equal(info["member_seed"], float(population.seed_at(step)))
        starts = np.argmax(np.asarray(batch.action_mask), axis=1)
        prompts = [np.asarray(batch.tokens)[i, :start].tolist() for i, start in enumerate(starts)]
        requests = [Request(tuple(ids), 6, adapter=n) for n, ids in enumerate(prompts)]
        weights = of_members(take_weights(policy, one.params), population.seed_at(step))
        found = sorted(stream(policy, weights, requests, settings), key=lambda done: done.index)
        assert [done.tokens.token.tolist() for done in found] == completion_ids(batch)
    assert len({tuple(ids) for ids in completion_ids(taken[0].scored.batch)[:4]}) > 1
    assert not np.array_equal(taken[0].params["layers"]["query"], taken[2].params["layers"]["query"])
    np.testing.assert_array_equal(taken[0].params["embed"], taken[2].params["embed"])


def test_a_resumed_run_repeats(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    given = {"checkpoint_every": 1, "hyperparameters": {"sigma": 0.02, "reuse": 2}}
    train(config_of(tmp_path / "a", **given))
    train(config_of(tmp_path / "b", **given, steps=2))
    train(config_of(tmp_path / "b", **given), resume=True, accept_changed_inputs=True)
    sums = [lines_of(tmp_path / name / "run/checkpoints/4/meta/metadata")[0]["checksums"] for name in ("a", "b")]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    lines = [reproducible(tmp_path / name / "run" / "metrics.jsonl") for name in ("a", "b")]
    assert lines[0] == lines[1]


@pytest.mark.heavy
def test_a_member_plays_a_whole_episode(tmp_path: Path) -> None:
    """Of several turns, whose tokens are all those of its weights, also after the environment's."""
    taken: list[Taken] = []
    changes = {"hyperparameters": {"sigma": 0.02}, "steps": 1, "top_p": 1.0, "temperature": 1.0, "group_size": 4}
    with watched(taken):
        train(agents(tmp_path, algorithm="eggroll", **changes))
    batch, params = taken[0].scored.batch, taken[0].params
    policy, _, _ = load_policy(tmp_path / "model")
    policy = dataclasses.replace(policy, population=Population(0.02))
    assert np.asarray(batch.turn).max() > 0
    info = batch.info or {}
    own = with_members(policy, params, np.asarray(info["member"], np.int32), info["member_seed"][0])
    real = np.asarray(batch.token_mask, np.int32)
    hidden, _ = policy.forward(own, np.asarray(batch.tokens), positions_of(real), real)
    logp = jax.nn.log_softmax(policy.logits_of(own, hidden))[:, :-1]
    logp = np.take_along_axis(np.asarray(logp), np.asarray(batch.tokens)[:, 1:, None], axis=2)[..., 0]
    where = np.asarray(batch.action_mask)[:, 1:]
    np.testing.assert_allclose(logp[where], np.asarray(batch.behaviour_logp)[:, 1:][where], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_staleness": 1}, "eggroll learns by evolution: its members are of one step, so leave out max_staleness"),
        ({"lora_rank": 2}, "its members perturb the model's own matrices, so leave out lora_rank"),
        ({"temperature": 0.5}, "its members are greedy, so leave out temperature, top_k, top_p and min_p"),
        ({"top_k": 5}, "its members are greedy, so leave out temperature"),
        ({"router_aux_coefficient": 0.1}, "its update runs no model, so leave out router_aux_coefficient"),
        ({"oversample": 1.5}, "are of one step, but oversample and segment_tokens continue their completions"),
        ({"segment_tokens": 8}, "are of one step, but oversample and segment_tokens continue their completions"),
        (
            {"group_size": 3},
            "an even number of members for each prompt, of which two share their noise, but group_size",
        ),
        ({"critic": "shared"}, "eggroll has no critic"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        check_method(TrainConfig(algorithm="eggroll", **changes), data_mesh())
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_it_goes_around_the_run_s_own_rollout() -> None:
    config = TrainConfig(algorithm="eggroll", rollout="hinted(hint)", seed=5)
    found = rollout_of(config, check_method(config, data_mesh()))
    assert found.population == Population(seed=5)
    assert found.columns == ("hint",)


def test_members_are_numbered_over_all_groups_of_a_step() -> None:
    """Also those of prompts that occur twice, and samples beyond those of the group."""
    tasks = [Task({}, (1,), prompt, count, 4) for prompt, count in ((7, 4), (8, 2), (7, 4))]
    numbers = sample_numbers(tasks)
    own = [[one.member(i) for i in range(task.samples)] for one, task in zip(numbers, tasks, strict=True)]
    assert own == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    more = [one.member(task.samples + i) for one, task in zip(numbers, tasks, strict=True) for i in range(3)]
    assert len({*more, *range(10)}) == 10 + 9


def test_the_plan_has_members() -> None:
    config = TrainConfig(algorithm="eggroll", model=str(MODEL))
    *_, algorithm, model = checked_plan(config, topology_of("cpu:1"))
    batch = full_batch(config, algorithm, model.vocab_size)
    assert (batch.info or {})["member"].shape == (128,)
