"""Groups of prompts that show candidate answers, over an engine that decodes nothing."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import Ran, Words, begin, resumed
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from jaxrl_llm.rollouts.guidance.candidates import contrast, with_candidates, wrong_ones
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

SEEN: list[str] = []


class Reader(Words):
    """Remembers the prompts that it encodes."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        SEEN.append(text)
        return {"input_ids": [len(text), zlib.crc32(text.encode()) % 1000]}


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setattr(fake_engine, "Words", Reader)


def run(rollout: Any, row: dict[str, Any], samples: int = 2) -> list[Any]:
    (one,) = Ran(begin([3], samples), Rule(), rollout, row={"prompt": "the problem", **row}).found.groups
    assert not one.failed
    return one.episodes


# The reward of the tests is the number of tokens: a teacher's answer is right with more than 100 of them.
RIGHT, BAD = " ".join(["71"] * 101), "72 72"
HARD = {"threshold": 1e9, "success": 100.0}


def test_hard_problems_have_three_groups() -> None:
    episodes = run(with_candidates(**HARD), {"teacher": [RIGHT, BAD]})
    assert [e.part for e in episodes] == [0, 0, 1, 1, 2, 2]
    assert len({e.sample for e in episodes}) == 6
    assert {e.info["solved"] for e in episodes} == {np.mean([e.reward for e in episodes[:2]])}
    assert all(e.actions.all() for e in episodes), "the policy wrote every token"
    assert [e.reward for e in episodes] == [e.size for e in episodes], "scored as answers to the row"
    rewrites, (both, wrong) = SEEN[:3], SEEN[3:]
    assert all(text.startswith("Problem: the problem\n\nSolution: ") for text in rewrites)
    assert RIGHT in rewrites[2], "the teacher's solution is rewritten like the others"
    assert "72 72" not in "".join(SEEN), "a wrong answer of the teacher is not shown"
    assert both.startswith("the problem\n\nOf two candidate solutions")
    assert wrong.count("Wrong solution") == 2


def test_what_there_is_not_is_not_shown() -> None:
    for row in ({"teacher": BAD}, {"teacher": ""}, {"teacher": None}):
        assert [e.part for e in run(with_candidates(**HARD), row)] == [0, 0, 2, 2], "no right answer of the teacher"
    plain = run(group(), {})
    for easy in (run(with_candidates(threshold=0.0), {"teacher": RIGHT}), run(with_candidates(success=0.0), {})):
        assert [e.own.token.tolist() for e in easy] == [e.own.token.tolist() for e in plain]
        assert {e.part for e in easy} == {0}


def test_a_function_may_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "teacher.py"
    path.write_text("def short(problem, solution):\n    return '5 ' * 9 if problem == 'the problem' else ''\n")
    run(with_candidates(rewriter=f"{path}:short", words=3, **HARD), {"teacher": RIGHT})
    assert len(SEEN) == 2, "the policy rewrites nothing"
    assert all("5 5 5\n" in text and "5 5 5 5" not in text for text in SEEN)
    with pytest.raises(InputError):
        with_candidates(rewriter="no such")


def test_a_resumed_program_asks_the_same() -> None:
    row, rollout = {"prompt": "p", "teacher": [RIGHT, BAD]}, with_candidates(**HARD)

    done = resumed(begin([2, 3, 4], 2), rollout, 4, row=row, limit=12)
    for one in Ran(begin([2, 3, 4], 2), Rule(), rollout, row=row, limit=12).found.groups:
        assert [(e.own.token.tolist(), e.reward, e.part) for e in done[one.task.prompt_id]] == [
            (e.own.token.tolist(), e.reward, e.part) for e in one.episodes
        ]


@drawn(st.integers(0, 1000))
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_a_contrast_does_not_say_which_is_right(seed: int) -> None:
    text = contrast(np.random.default_rng(seed), "P", "R" * 3, "W" * 3)
    first = np.random.default_rng(seed).random() < 0.5
    assert (text.index("RRR") < text.index("WWW")) == first


def test_wrong_answers_are_listed_once() -> None:
    text = wrong_ones("P", ["4", None, "4", "5"], list("abcd"))
    assert "final answers are: 4, 5\n" in text
    assert all(f"Wrong solution {i}:\n{c}" in text for i, c in enumerate("abcd", start=1))
