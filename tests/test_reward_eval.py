"""The command jaxrl reward-eval."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.cli.program import main
from jaxrl_llm.rewards import get_reward

MODEL = str(Path(__file__).parent / "reward_models" / "gemma2_1")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 122, 6))) for _ in range(24)]
    rows: list[dict[str, Any]] = [
        {"prompt": f"Q{n} ", "chosen": words[n], "rejected": words[n + 8], "subset": "pairs"} for n in range(8)
    ]
    rows += [
        {"prompt": f"Q{n} ", "chosen": [words[n]], "rejected": words[n + 1 : n + 4], "subset": "lists"}
        for n in range(4)
    ]
    rows.append({"prompt": "Q ", "chosen": "x" * 500, "rejected": "x", "subset": "pairs"})
    path = write(tmp_path / "rows.jsonl", rows)
    assert main(["reward-eval", MODEL, "--prompts", path, "--output", str(tmp_path / "out.json")]) == 0
    said, function = capsys.readouterr().out, get_reward(f"model:{MODEL}").function
    wins = []
    for row in rows[:12]:
        answers = [*([row["chosen"]] if isinstance(row["chosen"], str) else row["chosen"])]
        answers += [row["rejected"]] if isinstance(row["rejected"], str) else row["rejected"]
        scores = function([row["prompt"]] * len(answers), answers)
        wins.append(scores[0] > max(scores[1:]))
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["unscored"] == 1
    assert [one["accuracy"] for one in figures["subsets"]] == [np.mean(wins[:8]), np.mean(wins[8:]), np.mean(wins)]
    assert "1 prompt with an answer that was not scored left out" in said
    assert f"pairs: {100 * np.mean(wins[:8]):.1f} % (" in said
    assert "of 8 prompts" in said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Q", "chosen": "a"}, "row 1: rejected is None, but must be an answer"),
        ({"prompt": "Q", "chosen": [], "rejected": "a"}, "row 1: chosen is .*, but must be an answer"),
        ({"prompt": "Q", "chosen": 3, "rejected": "a"}, "row 1: chosen is 3, but must be an answer"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", [row])
    assert main(["reward-eval", MODEL, "--prompts", path]) != 0
    assert re.search(message, capsys.readouterr().err)


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-eval", MODEL]) != 0
    assert "--prompts is missing" in capsys.readouterr().err
    path = write(tmp_path / "rows.jsonl", [{"prompt": "Q", "chosen": "a", "rejected": "b"}])
    assert main(["reward-eval", str(Path(MODEL).parent / "qwen3_3"), "--prompts", path]) != 0
    assert "has 3 labels" in capsys.readouterr().err
