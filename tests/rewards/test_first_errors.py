"""The reward of verifiers that look for the first wrong step, by the rule written out."""

from __future__ import annotations

import pytest

from jaxrl_llm.rewards import get_reward
from jaxrl_llm.rewards.judges.questions import first_error, question, steps_in
from jaxrl_llm.utils.errors import InputError


def test_all_cases_of_five_steps_by_hand() -> None:
    for expected in range(-1, 5):
        for said in range(-2, 6):
            if not -1 <= said < 5:
                reward = -1.0  # no such step
            elif expected == -1 or said == -1:
                reward = 1.0 if said == expected else -1.0
            else:
                reward = 1 - abs(said - expected) / 5
            found = first_error([f"Let me see.\n[[{said}]]"], [expected], [["a", "b", "c", "d", "e"]])
            assert found == [pytest.approx(reward)]
            assert first_error([f"[[{said}]]"], first_error=[expected], steps=[5]) == found
    assert first_error(["no idea"], [-1], [5]) == [-1.0]
    for wrong, steps in ((5, 5), (-2, 5), ("1", 5), (1, "five")):
        with pytest.raises(InputError, match="first_error"):
            first_error(["[[1]]"], [wrong], [steps])


def test_it_is_a_reward_by_name_and_the_question_numbers_the_steps() -> None:
    assert get_reward("first_error").name == "first_error"
    text = question("1 + 1?", "2", steps_in("Add.\n \nIt is 3."))
    assert "Step 0:\nAdd.\n\nStep 1:\nIt is 3." in text
