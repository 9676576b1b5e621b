"""Curricula: properties of every rule, and each rule against a count made by hand."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from choosing import Ran, near_predicted, rows_of, step_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.prompts.drive_pre_grpo import hardest_in_phases
from jaxrl_llm.algorithms.prompts.gdro import samples_by_bin
from jaxrl_llm.algorithms.prompts.sgpo import sorted_by_profile
from jaxrl_llm.algorithms.prompts.v0_value import from_outcomes
from jaxrl_llm.algorithms.score_function.spo_single_stream import tracker
from jaxrl_llm.core.source import MakeCurriculum
from jaxrl_llm.curriculum.budgets import apportion, by_bound, by_failure, by_variance, divide
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.excluded import Why
from jaxrl_llm.curriculum.scores import (
    adversarial_sets,
    drop_solved,
    least_tried,
    mixed_sets,
    near_target,
    retry_failed,
    staged,
    thompson,
    uncertain,
    with_entropy,
)
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
LEVELS = [i % 3 for i in range(24)]
ROWS = rows_of(24, level=LEVELS, source=["ab"[i % 2] for i in range(24)], rate=[i % 9 / 8 for i in range(24)])
for number, row in enumerate(ROWS):
    row["policy_embedding"] = np.array([[number / 23, 1.0, number % 2], [1.0, 0.0, number % 3]], np.float32)
LEARNT = ("predicted", "from_outcomes")  # whose state has networks


def small_values(**options: Any) -> Any:
    return from_outcomes(queries=2, query_size=2, heads=1, bottleneck=4, width=8, layers=1, steps=8, **options)


def skill(number: int, step: int) -> float:
    return number / 23


EVERY: dict[str, MakeCurriculum] = {
    "plain": choose_prompts(),
    "least_tried": choose_prompts(least_tried()),
    "uncertain": choose_prompts(uncertain(), divide(), prior=(0.5, 0.5), kept=0.9),
    "near_target": choose_prompts(near_target(), divide(by_bound())),
    "predicted": choose_prompts(*near_predicted(references=6)),
    "tracked": choose_prompts(uncertain(model=tracker()), divide(by_variance, tracker())),
    "thompson": choose_prompts(thompson(), noise=0.0, kept=0.9, faded=0.95),
    "adversarial": choose_prompts(adversarial_sets("source")),
    "mixed": choose_prompts(mixed_sets("source", {"a": 3.0, "b": 1.0}), retry_failed(), divide(by_failure)),
    "staged": choose_prompts(staged("level", 4, earlier=0.2), drop_solved(back=5)),
    "phases": choose_prompts(hardest_in_phases(6, [(6, 4), (2, 4)], times=2), least_tried()),
    "profile": choose_prompts(sorted_by_profile(3), least_tried()),
    "arms": choose_prompts(least_tried(), samples_by_bin(bins=4)),
    "from_outcomes": choose_prompts(least_tried(), divide(by_variance, small_values(context=16))),
    "profiled": choose_prompts(sorted_by_profile(3, "rate"), least_tried()),
}
every = pytest.mark.parametrize("name", EVERY)


@every
def test_another_order_of_the_rows_draws_the_same_prompts(name: str) -> None:
    order = np.random.default_rng(0).permutation(24)
    one, two = Ran(EVERY[name], ROWS, skill, 12), Ran(EVERY[name], [ROWS[i] for i in order], skill, 12)
    assert one.ids == two.ids
    assert one.counts == two.counts
    assert one.metrics == pytest.approx(two.metrics)


@every
def test_a_resumed_run_draws_the_same(name: str) -> None:
    """The state goes through a checkpoint's JSON and arrays, and no function changes the one that it is given."""
    whole, half = Ran(EVERY[name], ROWS, skill, 12), Ran(EVERY[name], ROWS, skill, 5)
    kept, arrays = saved(ExperienceState(half.state, {}, (), Drafts()))
    state = loaded(json.loads(json.dumps(kept)), arrays).curriculum
    before = json.dumps(kept), {key: value.copy() for key, value in arrays.items()}
    rest = Ran(EVERY[name], ROWS, skill, 7, state=state, begin=5)
    assert half.ids + rest.ids == whole.ids
    again = saved(ExperienceState(half.state, {}, (), Drafts()))
    assert json.dumps(again[0]) == before[0]
    for key, value in before[1].items():
        np.testing.assert_array_equal(again[1][key], value)
    assert name in LEARNT or sum(value.nbytes for value in arrays.values()) < 100 * 24 + 500


@every
def test_it_goes_on_with_more_prompts(name: str) -> None:
    half = Ran(EVERY[name], ROWS, skill, 5)
    more = [*ROWS, *({**ROWS[i % 24], "prompt": f"prompt {i}"} for i in range(24, 30))]
    Ran(EVERY[name], more, lambda i, step: 0.5, 12, state=half.state, begin=5)
    with pytest.raises(InputError, match="state is of 24 prompts, but the set has 20"):
        EVERY[name](ROWS[:20], 0).select(half.state, 0)


@every
def test_reasons_are_those_that_it_says_and_none_is_drawn_that_has_one(name: str) -> None:
    curriculum = EVERY[name](ROWS, 0)
    state = Ran(EVERY[name], ROWS, skill, 9).state
    if curriculum.excluded is None:
        assert not [one for one in curriculum.metrics(state) if "left_out" in one]
        return
    why = curriculum.excluded(state)
    assert (why.dtype, why.shape) == (np.uint8, (24,))
    named = {Why(int(code)).name.lower() for code in why} - {"drawn"}
    assert named <= {one.rpartition("/")[2] for one in curriculum.metrics(state) if "left_out" in one}
    ids, after = curriculum.select(state, 2)
    if after["forced"] == state["forced"]:
        assert (why[ids] == Why.DRAWN).all()


@every
def test_it_prints_as_code(name: str) -> None:
    assert repr(EVERY[name]).startswith("choose_prompts(")


@given(st.integers(1, 30), st.integers(0, 5))
@few
def test_a_step_has_distinct_prompts_while_there_are_any(count: int, seed: int) -> None:
    curriculum = choose_prompts(uncertain())(ROWS, seed)
    ids, state = curriculum.select(curriculum.init(), count)
    more, _ = curriculum.select(state, 24)
    assert len(set(ids.tolist())) == min(count, 24)
    assert len(ids) == count
    if count < 24:
        assert len({*ids.tolist(), *more.tolist()[: 24 - count]}) == 24, "the others come first"


def test_passes_try_each_prompt_once() -> None:
    ran = Ran(choose_prompts(least_tried()), ROWS, skill, 12)
    for start in (0, 6):
        assert sorted(itertools.chain(*ran.ids[start : start + 6])) == list(range(24))


def test_a_small_pool_leaves_most_prompts_out_of_a_draw() -> None:
    curriculum = choose_prompts(near_target(0.0), pool=6, prior=(1e-6, 1.0))(ROWS, 0)
    draws = [curriculum.select({**curriculum.init(), "draws": n}, 4)[0] for n in range(40)]
    assert set(np.concatenate(draws).tolist()) == set(range(24))
    ids, _ = curriculum.select(curriculum.init(), 20)
    assert len(set(ids.tolist())) == 20, "more than the pool: all are considered"


def test_draws_are_in_proportion_to_the_weights() -> None:
    """By the tracker of the rates 0.2, 0.5, 0.9 and 0.388889: weights sqrt(v (1 - v)) + 0.05."""
    curriculum = choose_prompts(uncertain(0.05))(rows_of(4), 0)
    v = np.array([0.2, 0.5, 0.9, 0.388889])
    state = {**curriculum.init(), "alpha": v.astype(np.float32), "beta": (1 - v).astype(np.float32)}
    found = Counter(int(curriculum.select({**state, "draws": n}, 1)[0][0]) for n in range(4000))
    expected = np.array([0.238411, 0.291391, 0.185431, 0.284767])
    np.testing.assert_allclose([found[i] / 4000 for i in range(4)], expected, atol=0.025)


def test_nearness_is_a_softmax() -> None:
    p = np.array([0.1, 0.45, 0.5, 0.56, 0.9])
    curriculum = choose_prompts(near_target(0.5, 0.05))(rows_of(5), 0)
    state = {**curriculum.init(), "alpha": p.astype(np.float32), "beta": (1 - p).astype(np.float32)}
    found = Counter(int(curriculum.select({**state, "draws": n}, 1)[0][0]) for n in range(4000))
    np.testing.assert_allclose(
        [found[i] / 4000 for i in range(5)], [0.000201, 0.220321, 0.598894, 0.180383, 0.000201], atol=0.025
    )


def test_the_posterior_is_a_loop_and_fades() -> None:
    make = choose_prompts(prior=(1.0, 2.0), kept=0.9, faded=0.8)
    curriculum = make(rows_of(3), 0)
    state, alpha, beta = curriculum.init(), np.ones(3), np.full(3, 2.0)
    random = np.random.default_rng(1)
    for _ in range(7):
        tried = random.permutation(3)[: random.integers(1, 4)]
        reward = random.random((len(tried), 4)).round()
        for i in range(3):
            if i in tried:
                won = reward[list(tried).index(i)].sum()
                alpha[i], beta[i] = 0.9 * alpha[i] + won, 0.9 * beta[i] + 4 - won
            else:
                alpha[i], beta[i] = 1 + 0.8 * (alpha[i] - 1), 2 + 0.8 * (beta[i] - 2)
        state = curriculum.observe(state, step_of(np.repeat(tried, 4), reward.ravel()))
    from jaxrl_llm.curriculum.records import Memory, look_up

    found = look_up(state, Memory((1.0, 2.0), 0.9, 0.8), np.arange(3))
    np.testing.assert_allclose(found.alpha, alpha, rtol=1e-5)
    np.testing.assert_allclose(found.beta, beta, rtol=1e-5)


def test_thompson_draws_gather_where_the_rate_is_a_half_and_follow_it() -> None:
    rows = rows_of(60)
    make = choose_prompts(thompson(), noise=0.0, kept=0.7, faded=0.98)
    easy = Ran(make, rows, lambda i, step: [0.0, 0.5, 1.0][i // 20], 60)
    share = np.mean([20 <= i < 40 for i in itertools.chain(*easy.ids[30:])])
    assert share > 0.8
    moved = Ran(make, rows, lambda i, step: [0.0, 1.0, 0.5][i // 20], 120, state=easy.state, begin=60)
    assert np.mean([i >= 40 for i in itertools.chain(*moved.ids[80:])]) > 0.6


def test_sets_where_the_policy_fails_are_drawn_more() -> None:
    rows = rows_of(40, source=["easy" if i < 30 else "hard" for i in range(40)])
    ran = Ran(choose_prompts(adversarial_sets("source", rate=0.3, floor=0.3)), rows, lambda i, s: float(i < 30), 40)
    assert ran.metrics["curriculum/weight/hard"] > 0.9
    q = np.array([ran.metrics["curriculum/weight/easy"], ran.metrics["curriculum/weight/hard"]])
    assert -np.sum(q * np.log(q)) >= 0.3 * np.log(2) - 1e-6, "the floor of the entropy"
    even = Ran(choose_prompts(adversarial_sets("source", rate=0.0)), rows, lambda i, s: float(i < 30), 100)
    assert np.mean([i >= 30 for i in itertools.chain(*even.ids)]) == pytest.approx(0.5, abs=0.08)


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=6), st.floats(0, 1))
@few
def test_the_entropy_floor_holds(weights: list[float], floor: float) -> None:
    q = with_entropy(np.array(weights) / np.sum(weights), floor)
    assert q.sum() == pytest.approx(1)
    assert -np.sum(q * np.log(q)) >= floor * np.log(len(q)) - 1e-6


def test_sets_are_mixed_by_priority() -> None:
    rows = rows_of(40, source=["big" if i < 35 else "small" for i in range(40)])
    ran = Ran(choose_prompts(mixed_sets("source", {"big": 1.0, "small": 1.0})), rows, skill, 200, prompts=1)
    assert np.mean([i >= 35 for i in itertools.chain(*ran.ids)]) == pytest.approx(0.5, abs=0.1)
    with pytest.raises(InputError, match="the set 'small' of the column 'source' has no weight"):
        choose_prompts(mixed_sets("source", {"big": 1.0}))(rows, 0)


def test_failed_prompts_are_tried_again() -> None:
    ran = Ran(choose_prompts(retry_failed(1e6, most=2)), ROWS, lambda i, s: float(i >= 4), 40)
    tried = Counter(itertools.chain(*ran.ids))
    assert min(tried[i] for i in range(4)) >= 3


def test_stages_come_one_after_another() -> None:
    ran = Ran(choose_prompts(staged("level", 3)), ROWS, skill, 12)
    assert [{LEVELS[i] for i in ids} for ids in ran.ids] == [{0}] * 3 + [{1}] * 3 + [{2}] * 6
    assert ran.metrics["curriculum/stage"] == 2
    mixed = Ran(choose_prompts(staged("level", 1, earlier=0.3)), ROWS, skill, 200, prompts=2)
    late = [LEVELS[i] for i in itertools.chain(*mixed.ids[2:])]
    assert np.mean(np.array(late) < 2) == pytest.approx(0.3, abs=0.06)
    names = choose_prompts(staged("source", 2, order=("b", "a")))
    assert [{i % 2 for i in ids} for ids in Ran(names, ROWS, skill, 4).ids] == [{1}, {1}, {0}, {0}]
    with pytest.raises(InputError, match="the order of stages has no 'a'"):
        choose_prompts(staged("source", 2, order=("b",)))(ROWS, 0)
    with pytest.raises(InputError, match="reads the column 'stage', which 24 of 24 prompts do not have"):
        choose_prompts(staged("stage", 2))(ROWS, 0)


@given(st.integers(1, 3), st.sampled_from([None, 3]), st.integers(0, 3))
@few
def test_solved_prompts_are_dropped_and_return(visits: int, back: int | None, seed: int) -> None:
    make, out, streak = choose_prompts(drop_solved(visits=visits, back=back)), dict[int, int](), Counter[int]()
    curriculum = make(ROWS, seed)
    state = curriculum.init()
    for step in range(14):
        ids, state = curriculum.select(state, 4)
        inside = [i for i in range(24) if i not in out or (back is not None and step - out[i] >= back)]
        if len(inside) >= 4:
            assert set(ids.tolist()) <= set(inside)
        good = {int(i): bool(i < 12 and (i + step) % 4) for i in ids}
        state = curriculum.observe(state, step_of(list(good), list(map(float, good.values()))))
        for i, solved in good.items():
            streak[i] = streak[i] + 1 if solved else 0
            if streak[i] >= visits:
                out[i] = step
            else:
                out.pop(i, None)
        dropped = [i for i in out if back is None or step + 1 - out[i] < back]
        assert curriculum.metrics(state)["curriculum/left_out/solved"] == len(dropped) / 24
        assert curriculum.excluded is not None
        assert np.flatnonzero(curriculum.excluded(state) == Why.SOLVED).tolist() == sorted(dropped)


def test_where_all_are_dropped_prompts_are_drawn_from_all_and_counted() -> None:
    ran = Ran(choose_prompts(drop_solved()), rows_of(8), lambda i, s: 1.0, 4)
    assert ran.metrics["curriculum/left_out/solved"] == 1
    assert ran.metrics["curriculum/forced"] == 8
    some = Ran(choose_prompts(staged("level", 1)), rows_of(3, level=[0, 0, 1]), skill, 2)
    assert some.ids[1] == [2, 2, 2, 2], "the only prompt that is admitted, several times"
    assert "curriculum/forced" not in some.metrics


def test_phases_keep_the_prompts_that_are_hardest() -> None:
    ran = Ran(choose_prompts(hardest_in_phases(6, [(6, 3), (2, 9)], times=4), least_tried()), ROWS,
              lambda i, s: float(i >= 6) if s < 6 else float(i >= 2), 12)  # fmt: skip
    assert sorted(itertools.chain(*ran.ids[:6])) == list(range(24))
    assert {len(ids) for ids in ran.ids[6:]} == {1}, "a quarter of the prompts"
    assert ran.counts[6] == [32], "with four times the samples"
    assert set(itertools.chain(*ran.ids[6:9])) <= set(range(6))
    assert ran.metrics["curriculum/members"] == 2
    assert ran.metrics["curriculum/left_out/easier"] == 22 / 24
    assert ran.metrics["curriculum/phase"] == 2


def test_a_profile_sorts_prompts_and_sizes_their_groups() -> None:
    """Rates k/8 of the prompts 9 n + k; 0.10 of the unsolved ones stay, here by chance none or some of three."""
    ran = Ran(choose_prompts(sorted_by_profile(2, "rate"), least_tried()), ROWS, lambda i, s: 0.5, 6)
    sizes = [counts[0] for counts in ran.counts]
    assert sizes == [2, 2, 4, 4, 8, 8]
    assert [len(ids) for ids in ran.ids] == [16, 16, 8, 8, 4, 4]
    for size, ids in zip(sizes, ran.ids, strict=True):
        allowed = {2: {3, 4, 5, 6}, 4: {2}, 8: {1}}[size] | {0}
        assert {i % 9 for i in ids} <= allowed
    shares = {name: value * 24 for name, value in ran.metrics.items() if "/left_out/" in name}
    assert shares["curriculum/left_out/solved"] == sum(i % 9 in (7, 8) for i in range(24))
    assert shares["curriculum/left_out/earlier"] == sum(i % 9 in (2, 3, 4, 5, 6) for i in range(24)), "groups of 8 now"
    assert shares["curriculum/left_out/later"] == 0
    measured = Ran(choose_prompts(sorted_by_profile(2), least_tried()), ROWS, skill, 8)
    assert sorted(itertools.chain(*measured.ids[:6])) == list(range(24)), "the first pass measures"
    assert measured.counts[6][0] == 2
    with pytest.raises(InputError, match="set group_size to 8"):
        Ran(choose_prompts(sorted_by_profile(2, "rate")), ROWS, skill, 1, group=4)


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=12), st.integers(0, 60), st.integers(1, 3),
    st.sampled_from([None, 4, 9]),
)  # fmt: skip
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_samples_are_divided_exactly(weights: list[float], extra: int, least: int, most: int | None) -> None:
    n = len(weights)
    total = n + extra
    out = apportion(np.array(weights), total, least, most)
    assert out.sum() == total
    assert out.min() >= min(least, total // n)
    assert most is None or out.max() <= max(most, -(-total // n))
    for i, j in itertools.permutations(range(n), 2):
        assert weights[i] <= weights[j] or out[i] >= out[j] - (weights[i] - weights[j] < 1e-6), "more for more weight"
    with pytest.raises(InputError, match="each needs at least one"):
        apportion(np.array(weights), n - 1)


def test_the_square_root_law() -> None:
    """Counts of bins with variances 0.04 and 0.25, three prompts in four of the first, at a mean of 4."""
    out = apportion(np.sqrt([0.04, 0.04, 0.04, 0.25]), 16_000_000)
    np.testing.assert_allclose(out / 1e6, [2.909091, 2.909091, 2.909091, 7.272727], atol=1e-6)


def test_hard_prompts_get_more_samples() -> None:
    ran = Ran(choose_prompts(divide(by_failure), least_tried()), ROWS, lambda i, s: float(i % 2), 12)
    late: Any = dict(zip(itertools.chain(*ran.ids[6:]), itertools.chain(*ran.counts[6:]), strict=True))
    assert min(late[i] for i in range(0, 24, 2)) > max(late[i] for i in range(1, 24, 2))


@pytest.mark.parametrize(
    "rule",
    [
        divide(by_variance, least=3, most=5), divide(by_variance, small_values(), least=3, most=5),
        samples_by_bin(4, 3, 5),
    ],
)  # fmt: skip
def test_bounds_that_a_budget_does_not_allow_are_an_error(rule: Any) -> None:
    """They would be relaxed to the mean, which is plain groups."""
    curriculum = choose_prompts(rule)(ROWS, 0)
    ids, state = curriculum.select(curriculum.init(), 4)
    assert curriculum.counts is not None
    assert curriculum.counts(state, ids, 12).tolist() == [3] * 4
    with pytest.raises(InputError, match="4 prompts share 11 samples, but each gets at least 3: raise group_size"):
        curriculum.counts(state, ids, 11)
    with pytest.raises(InputError, match="4 prompts share 21 samples, but each gets at most 5: lower group_size"):
        curriculum.counts(state, ids, 21)
