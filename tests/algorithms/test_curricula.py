"""Methods that choose prompts and numbers of samples: worked examples, loops, limits, and runs by name."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, prepared, random_batch
from token_loops import agrees, group_scores

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.prompts.craft_gui import craft_gui
from jaxrl_llm.algorithms.prompts.dars import dars, extra_samples
from jaxrl_llm.algorithms.prompts.drive_pre_grpo import drive_pre_grpo, parse_phases
from jaxrl_llm.algorithms.prompts.gdro import best_arms, bin_of, bin_weights, gdro, smoothed_losses
from jaxrl_llm.algorithms.prompts.sgpo import profile_class, sgpo
from jaxrl_llm.algorithms.prompts.v0_value import v0_value
from jaxrl_llm.algorithms.prompts.vade import vade
from jaxrl_llm.algorithms.regularisation.brorl import brorl
from jaxrl_llm.algorithms.score_function.spo_single_stream import spo_single_stream
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "rollouts"), str(TESTS / "training")]

import tiny_runs as runs  # noqa: E402
from choosing import Ran, rows_of, step_of  # noqa: E402
from fake_engine import LIMIT, begin, length_of  # noqa: E402
from fake_engine import Ran as Sampled  # noqa: E402

close = np.testing.assert_allclose


def chosen(algorithm: Any, rows: list[dict[str, Any]], rate: Any, steps: int, **options: Any) -> Ran:
    """Steps of the method's curriculum."""
    assert algorithm.prompts is not None
    return Ran(algorithm.prompts, rows, rate, steps, **options)


@pytest.mark.parametrize("name", ["vade", "drive_pre_grpo", "sgpo", "v0_value", "craft_gui"])
def test_credit_and_loss_are_grpos(name: str) -> None:
    batch, logp = random_batch(3)
    A = np.broadcast_to(group_scores(batch.reward, batch.group, ddof=0 if name == "sgpo" else 1)[:, None], logp.shape)
    agrees(get(name, kl_coefficient=0.0), batch, logp, A, average="sequence")


def test_vade_tries_prompts_that_are_solved_half_the_time() -> None:
    """Against a loop over the same posteriors: the share of tries in the middle third is near that of exact draws."""
    rows, rate = rows_of(60), lambda i, step: (0.02, 0.5, 0.98)[i // 20]
    ran = chosen(vade(), rows, rate, 60)
    alpha, beta, random, middle = np.ones(60), np.ones(60), np.random.default_rng(5), 0
    for step in range(60):
        p = random.beta(alpha, beta)
        tried = np.argsort(-p * (1 - p))[:4]
        right = random.binomial(8, [rate(int(i), step) for i in tried])
        others = np.setdiff1d(np.arange(60), tried)
        alpha[others], beta[others] = 1 + 0.99 * (alpha[others] - 1), 1 + 0.99 * (beta[others] - 1)
        alpha[tried], beta[tried] = 0.9 * alpha[tried] + right, 0.9 * beta[tried] + 8 - right
        middle += int(np.sum((tried >= 20) & (tried < 40))) if step >= 30 else 0
    mine = sum(20 <= i < 40 for i in itertools.chain(*ran.ids[30:]))
    assert mine > 80 < middle
    assert mine == pytest.approx(middle, abs=15)


def test_the_worked_examples_of_gdro() -> None:
    S = smoothed_losses(jnp.array([0.5, 0.1, -0.2]), jnp.array([0.9, 0.2, 0.0]), 0.1)
    close(S, [0.54, 0.11, -0.18], atol=1e-6)
    w = bin_weights(S, 1.0, 3.0)
    close(w, [1.716007, 1.116278, 0.835270], atol=1e-6)
    p = np.log([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    assert best_arms(p, np.array([3, 1]), np.array([2, 4, 8]), 16).tolist() == [4, 4]
    assert p[0, 1] + p[1, 1] == pytest.approx(-2.407946)
    old = jnp.array([4, 4, 4, 4])
    assert bin_of(jnp.array([0.55, 0.52, 0.38, 0.35]), old, 10, 0.04).tolist() == [5, 4, 4, 3], "with hysteresis"


@pytest.mark.parametrize("seed", range(4))
def test_arms_are_those_of_a_search(seed: int) -> None:
    random, arms = np.random.default_rng(seed), np.array([2, 3, 5, 7])
    p, count, total = np.log(random.dirichlet(np.ones(4), 3)), random.integers(1, 5, 3), int(random.integers(6, 40))
    every = [(abs(int(count @ arms[list(c)]) - total), -sum(p[b, k] for b, k in enumerate(c)), c)
             for c in itertools.product(range(4), repeat=3)]  # fmt: skip
    gap, cost, _ = min(every)
    out = best_arms(p, count, arms, total)
    assert abs(int(count @ out) - total) == gap
    assert -sum(p[b, arms.tolist().index(n)] for b, n in enumerate(out)) == pytest.approx(cost)


def test_gdro_against_a_loop_over_steps() -> None:
    method = gdro(bins=4, bandit_rate=2.0, kl_coefficient=0.0, hysteresis=0.1, most_weight=2.5)
    state = method.transform.init(RunFacts(prompts=3))
    tries, solved, bins, S = [0] * 3, [0] * 3, [0] * 3, [np.nan] * 4
    random = np.random.default_rng(0)
    for _ in range(8):
        r = random.integers(0, 2, 12).astype(float) * random.integers(0, 2, 3).repeat(4)
        group = np.repeat([0, 1, 2], 4)
        losses: dict[int, list[float]] = {}
        for i in range(3):
            tries[i], solved[i] = tries[i] + 1, solved[i] + int(r[group == i].max() > 0.5)
            acc = solved[i] / tries[i]
            target = min(int(4 * acc + 1e-6), 3)
            if tries[i] == 1:
                bins[i] = target
            while bins[i] < target and acc >= (bins[i] + 1) / 4 + 0.1 - 1e-6:
                bins[i] += 1
            while bins[i] > target and acc <= bins[i] / 4 - 0.1 + 1e-6:
                bins[i] -= 1
            losses.setdefault(bins[i], []).append(1 - r[group == i].mean())
        for b, found in losses.items():
            S[b] = np.mean(found) if np.isnan(S[b]) else 0.9 * S[b] + 0.1 * np.mean(found)
        weight = [min(np.exp(2.0 * np.clip(S[bins[i]], -3, 3)), 2.5) for i in range(3)]
        batch = batch_of(np.ones((12, 1)), r, -np.ones((12, 1)), group)
        state, ready = method.transform.apply(state, batch)
        close(ready.advantages[:, 0], group_scores(r, group, ddof=0) * np.repeat(weight, 4), atol=1e-5)


def test_gdro_without_strength_is_grpo() -> None:
    batch, _ = random_batch(1)
    close(advantages(gdro(bandit_rate=0.0), batch), advantages(grpo(ddof=0), batch), rtol=1e-6)


def test_gdro_gives_arms_that_failed_less_more_often() -> None:
    """Prompts of one bin fail less with 6 samples: a bandit that compares them prefers 6 to 2 once all were tried."""
    method = gdro("samples", least_samples=2, most_samples=6, bandit_rate=1.0)
    ran = chosen(method, rows_of(16), lambda i, step: float(i >= 8), 40, group=4)
    counts = np.array(ran.counts)
    assert counts.min() >= 2
    assert counts.max() <= 6
    assert len(np.unique(counts)) > 2, "several numbers are tried"


def test_the_worked_example_of_dars() -> None:
    expected = {0: (27, 9, 56, 23), 1: (11, 5, 24, 14), 2: (3, 2, 8, 6), 3: (1, 1, 3, 3), 4: (0,) * 4, 8: (0,) * 4}
    for right, extra in expected.items():
        kinds = itertools.product(("equal", "hard"), (False, True))
        assert tuple(extra_samples(right / 8, 8, 64, rule, scaled) for rule, scaled in kinds) == extra
    assert extra_samples(0, 8, 32, "equal") == 24, "32 samples at most"


def test_dars_samples_more_of_hard_prompts() -> None:
    """The reward of the fake engine is the number of tokens, at least 2: solved. A row that wants more is not."""
    rollout = dars(most_samples=12).rollout
    assert rollout is not None
    (solved,) = Sampled(begin([3], 4), Rule(), rollout).found.groups
    assert [episode.sample for episode in solved.episodes] == list(range(4))
    import fake_engine

    async def never(task: Any, episodes: Any) -> Any:
        return [episode.scored(float(episode.sample == 1 and task.prompt_id == 4), {}) for episode in episodes]

    before, fake_engine.score = fake_engine.score, never
    try:
        ran = Sampled(begin([3, 4], 4), Rule(), rollout)
    finally:
        fake_engine.score = before
    hard, quarter = ran.found.groups
    assert [episode.sample for episode in hard.episodes] == list(range(10)), "6 more after 0 of 4"
    assert len(quarter.episodes) == 4 + extra_samples(0.25, 4, 12, "equal")
    assert [episode.size for episode in hard.episodes] == [min(length_of(3, i), LIMIT) for i in range(10)]


def test_dars_against_a_loop() -> None:
    batch, logp = random_batch(5, groups=(6, 3, 2))
    group, r = np.asarray(batch.group), np.asarray(batch.reward).copy()
    r[group == 1] = 1.0
    batch = batch.replace(reward=jnp.asarray(r))
    A = np.array([r[i] - r[group == group[i]].mean() for i in range(11)])
    weights = np.asarray(batch.action_mask) * (group != 1)[:, None]
    agrees(dars(), batch, logp, np.broadcast_to(A[:, None], logp.shape), weights=weights, average="token")


def test_brorl_against_a_loop() -> None:
    batch, logp = random_batch(6, groups=(5, 3, 3))
    group, r = np.asarray(batch.group), np.asarray(batch.reward).copy()
    r[group == 2] = 0.0
    batch = batch.replace(reward=jnp.asarray(r))
    A = np.broadcast_to(group_scores(r, group)[:, None], logp.shape)
    weights = np.asarray(batch.action_mask) * (group != 2)[:, None]
    agrees(brorl(kl_coefficient=0.0), batch, logp, A, weights=weights, high=0.4, average="token")


def mass_change(p: Any, right: Any, sampled: Any, R_c: float, R_w: float, step: float, N: int) -> tuple[float, float]:
    """The change of the right answers' mass to first order, and its last term alone."""
    Q, squares = p[right].sum(), p**2
    S = np.sum(np.where(right, R_c, R_w)[sampled] * p[sampled])
    A2, B2 = squares[right & sampled].sum(), squares[~right & sampled].sum()
    U_c2, U_w2 = squares[right & ~sampled].sum(), squares[~right & ~sampled].sum()
    last = S * (Q * U_w2 - (1 - Q) * U_c2)
    return step / N * ((R_c - S) * (1 - Q) * A2 + (S - R_w) * Q * B2 + last), step / N * last


def test_the_worked_example_of_brorl_and_its_last_term() -> None:
    p, right, sampled = np.array([0.3, 0.2, 0.25, 0.15, 0.1]), np.arange(5) < 2, np.isin(np.arange(5), [0, 2])
    S = 0.3 - 0.25
    z = np.log(p) + 0.01 / 2 * p * (np.where(right, 1.0, -1.0) * sampled - S)
    after = np.exp(z) / np.exp(z).sum()
    assert after[right].sum() - 0.5 == pytest.approx(3.768890e-4, abs=1e-9)
    assert mass_change(p, right, sampled, 1.0, -1.0, 0.01, 2)[0] == pytest.approx(3.768750e-4, abs=1e-9)
    random = np.random.default_rng(0)
    p = random.dirichlet(np.full(200, 0.2))
    right = random.random(200) < 0.3
    share = []
    for N in (16, 64, 256, 1024):
        draws = [np.bincount(random.choice(200, N, p=p), minlength=200) > 0 for _ in range(200)]
        found = np.array([mass_change(p, right, seen, 1.0, -1.0, N, N) for seen in draws])
        share.append(np.abs(found[:, 1]).mean() / (found[:, 0] - found[:, 1]).mean())
    assert all(after < before / 2 for before, after in itertools.pairwise(share)), "what was not sampled matters less"
    assert share[-1] < 1e-3 < share[0]


def test_the_worked_example_of_sgpo() -> None:
    classes = profile_class(np.arange(9) / 8, 0.75).tolist()
    assert classes[1:7] == [8, 4, 2, 2, 2, 2]
    assert len({classes[0], *classes[7:]}) == 2, "unsolved, and twice trivial"
    batch = batch_of(np.ones((4, 1)), [1.0, 0, 1, 1], np.zeros((4, 1)), group=[0, 0, 1, 1])
    close(advantages(sgpo(kl_coefficient=0.0), batch)[:, 0], [1, -1, 0, 0], atol=1e-5)


def test_sgpo_measures_drops_and_sorts() -> None:
    levels = [0.0, 0.125, 0.25, 0.5, 1.0]
    rows = rows_of(20, p=[levels[i % 5] for i in range(20)])
    ran = chosen(sgpo(stage_steps=2, profile="p", unsolved_share=0.0), rows, lambda i, step: 0.5, 6)
    assert [{i % 5 for i in ids} for ids in ran.ids] == [{3}, {3}, {2}, {2}, {1}, {1}]
    assert [counts[0] for counts in ran.counts] == [2, 2, 4, 4, 8, 8]
    measured = chosen(sgpo(stage_steps=2, unsolved_share=0.0), rows, lambda i, step: float(i % 5 == 4), 8)
    assert sorted(itertools.chain(*measured.ids[:5])) == list(range(20))
    assert measured.metrics["curriculum/left_out/solved"] == 4 / 20
    assert measured.metrics["curriculum/left_out/unsolved"] == 16 / 20
    assert measured.metrics["curriculum/forced"] > 0, "no prompt is left: drawn from all, and counted"


def test_drive_keeps_the_prompts_that_fail() -> None:
    assert parse_phases("72x64,50x32") == ((72, 64), (50, 32))
    with pytest.raises(InputError, match="phases is '72', but must be"):
        drive_pre_grpo(phases="72")

    def rate(i: int, step: int) -> float:
        if i >= 5:
            return 1.0
        return i / 8 if step < 5 else float(i >= 2)

    ran = chosen(drive_pre_grpo(5, "5x4,2x9", 2), rows_of(20), rate, 12)
    assert sorted(itertools.chain(*ran.ids[:5])) == list(range(20)), "one pass over all"
    assert set(itertools.chain(*ran.ids[5:9])) == set(range(5))
    assert set(itertools.chain(*ran.ids[9:])) == {0, 1}
    assert {tuple(counts) for counts in ran.counts[5:]} == {(16, 16)}, "twice as many samples of half the prompts"


def test_v0_gives_samples_where_prompts_are_mixed() -> None:
    """Prompts of one kind are never solved; of the other half are, by a number that the model can read too."""
    kinds = [[[float(i % 2), float(i // 2 % 2 * (i % 2)), 1.0]] for i in range(40)]
    rows = [{"prompt": f"prompt {i}", "policy_embedding": np.array(kinds[i], np.float32)} for i in range(40)]
    sizes = {"queries": 4, "bottleneck": 4, "width": 16, "layers": 1, "value_rate": 0.01}
    ran = chosen(v0_value(least_samples=1, **sizes), rows, lambda i, step: 0.5 if i % 2 else 0.0, 16, prompts=8)
    late = list(zip(itertools.chain(*ran.ids[8:]), itertools.chain(*ran.counts[8:]), strict=True))
    mixed, hopeless = (np.mean([n for i, n in late if i % 2 == kind]) for kind in (1, 0))
    assert mixed > 1.5 * hopeless
    assert ran.metrics["curriculum/prediction_error"] < 0.25


def test_craft_gui_trains_on_stages() -> None:
    rows = rows_of(12, stage=["easy", "hard", "medium"] * 4)
    ran = chosen(craft_gui(stage_steps=2, order="easy,medium,hard"), rows, lambda i, step: 0.5, 7)
    assert [{i % 3 for i in ids} for ids in ran.ids] == [{0}] * 2 + [{2}] * 2 + [{1}] * 3
    with pytest.raises(InputError, match="the column 'stage', which 12 of 12 prompts do not have"):
        chosen(craft_gui(), rows_of(12), lambda i, step: 0.5, 1)


def test_spo_draws_uncertain_prompts_by_its_tracker() -> None:
    """The curriculum's tracker is the baseline's, so the weights are those of its values; half the prompts are solved
    each time or never, and are drawn less and less."""
    method = spo_single_stream()
    assert method.prompts is not None
    curriculum, state, drawn = method.prompts(rows_of(6), 0), method.transform.init(RunFacts(prompts=6)), list[int]()
    at = curriculum.init()
    for step in range(60):
        ids, at = curriculum.select(at, 3)
        rewards = [float(step % 2) if i < 3 else float(i % 2) for i in ids]
        drift = jnp.full(3, 0.01)
        batch = batch_of(np.ones((3, 1)), rewards, np.zeros((3, 1)), [0, 1, 2], prompt_id=ids).with_info(drift=drift)
        state, ready = method.transform.apply(state, batch)
        at = curriculum.on_update(curriculum.observe(at, step_of(ids, rewards)), ready)
        close(at["rule0_value"], state.value, rtol=1e-4)
        drawn += ids.tolist()
    often = np.bincount(drawn, minlength=6)
    assert often[:3].min() > often[3:].max()


RUNS: dict[str, dict[str, Any]] = {
    "brorl": {"rounds": 1}, "craft_gui": {"column": "answer", "stage_steps": 1}, "dars": {"most_samples": 8},
    "drive_pre_grpo": {"first_steps": 1, "phases": "4x1", "times": 2}, "gdro": {"bandit_rate": 1.0},
    "sgpo": {"stage_steps": 1}, "v0_value": {"queries": 4, "bottleneck": 4, "value_steps": 4}, "vade": {},
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_by_name(name: str, tmp_path: Path) -> None:
    size = {"sgpo": 8, "brorl": 32}.get(name, 4)
    config = runs.small_config(
        tmp_path, algorithm=name, hyperparameters=RUNS[name], reward="starts_even", steps=2, eval_size=0,
        group_size=size, minibatches=1, micro_batches=8 if name == "brorl" else 1,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2
    assert all(np.isfinite(line["loss"]) for line in lines)
    if name not in ("brorl", "dars", "gdro"):
        assert all(0 < line["curriculum/tried"] <= 1 for line in lines)
    rows = [len(np.asarray(one.scored.batch.group)) for one in taken]
    assert rows == [4 * size] * 2 or name == "dars"
    if name == "drive_pre_grpo":
        assert np.bincount(np.asarray(taken[1].scored.batch.group)).tolist() == [8, 8]


@pytest.mark.heavy
def test_gdro_gives_numbers_of_samples_in_a_run(tmp_path: Path) -> None:
    config = runs.small_config(
        tmp_path, algorithm="gdro", hyperparameters={"controller": "samples"}, reward="starts_even", steps=2,
        eval_size=0, minibatches=1,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    for one in taken:
        sizes = np.bincount(np.asarray(one.scored.batch.group))
        assert sizes.sum() == 16
        assert sizes.min() >= 2


def test_prepared_rows_keep_their_shape() -> None:
    batch, _ = random_batch(2)
    assert prepared(gdro(), batch).advantages.shape == batch.tokens.shape
