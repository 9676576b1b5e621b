"""Methods with a judge: what a judge of pairs makes of a group, by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, prepared

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))
import fake_engine
from fake_engine import Ran, begin
from test_judged import PAIRS, QUALITY, Speaker, biased, scripted

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.judged.brpo import against_member, brpo, unanimous
from jaxrl_llm.algorithms.judged.pairwise_rl import pairwise_rl
from jaxrl_llm.algorithms.judged.urpo import player_and_referee, rank_agreement, urpo
from jaxrl_llm.rewards.environment import JUDGE
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.judges.answerers import Answerer
from jaxrl_llm.rollouts.judges.judged import against_anchor, judged, pair_judge
from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.runtime.admission import Rule


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [one.scored(one.rewards[JUDGE], one.rewards) for one in episodes]

    monkeypatch.setattr(fake_engine, "Words", Speaker)
    monkeypatch.setattr(fake_engine, "score", score)


def rewards_of(rollout: Any, prompt: int = 3, **row: Any) -> list[float]:
    (one,) = Ran(begin([prompt], 4), Rule(), rollout, row=row).found.groups
    assert not one.failed
    return [episode.score for episode in one.episodes]


def test_brpo_wins_are_unanimous_in_both_orders() -> None:
    """A random member is the reference; others win where the bonus of a place changes nothing."""
    rollout, references = judged(against_member(pair_judge(scripted(lambda q: biased(q, 0.75)), PAIRS))), set()
    for prompt in range(8):
        found = rewards_of(rollout, prompt)
        (reference,) = [place for place, score in enumerate(found) if score == 0]
        references.add(reference)
        wins = [1.0 if quality - 0.75 > QUALITY[reference] else -1.0 for quality in QUALITY]
        wins[reference] = 0.0
        assert found == wins
    assert len(references) > 1
    assert [unanimous(votes, 2) for votes in ([1, 1], [1, 0.5], [0, None])] == [1, -1, -1]
    assert math.isnan(unanimous([1, None], 2))


def test_brpo_of_a_judge_takes_its_verdicts() -> None:
    """The card's example: win, win, loss against the third of four; three wins are an outlier's group."""
    method = get("brpo", judge="policy")
    batch = batch_of(np.ones((8, 1)), [1, 1, 0, -1, 1, 1, 0, 1], np.zeros((8, 1)), np.repeat([0, 1], 4))
    found = prepared(method, batch)
    np.testing.assert_array_equal(found.advantages[:4, 0], [1, 1, 0, -1])
    np.testing.assert_array_equal(found.loss_weights[:, 0], [1] * 4 + [0] * 4)
    unscored = prepared(brpo(judge="policy"), batch.replace(reward=jnp.asarray([1, jnp.nan, 0, -1] * 2)))
    np.testing.assert_array_equal(unscored.advantages[:, 0], [1, 0, 0, -1] * 2)


def test_pairwise_rl_worked_example() -> None:
    """s(y, anchor) = .8 and s(anchor, y) = .3 make w = .75: ten answers of each order."""

    async def answers(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> list[list[str]]:
        return [
            [f"[[{'A' if n < (3 if question.split('|')[1] == 'anchor' else 8) else 'B'}]]" for n in range(count)]
            for question in questions
        ]

    rollout = judged(against_anchor("best", pair_judge(Answerer(answers, "ten"), PAIRS, samples=10)))
    assert rewards_of(rollout, best="anchor") == pytest.approx([0.75] * 4)
    own = pairwise_rl("best", "policy", samples=10)
    assert own.rollout is not None
    assert own.rollout.columns == ("best",)
    assert own.objective is not None
    assert own.needs == get("ppo").needs


def test_urpo_ranks_and_referees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's example; rankings in both orders of a pair; a referee's scores in the places of the samples."""
    assert rank_agreement([9, 7, 3, 5], [4, 3, 2, 1]) == pytest.approx(0.666667, abs=1e-6)
    assert [rank_agreement(s, [1, 0]) for s in ([7, 5], [6, 6], [5, 7])] == [1, 0, -1]
    says = ["so [[7, 5]]", "[[5, 7]]", "[[6, 6]]", "no idea"]

    class Ranker(Speaker):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return says[int(ids[0]) % 1000 // 100]

    monkeypatch.setattr(fake_engine, "Words", Ranker)
    first = set()
    for prompt in range(8):
        found = rewards_of(player_and_referee(), prompt, chosen="good", rejected="bad")
        first.add(found[0])
        assert found == [found[0], -found[0], 0.0, -1.0]
    assert first == {1.0, -1.0}, "where the better one is says nothing"
    listed: dict[str, Any] = {"completions": ["a", "b", "c"], "labels": [1, 2, 3]}
    assert rewards_of(player_and_referee(), **listed) == [-1.0] * 4, "two scores for three responses"

    monkeypatch.setattr(fake_engine, "Words", Speaker)
    asked = list[str]()

    async def quality(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> list[list[str]]:
        """Scores of what is shown, in its order; the second answer lacks one."""
        asked.extend(questions)
        shown = [[line.split()[0] for line in text.splitlines() if " by " in line] for text in questions]
        return [
            [f"[[{', '.join(str(float(q) + 1 + number) for q in one[: 3 if number == 1 else 4])}]]"]
            for number, one in enumerate(shown)
        ]

    found = rewards_of(player_and_referee(3, by=Answerer(quality, "quality")))
    assert found == pytest.approx([quality + 1 + (0 + 2) / 2 for quality in QUALITY])
    assert len(set(asked)) > 1, "orders differ"
    nothing = rewards_of(player_and_referee(2, by=scripted(lambda text: "none")))
    assert all(map(math.isnan, nothing))
    assert all(map(math.isnan, rewards_of(player_and_referee(open_from=1)))), "not yet"
    assert urpo().objective.needs == get("grpo").objective.needs
