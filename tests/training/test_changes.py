"""What a resumed run says of settings that changed."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.resume_checks import check_changes, larger_gradient_steps, settings_to_compare

OLD = {"prompts_per_step": 4, "group_size": 4, "minibatches": 2}


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        (
            {"prompts_per_step": 8},
            "32 completions in place of 16, and a gradient step 16 in place of 8: --minibatches 4",
        ),
        ({"group_size": 5}, "a step has 20 completions in place of 16, and a gradient step 10 in place of 8"),
        ({"prompts_per_step": 8, "minibatches": 4}, ""),
        ({"prompts_per_step": 8, "minibatches": 8}, ""),
        ({"prompts_per_step": 2}, ""),
        ({"minibatches": 1}, ""),
        ({}, ""),
    ],
)
def test_gradient_steps_that_grew_with_the_batch(changed: dict[str, Any], note: str) -> None:
    found = larger_gradient_steps(OLD, OLD | changed)
    assert len(found) == bool(note)
    assert all(note in one for one in found)
    if "group_size" in changed:  # no number of steps has the old size
        assert "--minibatches" not in found[0]


def test_a_resumed_run_says_it() -> None:
    before, config = TrainConfig(**OLD), TrainConfig(**(OLD | {"prompts_per_step": 8}))
    notes = check_changes({"settings": settings_to_compare(before, ".")}, config, ".", {}, accept=True)
    assert notes[0] == "since the checkpoint, prompts_per_step was 4, and is now 8"
    assert notes[1].startswith("since the checkpoint, a step has 32 completions in place of 16")
    assert check_changes({"settings": {}}, config, ".", {}, accept=True) == []
