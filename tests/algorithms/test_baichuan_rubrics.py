"""Rubrics that a judge writes and checks (Baichuan-M2): scores by hand, faults, and slices that are noise."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("rollouts", "training")]
import speaking
import tiny_runs as runs
from speaking import TEMPLATES, run_agents, tokenizer_of
from test_judged import scripted

from jaxrl_llm.algorithms.rewards import baichuan_m2 as baichuan_module
from jaxrl_llm.algorithms.rewards.baichuan_m2 import baichuan_m2, by_written_rubric, repeats, rubric_in, sliced
from jaxrl_llm.environments.patient import Patient
from jaxrl_llm.rewards.judges.questions import Grading
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.judges.judged import Criterion, judged
from jaxrl_llm.rollouts.programs import group

TOKENIZER, END = tokenizer_of("plain"), TEMPLATES["plain"][1]
RUBRIC = "Here it is.\n3: has a\n1: has b\n-2: has x\n-11: has y"
ROW = {
    "prompt": "", "complaint": "I cough.", "diagnosis": "Flu",
    "facts": {"fever": "39 degrees.", "travel": "None.", "smoke": "Never."},
}  # fmt: skip


@pytest.fixture(autouse=True)
def verdicts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(task: Any, episodes: Any) -> Any:
        return [one.scored(one.rewards[JUDGE], one.rewards) for one in episodes]

    monkeypatch.setattr(speaking, "by_length", score)


def checks(question: str) -> str | None:
    """Whether a letter of a criterion "has LETTER" is in the reply; nothing about one that has a question mark."""
    reply = question.split("Reply:\n")[1].split("\n\n")[0]
    asked = next(line for line in question.split("\n") if line.startswith(("Criterion: ", "Fault: ")))
    assert asked.startswith("Fault" if asked.endswith("x") else "Criterion"), "faults have a question of their own"
    if "?!" in reply:
        return None
    return "[[yes]]" if asked[-1] in reply else "[[no]]"


def judge(rubric: Any, questions: list[str]) -> Any:
    def says(question: str) -> str | None:
        return str(rubric(question)) if "Write a rubric" in question else checks(question)

    return scripted(says, questions)


def test_a_written_rubric_scores_by_hand() -> None:
    replies, questions = ["a", "b x", "a b", "x", "a?!", "a x"], list[str]()
    rollout = judged(by_written_rubric(judge(lambda question: RUBRIC, questions)), group())
    found, _ = run_agents(rollout, TOKENIZER, lambda text, n: replies[n] + END, [{"prompt": "Say."}], 6)
    expected = [3 / 4, 0.0, 1.0, 0.0, math.nan, 1 / 4]  # of 4 points, clipped at 0
    assert [one.score for one in found.groups[0].episodes] == pytest.approx(expected, nan_ok=True)
    assert sum("Write a rubric" in one for one in questions) == 1, "one rubric for the whole group"
    assert all("Say." in one for one in questions)
    first = found.groups[0].episodes[0].info
    assert (first["judge/asked"], first["judge/unparsed"]) == (18, pytest.approx(1 / 6))


def test_without_a_rubric_nothing_is_scored() -> None:
    questions = list[str]()
    rollout = judged(by_written_rubric(judge(lambda question: "-3: has x", questions)), group())
    found, _ = run_agents(rollout, TOKENIZER, lambda text, n: "a" + END, [{"prompt": "Say."}], 3)
    assert all(math.isnan(one.score) for one in found.groups[0].episodes)
    assert len(questions) == 1, "no reply is checked"


def test_lines_that_are_no_criteria() -> None:
    found = rubric_in("1. Be kind\n* 2 points: It is kind.\n0: Nothing.\n+10: All.\n-10: It lies. \n100: Much.\n3:")
    assert [(one.text, one.weight) for one in found] == [("It is kind.", 2), ("All.", 10), ("It lies.", -10)]


def doctor(text: str, sample: int) -> str:
    """In the dialogue, sample 3, asks the third question twice; the replies to its slices are letters."""
    asked = text.count("assistant\n") - 1
    return (("fever?", "travel?", "pain?", "pain?", "flu")[asked] if sample == 3 else "abx"[sample]) + END


def test_slices_that_are_noise_are_drawn_again() -> None:
    """Turns 0 to 4: before 4 the doctor has repeated itself; the judge writes rubrics for turns 1 and 2 alone."""
    drawn, orders = set[int](), set[tuple[int, ...]]()
    for seed in range(14):
        questions = list[str]()

        def rubric(question: str) -> str:
            return RUBRIC if question.count("assistant: ") in (1, 2) else "It is hard to say."

        rollout: Any = sliced(judge(rubric, questions)).wrap
        found, _ = run_agents(rollout(agent(Patient, turns=5)), TOKENIZER, doctor, [ROW] * (seed + 1), 3)
        one = found.groups[seed]
        assert not one.failed
        (context,) = {TOKENIZER.decode(episode.prompt) for episode in one.episodes}
        turn = context.count("assistant\n") - 1
        drawn.add(turn)
        assert [episode.score for episode in one.episodes] == [3 / 4, 1 / 4, 0.0]
        assert all(episode.info["judge/unparsed"] == 0 for episode in one.episodes)
        asked = [text.count("assistant: ") for text in questions if "Write a rubric" in text]
        assert 4 not in asked, "what repeats itself is not asked about"
        orders.add(tuple(asked))
        said = ["user: I cough.", "assistant: fever?", "user: 39 degrees.", "assistant: travel?", "user: None."]
        checked = [text for text in questions if "Reply:" in text]
        assert sum("\n\n".join(said[: 2 * turn + 1]) + "\n\nReply:" in text for text in checked) >= 9
    assert drawn == {1, 2}
    assert len(orders) > 2


def test_a_dialogue_of_noise_is_not_scored() -> None:
    rollout: Any = sliced(judge(lambda question: "no", [])).wrap
    found, _ = run_agents(rollout(agent(Patient, turns=5)), TOKENIZER, doctor, [ROW], 3)
    assert all(math.isnan(one.score) for one in found.groups[0].episodes)
    assert repeats([{"role": "user", "content": "A  b"}, {"role": "user", "content": "a b"}])
    assert not repeats([{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}])


def test_the_method_asks_its_judge() -> None:
    alone, whole = baichuan_m2(judge="reference").rollout, baichuan_m2(judge="reference", slices=True).rollout
    assert alone is not None
    assert whole is not None
    assert whole.wrap is not None
    for rollout in (alone, whole.wrap(group()), whole.wrap(agent(Patient))):
        assert JUDGE in rollout.provides
        assert rollout.demands.reference
    assert baichuan_m2().rollout is None


@pytest.mark.heavy
def test_a_run_with_slices_and_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights, whose texts are read as a rubric and as verdicts; both components make the reward."""
    rubric = Criterion("It asks.", 2.0), Criterion("It is rude.", -1.0)
    monkeypatch.setattr(baichuan_module, "rubric_in", lambda text: rubric)
    monkeypatch.setattr(baichuan_module, "WRITE", "{problem:.20}")  # the context is small
    monkeypatch.setattr(
        baichuan_module,
        "Grading",
        lambda template: Grading("{problem}|{response}|{criterion}", lambda text: len(text) % 2),
    )
    rows = [{**ROW, "complaint": f"I cough {n}."} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = runs.small_config(
        tmp_path, algorithm="baichuan_m2", hyperparameters={"slices": True, "judge": "policy"}, steps=2, minibatches=1,
        prompts=str(tmp_path / "rows.jsonl"), prompts_per_step=2, top_p=1.0, eval_size=0, prompt_format="plain",
        environment="jaxrl_llm.environments.patient:Patient", turns=2, rewards=("environment", "judge*0.5"),
        max_new_tokens=8,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    for one, line in zip(taken, runs.lines_of(tmp_path / "run" / "metrics.jsonl"), strict=True):
        assert line.get("rollout/failed_groups", 0) == 0
        assert line["judge/unparsed"] == 0
        batch = one.scored.batch
        parts = {name: np.asarray(x) for name, x in (batch.rewards or {}).items()}
        np.testing.assert_allclose(np.asarray(batch.reward), parts["environment"] + 0.5 * parts["judge"], atol=1e-6)
        assert set(parts["judge"].tolist()) <= {0.0, 0.5, 1.0}
