"""Agents that call tools in the formats of today's families: three turns, in the tokens that were sampled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from speaking import run_agents

sys.path.append(str(Path(__file__).parents[1]))

from family_templates import KNOWN, Family, called, sampled, tokenizer_of_family

from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools import with_tools
from jaxrl_llm.rollouts.agents import agent


def find(text: str, count: int) -> str:
    """Find.

    Args:
        text: What.
        count: How many.
    """
    return f"found {text!r} {count + 40} times"


each_family = pytest.mark.parametrize("family", KNOWN, ids=[one.name for one in KNOWN])


@each_family
def test_tokens_of_three_turns_are_those_that_were_sampled(family: Family) -> None:
    tokenizer, make = tokenizer_of_family(family.name), with_tools([find])
    turns = ChatTurns(tokenizer, make({}).tools)
    replies = [
        sampled(turns, called(family, turns, {"count": 1, "text": "a\nb"}), calls=True),
        sampled(turns, called(family, turns, {"count": 2, "text": "3"}), calls=True),
        sampled(turns, "Done.", calls=False),
    ]
    found, engines = run_agents(
        agent(make, turns=3), tokenizer, lambda text, sample: replies[text.count("found ")], [{"prompt": "so?"}],
        limit=600, ends=turns.stops,
    )  # fmt: skip
    (group,) = found.groups
    assert not group.failed
    assert len(group.episodes) == 2, "no new rows"
    requests = {(one.sample, len(one.prompt) + one.begun.size): one for engine in engines for one in engine.requests}
    for episode in group.episodes:
        assert [episode.own.token[episode.turns == turn].tolist() for turn in range(3)] == replies
        assert episode.tokens[: len(episode.prompt)] == tuple(turns.begin([{"role": "user", "content": "so?"}]))
        said = tokenizer.decode(episode.tokens)
        assert said.count(" 41 times") == said.count(" 42 times") == 1
        for (sample, size), request in requests.items():  # what the policy sees is what was sampled and given before
            if sample == episode.sample:
                assert episode.tokens[:size] == (*request.prompt, *request.begun.token.tolist())


@each_family
def test_a_call_that_the_limit_of_tokens_cuts_is_counted_and_not_run(family: Family) -> None:
    tokenizer, make = tokenizer_of_family(family.name), with_tools([find])
    turns = ChatTurns(tokenizer, make({}).tools)
    whole = sampled(turns, called(family, turns, {"count": 1, "text": "a" * 20}), calls=True)
    limit = next(size for size in range(len(whole)) if tokenizer.decode(whole[:size]).endswith("a" * 5))
    found, _ = run_agents(
        agent(make, turns=2), tokenizer, lambda text, sample: whole, [{"prompt": "so?"}], limit=limit, ends=turns.stops
    )
    for episode in found.groups[0].episodes:
        assert episode.truncated
        assert episode.own.token.tolist() == whole[:limit]
        assert (episode.info["malformed_calls"], episode.info.get("calls", 0.0)) == (1.0, 0.0)
