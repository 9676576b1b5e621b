"""Runs of methods that sample their own pairs: each by name, the anchors of rounds, and opponents token by token."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.online_preferences.nash_md import geometric_mixture
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.sampler import SamplingConfig

pytestmark = pytest.mark.heavy


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def test_an_opponent_is_drawn_from_the_mixture_and_the_policy_from_itself() -> None:
    policy, params, _ = load_policy(runs.MODEL)
    policy = dataclasses.replace(policy, config=dataclasses.replace(policy.config, eos_token_ids=()))
    other, share, seen = jax.tree.map(lambda x: 0.7 * x, params), 0.3, list[list[Episode]]()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        own = await tools.sample(task.prompt, number=0)
        seen.append([own, await tools.sample(task.prompt, number=1, reference=True)])
        return [own]

    setup = Experience(
        policy, PromptSet([{"prompt": "a"}, {"prompt": "b"}], [[5, 6], [7, 8, 9]]),
        [Reward(lambda completions: [0.0] * len(completions))], shuffled_epochs([{}, {}], seed=0),
        SamplingConfig(max_new_tokens=6),
        Rollout(program, demands=Demands(reference=True), drawing=geometric_mixture(share)),
        prompts_per_step=2, group_size=1, reference=other,
    )  # fmt: skip
    source = experience(setup)
    source.next(source.init(), params, jax.random.key(0), 0)
    for own, theirs in seen:
        for episode, weight in ((own, 0.0), (theirs, share)):
            ids: Any = np.asarray([episode.tokens], np.int32)
            first, second = (
                log_softmax(np.asarray(policy.logits(weights, ids), np.float64)[0, len(episode.prompt) - 1 : -1])
                for weights in (params, other)
            )
            mixed = log_softmax(weight * second + (1 - weight) * first)
            drawn = mixed[np.arange(episode.size), ids[0, len(episode.prompt) :]]
            np.testing.assert_allclose(episode.own.logp, drawn, atol=2e-4)


def test_the_anchors_of_inpo_are_the_first_policy_and_that_of_the_round(tmp_path: Path) -> None:
    steps: list[runs.Taken] = []
    config = runs.small_config(
        tmp_path, steps=4, minibatches=1, algorithm="inpo", hyperparameters={"share": 0.25, "reset": 2, "eta": 0.1},
        eval_size=0, top_p=1.0,
    )  # fmt: skip
    with runs.watched(steps):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    policy, _, _ = load_policy(runs.MODEL)
    for number, (step, line) in enumerate(zip(steps, lines, strict=True)):
        batch = jax.tree.map(jnp.asarray, step.scored.batch)
        mask = np.asarray(batch.action_mask)
        now, first, anchor = (
            np.where(mask, np.asarray(outputs_of(policy, steps[of].params, batch).logp, np.float64), 0).sum(1)
            for of in (number, 0, number // 2 * 2)
        )
        u = now - 0.25 * first - 0.75 * anchor
        reward, group = np.asarray(batch.reward), np.asarray(batch.group)
        losses = []
        for g in set(group):
            a, b = np.flatnonzero(group == g)
            if reward[a] != reward[b]:
                w, l = (a, b) if reward[a] > reward[b] else (b, a)
                losses.append((u[w] - u[l] - 1 / 0.2) ** 2)
        assert line["pairwise"] == pytest.approx(np.mean(losses), rel=1e-3)
        assert len(group) == 2 * config.prompts_per_step, "the rest is sampled alone"
        assert line["rollout/sampled_reward"] > 0


@pytest.mark.parametrize(
    ("name", "given", "metric"),
    [
        ("dpo_online", {"reset": 1}, "rewards/margins"), ("sppo", {"reset": 1, "beta": 0.1}, "win_rate_regression"),
        ("spo_self_play", {}, "clip/high"), ("xpo", {}, "opponent_logp"), ("nash_md", {}, "nash"),
        ("xpo", {"judge": "policy"}, "judge/unparsed"), ("nash_md", {"judge": "reference"}, "judge/unparsed"),
        ("spo_structured", {"judge": "policy", "column": "answer"}, "judge/unparsed"),
        ("baichuan_m2", {"judge": "policy"}, "judge/unparsed"),
    ],
)  # fmt: skip
def test_methods_train_by_name(tmp_path: Path, name: str, given: dict[str, Any], metric: str) -> None:
    settings: dict[str, Any] = {"rewards": ("judge",)} if "judge" in given else {}
    config = runs.small_config(
        tmp_path, steps=2, minibatches=1, algorithm=name, hyperparameters=given, top_p=1.0,
        **({"eval_size": 0} if "judge" in given else {}),
    )  # fmt: skip
    runs.train(dataclasses.replace(config, **settings))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [metric in line for line in lines] == [True, True]
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert get(name, **given).rollout is not None
