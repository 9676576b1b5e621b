"""What a method adds to a loss that it shares: its own groups, over an engine that decodes nothing, and their credit.

The rollout is the one that the method's name builds, with its default hyper-parameters where the card has them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import advantages, batch_of

from jaxrl_llm.algorithms import get

sys.path += [str(Path(__file__).resolve().parents[1] / "rollouts")]

import fake_engine
from fake_engine import Ran, Words, begin, length_of, tokens_with_ties

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig

Judge = Callable[[Episode], float]


class Says(Words):
    """What the policy writes, by the number of the sample; the ids of other texts are numbers and word lengths."""

    said: dict[int, str] = {}  # noqa: RUF012
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.said.get(int(ids[0]) % 1000 // 100, "") if len(ids) else ""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Plays one group of a method, whose rewards are a judge's; gives what the driver found."""

    def run(name: str, judge: Judge, samples: int, row: dict[str, Any], said: Any = None, **options: Any) -> Ran:
        async def score(task: Any, episodes: Sequence[Episode]) -> list[Episode]:
            return [one.scored(judge(one), {"right": judge(one)}) for one in episodes]

        monkeypatch.setattr(fake_engine, "score", score)
        if said is not None:
            monkeypatch.setattr(fake_engine, "Words", Says)
            monkeypatch.setattr(Says, "said", said)
        rollout = get(name, **options).rollout
        assert rollout is not None
        ran = Ran(begin([5], samples), Rule(), rollout, row=row)
        assert not ran.found.groups[0].failed
        return ran

    return run


def credit(name: str, ran: Ran, **options: Any) -> np.ndarray:
    """The advantages of the group's rows, of the rewards and groups that the rollout gives."""
    made: Any = to_batch(ran.found.groups, SamplingConfig(), 0)
    episodes = ran.found.groups[0].episodes
    rows = len(episodes)
    batch = batch_of(
        np.ones((rows, 1)), [one.reward for one in episodes], -np.ones((rows, 1)), made.group,
        info={key: np.asarray(value) for key, value in (made.info or {}).items() if np.ndim(value) == 1},
    )  # fmt: skip
    return advantages(get(name, **options), batch)[:, 0]


def has(*words: int) -> Judge:
    """1 where the prompt has one of these words."""
    return lambda one: float(bool(set(words) & set(one.prompt)))


def test_ghpo_shows_more_of_the_solution_until_a_sample_is_right(play: Any) -> None:
    """A quarter, a half, three quarters of 24 characters, and no further stage once one of G is right."""
    row = {"solution": "101 202 303 404 505 606 "}
    ran = play("ghpo", lambda one: float(404 not in one.prompt and 303 in one.prompt and one.sample % 4 == 1), 4, row)
    shown = [tuple(w for w in (101, 202, 303, 404, 505, 606) if w in request.prompt) for request in ran.requests]
    assert shown == [()] * 4 + [(101,)] * 4 + [(101, 202, 303)] * 4
    found = ran.found.groups[0].episodes
    assert [one.trained_prompt for one in found] == [None] * 4, "the ratio is under the prompt that was used"
    assert [one.reward for one in found] == [0, 1, 0, 0]
    np.testing.assert_allclose(credit("ghpo", ran), np.array([-0.25, 0.75, -0.25, -0.25]) / (0.5 + 1e-4), rtol=1e-5)
    ran = play("ghpo", has(505), 4, row)
    assert {one.reward for one in ran.found.groups[0].episodes} == {0.0}, "the last stage shows 101 to 404"
    assert not credit("ghpo", ran).any()


def test_scaf_grpo_replaces_one_failure_by_the_right_answer_of_the_weakest_hint(play: Any) -> None:
    """Of the levels 71; 71, 72; 81 the second is the first that helps: A = 2.474867 and -0.353552 seven times."""
    row = {"hints": [["71", "72"], ["81"]]}
    ran = play("scaf_grpo", has(72, 81), 8, row, hints_from=0)
    found = ran.found.groups[0].episodes
    assert [one.reward for one in found] == [1.0] + [0.0] * 7
    assert {71, 72} <= set(found[0].prompt)
    assert 81 not in found[0].prompt
    assert [one.sample for one in found[1:]] == [1, 2, 3, 4, 5, 6, 7], "the first failed response is replaced"
    assert len(ran.requests) == 8 + 3, "one sample for each level"
    A = credit("scaf_grpo", ran, hints_from=0)
    np.testing.assert_allclose(A, [2.474867] + [-0.353552] * 7, atol=1e-5)


def test_nurl_samples_a_failed_group_again_but_for_one_without_the_hint(play: Any) -> None:
    """Seven right and the plain one wrong: 0.377963 seven times and -2.645743; before its stage it is GRPO."""
    row, options = {"hint": "7777"}, {"source": "column", "hints_from": 0}
    ran = play("nurl", has(7777), 8, row, **options)
    found = ran.found.groups[0].episodes
    assert len(ran.requests) == 8 + 8
    assert sorted(7777 in one.prompt for one in found) == [False] + [True] * 7
    A = credit("nurl", ran, **options)
    np.testing.assert_allclose(sorted(A), [-2.645743] + [0.377963] * 7, atol=1e-5)
    one_right = play("nurl", lambda one: float(7777 in one.prompt and one.sample == 9), 8, row, **options)
    A = credit("nurl", one_right, **options)
    np.testing.assert_allclose(sorted(A), [-0.377963] * 7 + [2.645743], atol=1e-5)
    assert len(play("nurl", lambda one: float(one.sample == 0), 8, row, **options).requests) == 8, "one is right"
    before = play("nurl", has(7777), 8, row, source="column", hints_from=1)
    assert len(before.requests) == 8


def test_sage_trains_on_the_first_level_of_its_hints_that_helps(play: Any) -> None:
    """The policy writes three levels in one answer; the second helps one of four."""
    row, said = {"solution": "the solution"}, {4: '["2111", "2222", "2333"]'}
    ran = play("sage_self_hint", lambda one: float(2222 in one.prompt and one.sample == 13), 4, row, said)
    found = ran.found.groups[0].episodes
    assert all(2222 in one.prompt for one in found)
    assert [one.reward for one in found].count(1.0) == 1
    asked = [tuple(w for w in (2111, 2222, 2333) if w in request.prompt) for request in ran.requests]
    assert asked == [()] * 5 + [(2111,)] * 4 + [(2222,)] * 4, "four samples, the hints, and no third level"
    A = credit("sage_self_hint", ran)
    np.testing.assert_allclose(sorted(A), [-1 / np.sqrt(3)] * 3 + [np.sqrt(3)], rtol=1e-4)  # population deviation
    early = play("sage_self_hint", lambda one: float(one.sample == 0), 4, row, said)
    assert len(early.requests) == 4, "level 0 is without a hint"


def test_masa_rewards_predictions_of_rate_length_and_notions_in_a_group_of_their_own(play: Any) -> None:
    """r = ((least < length < longest) + 0.01^|d - rate| + share of notions of right answers)/3, d in eighths."""
    samples, right = 4, [1.0, 0.0, 0.0, 1.0]
    rights, eighths = [i for i in range(samples) if right[i]], {4: 4, 5: 1, 6: 7, 7: 0}
    said = {i: "by symmetry" if right[i] else "by primes" for i in range(samples)}
    lengths = [min(length_of(5, i), fake_engine.LIMIT) for i in rights]
    guess = {4: min(lengths), 5: (min(lengths) + max(lengths)) // 2, 6: max(lengths), 7: max(lengths) + 1}
    said |= {i: f"Length: {guess[i]}\nRight: {eighths[i]}\nNotions: symmetry, primes" for i in eighths}
    ran = play("masa", lambda one: right[one.sample], samples, {"prompt": "a problem"}, said, predictions=4)
    found = ran.found.groups[0].episodes
    assert [one.reward for one in found[:samples]] == right, "solutions keep the task's reward"
    expected = []
    for i, d in eighths.items():
        inside = float(min(lengths) < guess[i] < max(lengths))
        expected.append((inside + 0.01 ** abs(d / 8 - 0.5) + 0.5) / 3)
    np.testing.assert_allclose([one.reward for one in found[samples:]], expected, rtol=1e-5)
    A = credit("masa", ran, predictions=4)
    assert abs(A[:samples].sum()) < 1e-5, "each group has its own mean"
    assert np.argmax(A[samples:]) == int(np.argmax(expected))


@pytest.mark.parametrize(("right", "verdict"), [(1.0, "yes"), (0.0, "no")])
def test_spark_asks_of_its_own_answers_what_it_knows_to_be_right(play: Any, right: float, verdict: str) -> None:
    """All right: "is this answer correct?", yes. All wrong: no, and one more question that shows a wrong attempt."""
    said = {0: r"so \boxed{17}", 1: r"so \boxed{18}", 2: rf"\boxed{{{verdict}}}", 3: r"\boxed{maybe}"}
    said |= {4: r"\boxed{17}", 5: r"\boxed{19}"}
    ran = play("spark_co_evolving", lambda one: right, 2, {"prompt": "p"}, said, share=1.0)
    found = ran.found.groups[0].episodes
    assert [one.part for one in found] == [0, 0, 1, 1] + ([] if right else [2, 2])
    assert [one.reward for one in found[2:4]] == [1.0, 0.0], "by the label alone"
    assert [one.reward for one in found[4:]] == ([] if right else [right] * 2), "a new attempt has the problem's reward"
    assert len({one.prompt for one in found}) == (2 if right else 3)
    A = credit("spark_co_evolving", ran, share=1.0)
    np.testing.assert_allclose(A[2:4], [np.sqrt(0.5), -np.sqrt(0.5)], atol=1e-4)
    assert not np.any(np.delete(A, [2, 3])), "groups with equal rewards have no signal, whatever the others have"


def test_prefixrl_compares_samples_after_the_same_prefix_and_trains_on_none_of_it(play: Any) -> None:
    """Contexts: no prefix, and `prefixes` of 0.4 to 0.8 of a right trace of ten tokens."""
    trace = list(range(50, 60))
    row = {"trace": " ".join(map(str, trace))}

    def judge(one: Episode) -> float:
        return float(one.info.get("prefix", 0) > 0 and one.sample % 3 == 0)

    ran = play("prefixrl", judge, 3, row, prefixes=2)
    found = ran.found.groups[0].episodes
    made: Any = to_batch(ran.found.groups, SamplingConfig(), 0)
    assert [one.part for one in found] == [0] * 3 + [1] * 3 + [2] * 3
    for number, one in enumerate(found):
        h = int(one.info["prefix"])
        assert (h == 0) == (one.part == 0)
        assert h == 0 or 4 <= h <= 8
        assert one.own.token[:h].tolist() == trace[:h]
        assert one.actions.tolist() == [False] * h + [True] * (one.size - h)
        assert made.action_mask[number].sum() == one.size - h
    A = credit("prefixrl", ran, prefixes=2).reshape(3, 3)
    rewards = np.asarray([one.reward for one in found]).reshape(3, 3)
    expected = [(r - r.mean()) / (r.std(ddof=1) + 1e-6) if np.ptp(r) else 0 * r for r in rewards]
    np.testing.assert_allclose(np.sign(A), np.sign(expected))
    np.testing.assert_allclose(A.sum(axis=1), 0, atol=1e-5)


# Of the card: the second stage of N = 8 samples with N_max = 64, by the number of right ones.
EXTRA = {"equal": (27, 11, 3, 1, 0), "hard": (56, 24, 8, 3, 0)}


@pytest.mark.parametrize(("rule", "right"), list(itertools.product(EXTRA, range(5))))
def test_dars_samples_more_of_a_prompt_the_fewer_are_right(play: Any, rule: str, right: int) -> None:
    ran = play("dars", lambda one: float(one.sample < right), 8, {}, rule=rule, most_samples=64)
    assert len(ran.found.groups[0].episodes) == 8 + EXTRA[rule][right]
    rewards = np.asarray([one.reward for one in ran.found.groups[0].episodes])
    expected = rewards - rewards.mean() if right else 0 * rewards
    np.testing.assert_allclose(credit("dars", ran, rule=rule), expected, atol=1e-6)


@pytest.mark.parametrize("alike", [False, True])
def test_latr_opens_branches_at_near_ties_alone_and_drops_those_that_go_on_alike(
    play: Any, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's 0.45 and 0.35 are near ties, as 0.4 and 0.3; at 4 the second is too rare, at 9 it is too far below."""
    ties = {2: (0.45, 0.35), 6: (0.4, 0.3)} | ({} if alike else {4: (0.3, 0.24), 9: (0.47, 0.31)})
    monkeypatch.setattr(fake_engine, "length_of", lambda prompt, sample: 10**6)
    monkeypatch.setattr(fake_engine, "tokens_of", tokens_with_ties(ties, alike))
    found = play("latr", lambda one: 0.0, 6, {}, windows="4", until=12).found.groups[0].episodes
    assert len(found) == 6, "the missing ones are samples of their own"
    tokens = [one.own.token.tolist() for one in found]
    parted = set()
    for a, b in itertools.combinations(tokens, 2):
        parted.add(next(t for t in range(len(a)) if a[t] != b[t]))
    nodes: list[Any] = [one.info["node"] for one in found]
    shared = {t for a, b in itertools.combinations(nodes, 2) for t in range(12) if a[t] == b[t]}
    if alike:
        assert shared <= {0, 1}, "an edit distance of 1 in 4 tokens is below 0.4: no branch is left"
    else:
        assert parted <= {0, 2, 6}
        assert parted >= {2, 6}
        assert shared == {0, 1, 2, 3, 4, 5}
        begun = {int(one.own.token[2]) for one in found if one.info["node"][:2] == found[0].info["node"][:2]}
        assert begun == {5002, 9002}, "one goes on with the first token, the other with the second, whatever is drawn"
