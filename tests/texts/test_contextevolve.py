"""ContextEvolve: the memory of solutions, examples drawn by priority, and contexts that are tried."""

from __future__ import annotations

import numpy as np
from spoken import Spoken, tasks

from jaxrl_llm.texts import Experience, get, worked_example
from jaxrl_llm.texts.methods.contextevolve import exemplars, remembered
from jaxrl_llm.texts.proposer import split_text


def test_exemplars_are_drawn_by_priority() -> None:
    """contextevolve draws with weight / (1 + uses): 1 : 1/4 : 0 here, whatever the order."""
    memory = [Experience("a", 1.0, 0), Experience("b", 1.0, 3), Experience("c", 0.0, 0)]
    random, first = np.random.default_rng(0), list[str]()
    for _ in range(500):
        (text,), used = exemplars(random, memory, 1)
        first.append(text)
        assert sum(one.uses for one in used) == 4
    assert abs(first.count("a") - 400) < 40
    assert first.count("c") == 0
    assert sorted(exemplars(random, memory, 3)[0]) == ["a", "b"]
    assert exemplars(random, memory[2:], 3) == ([], (memory[2],))


def test_of_each_question_the_best_and_shortest_solution_is_remembered() -> None:
    old = [Experience(worked_example("q0", "long answer"), 1.0, 2), Experience(worked_example("q1", "a"), 0.5)]
    new = [Experience(worked_example("q0", "short"), 1.0), Experience(worked_example("q1", "worse"), 0.25),
           Experience(worked_example("q2", "b"), 0.75)]  # fmt: skip
    found = remembered(old, new, 2)
    assert found == (Experience(worked_example("q0", "short"), 1.0, 2), new[2])


def test_a_step_tries_children_with_examples_and_a_direction() -> None:
    def answer(text: str, question: str, sample: int) -> tuple[str, float]:
        return f"{question} is right", float(sample == 1) if "User:" not in text else 1.0

    def reply(question: str, number: int) -> str:
        return "Show the sum." if "direction" in question else "An abstract."

    engine, method = Spoken(answer, reply), get("contextevolve", children=2, shots=1)
    state = method.step(method.init("Go."), tasks("q0", "q1"), engine)
    first, *children = state.candidates
    assert (first.text, first.mean) == ("Go.", 0.5)
    assert [split_text(one.text)[0] for one in children] == ["Go.", "Go.\nShow the sum."]
    assert all(one.mean == 1.0 and len(split_text(one.text)[1]) == 1 for one in children)
    assert {one.text for one in state.experiences} == {worked_example(q, f"{q} is right") for q in ("q0", "q1")}
    assert sum(one.uses for one in state.experiences) == 2
    assert "- Go. (0.50)" in engine.asked[0]
    assert method.text(state) == children[0].text
    engine, method = Spoken(answer, reply), get("contextevolve", abstract_above=4)
    state = method.step(method.init("Go."), tasks("q0"), engine)
    assert state.experiences[0].text == worked_example("q0", "An abstract.")
    kept = get("contextevolve", pool=1).step(state, tasks("q0"), engine)
    assert len(kept.candidates) == 1
