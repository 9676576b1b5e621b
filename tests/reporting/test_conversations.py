"""Conversations and trees in reports: what is logged of them, how they are drawn, and which lines are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sample_runs import write_run
from test_completions_shown import Bytes, batch_of
from test_report import Page
from turn_episodes import episodes

from jaxrl_llm.reporting import show
from jaxrl_llm.reporting.html.conversations import marks, observation
from jaxrl_llm.reporting.html.report import write_report
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.shown_completions import training_groups
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.training.folder.completion_lines import completion_lines
from jaxrl_llm.utils.errors import InputError

ROWS: list[dict[str, Any]] = [{"prompt": "Play."}]


def lines_of(batch: Any) -> list[dict[str, Any]]:
    scored = Scored(batch.replace(rewards={}), [""] * len(batch.group), {})
    return list(completion_lines(Bytes(), scored, ROWS, 1))


def test_a_line_has_the_observations_and_rewards_of_its_turns() -> None:
    batch = episodes([[1, 2], [3]], [[0.5, 1.0], [0.25]], actions=[[65, 66], [67]])
    long, short = lines_of(batch.replace(info={"first_turn": jnp.asarray([0.0, 2.0])}))
    assert long["tokens"] == ["A", "\0", "B", "\1"]
    assert [before for before, _ in long["given"]] == [2, 4]  # an observation comes after the last turn, too
    assert long["turn_rewards"][:2] == [0.5, 1.0]
    assert "turn" not in long
    assert short["turn"] == 2
    assert short["turn_rewards"][0] == 0.25


def test_a_group_has_none_of_it() -> None:
    (line, other) = lines_of(batch_of([("Q: ", "yes"), ("Q: ", "no")], reward=jnp.zeros(2)))
    assert not {"given", "turn_rewards", "turn", "begins"} & (line.keys() | other.keys())
    assert marks(line) == {}


def tree() -> Any:
    """Paths abcd, abxy and abxz of one tree, and one of another."""
    batch = batch_of([("Q", "abcd"), ("Q", "abxy"), ("Q", "abxz"), ("Q", "abcd")], reward=jnp.zeros(4))
    nodes = np.zeros(batch.tokens.shape, np.float32)
    nodes[:, 1:5] = [[0, 0, 1, 1], [0, 0, 2, 3], [0, 0, 2, 4], [5, 5, 5, 5]]
    return batch.replace(info={"node": jnp.asarray(nodes)}, group=jnp.zeros(4, jnp.int32))


def test_paths_of_a_tree_say_what_they_share() -> None:
    assert [line.get("begins") for line in lines_of(tree())] == [None, (0, 2), (1, 3), None]


def test_show_folds_observations_and_what_a_path_shares() -> None:
    found = show(tree(), Bytes())
    assert str(found).splitlines()[1:] == [
        "row 0, group 0, reward 0, 4 tokens, mean logp -1.5", "  Q", "> abcd",
        "row 1, group 0, reward 0, 4 tokens, truncated, mean logp -1.5", "  [as the row before up to here]", "> xy",
        "row 2, group 0, reward 0, 4 tokens, mean logp -1.5", "  [as the row before up to here]", "> z",
        "row 3, group 0, reward 0, 4 tokens, mean logp -1.5", "> abcd",
    ]  # fmt: skip
    page = found._repr_html_()
    assert page.count("[as the row before up to here]") == 2
    assert page.count(">a</i>") == 2


def test_marks_are_where_turns_begin() -> None:
    line = {"tokens": ["a", "b", "c"], "given": [[2, "saw <b>"]], "turn_rewards": [0.5, None], "turn": 3}
    assert marks(line) == {
        0: ['<span class="turn">turn 4, reward 0.5</span>'],
        2: [observation("saw <b>"), '<span class="turn">turn 5</span>'],
    }
    assert "characters left out" in observation("x" * 1000)
    assert "&lt;b&gt;" in observation("saw <b>")


def conversations(folder: Path, **changes: Any) -> Path:
    run = write_run(folder)
    own = {
        "step": 0, "phase": "train", "prompt_id": 900, "prompt": "Play.", "tokens": ["go", " left", "stop"],
        "advantage": [1.0, 1.0, -1.0], "logp": [-0.1] * 3, "entropy": [0.2] * 3, "reward": 1.0, "rewards": {},
        "truncated": False,
    }  # fmt: skip
    lines: list[dict[str, Any]] = [
        {**own, "sample": 0, "given": [[2, "a <wall>"]], "turn_rewards": [0.25, 0.75]},
        {**own, "sample": 1, "reward": 0.0, "begins": [0, 2], **changes},
    ]
    old = (run / "completions.jsonl").read_text()
    (run / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + old)
    return run


def test_a_report_draws_turns_and_forks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = write_report(conversations(tmp_path / "run")).read_text()
    page = Page(text)
    said = " ".join(page.text)
    assert "turn 1, reward 0.25" in said
    assert "turn 2, reward 0.75" in said
    assert "begins with 2 tokens of sample 1" in said
    assert text.count("a &lt;wall&gt;</details>") == 1
    assert "<wall>" not in text
    assert "margin-left:1.5rem" in text


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"given": [[9, "x"]]}, "its given is behind its 3 tokens"),
        ({"given": [["x", 1]]}, "its given is not a list of pairs"),
        ({"turn_rewards": 3}, "its turn_rewards are not a list of numbers"),
        ({"begins": [1]}, "its begins is not a pair"),
    ],
)
def test_damaged_lines_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"completions.jsonl, line 2: {said}"):
        write_report(conversations(tmp_path / "run", **changes))


def test_rows_of_an_episode_are_one_sample_and_say_what_the_policy_saw_first() -> None:
    batch = batch_of(
        [("Tools. Play.", "go"), ("Summary.", "on"), ("Tools. Play.", "no"), ("Tools. Play.", "up")],
        reward=jnp.zeros(4),
    )  # fmt: skip
    batch = batch.replace(
        group=jnp.asarray([0, 0, 0, 1]), prompt_id=jnp.asarray([7, 7, 7, 7]),
        info={"first_turn": jnp.asarray([0.0, 1.0, 0.0, 0.0])},
    )  # fmt: skip
    scored = Scored(batch.replace(rewards={}), [""] * 4, {})
    found = list(completion_lines(Bytes(), scored, [*ROWS, *ROWS], 2))
    assert [(line["group"], line["sample"], line.get("row", 0)) for line in found] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    ]  # fmt: skip
    assert [line["context"] for line in found] == ["Tools. Play.", "Summary.", "Tools. Play.", "Tools. Play."]
    assert all(line["prompt"] == "Play." for line in found)


def test_two_groups_of_a_prompt_are_two_cards_and_an_episode_is_counted_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run")
    own: dict[str, Any] = {
        "step": 0, "phase": "train", "prompt_id": 900, "prompt": "Play.", "context": "Tools: add. Play, it said.",
        "tokens": ["go"], "advantage": [1.0], "logp": [-0.1], "entropy": [0.2], "rewards": {}, "truncated": False,
    }  # fmt: skip
    lines = [
        {**own, "group": 0, "sample": 0, "reward": 1.0},
        {**own, "group": 0, "sample": 0, "row": 1, "reward": 1.0},
        {**own, "group": 0, "sample": 1, "reward": 0.0},
        {**own, "group": 1, "sample": 0, "reward": 0.0},
        {**own, "group": 1, "sample": 1, "reward": 0.0},
    ]
    (run / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = training_groups(RunData(run).rows)
    assert [(group.prompt_id, group.number, group.samples, group.correct) for group in found] == [
        (900, 0, 2, 1), (900, 1, 2, 0),
    ]  # fmt: skip
    said = " ".join(Page(write_report(run).read_text()).text)
    assert "1 of 2 right" in said
    assert "0 of 2 right" in said
    assert "Tools: add. Play, it said." in said


def test_cards_of_few_shot_prompts_begin_with_what_differs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run")
    shots = "".join(f"Q: what is {n} + {n}?\nA: {2 * n}\n\n" for n in range(30))
    own: dict[str, Any] = {
        "step": 0, "phase": "train", "tokens": ["1"], "advantage": [1.0], "logp": [-0.1], "entropy": [0.2],
        "reward": 1.0, "rewards": {}, "truncated": False, "sample": 0,
    }  # fmt: skip
    lines = [{**own, "prompt_id": n, "prompt": f"{shots}Q: name a {word}?\nA:"} for n, word in enumerate("abc")]
    (run / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = " ".join(Page(write_report(run).read_text()).text)
    for word in "abc":
        assert f"…{word}?" in said
