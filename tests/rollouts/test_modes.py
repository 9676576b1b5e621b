"""Modes of episodes with tools: tags that are given or written, and what form each mode has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.algorithms.guidance.a2fm_apo import tagged
from jaxrl_llm.environments.tools.base import with_tools
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
FREE = {6: f"<agentic>{CALL}", 7: "<instant>42", 8: "42", 9: "<agentic>42", 10: f"<reasoning>{CALL}"}


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: which.
    """
    return 2 * number


def says(text: str, sample: int) -> str:
    """A tool is called after <agentic>, and by sample 3, which reasons; then, and in other modes, the answer is 42."""
    begun = text.rpartition("assistant\n")[2]
    if "tool_response" in text:
        return f"42{END}"
    if sample >= 6:
        return f"{FREE[sample]}{END}"
    return f"{CALL if begun == '<agentic>' or sample == 3 else '42'}{END}"


def episodes_of(samples: int = 11, **options: Any) -> tuple[list[Any], Any, Any]:
    rollout = tagged("<instant>,<reasoning>", **options).wrap(agent(with_tools([double]), turns=3))  # type: ignore[misc]
    assert rollout.demands.min_samples == 7
    found, _ = run_agents(rollout, tokenizer_of("hermes"), says, [{"prompt": "Twice 21?"}], samples)
    return list(found.groups[0].episodes), to_batch(found.groups, SamplingConfig(), 0), found


def test_each_mode_has_its_form_and_the_agentic_one_its_tool() -> None:
    tokenizer = tokenizer_of("hermes")
    episodes, batch, _ = episodes_of(success=1e9)
    assert [episode.info["mode"] for episode in episodes] == [0, 0, 1, 1, 2, 2, 2, 0, -1, 2, 1]
    assert [episode.info["calls"] for episode in episodes] == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]
    tags = ["<instant>"] * 2 + ["<reasoning>"] * 2 + ["<agentic>"] * 2 + [""] * 5
    proper = [1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0]
    for row, (episode, tag, is_proper) in enumerate(zip(episodes, tags, proper, strict=True)):
        begun = tokenizer.encode(tag, add_special_tokens=False) if tag else []
        assert episode.info["prefix"] == len(begun)
        assert episode.own.token[: len(begun)].tolist() == begun
        assert not episode.actions[: len(begun)].any(), "what is given is masked"
        assert episode.actions[len(begun)]
        action = np.asarray(batch.action_mask)[row]
        said = tokenizer.decode(np.asarray(batch.tokens)[row][~action & np.asarray(batch.token_mask)[row]])
        assert ("<tool_response>\n42\n</tool_response>" in said) == (episode.info["calls"] == 1)
        assert np.asarray(batch.turn)[row].max() == episode.info["calls"]
        # Reward functions, here the number of sampled tokens, read the tag.
        assert episode.reward == is_proper * (len(begun) + episode.actions.sum())
        assert episode.info["adaptive"] == 1.0


def test_a_free_choice_of_tools_for_an_easy_question_is_worth_less() -> None:
    """All forced samples are right: 1 - 1^alpha of the reward is left of a dearer mode than needed."""
    episodes, _, _ = episodes_of(success=0.0)
    assert [episode.info["adaptive"] for episode in episodes] == [1.0] * 6 + [0.0, 1.0, 1.0, 0.0, 0.0]
    assert episodes[6].reward == 0.0
    assert episodes[4].reward > 0, "forced"
    assert episodes[7].reward > 0, "the cheapest mode"


def test_what_cannot_be_in_modes_is_refused() -> None:
    with pytest.raises(InputError, match="agentic is '<a>', but must be a tag that is not among '<a>,<b>'"):
        tagged("<a>,<b>", agentic="<a>")
    with pytest.raises(InputError, match="the agentic mode is of agents, but the rollout group has none"):
        tagged().wrap(group())  # type: ignore[misc]
    rollout = tagged().wrap(agent(with_tools([double]), turns=3, turn_tokens=4))  # type: ignore[misc]
    found, _ = run_agents(rollout, tokenizer_of("hermes"), says, [{"prompt": "Twice 21?"}], 7)
    assert found.groups[0].failed, "a tag of more tokens than a reply has"
