"""Methods with replay: batches of several steps through their replay, and the loss on the last against loops.

The loops know a replayed completion by its text, and take all else about it from the step that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of
from method_step import Learned, assert_matches_loop, learn
from stored_rows import all_facts, run, scored_of, some_steps

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.policy_loss.r2vpo import r2vpo
from jaxrl_llm.algorithms.policy_loss.remix import remix
from jaxrl_llm.algorithms.prompts.dots_rr import dots_rr
from jaxrl_llm.algorithms.replay.a2pr import a2pr, best_answers
from jaxrl_llm.algorithms.replay.arpo_replay import arpo_replay
from jaxrl_llm.algorithms.replay.rapo_reward_aware import rapo_reward_aware
from jaxrl_llm.algorithms.replay.sapo_swarm import sapo_swarm
from jaxrl_llm.algorithms.replay.spear import spear, varied_groups, warm_up_replay
from jaxrl_llm.algorithms.replay.symphony_fading_replay import symphony_fading_replay
from jaxrl_llm.algorithms.replay.vspo_prs import vspo_prs
from jaxrl_llm.algorithms.replay.wmar_reservoir_replay import wmar_reservoir_replay
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Step
from jaxrl_llm.core.trajectory import PolicyOutputs
from jaxrl_llm.objectives.off_policy import importance_correction
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.replay.base import shared
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.utils.errors import InputError

STEPS = [
    scored_of([[1.0, 0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], [0, 1, 2], 0),
    scored_of([[1.0, 1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], [3, 1, 2], 1),
    scored_of([[0.0, 0.0, 0.0], [0.0, 0.0], [1.0, 0.0]], [0, 2, 4], 2),
]
WIDTH = 8  # all batches are padded to it, so that they share compiled programs


class Row:
    """A completion as its own step has it."""

    def __init__(self, scored: Scored, i: int) -> None:
        b: Any = scored.batch
        mine = b.reward[b.group == b.group[i]]
        self.reward, self.mean, self.prompt = float(b.reward[i]), float(mine.mean()), int(b.prompt_id[i])
        self.deviation = float(mine.std(ddof=1)) if len(mine) > 1 else 0.0
        self.mask, self.behaviour = b.action_mask[i], b.behaviour_logp[i]


ROWS = {scored.texts[i]: Row(scored, i) for scored in STEPS for i in range(len(scored.texts))}


def last(method: Algorithm, steps: list[Scored] = STEPS) -> tuple[Any, list[str], np.ndarray]:
    """The mixed batch of the last step, as JAX has it, the texts of its rows, and log-probabilities f64[N, L]."""
    assert method.replay is not None
    mixed = run(method.replay, steps)[0][-1]
    random = np.random.default_rng(5)

    def wide(x: Any) -> Any:
        x = np.asarray(x)
        return np.pad(x, ((0, 0), (0, WIDTH - x.shape[1]))) if x.ndim == 2 else x

    batch: Any = jax.tree.map(wide, mixed.batch)
    behaviour = batch.behaviour_logp
    old, reference = (behaviour + 0.1 * random.normal(size=behaviour.shape).astype(np.float32) for _ in range(2))
    batch = batch.replace(old_logp=old, reference_logp=reference, entropy=np.zeros_like(behaviour))
    return jax.tree.map(jnp.asarray, batch), mixed.texts, behaviour + 0.3 * random.normal(size=behaviour.shape)


def tokens(texts: list[str]) -> list[tuple[int, int]]:
    return [(i, int(t)) for i, text in enumerate(texts) for t in np.flatnonzero(ROWS[text].mask)]


def within(batch: Any, texts: list[str], ddof: int = 1) -> np.ndarray:
    """GRPO's advantage of each row in its group of the mixed batch."""
    group, reward = np.asarray(batch.group), np.asarray([ROWS[text].reward for text in texts])
    out = np.zeros(len(texts))
    for g in set(group.tolist()):
        mine = group == g
        spread = reward[mine].std(ddof=ddof) if mine.sum() > ddof else 0.0
        out[mine] = (reward[mine] - reward[mine].mean()) / (spread + 1e-6) if spread > 0 else 0.0
    return out


def gain(rho: float, A: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(rho * A, float(np.clip(rho, 1 - low, 1 + high)) * A)


def ratios(texts: list[str], logp: np.ndarray) -> dict[tuple[int, int], float]:
    """To the policy that sampled each token."""
    return {(i, t): float(np.exp(logp[i, t] - ROWS[texts[i]].behaviour[t])) for i, t in tokens(texts)}


def check(method: Algorithm, batch: Any, logp: np.ndarray, loop: Callable[[np.ndarray], float]) -> Learned:
    found = learn(method, batch, logp)
    assert_matches_loop(found, loop, logp)
    return found


def test_arpo_is_the_loop_over_steps() -> None:
    batch, texts, logp = last(arpo_replay())
    # Step 0 had two successes for prompt 0 and step 1 one for prompt 2; both groups failed in step 2.
    assert texts[2] in (STEPS[0].texts[0], STEPS[0].texts[2])
    assert texts[4] == STEPS[1].texts[6]
    assert texts[:2] == STEPS[2].texts[1:3]  # sample 1 went
    A, old = within(batch, texts), np.asarray(batch.old_logp, float)
    assert A[1:3] == pytest.approx([-1 / 3 / (1 / 3) ** 0.5, 2 / 3 / (1 / 3) ** 0.5], rel=1e-4)

    def loop(x: np.ndarray) -> float:
        return -float(np.mean([gain(float(np.exp(x[i, t] - old[i, t])), A[i], 0.2, 0.3) for i, t in tokens(texts)]))

    check(arpo_replay(), batch, logp, loop)


def test_dots_rr_is_the_loop() -> None:
    """Over the step's groups and as many of the store, whose clip is around pi_old / pi_behaviour."""
    method = dots_rr(clip_low=0.1, clip_high=0.15)
    batch, texts, logp = last(method)
    again = [text for text in texts if text not in STEPS[2].texts]
    # Both mixed groups of step 0 and both of step 1 are in the store: 3 of these 4 groups come back.
    assert len({(ROWS[text].prompt, text[0]) for text in again}) == 3
    assert not {text for text in again if ROWS[text].deviation == 0}
    A, old = within(batch, texts), np.asarray(batch.old_logp, float)
    for i, text in enumerate(texts):  # as when the group was fresh
        one = ROWS[text]
        expected = (one.reward - one.mean) / (one.deviation + 1e-6) if one.deviation else 0.0
        assert A[i] == pytest.approx(expected, rel=1e-4)

    def loop(x: np.ndarray) -> float:
        total = 0.0
        for (i, t), r in ratios(texts, x).items():
            r0 = float(np.exp(old[i, t] - ROWS[texts[i]].behaviour[t]))
            total += max(-A[i] * r, -A[i] * min(max(r, r0 * 0.9), r0 * 1.15))
        return total / len(tokens(texts))

    check(method, batch, logp, loop)


@pytest.mark.parametrize(("A", "loss"), [(1.0, -0.958941), (-1.0, 1.063180)])
def test_dots_rr_worked_example(A: float, loss: float) -> None:
    method = dots_rr()
    old, logp = (np.array([[*x], [0.0] * 3], np.float32) for x in ((-0.8, -1.2, -1.0), (-0.5, -1.3, -1.4)))
    action = np.array([[1.0] * 3, [0.0] * 3])
    batch: Any = batch_of(action, [1.0, 0.0], [[-1.0] * 3, [0.0] * 3], [0, 1], old_logp=jnp.asarray(old))
    batch = batch.replace(advantages=jnp.asarray(A * action, jnp.float32))
    correction = importance_correction("token", "truncate", high=1e30)
    _, ready = correction.apply(correction.init(), batch)
    outputs = PolicyOutputs(jnp.asarray(logp), jnp.zeros((2, 3)))
    assert float(method.objective(outputs, ready)[0]) == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("wrong", [0.0, 1.5])
def test_dots_rr_needs_fresh_groups(wrong: float) -> None:
    with pytest.raises(InputError, match="fresh_share"):
        dots_rr(fresh_share=wrong)


def test_arpo_without_successes_is_grpo() -> None:
    steps = [scored_of([[0.0, 0.0], [0.0, 0.0]], [0, 1], step) for step in range(3)]
    mixed, _ = run(arpo_replay().replay, steps)  # type: ignore[arg-type]
    assert [all_facts(x) for x in mixed] == [all_facts(x) for x in steps]


def test_symphony_is_the_loop_over_replayed_groups() -> None:
    batch, texts, logp = last(symphony_fading_replay())
    past = np.asarray(batch.info["replayed"]) > 0
    assert np.asarray(batch.group)[past].tolist() == sorted(np.asarray(batch.group)[past].tolist())
    assert len(set(np.asarray(batch.group)[past].tolist())) == 3  # as many groups as are fresh
    A = within(batch, texts)
    np.testing.assert_allclose(  # a group is compared within itself, as in its own step
        A[past],
        [(ROWS[t].reward - ROWS[t].mean) / ROWS[t].deviation for t, is_so in zip(texts, past, strict=True) if is_so],
        rtol=1e-5,
    )

    def loop(x: np.ndarray) -> float:
        return -float(np.mean([gain(rho, A[i]) for (i, _), rho in ratios(texts, x).items()]))

    check(symphony_fading_replay(), batch, logp, loop)


def test_wmar_is_the_loop_over_replayed_rows() -> None:
    method = wmar_reservoir_replay(recent=4, reservoir=3)
    batch, texts, logp = last(method)
    past = np.asarray(batch.info["replayed"]) > 0
    assert past.sum() == 7  # as many as are fresh: 4 of the newest, 3 of the reservoir
    A = within(batch, texts)
    for i in np.flatnonzero(past):
        row = ROWS[texts[i]]
        A[i] = (row.reward - row.mean) / row.deviation

    def loop(x: np.ndarray) -> float:
        return -float(np.mean([gain(rho, A[i]) for (i, _), rho in ratios(texts, x).items()]))

    check(method, batch, logp, loop)


def test_a2pr_is_the_loop() -> None:
    method = a2pr(alpha=2.0)
    batch, texts, logp = last(method)
    past, group = np.asarray(batch.info["replayed"]) > 0, np.asarray(batch.group)
    assert past.sum() == 2  # prompts 0 and 2 were answered before
    fresh = [i for i in range(len(texts)) if not past[i]]
    A, best = np.zeros(len(texts)), dict[int, float]()
    for g in set(group.tolist()):
        own = [i for i in fresh if group[i] == g]
        reward = np.asarray([ROWS[texts[i]].reward for i in own])
        for i in own:
            A[i] = (ROWS[texts[i]].reward - reward.mean()) / (reward.std(ddof=1) + 1e-6) if np.ptp(reward) else 0.0
        stored = [i for i in np.flatnonzero(past) if group[i] == g]
        if stored and ROWS[texts[stored[0]]].reward > reward.max():
            best[stored[0]] = 1.0
        elif reward.max() > reward.mean():
            top = [i for i in own if ROWS[texts[i]].reward == reward.max()]
            best |= dict.fromkeys(top, 1 / len(top))
    assert len(best) == 3

    def loop(x: np.ndarray) -> float:
        there = ratios(texts, x)
        policy = -float(np.mean([gain(rho, A[i]) for (i, _), rho in there.items() if not past[i]]))
        return policy - float(np.mean([best[i] * x[i, t] for i, t in there if i in best])) / 2.0

    check(method, batch, logp, loop)


def test_equal_best_answers_share_and_no_better_one_is_cloned() -> None:
    scores, group = jnp.asarray([1.0, 1, 0, 2, 2, 0.5, 0.5, 0.4]), jnp.asarray([0, 0, 0, 1, 1, 2, 2, 2])
    stored = jnp.asarray([0, 0, 0, 0, 1, 0, 0, 1], bool)
    assert best_answers(scores, group, stored).tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_vspo_is_the_loop() -> None:
    method = vspo_prs(copies=1.0, kl_coefficient=0.1)
    batch, texts, logp = last(method)
    assert sorted(set(texts)) == sorted(STEPS[-1].texts[5:7])  # the one group with different rewards, three times
    A, reference = within(batch, texts) / 3, np.asarray(batch.reference_logp, float)

    def loop(x: np.ndarray) -> float:
        rows = []
        for i, text in enumerate(texts):
            terms = []
            for t in np.flatnonzero(ROWS[text].mask):
                d = reference[i, t] - x[i, t]
                rho = float(np.exp(x[i, t] - ROWS[text].behaviour[t]))
                terms.append(-gain(rho, A[i]) + 0.1 * (np.exp(d) - d - 1))
            rows.append(np.mean(terms))
        return float(np.mean(rows))

    check(method, batch, logp, loop)


def test_vspo_rewards_in_stages() -> None:
    scored = scored_of([[1.0, 1.0, 0.0]], [0], 0)
    form = np.asarray([1.0, 0.0, 1.0], np.float32)
    scored = scored._replace(batch=scored.batch.replace(rewards={"right": scored.batch.reward, "form": form}))
    method = vspo_prs(reward_stages="form=0.1,right=2")
    (mixed,), _ = run(method.replay, [scored])  # type: ignore[arg-type]
    np.testing.assert_allclose(mixed.batch.reward, [2.1, 0.0, 0.1], rtol=1e-6)
    with pytest.raises(InputError, match="unknown reward 'from': did you mean 'form'"):
        run(vspo_prs(reward_stages="from=1").replay, [scored])  # type: ignore[arg-type]


def test_the_rewards_of_a_run_are_the_stages_of_vspo_in_their_order() -> None:
    config = TrainConfig(algorithm="vspo_prs", rewards=("my.py:form*0.1", "valid_calls*0.2", "answer_bleu"))
    found = repr(make_algorithm(config).replay)
    stages = '{"form": 0.1, "valid_calls": 0.2, "answer_bleu": 1.0}'
    assert found == f"with_staged_reward(valued_groups(2.0, 1.3), {stages})", "1.3 is the largest reward"
    assert "staged" not in repr(vspo_prs().replay)


def test_rapo_worked_example_and_loop() -> None:
    reward = [0.1, 0.1, 1, 1, 1, 1, 0.1, 1, 1, 0.1, 0.1, 0.1]
    found = advantages(
        rapo_reward_aware(epsilon=0.0), batch_of(np.ones((12, 1)), reward, np.zeros((12, 1)), np.repeat(range(4), 3))
    )
    two, one = 2.828427, 1.414214
    np.testing.assert_allclose(found[:, 0], [-one, -one, two, 0, 0, 0, -two, one, one, 0, 0, 0], rtol=1e-5)

    method = rapo_reward_aware()
    batch, texts, logp = last(method)
    past = np.asarray(batch.info["replayed"]) > 0
    assert past.sum() == 2  # prompt 0's latest success is of step 0, prompt 2's of step 1
    assert {texts[i] for i in np.flatnonzero(past)} == {STEPS[0].texts[2], STEPS[1].texts[6]}
    A = within(batch, texts, ddof=0)  # all three groups are informative now

    def loop(x: np.ndarray) -> float:
        there = ratios(texts, x)
        rows = [[gain(rho, A[i]) for (j, _), rho in there.items() if j == i] for i in range(len(texts))]
        return -float(np.mean([np.mean(row) for row in rows]))

    check(method, batch, logp, loop)


def test_rapo_drops_solved_prompts_at_the_end_of_an_epoch() -> None:
    method = rapo_reward_aware()
    assert method.prompts is not None
    curriculum = method.prompts([{}] * 4, 7)
    state = curriculum.init()
    for epoch in range(3):
        ids, state = curriculum.select(state, 4 if epoch == 0 else 3)
        assert sorted(ids.tolist()) == ([0, 1, 2, 3] if epoch == 0 else [0, 1, 3])
        rewards = [[1.0, 1.0] if one == 2 else [1.0, 0.0] for one in ids]
        state = curriculum.observe(state, Step(scored_of(rewards, ids.tolist(), epoch), [], {}))
    assert curriculum.excluded is not None
    assert curriculum.excluded(state).tolist() == [0, 0, 1, 0]
    assert curriculum.metrics(state) == {"curriculum/left_out/solved": 0.25, "curriculum/restarts": 0.0}
    state = curriculum.observe(state, Step(scored_of([[1.0]] * 3, [0, 1, 3], 9), [], {}))
    ids, state = curriculum.select(state, 4)  # all are solved: they come back
    assert sorted(ids.tolist()) == [0, 1, 2, 3]
    assert curriculum.metrics(state) == {"curriculum/left_out/solved": 0.0, "curriculum/restarts": 1.0}


def test_spear_is_the_loop() -> None:
    """Three rows are above 1/2, the median of the means of step 0: two are replayed in step 1, with half weight."""
    given: dict[str, Any] = {"replay_rows": 2, "surplus": 1.0, "warm_up": 200, "max_length": 6.0, "covariance_low": 0.1}
    method = spear(**given)
    steps = [x._replace(batch=x.batch.replace(truncated=np.arange(len(x.texts)) == 4)) for x in STEPS[:2]]
    batch, texts, logp = last(method, steps)
    past = np.asarray(batch.info["replayed"]) > 0
    assert past.sum() == 2
    state = jax.tree.map(lambda x: x, method.transform.init())
    state = tuple(jnp.int32(100) if getattr(one, "dtype", None) == jnp.int32 else one for one in state)
    found = learn(method, batch, logp, state=state)
    assert found.metrics["ratio/mean"] > 0
    detached = np.asarray(found.batch.info["detached"])
    assert detached.sum() == 1  # max(1, floor(0.02 n))
    # Group 1 lost its truncated row; of the deviations 0.47, 0 and 0.5 the largest ceil(0.75 * 3) = 3 stay.
    reward, group = np.asarray(batch.reward, float), np.asarray(batch.group)
    left = past | ~np.asarray(batch.truncated)
    A = np.zeros(len(texts))
    for i in range(len(texts)):
        own = (group == group[i]) & left
        A[i] = reward[i] - 0.5 if past[i] else reward[i] - reward[own].mean()

    def loop(x: np.ndarray) -> float:
        there = ratios(texts, x)
        total = 0.0
        for weight, rows in ((1.0, ~past), (0.5, past)):
            terms = [
                gain(r, A[i], 0.2, 0.28) for (i, t), r in there.items() if rows[i] and left[i] and not detached[i, t]
            ]
            total -= weight * sum(terms) / (6.0 * (rows & left).sum())  # those that stay
        return total

    assert_matches_loop(found, loop, logp)


def test_spear_weights_and_varied_groups() -> None:
    weights = [float(warm_up_replay(200).apply(jnp.int32(t), batch_of())[1].controls["replay_weight"])  # type: ignore
               for t in (0, 50, 100, 200, 300)]  # fmt: skip
    np.testing.assert_allclose(weights, [0, 0.146447, 0.5, 1, 1], atol=1e-6)
    scores = jnp.asarray([1.0, 0, 1, 1, 0.5, 1, 0, 1])
    group = jnp.asarray([0, 0, 1, 1, 2, 2, 3, 3])
    assert varied_groups(scores, group, 0.5).tolist() == [True, True, False, False, False, False, True, True]
    assert varied_groups(scores, group, 0.75).tolist() == [True, True, False, False, True, True, True, True]
    assert varied_groups(scores, group, 0.25).tolist() == [True, True, False, False, False, False, True, True]


def test_sapo_learns_from_another_node() -> None:
    """Node A's own groups are all wrong; B publishes rewards 1 and 0, and a group that is dropped."""
    a = scored_of([[0.0, 0.0], [0.0, 0.0]], [0, 1], 0)
    b = scored_of([[1.0, 1.0], [1.0, 0.0]], [2, 3], 1)
    method = sapo_swarm()
    alone, both = shared(a, [], 4, 4, 0), shared(a, [b], 4, 4, 0)
    assert all_facts(alone) == all_facts(a)
    assert both.texts == [*a.texts, *b.texts[2:]]
    assert both.batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.batch.info["replayed"].tolist() == [0, 0, 0, 0, 1, 1]
    mask = np.asarray(both.batch.action_mask)
    old = np.where(mask, both.batch.behaviour_logp - 0.5, 0.0).astype(np.float32)
    batch = jax.tree.map(jnp.asarray, both.batch.replace(old_logp=old))
    A = np.asarray([0, 0, 0, 0, 1, -1]) * 0.5**0.5

    def loop(x: np.ndarray) -> float:
        terms = [gain(float(np.exp(x[i, t] - old[i, t])), A[i], 0.2, 0.28) for i, t in np.argwhere(mask)]
        return -float(np.mean(terms))

    logp = old + 0.3 * np.random.default_rng(1).normal(size=old.shape)
    found = learn(method, batch, logp)
    assert_matches_loop(found, loop, logp)
    assert np.abs(found.gradient[4:]).max() > 0
    assert not np.abs(found.gradient[:4]).any()


@pytest.mark.parametrize(("own", "foreign"), [(2, 0), (1, 3), (0, 2), (0, 0)])
def test_own_and_foreign_items_are_as_many_as_asked(own: int, foreign: int) -> None:
    found = shared(STEPS[0], [STEPS[1], STEPS[2]], own, foreign, 3)
    group, past = found.batch.group, found.batch.info["replayed"] > 0
    assert len(np.unique(group[~past])) == (own if own + foreign else 1)  # one at least
    assert len(np.unique(group[past])) == min(foreign, 3)  # of which there are three with different rewards
    assert {text[0] for text, is_past in zip(found.texts, past, strict=True) if is_past} <= {"1", "2"}
    assert all(np.ptp(found.batch.reward[group == g]) > 0 for g in np.unique(group[past]))


def test_r2vpo_and_remix_replay_whole_groups() -> None:
    for method, share in ((r2vpo(), 1.0), (remix(past_share=0.5), 1.0), (remix(past_share=0.25), 1 / 3)):
        batch, texts, logp = last(method)
        past = np.asarray(batch.info["replayed"]) > 0
        assert len(set(np.asarray(batch.group)[past].tolist())) == round(3 * share)
        for g in set(np.asarray(batch.group)[past].tolist()):
            assert len({ROWS[texts[i]].mean for i in np.flatnonzero(np.asarray(batch.group) == g)}) == 1
        A, old = within(batch, texts), np.asarray(batch.old_logp, float)

        def variance(x: np.ndarray, texts: list[str] = texts, A: np.ndarray = A) -> float:
            there = ratios(texts, x)
            squares = [(rho - 1) ** 2 - 0.02 for rho in there.values()]
            return -float(np.mean([rho * A[i] for (i, _), rho in there.items()])) + 0.04 * float(np.mean(squares))

        def mixed(x: np.ndarray, texts: list[str] = texts, A: np.ndarray = A, old: np.ndarray = old) -> float:
            total = []
            for (i, t), rho in ratios(texts, x).items():
                c = float(np.exp(old[i, t] - ROWS[texts[i]].behaviour[t]))
                total.append(min(rho * A[i], float(np.clip(rho, c - 0.2, c + 0.2)) * A[i]))
            return -float(np.mean(total))

        if share == 1.0 and method.needs == r2vpo().needs:
            check(method, batch, logp, variance)
        else:
            check(remix(past_share=0.5, kl_coefficient=0.0), batch, logp, mixed)


@pytest.mark.parametrize("method", [r2vpo(replay_share=0.0), remix(past_share=0.0)], ids=["r2vpo", "remix"])
def test_without_a_share_there_is_no_replay(method: Algorithm) -> None:
    assert method.replay is None


def test_replay_of_remix_ends_at_the_switch() -> None:
    found, _ = run(remix(switch=2).replay, some_steps(4))  # type: ignore[arg-type]
    assert not any(x.batch.info["replayed"].any() for x in found[2:])


@pytest.mark.parametrize(("name", "rows"), [("grpo", 16), ("arpo_replay", 16), ("r2vpo", 32), ("spear", 48)])
def test_a_plan_counts_replayed_rows(name: str, rows: int) -> None:
    config = TrainConfig(algorithm=name, prompts_per_step=4, group_size=4, max_prompt_tokens=4, max_new_tokens=4)
    assert full_batch(config, algorithms.get(name), 50).tokens.shape[0] == rows


def test_every_replay_provides_what_its_method_needs() -> None:
    for name in algorithms.names():
        method = algorithms.get(name)
        if method.replay is not None:
            asked = {"replayed", "replay_advantage", "copy_weight"} & method.needs
            assert asked <= method.replay.provides, name
