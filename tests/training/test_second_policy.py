"""Programs that also draw from the reference policy: which weights draw what, in an experience and in runs."""

from __future__ import annotations

from asyncio import gather
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from test_moving_references import other_model

from jaxrl_llm.algorithms import get
from jaxrl_llm.core.reference import Mixture, exponential_average, with_initial
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed import mesh_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime import engines
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.rollouts.trees import valued
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import check_method
from jaxrl_llm.utils.errors import InputError


def logp_of(policy: Any, params: Any, episode: Episode, first: int) -> np.ndarray:
    """Log-probabilities of the tokens of an episode from place `first` on."""
    ids: Any = np.asarray([episode.tokens], np.int32)
    logits = np.asarray(policy.logits(params, ids), np.float64)[0, len(episode.prompt) + first - 1 : -1]
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.asarray(logp[np.arange(len(logits)), ids[0, len(episode.prompt) + first :]])


@pytest.mark.heavy
def test_each_token_is_drawn_by_the_policy_that_is_asked() -> None:
    """Also where the reference goes on from the policy's tokens, at another temperature, and greedily."""
    policy, params, _ = load_policy(runs.MODEL)
    other = jax.tree.map(lambda x: 0.7 * x, params)
    seen: list[list[Episode]] = []

    async def program(tools: Tools, task: Task) -> list[Episode]:
        own, theirs = await gather(
            tools.sample(task.prompt, number=0), tools.sample(task.prompt, number=1, reference=True)
        )
        longer, best = await gather(
            tools.sample(own.first(2), number=2, reference=True, limit=4),
            tools.sample(task.prompt, number=0, reference=True, greedy=True),
        )
        seen.append([own, theirs, longer, best])
        return [own]

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    setup = Experience(
        replace(policy, config=replace(policy.config, eos_token_ids=())),
        PromptSet(rows, [[5, 6], [7, 8, 9]]),
        [Reward(lambda completions: [0.0] * len(completions))],
        shuffled_epochs(rows, seed=0),
        SamplingConfig(max_new_tokens=6),
        Rollout(program, demands=Demands(reference=True)),
        prompts_per_step=2,
        group_size=1,
        reference=other,
    )
    source = experience(setup)
    source.next(source.init(), params, jax.random.key(0), 0)
    assert len(seen) == 2
    for own, theirs, longer, best in seen:
        for episode, weights, first in ((own, params, 0), (theirs, other, 0), (longer, other, 2)):
            assert episode.size == 6
            np.testing.assert_allclose(episode.own.logp[first:], logp_of(policy, weights, episode, first), atol=2e-5)
        assert np.abs(theirs.own.logp - logp_of(policy, params, theirs, 0)).max() > 1e-3, "the two policies differ"
        ids: Any = np.asarray([best.tokens[:-1]], np.int32)
        likeliest = np.asarray(policy.logits(other, ids))[0, len(best.prompt) - 1 :].argmax(-1)
        assert best.own.token.tolist() == likeliest.tolist()
    for wrong in (None, Mixture((other, params), (0.5, 0.5))):
        with pytest.raises(InputError, match="draws from a reference policy: give its parameters"):
            experience(replace(setup, reference=wrong))


@pytest.mark.heavy
@pytest.mark.parametrize("prover", ["initial", "other"])
def test_the_prover_of_pav_stays_as_it_is(tmp_path: Path, monkeypatch: Any, prover: str) -> None:
    """The weights of both engines in each of three steps, with a learning rate at which the policy moves."""
    drawn: list[tuple[int, Any]] = []
    inner = engines.engine_of

    def engine(policy: Any, weights: Any, *rest: Any, policy_step: int, **more: Any) -> Any:
        drawn.append((policy_step, jax.tree.map(np.array, weights.loop["embed"])))
        return inner(policy, weights, *rest, policy_step=policy_step, **more)

    monkeypatch.setattr(engines, "engine_of", engine)
    given: dict[str, Any] = {"continuations": 2}
    if prover == "other":
        given["prover"] = other_model(tmp_path / "other", 0.7)
    runs.train(
        runs.small_config(
            tmp_path, algorithm="pav", hyperparameters=given, steps=3, eval_size=0, minibatches=1, top_p=1.0
        )
    )
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) and "rollout/failed_groups" not in line for line in lines)
    assert all(line["mismatch"] < 1e-4 for line in lines), "the prover's tokens are not trained on"
    assert [step for step, _ in drawn] == [0, 0, 1, 1, 2, 2]
    _, params, _ = load_policy(runs.MODEL)
    fixed = np.asarray(params["embed"]) * np.float32(0.7 if prover == "other" else 1.0)
    for number, (_, embed) in enumerate(drawn):
        gap = float(np.abs(np.asarray(embed, np.float32) - fixed).max())
        if number % 2:  # the second engine of a step
            assert gap < 1e-6
        else:
            assert (gap > 1e-4) == (number > 0 or prover == "other")


def test_what_cannot_be_is_refused_before_a_model_is_loaded() -> None:
    moving = replace(get("grpo"), rollout=valued(2, "lines", of="reference"), reference=exponential_average())
    check_method(TrainConfig(), mesh_of(""), moving)
    mixed = replace(moving, reference=with_initial(exponential_average(), 0.5))
    with pytest.raises(InputError, match=r"draws from the reference, but that of \S+ mixes log-probabilities"):
        check_method(TrainConfig(), mesh_of(""), mixed)
    for changes in ({"oversample": 2.0}, {"max_staleness": 1}):
        with pytest.raises(InputError, match="the reference of one step, which moves"):
            check_method(replace(TrainConfig(), **changes), mesh_of(""), moving)


@pytest.mark.heavy
def test_with_adapters_the_prover_is_the_frozen_model(tmp_path: Path, monkeypatch: Any) -> None:
    arrays: list[int] = []
    inner = engines.engine_of

    def engine(policy: Any, weights: Any, *rest: Any, **more: Any) -> Any:
        arrays.append(len(jax.tree.leaves(weights.loop)))
        return inner(policy, weights, *rest, **more)

    monkeypatch.setattr(engines, "engine_of", engine)
    runs.train(
        runs.small_config(
            tmp_path, algorithm="pav", hyperparameters={"continuations": 2}, steps=2, eval_size=0, minibatches=1,
            top_p=1.0, lora_rank=2,
        )
    )  # fmt: skip
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) and "rollout/failed_groups" not in line for line in lines)
    policy, prover = arrays[0], arrays[1]
    assert arrays == [policy, prover] * 2
    assert prover < policy, "it has no adapters"
