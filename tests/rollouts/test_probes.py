"""Answers and blanks around the episodes of agents: exact tokens, in batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.algorithms.turn_credit.igpo_information_gain import with_answers
from jaxrl_llm.algorithms.turn_credit.infopo import with_blanks
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.runtime.answer_likelihood import content_of
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

ROWS = [{"prompt": "Go.", "answer": "north"}, {"prompt": "On.", "answer": ""}, {"prompt": "On.", "answer": ["a", "b"]}]
SAID = ("0 is a longer observation than others", "70")


class Saying:
    """It says two things and is over."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.turn = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation()

    def step(self, reply: Reply) -> Observation:
        self.turn += 1
        return Observation([{"role": "user", "content": SAID[min(self.turn, 2) - 1]}], done=self.turn == 3)


def batch_of(rollout: Any, name: str = "plain", rows: Any = ROWS) -> tuple[Any, Any]:
    tokenizer = tokenizer_of(name)
    assert rollout.wrap is not None
    found, _ = run_agents(
        rollout.wrap(agent(Saying, turns=3)), tokenizer, lambda text, sample: "fine" + TEMPLATES[name][1], rows
    )
    return to_batch(found.groups, SamplingConfig(), 0), tokenizer


def test_episodes_know_the_answer_of_their_prompt() -> None:
    batch, tokenizer = batch_of(with_answers("answer", "<a>"))
    rows = np.asarray(batch.info["answer_tokens"])
    assert len(rows) == 6, "two episodes of each prompt"
    opening, north, a = (tokenizer.encode(text, add_special_tokens=False) for text in ("<a>", "north", "a"))
    for row, own in zip(rows, [north, north, [], [], a, a], strict=True):
        assert row[row != -1].tolist() == ([-2 - token for token in opening] + own if own else [])


@pytest.mark.parametrize("name", ["plain", "headers", "alternating"])
def test_blanks_stand_in_for_the_content_of_observations(name: str) -> None:
    """A longer one ends with the last token of the placeholder again and again, a shorter one is a part of it."""
    batch, tokenizer = batch_of(with_blanks("None."), name)
    blanked = np.asarray(batch.info["blanked"])
    for tokens, instead, mask in zip(np.asarray(batch.tokens), blanked, np.asarray(batch.token_mask), strict=True):
        there = ~np.isnan(instead)
        assert tokenizer.decode(tokens[there]) == "".join(SAID), "what the template writes around it stays"
        text = tokenizer.decode(instead[there].astype(int))
        assert text == "None." + "." * (len(SAID[0]) - 5) + "No"
        assert not there[~mask].any()


def test_without_a_template_all_between_two_turns_is_content() -> None:
    assert content_of([5, 6, 7], []) == (0, 3)
    assert content_of([5, 6], [([5, 6], [6])]) == (0, 2), "nothing would be left"
    assert content_of([5, 8, 6], [([5], [6]), ([4], [6])]) == (1, 2)
    assert math.isnan(float(np.asarray(batch_of(with_blanks("."))[0].info["blanked"])[0, 0]))
    with pytest.raises(InputError, match="must be a text that is not empty"):
        with_blanks("")
