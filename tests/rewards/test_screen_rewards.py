"""Rewards of actions on screens and of boxes, against worked examples, loops over all pairs, and limits."""

from __future__ import annotations

import doctest
import json
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rewards import boxes, close_rewards, get_rewards, score, screens
from jaxrl_llm.rewards.verifiers import answer_tags
from jaxrl_llm.utils.errors import InputError


def said(kind: Any, point: Any = (0, 0), text: Any = "") -> str:
    return f"<think>so</think><answer>{json.dumps([{'action': kind, 'point': point, 'input_text': text}])}</answer>"


def boxed(*found: tuple[Any, Any]) -> str:
    """As the paper writes them, a Python literal."""
    return f"<think></think><answer>{[{'Position': list(box), 'Confidence': c} for box, c in found]}</answer>"


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(screens) == (0, 6)
    assert doctest.testmod(boxes) == (0, 3)


@pytest.mark.parametrize(
    ("answer", "wanted", "right"),
    [
        (said("click", [100, 99]), {"action": "click", "point": [0, 0]}, False),  # 19801 is more than 140^2
        (said("click", [98, 99]), {"action": "click", "point": [0, 0]}, True),
        (said("CLICK ", [98, 99]), {"action": "click", "point": [0, 0]}, True),
        (said("click", [84, 112]), {"action": "click", "point": [0, 0]}, False),  # 140 itself
        (said("click", [5, 5]), {"action": "click", "box": [5, 0, 9, 9]}, False),  # on the border
        (said("click", [6, 5]), {"action": "click", "box": [5, 0, 9, 9]}, True),
        (said("click", "here"), {"action": "click", "point": [0, 0]}, False),
        (said("back"), {"action": "click", "point": [0, 0]}, False),
        (said("back"), {"action": "back"}, True),
        (said("open_app", text="Maps"), {"action": "open_app", "input_text": "Mail"}, True),  # by its kind alone
        (said("scroll", text="down"), {"action": "scroll", "input_text": "DOWN"}, True),
        (said("scroll", text="up"), {"action": "scroll", "input_text": "down"}, False),
        (said("type", text="a b"), {"action": "type", "input_text": "b c d"}, False),  # 2/5
        (said("type", text="a b c"), {"action": "type", "input_text": "b c d e"}, True),  # 4/7
        (said("select", text="shoe"), '{"action": "select", "input_text": "shoes"}', True),
        ("<answer>{'action': 'back'}</answer>", {"action": "back"}, True),
        ("back", {"action": "back"}, False),
        ("<answer>[1, 2]</answer>", {"action": "back"}, False),
    ],
)
def test_gui_action(answer: str, wanted: Any, right: bool) -> None:
    assert screens.gui_action([answer], action=[wanted]) == [float(right)]


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (said("click", [1, 2]), True),
        (f"\n{said('back')}\n", True),
        (said("click", [1, 2]).replace("<think>so</think>", ""), False),
        (f"{said('back')} done", False),
        (said("click", [1]), False),
        (said("click", [1, True]), False),
        (said(3), False),
        (said("back", text=None), False),
        (said("type"), False),
        (said("type", text="a"), True),
        (said("open_app", text=" "), False),
        (said("scroll", text="Left"), True),
        (said("scroll", text="away"), False),
        ("<think></think><answer>[]</answer>", False),
        ("<think></think><answer>[" + "[" * 9999 + "</answer>", False),
    ],
)
def test_gui_format(answer: str, whole: bool) -> None:
    assert screens.gui_format([answer]) == [float(whole)]


def test_the_parts_of_ui_r1_add_up_to_3() -> None:
    """A point on the border counts; actions that are no clicks have no place."""
    wanted = [{"action": "click", "box": [5, 0, 9, 9]}, {"action": "back"}, {"action": "click", "point": [5, 5]}]
    answers = [said("click", [5, 9]), said("back", None), said("back", [5, 5])]
    parts = [answer_tags(answers), screens.gui_kind(answers, wanted), screens.gui_click(answers, wanted)]
    assert [sum(one) for one in zip(*parts, strict=True)] == [3.0, 3.0, 2.0]


def test_parameters_are_graded() -> None:
    wanted = [
        {"action": kind, "input_text": text} for kind, text in [("type", "a b c"), ("scroll", "up"), ("back", "")]
    ]
    answers = [said("type", text="A b x"), said("scroll", text="UP "), said("back", text="home")]
    np.testing.assert_allclose(screens.gui_parameter(answers, wanted), [2 / 3, 1.0, 1.0])
    assert screens.gui_parameter(answers[::-1], wanted)[0] == 0.0, "of another kind"
    click = {"action": "click", "box": [0, 0, 4, 4]}
    assert screens.gui_parameter([said("click", [4, 4]), said("click", [5, 4])], [click] * 2) == [1.0, 0.0]


def test_wrong_columns_are_named() -> None:
    for action in (3, "back", {"kind": "back"}, None):
        with pytest.raises(InputError, match=r"the column 'action' has .*must have an object with a text named action"):
            screens.gui_kind(["x"], [action])
    with pytest.raises(InputError, match="without a point"):
        screens.gui_action(["x"], [{"action": "click", "box": [1, 2, 3]}])
    for wrong in (3, [[1, 2, 3]], "box"):
        with pytest.raises(InputError, match=r"the column 'boxes' has .*must have a list of boxes"):
            boxes.box_overlap(["x"], [wrong])


def test_boxes_of_the_worked_example() -> None:
    answer, wanted = boxed(([1, 1, 10, 10], 0.9), ([50, 50, 60, 60], 0.3)), [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert boxes.box_overlap([answer, answer], boxes=[wanted, json.dumps(wanted)]) == [0.405, 0.405]
    np.testing.assert_allclose(boxes.box_confidence([answer], boxes=[wanted]), [0.8])
    assert boxes.box_format([answer]) == [1.0]


def test_answers_that_are_no_boxes() -> None:
    wanted = [[0, 0, 1, 1]]
    broken = ["nothing", "<answer>[{'Position': [0, 0, 1, 1]}]</answer>", boxed(([0, 0, 1, 1], 2)), boxed(([0, 0], 1))]
    assert boxes.box_overlap(broken, [wanted] * 4) == boxes.box_confidence(broken, [wanted] * 4) == [0.0] * 4
    assert boxes.box_format(broken) == [0.0] * 4
    none = boxed()
    assert boxes.box_overlap([none] * 2, [wanted, []]) == boxes.box_confidence([none] * 2, [wanted, []]) == [0.0, 1.0]
    twice = boxed(([0, 0, 1, 1], 1.0), ([0, 0, 1, 1], 1.0))
    assert boxes.box_overlap([twice], [wanted]) == [1.0], "the same box twice is one"


corner = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda p: (*p, p[0] + 6.0, p[1] + 6.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(corner, max_size=3, unique=True), st.lists(corner, max_size=3, unique=True))
def test_matches_against_counted_pixels(found: list[Any], wanted: list[Any]) -> None:
    """The IoU by counting pixels; each match is the best that is left, and no matching has more than one for a box."""

    def pixels(box: Any) -> set[tuple[int, int]]:
        return {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))}

    guesses = [boxes.Guess(box, 0.9 - 0.1 * i) for i, box in enumerate(found)]
    left, expected = list(wanted), list[float]()
    for box in found:  # in descending confidence already
        shares = [len(pixels(box) & pixels(one)) / len(pixels(box) | pixels(one)) for one in left]
        best = max(shares, default=0.0)
        if best > 0.5:
            del left[shares.index(best)]
        expected.append(best if best > 0.5 else 0.0)
    for order in permutations(guesses):
        np.testing.assert_allclose(boxes.matched(order, wanted), expected)


def test_names_contain_each_other() -> None:
    answers = [f"<answer>{text}</answer>" for text in ("Red Fox", "a red_fox.", "fox", "cat", " ")]
    assert boxes.class_match(answers, ["red fox"] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert boxes.class_match(["red fox"], ["red fox"]) == [0.0], "without tags"


def test_they_are_rewards_by_name() -> None:
    names = ["gui_action*0.8", "gui_format*0.2", "gui_kind", "gui_click", "gui_parameter", "answer_tags"]
    rewards = get_rewards([*names, "box_overlap", "box_confidence", "box_format", "class_match"])
    try:
        columns = {"action": [{"action": "back"}], "boxes": [[]], "answer": ["back"]}
        found = score(rewards, [said("back")], columns)
    finally:
        close_rewards(rewards)
    assert {name: float(x[0]) for name, x in found.components.items()} == {
        "gui_action": 1.0, "gui_format": 1.0, "gui_kind": 1.0, "gui_click": 1.0, "gui_parameter": 1.0,
        "answer_tags": 1.0, "box_overlap": 0.0, "box_confidence": 0.0, "box_format": 0.0, "class_match": 1.0,
    }  # fmt: skip
    assert float(found.total[0]) == pytest.approx(6.0)
