"""Methods of rewards for screens and images: from answers to advantages and losses, against loops."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, prepared, random_batch
from method_step import arrays, assert_matches_loop, learn
from test_turn_rows import rounds

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.agents.dart_gui import LONGEST, SHARE, dart_gui
from jaxrl_llm.algorithms.rewards.gui_r1 import gui_r1
from jaxrl_llm.algorithms.rewards.visual_rft import visual_rft
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Step
from jaxrl_llm.rewards import boxes, screens, verifiers

BATCH, LOGP = random_batch(3)
X = arrays(BATCH)
N = len(X.reward)


def batch_with(parts: dict[str, Any]) -> Any:
    """Rows with these components, of equal weights in the run."""
    columns = {name: jnp.asarray(x, jnp.float32) for name, x in parts.items()}
    return BATCH.replace(rewards=columns, reward=sum(columns.values(), jnp.zeros(N)))


def check(method: Algorithm, batch: Any, reward: np.ndarray) -> None:
    """The method is GRPO of this reward: its advantages by a loop over groups, its loss by one over tokens."""
    np.testing.assert_allclose(np.asarray(prepared(method, batch).reward), reward, rtol=1e-6)
    A = np.zeros(N)
    for g in np.unique(X.group):
        mine = X.group == g
        A[mine] = (reward[mine] - reward[mine].mean()) / (reward[mine].std(ddof=1) + 1e-6)
    np.testing.assert_allclose(advantages(method, batch)[:, 0], A * X.mask[:, 0], rtol=1e-4, atol=1e-5)

    def loop(logp: np.ndarray) -> float:
        rows = []
        for i in range(N):
            gains = []
            for t in np.flatnonzero(X.mask[i]):
                rho = float(np.exp(logp[i, t] - X.behaviour[i, t]))
                gains.append(min(rho * A[i], float(np.clip(rho, 0.8, 1.2)) * A[i]))
            rows.append(np.mean(gains))
        return -float(np.mean(rows))

    assert_matches_loop(learn(method, batch, LOGP), loop, LOGP)


def test_gui_r1_is_the_loop_over_answers() -> None:
    """Clicks at growing distances of the expected one, every third without a point, and words that differ more."""
    answers, wanted, expected = [], [], []
    for i in range(N):
        kind = ("click", "type")[i % 2]
        text = " ".join("abcdefg"[i % 5 : i % 5 + 3])
        answer = [{"action": kind, "point": [40 * i, 0], "input_text": text}]
        body = json.dumps(answer if i % 3 else answer[0] | {"point": None})
        answers.append(f"<think>{i}</think><answer>{body}</answer>")
        wanted.append({"action": kind, "point": [0, 0], "input_text": "a b c"})
        shared = len(set(text.split()) & set("abc"))
        if kind == "click":
            right = i % 3 > 0 and 40 * i < 140
        else:
            right = 2 * shared / (3 + len(text.split())) >= 0.5
        expected.append(0.8 * right + 0.2 * (i % 3 > 0))
    parts = {"gui_action": screens.gui_action(answers, wanted), "gui_format": screens.gui_format(answers)}
    assert 0 < sum(parts["gui_action"]) < N
    check(gui_r1(kl_coefficient=0.0), batch_with(parts), np.asarray(expected))


def test_visual_rft_is_the_loop_over_answers() -> None:
    """A box that moves away from the expected one, with falling confidence."""
    answers, expected = [], []
    for i in range(N):
        c, moved = round(0.9 - 0.05 * i, 2), i % 4
        answers.append(
            f"<think></think><answer>[{{'Position': [{moved}, 0, {moved + 6}, 6], 'Confidence': {c}}}]</answer>"
        )
        iou = (6 - moved) / (6 + moved)
        good = iou > 0.5
        expected.append(iou * good + (c if good else 1 - c) + 1)
    wanted = [[[0, 0, 6, 6]]] * N
    parts = {
        "box_overlap": boxes.box_overlap(answers, wanted), "box_confidence": boxes.box_confidence(answers, wanted),
        "box_format": boxes.box_format(answers),
    }  # fmt: skip
    assert 0 < np.count_nonzero(parts["box_overlap"]) < N
    check(visual_rft(kl_coefficient=0.0), batch_with(parts), np.asarray(expected))


def test_classification_has_rewards_of_its_own() -> None:
    answers = [f"<think></think><answer>{('a fox', 'cat')[i % 2]}</answer>"[i % 3 :] for i in range(N)]
    parts = {
        "class_match": boxes.class_match(answers, ["fox"] * N), "answer_tags": verifiers.answer_tags(answers),
    }  # fmt: skip
    expected = [(i % 2 == 0) + float(i % 3 == 0) for i in range(N)]
    method = visual_rft(classification=True, kl_coefficient=0.0)
    assert method.transform.needs == {"class_match", "answer_tags"}
    check(method, batch_with(parts), np.asarray(expected))


def steps_of(seed: int = 4) -> Any:
    """Four episodes of 2, 3, 1 and 4 steps, in two groups, with three policies that differ."""
    random = np.random.default_rng(seed)
    turns = [2, 3, 1, 4]
    batch = rounds(turns, [1.0, 0.0, 0.25, 0.75], [[0.0] * n for n in turns], [0, 0, 1, 1])
    mask, shape = np.asarray(batch.action_mask), batch.tokens.shape
    old, behaviour = (np.where(mask, -1 + 0.3 * random.normal(size=shape), 0.0) for _ in range(2))
    entropy = np.where(mask, random.uniform(0.1, 2, shape), 0.0)
    fields = {"old_logp": old, "behaviour_logp": behaviour, "entropy": entropy}
    return batch.replace(**{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()})


def test_dart_gui_is_the_loop_over_steps() -> None:
    batch, method = steps_of(), dart_gui(kept=0.6, kl_coefficient=0.0)
    b = arrays(batch)
    logp = np.where(b.mask, b.old + 0.6 * np.random.default_rng(1).normal(size=b.mask.shape), 0.0)
    found = learn(method, batch, logp)
    outcome = {0: [1.0, 0.0], 1: [0.25, 0.75]}
    H, kept = np.asarray([b.entropy[i][b.mask[i]].mean() for i in range(len(b.group))]), set[int]()
    for g in (0, 1):
        rows = sorted(np.flatnonzero(b.group == g), key=lambda i: -H[i])
        assert len(rows) == 5
        kept |= {int(i) for i in rows[:3]}
    loss, gradient, clipped = 0.0, np.zeros(b.mask.shape), 0
    for i in kept:
        R = outcome[int(b.group[i])]
        A = (b.reward[i] - np.mean(R)) / (np.std(R, ddof=1) + 1e-6)
        places = np.flatnonzero(b.mask[i])
        s = float(np.exp(np.mean([logp[i, t] - b.old[i, t] for t in places])))
        inside = s * A <= np.clip(s, 0.9, 1.28) * A
        clipped += not inside
        for t in places:
            w = min(np.exp(b.old[i, t] - b.behaviour[i, t]), 1.0)
            loss -= w * min(s * A, np.clip(s, 0.9, 1.28) * A) / len(places) / len(kept)
            gradient[i, t] = -w * s * A * inside / len(places) / len(kept)
    assert 0 < clipped < len(kept)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(found.gradient, gradient, rtol=1e-4, atol=1e-7)


def test_dart_gui_gives_solved_tasks_fewer_samples_and_steps() -> None:
    """By hand: four of five episodes solve task 0, two of them in three turns; half of task 1 is within bounds."""
    turns, group = [2, 3, 1, 3, 4, 1, 2, 2, 1], [0, 0, 0, 0, 0, 1, 1, 2, 3]
    scores = [1.0, 1.0, 0.9, 0.6, 0.5, 1.0, 0.0, 0.0, np.nan]
    batch = rounds(turns, scores, [[0.0] * n for n in turns], group)
    batch = batch.replace(prompt_id=batch.group)
    rows = [{"prompt": f"{i}"} for i in range(5)]
    made = dart_gui().curriculum
    assert made is not None
    curriculum: Any = made(rows, 0)
    everything = np.arange(5)
    first = curriculum.columns(curriculum.init(), everything)
    assert first == [{SHARE: 1.0, LONGEST: 0}] * 5
    scored: Any = SimpleNamespace(batch=batch)
    state = curriculum.observe(curriculum.init(), Step(scored, rows, {}))
    found = curriculum.columns(state, everything)
    np.testing.assert_allclose([one[SHARE] for one in found], [0.5, 1, 1, 1, 1], rtol=1e-6)  # 0.2 / 0.4
    assert [one[LONGEST] for one in found] == [3, 1, 0, 0, 0], "an episode without a score says nothing"
    fails: Any = SimpleNamespace(batch=batch.replace(reward=batch.reward * 0))
    assert curriculum.columns(curriculum.observe(state, Step(fails, rows, {})), everything) == first
    assert dart_gui(solved=None).curriculum is dart_gui(solved=None).rollout is None


def test_dart_gui_of_all_steps_of_one_sampler_is_gspo() -> None:
    """Episodes of one step, whose sampler is the trainer, without the filter."""
    batch = BATCH.replace(old_logp=BATCH.behaviour_logp)
    own = learn(dart_gui(1.0, kl_coefficient=0.0), batch, LOGP)
    other = learn(get("gspo", clip_low=0.1, clip_high=0.28), batch, LOGP)
    assert own.loss == pytest.approx(other.loss, rel=1e-5)
    np.testing.assert_allclose(own.gradient, other.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [gui_r1(), visual_rft()])
def test_without_its_rewards_it_takes_the_run_s(method: Algorithm) -> None:
    np.testing.assert_array_equal(prepared(method, BATCH).reward, BATCH.reward)
