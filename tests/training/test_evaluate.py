"""Accuracy and pass@k count the completions with reward 1."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.data.prompt_set import PromptSet, encode_rows
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.sampling import completion_ids, sample
from jaxrl_llm.training.evaluation.evaluate import Evaluation, evaluate_policy
from jaxrl_llm.training.notes import accuracy_line
from jaxrl_llm.utils.errors import InputError


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any, Any]:
    return load_policy(runs.MODEL)


@pytest.fixture(scope="module")
def prompts(model: tuple[Any, Any, Any]) -> PromptSet:
    rows = [{"prompt": f"number {i:02d}:", "answer": str(i)} for i in range(4)]
    return encode_rows(model[2], rows, max_tokens=64, long_prompts="skip", system_prompt=None)


def run(model: tuple[Any, Any, Any], prompts: PromptSet, reward: Any, **settings: Any) -> Evaluation:
    policy, params, _ = model
    rewards = reward if isinstance(reward, list) else [Reward(reward, name="reward")]
    return evaluate_policy(policy, params, prompts, rewards, max_new_tokens=6, **settings)


def fixed(*scores: float) -> Any:
    """A reward that ignores the completions."""
    return lambda completions: list(scores)


def test_accuracy_is_the_share_of_ones(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    result = run(model, prompts, fixed(1.0, 0.75, 1.0, -3.0))
    figures = result.figures
    assert figures["accuracy"] == 0.5
    assert figures["reward"] == pytest.approx((1 + 0.75 + 1 - 3) / 4)
    assert (figures["prompts"], figures["samples"], figures["temperature"]) == (4, 1, 0.0)
    # Wilson's interval for 2 of 4: (p + z^2/2n +- z sqrt(p q / n + z^2/4n^2)) / (1 + z^2/n)
    z = 1.959964
    middle, half = 0.5, z * math.sqrt(1 / 16 + z * z / 64) / (1 + z * z / 4)
    assert figures["low"] == pytest.approx(middle - half, abs=1e-5)
    assert figures["high"] == pytest.approx(middle + half, abs=1e-5)
    assert "pass_at" not in figures


def test_accuracy_is_a_count_over_greedy_completions(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    def first_is_even(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        return [float(ids[0] % 2 == 0) for ids in completion_ids]

    policy, params, _ = model
    result = run(model, prompts, first_is_even)
    ids = np.asarray(prompts.ids)
    logits = policy.logits(params, ids)[:, -1]
    by_hand = int(np.sum(np.argmax(np.asarray(logits), axis=-1) % 2 == 0))
    assert result.figures["accuracy"] == by_hand / 4
    greedy = sample(policy, params, prompts.ids, jax.random.key(5), max_new_tokens=6, temperature=0.0)
    assert completion_ids(result.scored.batch) == completion_ids(greedy)
    lengths = [len(ids) for ids in completion_ids(greedy)]
    assert result.figures["length"] == np.mean(lengths)
    assert result.figures["truncated"] == np.mean([n == 6 for n in lengths])


def test_the_judge_is_the_first_reward_or_the_one_named(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    rewards = [Reward(fixed(1, 1, 1, 0), name="style"), Reward(fixed(0, 0, 0, 1), name="right", weight=3.0)]
    assert run(model, prompts, rewards).figures["accuracy"] == 0.75
    named = run(model, prompts, rewards, judge="right").figures
    assert named["accuracy"] == 0.25
    assert named["reward"] == pytest.approx((1 + 1 + 1 + 3) / 4)
    with pytest.raises(InputError, match="unknown reward to judge by 'rigth': did you mean 'right'"):
        run(model, prompts, rewards, judge="rigth")


def test_pass_at_k(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    """Of 4 samples each, 0, 1, 2 and 4 are right: pass@k is 1 - C(4 - c, k) / C(4, k), averaged over the prompts."""
    right = [0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1]
    result = run(model, prompts, fixed(*right), samples=4, temperature=1.0)
    figures = result.figures
    assert figures["accuracy"] == 7 / 16
    assert set(figures["pass_at"]) == {"1", "2", "4"}
    for k in (1, 2, 4):
        expected = np.mean([1 - math.comb(4 - c, k) / math.comb(4, k) for c in (0, 1, 2, 4)])
        found = figures["pass_at"][str(k)]
        assert found["value"] == pytest.approx(expected)
        assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert figures["low"] <= figures["accuracy"] <= figures["high"]
    assert len(completion_ids(result.scored.batch)) == 16
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_no_right_answer_is_no_certainty(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    """4 prompts whose 2 samples all fail tell as much as 4 wrong answers: z^2 / (4 + z^2) = 0.489891."""
    figures = run(model, prompts, fixed(*[0] * 8), samples=2, temperature=1.0).figures
    for found in (figures, *figures["pass_at"].values()):
        assert (found["low"], round(found["high"], 6)) == (0.0, 0.489891)
    assert accuracy_line(figures).startswith("accuracy 0.0 % (0.0 to 49.0) on 4 held-out prompts")


def test_samples_that_are_no_power_of_two(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    figures = run(model, prompts, fixed(*[1] * 12), samples=3, temperature=1.0).figures
    assert {k: v["value"] for k, v in figures["pass_at"].items()} == {"1": 1.0, "2": 1.0}


@pytest.mark.heavy
def test_how_many_rows_go_at_once_changes_nothing(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    results = [
        completion_ids(run(model, prompts, fixed(*[0] * 16), samples=4, temperature=1.0, slots=n).scored.batch)
        for n in (0, 16, 6)
    ]
    assert results[0] == results[1] == results[2]


def test_accuracy_is_over_what_was_scored(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    """Of 8 samples 2 are not scored; of prompts with one or no scored sample pass@2 says nothing."""
    nan = float("nan")
    figures = run(model, prompts, fixed(1, 0, 1, nan, 1, 1, 0, nan), samples=2, temperature=1.0).figures
    assert (figures["accuracy"], figures["unscored"]) == (4 / 6, 2)
    assert figures["pass_at"]["1"]["value"] == (0.5 + 1 + 1 + 0) / 4
    assert figures["pass_at"]["2"]["value"] == 1.0
    assert accuracy_line(figures).endswith(", 2 not scored")
    greedy = run(model, prompts, fixed(1, nan, 0, 1))
    assert (greedy.figures["accuracy"], greedy.figures["unscored"]) == (2 / 3, 1)
    assert repr(greedy).endswith("on 4 prompts, 1 not scored")
    assert "not scored" not in repr(run(model, prompts, fixed(1, 1, 0, 1)))


def test_one_completion_that_hangs_leaves_the_others(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    def verifier(completions: list[str], answer: list[str]) -> list[float]:
        time.sleep(30 if "2" in answer else 0)
        return [1.0] * len(completions)

    figures = run(model, prompts, [Reward(verifier, time_limit=0.2)]).figures
    assert (figures["accuracy"], figures["unscored"], figures["failed"]) == (1.0, 1, 1)


def test_nothing_scored_is_no_number_and_no_right_answer(model: tuple[Any, Any, Any], prompts: PromptSet) -> None:
    """A reward that abstains throughout must not stop the run that waits to write its summary."""
    nan = float("nan")
    figures = run(model, prompts, fixed(nan, nan, nan, nan)).figures
    assert figures["reward"] is None
    assert (figures["accuracy"], figures["low"], figures["high"], figures["unscored"]) == (0.0, 0.0, 1.0, 4)
    json.dumps(figures, allow_nan=False)
    assert run(model, prompts, fixed(nan, 1, nan, nan)).figures["reward"] == 1.0
