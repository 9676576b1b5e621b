"""Sub-questions for a solver: what each model sees, what is judged, and what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.algorithms.guidance.daslam import decomposing, terms_of
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["plain"][1]
ROW = {"prompt": "Tom has 3 apples and 4 pears. How many fruits?", "solution": "3 + 4 = 7"}
SOLVER = """
def solve(text):
    return "3 + 4 = 7" if "help of these" in text else "apples: 3" if "apples?" in text else "3 * 4 = 12"


def nouns(text):
    return text.split()


def embed(text):
    return [1.0, len(text)]
"""


def says(text: str, sample: int) -> str:
    """As policy two or three questions; as solver an answer to each kind of prompt."""
    if "nothing else.<" in text:
        return "1. How many apples?\n2. How many pears?" + ("\nWhat else?" if sample else "") + END
    return ("3 + 4 = 7" if "help of these" in text else "three" if "nothing else:" in text else "3 * 4 = 12") + END


async def right(task: Any, episodes: Any) -> list[Episode]:
    return [one.scored(float(tokenizer_of("plain").decode(one.last).startswith("3 + 4"))) for one in episodes]


def played(monkeypatch: pytest.MonkeyPatch, rollout: Rollout, samples: int = 2) -> tuple[list[Episode], list[str], Any]:
    monkeypatch.setattr("speaking.by_length", right)
    found, engines = run_agents(rollout, tokenizer_of("plain"), says, [ROW], samples)
    asked = [str(tokenizer_of("plain").decode(list(one.prompt))) for engine in engines for one in engine.requests]
    return list(found.groups[0].episodes), asked, found


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(SOLVER)
    return str(tmp_path / "own.py")


def text_of(row: Episode) -> str:
    return str(tokenizer_of("plain").decode(row.own.token.tolist())).removesuffix(END)


def test_the_reference_solves_and_the_policy_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, asked, found = played(monkeypatch, decomposing(questions=2))
    assert [text_of(row) for row in rows] == [
        "1. How many apples?\n2. How many pears?" + s for s in ("", "\nWhat else?")
    ]
    assert [row.reward for row in rows] == [1.0, 1.0], "that of the solver's last answer"
    # One first attempt; then each sample has its prompt, two questions and the problem again.
    assert len(asked) == 1 + 2 * 4
    solution = [text for text in asked if "help of these" in text]
    assert all("How many apples?\nthree\nHow many pears?\nthree\n\nSolve the problem" in text for text in solution)
    second = [text for text in asked if "nothing else: How many pears?" in text]
    assert len(second) == 2
    assert all("How many apples?\nthree" in text for text in second)
    assert sum("A first attempt at this problem:\n3 * 4 = 12" in text for text in asked) == 2
    wanted = terms_of(
        ROW["prompt"], ["How many apples?", "How many pears?"], ["three", "three"], ROW["solution"], "3 * 4 = 12",
        "3 + 4 = 7",
    )  # fmt: skip
    assert [row.info["decomposition"] for row in rows] == [pytest.approx(list(wanted))] * 2
    assert wanted.operators == 0.5
    batch = to_batch(found.groups, SamplingConfig(), 0)
    assert np.asarray((batch.info or {})["decomposition"]).shape == (2, 4)
    assert decomposing().demands.reference


def test_a_function_may_solve_and_measure(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    rollout = decomposing(f"{own}:solve", nouns=f"{own}:nouns", embed=f"{own}:embed")
    assert not rollout.demands.reference
    rows, asked, _ = played(monkeypatch, rollout, 1)
    assert len(asked) == 1, "the policy alone"
    assert rows[0].reward == 1.0
    coverage, relevance, *_ = rows[0].info["decomposition"]  # type: ignore[misc]
    problem, own_words = set(ROW["prompt"].split()), {"How", "many", "apples?", "pears?"}
    assert coverage == pytest.approx(1 - len(problem ^ own_words) / len(problem))
    assert relevance > 0.49


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="questions"):
        decomposing(questions=0)
    with pytest.raises(InputError, match="no_such_file"):
        decomposing("no_such_file.py:solve")
