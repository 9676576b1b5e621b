"""POLCA: a step by hand, with the priority by mean reward and the net of distances."""

from __future__ import annotations

from spoken import Spoken, tasks

from jaxrl_llm.texts import Candidate, State, get

MEANS = {"one two": 0.5, "three four": 0.25, "five six": 0.75, "one two three": 1.0, "seven eight": 1.0}
MEMORY = (Candidate("one two", 3, 4), Candidate("three four", 1, 4), Candidate("five six", 1, 2))


def test_a_step_by_hand() -> None:
    """polca tries the best two again, leaves a near text out, and tries the far one on the same tasks."""
    new = iter(["one two three", "nine ten", "seven eight", ""])
    engine = Spoken(
        lambda text, question, sample: ("a", MEANS.get(text, 0.0)),
        lambda question, number: "Summed up." if "tried" in question else next(new),
    )
    method = get("polca", best=2, proposals=2, epsilon=0.25)
    state = method.step(State("one two", MEMORY), tasks("q0", "q1"), engine)
    # Means 0.75, 0.25 and 0.5 before: the first and the third have 4 more answers each (2 tasks of 2).
    assert engine.answered[:4] == [(text, q) for text in ("one two", "five six") for q in ("q0", "q1")]
    by_text = {one.text: (one.total, one.count) for one in state.candidates}
    assert by_text == {
        "one two": (5, 8), "three four": (1, 4), "five six": (4, 6), "nine ten": (0, 4), "seven eight": (4, 4),
    }  # fmt: skip
    # Cosine of (1, 1, 0) and (1, 1, 1): 2 / sqrt(6) = 0.816, so that "one two three" is at 0.184 from "one two".
    assert engine.counts["texts/too_near"] == 1
    assert engine.counts["texts/empty"] == 1
    assert method.text(state) == "seven eight"
    assert engine.answered[4:] == [(text, q) for text in ("nine ten", "seven eight") for q in ("q0", "q1")]


def test_the_proposer_gets_the_summary_of_all_of_the_pool() -> None:
    engine = Spoken(reply=lambda question, number: "Short ones work." if "were tried" in question else "New.")
    method = get("polca")
    method.step(State("one two", MEMORY), tasks("q"), engine)
    (summary,) = (one for one in engine.asked if "were tried" in one)
    assert all(one.text in summary for one in MEMORY)
    assert "0 of 2 right" in summary
    assert all("Short ones work." in one for one in engine.asked if one != summary)


def test_a_lucky_text_is_tried_again_until_its_mean_falls() -> None:
    engine = Spoken(lambda text, question, sample: ("a", 0.5 if text == "good" else 0.0))
    method = get("polca", best=1, by="examples")
    state = State("good", (Candidate("good", 4, 8), Candidate("lucky", 1, 1)))
    for _ in range(2):
        state = method.step(state, tasks("q0"), engine)
    assert method.text(state) == "good"
    assert {one.text: one.count for one in state.candidates}["lucky"] == 3
