"""The table of prompts against counts made by hand, from groups and from logged completions, and its size."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import write_run

from jaxrl_llm.cli.program import main
from jaxrl_llm.reporting.html.report import write_report
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.prompt_table import KINDS, PromptTable, prompt_table, read_table, sparkline
from jaxrl_llm.training.folder.completion_lines import write_left_out
from jaxrl_llm.utils.errors import InputError


def write_groups(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def step_line(step: int, groups: dict[int, tuple[int, int]], left_out: list[str | None] | None = None) -> Any:
    """groups: (right, samples) by prompt."""
    right, samples = zip(*groups.values(), strict=True)
    line = {
        "step": step, "prompt": [*groups], "samples": samples, "right": right,
        "reward": [a / b for a, b in groups.values()], "equal": [int(a in (0, b)) for a, b in groups.values()],
    }  # fmt: skip
    return line | ({"left_out": left_out} if left_out else {})


def table_of(folder: Path, **options: Any) -> PromptTable:
    found = prompt_table(RunData(folder), **options)
    assert found is not None
    return found


def test_rows_are_what_a_count_by_hand_gives(tmp_path: Path) -> None:
    lines = [
        step_line(1, {7: (0, 4), 3: (4, 4), 9: (0, 4)}),
        step_line(2, {7: (1, 4), 3: (4, 4), 5: (2, 4)}, [None, "no signal", None]),
        step_line(4, {7: (3, 4), 9: (0, 4), 8: (3, 4), 2: (1, 4)}),
        step_line(5, {7: (4, 4), 8: (1, 4), 2: (1, 4)}, ["no signal", None, "more"]),
    ]
    write_groups(tmp_path, lines)
    why = np.zeros(12, np.uint8)
    why[[3, 11]], why[9] = 1, 3
    write_left_out(tmp_path / "left_out.npz", 4, why)
    table = table_of(tmp_path)
    found = {row.prompt_id: row for row in table.rows}
    assert [row.kind for row in table.rows] == sorted((row.kind for row in table.rows), key=KINDS.index)
    assert {i: row.kind for i, row in found.items()} == {
        7: "rose", 3: "always solved", 9: "never solved", 5: "tried once", 8: "fell", 2: "steady",
    }  # fmt: skip
    assert found[7][3:] == (4, 1, 5, 0.0, 1.0, "▁▃▆█", 2, 1, "")
    assert found[8][3:] == (2, 4, 5, 0.75, 0.25, "▆▃", 0, 0, "")
    assert (found[3].dropped, found[3].why, found[9].why) == (1, "solved", "not yet admitted")
    assert table.dropped == {"no signal": 2, "more": 1}
    assert table.left_out == {"solved": 2, "not yet admitted": 1}
    assert (table.tried, table.total, table.groups, table.equal, table.as_of) == (6, 12, 13, 6, 4)
    assert table.kinds == {kind: 1 for kind in KINDS}


def test_thirds_weigh_nothing_but_the_groups(tmp_path: Path) -> None:
    right = [0, 1, 1, 3, 2, 4, 4]  # the first third are 2 groups of 7, the last 2
    write_groups(tmp_path, [step_line(i, {0: (x, 4)}) for i, x in enumerate(right)])
    (row,) = table_of(tmp_path).rows
    assert (row.before, row.after) == (pytest.approx(0.125), pytest.approx(1.0))


def test_without_a_correct_sample_it_is_of_rewards(tmp_path: Path) -> None:
    lines = [{**step_line(i, {0: (0, 4), 1: (0, 4)}), "reward": [-1.0 + i, 2.0]} for i in range(3)]
    table = table_of(write_groups(tmp_path, lines))
    assert table.value == "mean reward"
    assert {row.prompt_id: (row.kind, row.before, row.after) for row in table.rows} == {
        0: ("rose", -1.0, 1.0), 1: ("steady", 2.0, 2.0),
    }  # fmt: skip
    assert table.rows[0].line == "▁▃▆", "between the least and the greatest of the run"


def test_a_million_prompts_are_counted_and_some_shown(tmp_path: Path) -> None:
    """What moved most is shown, whichever it is, and all are counted."""
    random, P = np.random.default_rng(0), 1_000_000
    ids, expected = random.permutation(P)[:3000], defaultdict[int, list[float]](list)
    lines = []
    for step in range(8):
        groups = {int(i): (int(random.integers(0, 5)), 4) for i in random.choice(ids, 500, replace=False)}
        lines.append(step_line(step, groups))
        for i, (a, b) in groups.items():
            expected[i].append(a / b)
    why = (np.arange(P) % 3 == 0).astype(np.uint8)
    write_left_out(write_groups(tmp_path, lines) / "left_out.npz", 8, why)
    assert (tmp_path / "left_out.npz").stat().st_size < 20_000
    table = table_of(tmp_path, each=5)
    assert len(table.rows) <= 5 * len(KINDS) + 5
    assert (table.tried, table.total, table.groups) == (len(expected), P, 4000)
    assert sum(table.kinds.values()) == table.tried
    assert table.left_out == {"solved": int(why.sum())}

    def change(values: list[float]) -> float:
        n = max(len(values) // 3, 1)
        return float(np.mean(values[-n:]) - np.mean(values[:n]))

    moved = {i: change(values) for i, values in expected.items() if max(values) > 0 and min(values) < 1}
    assert table.kinds["fell"] == sum(x < -1e-9 for x in moved.values())
    assert table.kinds["never solved"] == sum(max(values) == 0 for values in expected.values())
    worst = [row.after - row.before for row in table.rows if row.kind == "fell"]
    np.testing.assert_allclose(worst, sorted(moved.values())[:5], atol=1e-9)


def test_a_run_without_groups_has_its_logged_completions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=24)
    table = table_of(run)
    assert table.sampled
    assert table.tried == 4 * 5, "of the steps 0, 6, 12, 18 and 23"
    assert table.rows[0].text.startswith("Calculate ")
    lines = (run / "completions.jsonl").read_text().splitlines()
    again = [json.dumps({**json.loads(x), "step": 50, "replayed": True}) for x in lines if '"train"' in x]
    (run / "completions.jsonl").write_text("\n".join([*lines, *again]) + "\n")
    assert table_of(run) == table, "replayed rows are no visit"


def test_the_report_and_the_terminal_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", steps=6, prompts_per_step=4)
    write_groups(tmp_path / "groups", [step_line(1, {0: (1, 4)}), step_line(4, {0: (3, 4), 1: (0, 4)})])
    shutil.copy(tmp_path / "groups" / "groups.jsonl", run)
    page = write_report(run).read_text()
    assert "<h2>Prompts</h2>" in page
    assert "0.25 → 0.75" in page
    assert "2 prompts tried: 1 rose, 1 never solved. 3 groups, 1 with equal rewards." in page
    (run / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no groups yet"):
        read_table(write_groups(tmp_path / "empty", []))
    assert main(["report", str(run), "--prompts", "--output", "x.html"]) == 2
    assert "--prompts prints a table of one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ['{"step": 1, "prompt": [1]}', '{"step": "x"}', '{"step": 1, "prompt": ["a"], "samples": [1], '
             '"reward": [1], "right": [1], "equal": [1]}'],
)  # fmt: skip
def test_a_damaged_file_is_told(line: str, tmp_path: Path) -> None:
    folder = write_groups(tmp_path, [step_line(0, {0: (1, 4)})])
    (folder / "groups.jsonl").write_text((folder / "groups.jsonl").read_text() + line + "\n")
    with pytest.raises(InputError, match=r"groups\.jsonl, line 2"):
        table_of(folder)
    write_groups(tmp_path, [step_line(0, {0: (1, 4)})])
    (tmp_path / "left_out.npz").write_bytes(b"PK no zip")
    with pytest.raises(InputError, match=r"left_out\.npz cannot be read"):
        table_of(folder)


def test_bars() -> None:
    assert sparkline(np.array([0.5])) == ""
    assert sparkline(np.array([1.0, 1.0]), (1.0, 1.0)) == "▅▅"
    assert sparkline(np.repeat([0.0, 1.0], 100)) == "▁▁▁▁████"
