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
from batches import batch_of, prepared, random_batch
from method_step import arrays, assert_matches_loop, learn

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))
import fake_engine
from fake_engine import Ran, begin
from test_judged import PAIRS, QUALITY, SINGLE, Speaker, biased, scripted

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.judged.brpo import against_member, brpo, unanimous
from jaxrl_llm.algorithms.judged.cgpo_judges import TaskSetting, against_baseline, cgpo_judges, settings_of
from jaxrl_llm.algorithms.judged.pairwise_rl import pairwise_rl
from jaxrl_llm.algorithms.judged.spo_structured import GROUNDING, HISTORY, TASK, spo_structured
from jaxrl_llm.algorithms.judged.urpo import player_and_referee, rank_agreement, urpo
from jaxrl_llm.algorithms.rewards.fapo import fapo, with_first_errors
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.judges import judged as judges
from jaxrl_llm.rollouts.judges.answerers import Answerer
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.judges.judged import against_anchor, judged
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError


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


TABLE = """{
    "chat": {"optimiser": "crpg", "kl_max": 3.0, "weight": 0.5},
    "safe": {"optimiser": "codpo"}, "math": {"optimiser": "crraft", "kl_max": 0.5}
}"""


def test_cgpo_by_loop_and_worked_example() -> None:
    """The card's rows, then the sum over three tasks with an optimiser each, of four rows and two."""
    card = batch_of(np.ones((3, 1)), [1.2, 0.3, -0.5], np.zeros((3, 1)), reference_logp=np.zeros((3, 1)))
    card = card.with_info(
        task=jnp.zeros(3), feasible=jnp.asarray([1.0, 0, 1]), baseline_reward=jnp.full(3, 0.2)
    )  # fmt: skip
    found = learn(cgpo_judges(), card, np.zeros((3, 1)))
    weights = np.array([0.376768, -0.354290, -0.022478])
    np.testing.assert_allclose(found.gradient[:, 0], -weights / 3, atol=1e-6)
    assert found.metrics["constraints/met"] == pytest.approx(2 / 3)

    batch, logp = random_batch(5, (4, 4, 4, 4, 2))
    x, random = arrays(batch), np.random.default_rng(1)
    task = np.repeat([0, 1, 1, 2, 2], [4, 4, 4, 4, 2])
    feasible = np.array([1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0], float)
    reward, base = random.normal(size=18), np.repeat(random.normal(size=5), [4, 4, 4, 4, 2])
    batch = batch.replace(reward=jnp.asarray(reward, jnp.float32)).with_info(
        **{
            k: jnp.asarray(v, jnp.float32)
            for k, v in (("task", task), ("feasible", feasible), ("baseline_reward", base))
        }
    )
    calibrated, first = 1 / (1 + np.exp(base - reward)), ((logp - x.reference) * x.mask).sum(1)

    def loss(now: np.ndarray) -> float:
        s, size = (now * x.mask).sum(1), x.mask.sum(1)
        l = s - (x.reference * x.mask).sum(1)
        w = [calibrated[i] * feasible[i] * max(1 - first[i] / 3, 0) for i in range(4)]
        chat = -sum((w[i] - np.mean(w)) * s[i] for i in range(4)) / 4
        pairs = []
        for rows in (range(4, 8), range(8, 12)):
            best = max((i for i in rows if feasible[i]), key=lambda i: reward[i])
            bad = [i for i in rows if not feasible[i]] or [i for i in rows if i != best]
            pairs.append((best, min(bad, key=lambda i: reward[i])))
        safe = np.mean([np.logaddexp(0, -0.4 * (l[w] - l[v])) - 0.2 * s[w] / size[w] for w, v in pairs])
        near = [i for i in range(12, 16) if feasible[i] and first[i] <= 0.5]
        one = max(near, key=lambda i: reward[i])
        return float(0.5 * chat + safe - calibrated[one] * s[one])

    method = cgpo_judges(tasks=TABLE, beta=0.4, likelihood=0.2)
    assert_matches_loop(learn(method, batch, logp), loss, logp)


def test_cgpo_knows_tasks_judges_and_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        """A reward by the number of tokens, and a judge that does not accept the longest."""
        each = [float(one.size) for one in episodes]
        rewards = [{"long": n, "brief": float(n < max(each))} for n in each]
        return [one.scored(n, found) for one, n, found in zip(episodes, each, rewards, strict=True)]

    monkeypatch.setattr(fake_engine, "score", score)
    table = settings_of({"optimiser": "crpg", "kl_max": 5.0, "judges": "brief", "tasks": TABLE.replace(
        '"codpo"', '"codpo", "judges": [], "rewards": ["brief"], "samples": 2'
    )})  # fmt: skip
    assert table["chat"] == TaskSetting("crpg", 3.0, ("brief",), weight=0.5)
    rollout = against_baseline(table, "best", "task")
    assert rollout.columns == ("best", "task")
    assert rollout.rows(4) == 4

    def episodes(**row: Any) -> list[Episode]:
        (one,) = Ran(begin([3], 4), Rule(), rollout, row={"best": "a b c", **row}).found.groups
        return [] if one.failed else one.episodes

    found = episodes(task="chat")
    sizes = [one.size for one in found]
    assert [one.score for one in found] == sizes
    assert [one.info["feasible"] for one in found] == [float(size < max(sizes)) for size in sizes]
    assert {one.info["baseline_reward"] for one in found} == {3.0}
    safe = episodes(task="safe")
    assert len(safe) == 2
    assert {one.info["feasible"] for one in safe} == {1.0}, "no judges"
    assert {one.info["task"] for one in safe} == {1.0}
    assert [one.score for one in safe] == [one.rewards["brief"] for one in safe]
    assert episodes(task="other") == []
    for wrong, said in (
        ("{}", "form"), ("[1]", "JSON"), ('{"a": {"kl": 1}}', "kl"), ('{"a": {"optimiser": "ppo"}}', "optimiser"),
        ('{"a": {"kl_max": 0}}', "kl_max"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            cgpo_judges(tasks=wrong)


def test_spo_structured_scores_pairs_and_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights 3, 1 and 2: samples 1 and 2 meet one criterion each, 0 and 3 two; then the first and the last stage."""
    met = {0: {TASK, HISTORY}, 1: {TASK}, 2: {GROUNDING}, 3: {TASK, GROUNDING}}

    def says(question: str) -> str:
        _, said, criterion = question.split("|")
        return "[[yes]]" if criterion in met[int(said[-1])] else "[[no]]"

    monkeypatch.setattr(judges, "answerer", lambda name: scripted(says))
    monkeypatch.setattr(judges, "Grading", lambda: SINGLE)
    method = spo_structured(relevance=3.0, grounding=1.0, history=2.0, stage_steps=2, order="short,long")
    (one,) = Ran(begin([3], 4), Rule(), method.rollout).found.groups
    assert [episode.sample for episode in one.episodes] == [0, 2]
    assert [episode.score for episode in one.episodes] == pytest.approx([5 / 6, 1 / 6])
    assert method.prompts is not None
    curriculum = method.prompts([{"prompt": "a", "stage": stage} for stage in ("long", "short", "short", "long")], 0)
    assert set(curriculum.select(curriculum.init(), 8)[0].tolist()) == {1, 2}, "not the alphabet's order"
    assert method.objective.needs == get("dpo").objective.needs


def test_fapo_asks_a_judge_about_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are the qualities; 1 is wrong, 0 is flawed in its second step, and what is said of 3 names none."""
    says, asked = {"2.0 by 0": "[[0]]", "1.0 by 2": "[[-1]]", "2.0 by 3": "[[7]]"}, list[str]()

    async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [one.scored(QUALITY[one.sample]) for one in episodes]

    def verdict(text: str) -> str:
        return next(said for step, said in says.items() if step in text)

    monkeypatch.setattr(fake_engine, "score", score)
    rollout = with_first_errors(scripted(verdict, asked))
    (one,) = Ran(begin([3], 4), Rule(), rollout, row={"prompt": "p", "answer": "4"}).found.groups
    assert [episode.info["flawed"] for episode in one.episodes] == [1, 0, 0, 0]
    assert len(asked) == 3, "wrong answers are not judged"
    assert one.episodes[0].info["judge/unparsed"] == pytest.approx(1 / 3)
    own = fapo(judge="policy").rollout
    assert own is not None
    assert "sound" in own.provides
    assert fapo().rollout is None
