"""A run's logged completions become a batch again, and other methods' credit is added to its report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import compare
from jaxrl_llm.reporting import logged_batch, logged_prompts
from jaxrl_llm.utils.errors import InputError


def write(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(
    prompt: int, sample: int, tokens: list[str], reward: float | None, step: int = 3, phase: str = "train"
) -> dict:
    numbers = [-0.5 * (i + 1) for i in range(len(tokens))]
    return {
        "step": step, "phase": phase, "prompt_id": prompt, "sample": sample, "prompt": "?", "tokens": tokens,
        "advantage": None, "logp": numbers, "entropy": [1.0] * len(tokens), "reward": reward,
        "rewards": {"right": reward}, "answer": None, "truncated": sample == 1,
    }  # fmt: skip


LINES = [
    line(7, 0, ["a"], 0.0, step=1),
    line(7, 0, ["a", "b"], 1.0),
    line(7, 1, ["c"], 0.0),
    line(9, 0, ["a", "b", "d"], None),
    line(9, 1, ["a"], 1.0, phase="eval_after"),
]


def test_the_last_step_of_training_comes_back(tmp_path: Path) -> None:
    batch, texts = logged_batch(write(tmp_path, LINES))
    assert texts == [["a", "b"], ["c"], ["a", "b", "d"]]
    assert batch.action_mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert batch.behaviour_logp.tolist() == [[-0.5, -1, 0], [-0.5, 0, 0], [-0.5, -1, -1.5]]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.prompt_id.tolist() == [7, 7, 9]
    assert batch.truncated.tolist() == [False, True, False]
    np.testing.assert_array_equal(batch.reward, [1, 0, np.nan])
    np.testing.assert_array_equal(batch.rewards["right"], [1, 0, np.nan])
    assert batch.tokens[0, 0] == batch.tokens[2, 0] != batch.tokens[0, 1]
    assert logged_batch(tmp_path, step=1)[1] == [["a"]]


def test_its_prompts_come_with_it(tmp_path: Path) -> None:
    named = [{**one, "prompt": f"{one['step']}-{one['prompt_id']}"} for one in LINES]
    del named[3]["prompt"]
    write(tmp_path, named)
    assert logged_prompts(tmp_path) == ["3-7", "3-7", ""]
    assert logged_prompts(tmp_path, step=1) == ["1-7"]


def test_methods_are_compared_on_it(tmp_path: Path) -> None:
    batch, texts = logged_batch(write(tmp_path, LINES))
    found = compare(["dr_grpo", "rloo"], batch)
    np.testing.assert_allclose(found.advantages["dr_grpo"][:, 0], [0.5, -0.5, 0])
    np.testing.assert_allclose(found.advantages["rloo"][:, 0], [1, -1, 0])
    assert ">d</i>" in found.to_html(texts)


def test_nothing_written_down_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has none"):
        logged_batch(tmp_path)
    with pytest.raises(InputError, match=r"has those of the steps \[1, 3\]"):
        logged_batch(write(tmp_path, LINES), step=2)


def test_completions_without_tokens_or_values(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"those of step 3 in .* have no tokens"):
        logged_batch(write(tmp_path, [line(7, 0, [], 0.0)]))
    bare = {"step": 3, "phase": "train", "prompt_id": 7, "tokens": ["a", "b"]}
    batch, _ = logged_batch(write(tmp_path, [bare, line(7, 1, ["a"], 1.0) | {"logp": [None]}]))
    np.testing.assert_array_equal(batch.behaviour_logp, [[0, 0], [np.nan, 0]])
    np.testing.assert_array_equal(batch.reward, [np.nan, 1])


@pytest.mark.parametrize("step", ["3", 3.0, True])
def test_a_step_of_another_kind_is_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(InputError, match=r"step is .*, but must be the number of a step"):
        logged_batch(write(tmp_path, LINES), step=step)  # type: ignore[arg-type]
