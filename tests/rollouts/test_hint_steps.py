"""What trying groups again costs: decode steps, by the engine's counters, with long-tailed lengths."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.models import load_policy
from jaxrl_llm.rollouts.runtime import source

TESTS = Path(__file__).parents[1]
LONG_TAIL: dict[str, Any] = {"groups": 20, "samples": 4, "median": 12, "longest": 16, "seed": 0}
SHORTER: dict[str, Any] = {**LONG_TAIL, "longest": 6}


@pytest.mark.heavy
@pytest.mark.parametrize("slots", [0, 20])
def test_a_fifth_of_the_groups_is_tried_again_in_the_tail(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New samples take the slots that are free while long completions of other groups go on."""
    monkeypatch.syspath_prepend(str(TESTS.parent / "experiments" / "benchmarks"))
    steps = importlib.import_module("hint_steps").decode_steps
    policy, params, _ = load_policy(TESTS / "vectors" / "llama_tied")
    policy = replace(policy, config=replace(policy.config, max_positions=1024, eos_token_ids=()))
    none, some = (steps(policy, params, share, slots=slots, **LONG_TAIL) for share in (0.0, 0.2))
    assert none <= some <= 1.3 * none
    if slots:  # the driver looks whenever a reward counts, which is often enough
        return
    # If the driver looked as seldom as for a program that asks for nothing later, samples would wait for it.
    often = steps(policy, params, 0.2, slots=slots, **SHORTER)
    monkeypatch.setattr(source, "LOOK", source.CHUNK)
    assert steps(policy, params, 0.2, slots=slots, **SHORTER) > 1.1 * often
