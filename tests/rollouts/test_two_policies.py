"""Responses that a learner and a guide write in turn, over an engine that decodes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import LIMIT, Ran, begin, length_of, resumed

from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.guidance.prefixes import guide_begins, two_policies
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

ROW = {"prompt": "p", "guide": ["51 52 53 54", "61 62 63"]}
SAMPLES = 8


@pytest.fixture
def guide(tmp_path: Path) -> str:
    path = tmp_path / "guide.py"
    path.write_text("def complete(problem, begun):\n    return f'9 {len(begun.split())} 9'\n")
    return f"{path}:complete"


def episodes_of(rollout: Any, **options: Any) -> list[Any]:
    (one,) = Ran(begin([3], SAMPLES), Rule(), rollout, **{"row": ROW, **options}).found.groups
    assert not one.failed
    return one.episodes


def test_the_learner_continues_the_guide() -> None:
    episodes = episodes_of(two_policies(share=1.0))
    for episode in episodes:
        h = int(episode.info["prefix"])
        assert episode.info["switch"] == -1
        assert episode.own.token[:h].tolist() in ([51, 52, 53][:h], [61, 62][:h])
        assert h >= 1
        assert episode.actions.tolist() == [False] * h + [True] * (episode.size - h)
    assert len({episode.own.token[0] for episode in episodes}) == 2


def test_the_guide_completes_the_learner(guide: str) -> None:
    plain = episodes_of(group())
    episodes = episodes_of(two_policies("learner", guide=guide, share=1.0))
    for episode, full in zip(episodes, plain, strict=True):
        h, n = int(episode.info["switch"]), min(length_of(3, full.sample), LIMIT)
        assert 1 <= h <= n - 1 if n >= 2 else h == 0
        assert episode.own.token.tolist() == [*full.own.token[:h].tolist(), *[9, h, 9][: LIMIT - h]]
        assert episode.actions.all(), "a critic values the guide's tokens"
        assert episode.truncated == (h + 3 > LIMIT)
        assert episode.reward == episode.size, "the score is that of the whole response"
    assert len({int(episode.info["switch"]) for episode in episodes}) > 2
    whole = episodes_of(two_policies("learner", guide=guide, share=0.0))
    assert [e.own.token.tolist() for e in whole] == [[9, 0, 9]] * SAMPLES


class TwoPens:
    """Tools of which the learner writes six tokens 1, the reference policy seven tokens 2, as far as there is room."""

    first_step = 0

    def __init__(self) -> None:
        self.asked = list[tuple[int, int]]()

    def random(self, name: str) -> np.random.Generator:
        return np.random.default_rng(3)

    async def sample(self, context: Any, *, number: int, limit: int = 9, reference: bool = False) -> Episode:
        context = context if isinstance(context, Episode) else Episode(tuple(context), 0, number)
        assert (number, context.size) not in self.asked, "each is drawn with noise of its own"
        self.asked.append((number, context.size))
        segment = given([2] * min(7, limit) if reference else [1] * min(6, limit))._replace(sampled=True)
        return replace(context + segment, ended=limit >= 7, truncated=limit < 7)

    async def score(self, episodes: Any) -> list[Episode]:
        return [one.scored(float(one.size)) for one in episodes]


@pytest.mark.parametrize("begins", ["guide", "learner"])
def test_the_reference_policy_is_a_guide(begins: Any) -> None:
    rollout = two_policies(begins, guide="reference", share=0.7)
    assert rollout.demands.reference
    assert rollout.columns == ()
    tools: Any = TwoPens()
    task: Any = SimpleNamespace(prompt=(3,), prompt_id=0, samples=SAMPLES, limit=9)
    found = asyncio.run(rollout.program(tools, task))
    first, second, longest = (2, 1, 7) if begins == "guide" else (1, 2, 6)
    heads = []
    for episode in found:
        tokens = episode.own.token.tolist()
        h = tokens.index(second)
        heads.append(h)
        assert tokens == [first] * h + [second] * min(13 - longest, 9 - h)
        assert h < longest
        assert episode.info["prefix" if begins == "guide" else "switch"] == h
        assert episode.actions.tolist() == [begins == "learner"] * h + [True] * (len(tokens) - h)
        assert episode.reward == len(tokens)
        assert episode.truncated == (9 - h < 7)
    assert 0 in heads
    assert len(set(heads)) > 2


def test_the_learner_begins_in_the_first_steps(guide: str) -> None:
    rollout = two_policies("learner_first", guide=guide, share=1.0, steps=2)
    for step, begins in ((0, "learner"), (1, "learner"), (2, "guide")):
        (one,) = Ran(begin([3], 2, step), Rule(), rollout, row=ROW, step=step).found.groups
        assert all((e.info["switch"] >= 0) == (begins == "learner") for e in one.episodes)


def test_one_draw_says_who_begins_a_step(guide: str) -> None:
    """All groups of a step alike, about as often as told, and by the seed."""
    for often, seed, asked in ((0.0, 0, 40), (1.0, 0, 40), (0.6, 1, 400), (0.6, 2, 400)):
        drawn = [guide_begins(often, seed, step) for step in range(asked)]
        assert abs(np.mean(drawn) - often) < 4 * np.sqrt(often * (1 - often) / asked) + 1e-9
    assert [guide_begins(0.6, 1, step) for step in range(40)] != [guide_begins(0.6, 2, step) for step in range(40)]
    rollout = two_policies("either", guide=guide, share=1.0, often=0.5, seed=5)
    seen = set()
    for step in range(6):
        found = Ran(begin([3, 4, 5], 2, step), Rule(), rollout, row=ROW, step=step).found.groups
        begun = {bool(e.info["switch"] < 0) for one in found for e in one.episodes}
        assert begun == {guide_begins(0.5, 5, step)}
        seen |= begun
    assert seen == {True, False}


def test_a_resumed_program_draws_the_same(guide: str) -> None:
    """Also where it is resumed in a step in which another policy would begin."""
    assert [guide_begins(0.5, 2, step) for step in (0, 1)] == [True, False]
    drawn = two_policies("either", guide=guide, often=0.5, seed=2)
    for rollout in (two_policies("learner_first", guide=guide, steps=1), drawn):
        flight, options = begin([2, 3], 4), {"row": ROW, "limit": 20}
        done = resumed(flight, rollout, **options)
        for one in Ran(flight, Rule(), rollout, **options).found.groups:
            tokens = [e.own.token.tolist() for e in one.episodes]
            assert [e.own.token.tolist() for e in done[one.task.prompt_id]] == tokens


def test_without_the_guide_it_is_a_group() -> None:
    plain = [e.own.token.tolist() for e in episodes_of(group())]
    for rollout, row in ((two_policies(share=0.0), ROW), (two_policies(), {"prompt": "p", "guide": ""})):
        assert [e.own.token.tolist() for e in episodes_of(rollout, row=row)] == plain


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match=r"begins is 'learner', whose responses a guide completes: give guide, FILE"):
        two_policies("learner")
    with pytest.raises(InputError, match="the guide"):
        two_policies("learner", guide="no_such_file.py:complete")
