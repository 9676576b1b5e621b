"""Pairs of rows in a batch: TRL's token-level cases in double precision, slices, and which rows are pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.core.trajectory import SHARED, PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.core.transform import Objective, chain
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.objectives import (
    all_pairs,
    best_and_worst,
    chosen_likelihood,
    on_policy_weights,
    pairwise,
    shared_length,
    weighted_losses,
)
from jaxrl_llm.objectives.preference.by_name import PAIR_LOSSES, loss_named
from jaxrl_llm.objectives.preference.losses import aot, robust, sigmoid
from jaxrl_llm.selection.rows import row_noise

TOKENS = Path(__file__).parents[1] / "preference_vectors" / "dpo_token.npz"


def batch_of(mask: np.ndarray, reference: np.ndarray, reward: Any, group: Any, **info: Any) -> Trajectories:
    mask, (N, L) = np.asarray(mask, bool), mask.shape
    return Trajectories(
        tokens=jnp.zeros((N, L), jnp.int32), token_mask=jnp.asarray(mask), action_mask=jnp.asarray(mask),
        behaviour_logp=jnp.zeros((N, L)), policy_step=jnp.zeros((N, L), jnp.int32),
        turn=jnp.where(jnp.asarray(mask), 0, -1).astype(jnp.int32), group=jnp.asarray(group, jnp.int32),
        prompt_id=jnp.asarray(group, jnp.int32), truncated=jnp.zeros(N, bool), reward=jnp.asarray(reward, jnp.float32),
        reference_logp=jnp.asarray(reference), info={name: jnp.asarray(x) for name, x in info.items()},
    )  # fmt: skip


def loss_of(objective: Objective, batch: Trajectories, logp: Any) -> jax.Array:
    return objective(PolicyOutputs(logp, jnp.zeros_like(logp)), batch)[0]


@pytest.mark.heavy
def test_token_cases_of_trl() -> None:
    with np.load(TOKENS) as file, jax.enable_x64(True):
        given = {key.removeprefix("s0/"): jnp.asarray(x) for key, x in file.items() if key.startswith("s0/")}
        order = np.arange(16).reshape(2, 8).T.reshape(-1)  # pair after pair, rejected rows are 8 to 15
        logp, mask = given["token_logps"][order], np.asarray(given["mask"])[order] > 0
        plain = batch_of(mask, given["ref_token_logps"][order], np.tile([1.0, 0.0], 8), np.repeat(np.arange(8), 2))
        plain = plain.replace(old_logp=logp).with_info(squared_probability=jnp.exp(given["log_sum_sq_probs"][order]))
        for number, case in enumerate(map(json.loads, file["cases"])):
            weights, smoothing = case.get("weights", [1.0] * 3), case.get("label_smoothing")
            terms = [
                weight * (chosen_likelihood() if name == "sft" else pairwise(loss_named(name, smoothing), case["beta"]))
                for name, weight in zip(case["losses"], weights, strict=False)
            ]
            lengths = [shared_length(case["ld_alpha"])] if "ld_alpha" in case else []
            before = chain(*lengths, *([on_policy_weights()] if case.get("wpo") else []))
            batch = before.apply(before.init(), plain)[1]
            objective: Any = sum(terms)
            value, by = jax.value_and_grad(lambda x, f=objective, b=batch: loss_of(f, b, x))(logp)  # type: ignore
            # Weights of tokens and rewards of a batch are float32.
            np.testing.assert_allclose(value, file["mean"][number], rtol=1e-6)
            expected = file["grad_tokens_s0"][number][order] * mask
            np.testing.assert_allclose(by, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())


def random_batch(N: int = 12, L: int = 6) -> tuple[Trajectories, jax.Array]:
    random = np.random.default_rng(3)
    mask = np.arange(L) < random.integers(2, L + 1, N)[:, None]
    logp = -random.gamma(2.0, 0.5, (N, L))
    reward = random.integers(0, 3, N).astype(float)
    reward[4] = np.nan
    return batch_of(mask, logp + 0.5 * random.normal(size=(N, L)), reward, np.repeat([0, 1, 2, 3], [4, 4, 3, 1])), logp


@pytest.mark.parametrize("pairs", [best_and_worst, all_pairs])
def test_pairs_by_loop_however_they_are_split(pairs: Any) -> None:
    batch, logp = random_batch()
    mask, group, reward = (np.asarray(x) for x in (batch.action_mask, batch.group, batch.reward))
    u = ((logp - np.asarray(batch.reference_logp)) * mask).sum(1)
    found, noise = [], np.asarray(row_noise(batch, 0))
    for number in np.unique(group):
        rows = [i for i in np.flatnonzero(group == number) if not np.isnan(reward[i])]
        if pairs is all_pairs:
            found += [(i, j) for i in rows for j in rows if reward[i] > reward[j]]
        elif reward[rows].max() > reward[rows].min():
            ends = (max(rows, key=lambda i, sign=sign: (sign * reward[i], noise[i])) for sign in (1, -1))
            found.append(tuple(ends))
    expected = np.mean([np.log1p(np.exp(-0.3 * (u[i] - u[j]))) for i, j in found])
    objective = pairwise(beta=0.3, pairs=pairs())
    value, metrics = objective(PolicyOutputs(jnp.asarray(logp, jnp.float32), jnp.zeros(mask.shape)), batch)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["rewards/margins"]) == pytest.approx(
        np.mean([0.3 * (u[i] - u[j]) for i, j in found]), rel=1e-4
    )
    assert float(metrics["rewards/accuracies"]) == pytest.approx(np.mean([u[i] > u[j] for i, j in found]))

    whole = jax.grad(lambda x: loss_of(objective, batch, x))(jnp.asarray(logp, jnp.float32))
    ready = objective.refreshed(
        PolicyOutputs(jnp.asarray(logp, jnp.float32), jnp.zeros(mask.shape)), with_totals(batch)
    )
    shared, total = {name: getattr(ready, name) for name in SHARED}, dict[str, float]()
    for first in (0, 1):
        rows = np.arange(first, len(logp), 2)
        part = map_rows(lambda x, rows=rows: x[rows], ready).replace(**shared)

        def of_part(x: Any, part: Any = part) -> Any:
            return objective.function(PolicyOutputs(x, jnp.zeros_like(x)), part)

        by, some = jax.grad(of_part, has_aux=True)(jnp.asarray(logp[rows], jnp.float32))
        np.testing.assert_allclose(by, whole[rows], atol=1e-7)
        total = {name: total.get(name, 0.0) + float(x) for name, x in some.items()}
    for name, x in metrics.items():
        assert total[name] == pytest.approx(float(x), rel=1e-5), name


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
def test_rows_without_a_partner_change_nothing(name: str) -> None:
    batch, logp = random_batch()
    without = np.flatnonzero(~np.isin(np.arange(12), [4, 11]))  # not scored, and alone in its group
    objective = pairwise(PAIR_LOSSES[name])
    few = map_rows(lambda x: x[without], batch)
    logp = jnp.asarray(logp, jnp.float32)
    value, by = jax.value_and_grad(lambda x: loss_of(objective, batch, x))(logp)
    expected, of_few = jax.value_and_grad(lambda x: loss_of(objective, few, x))(logp[without])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(by[without], of_few, rtol=1e-4, atol=1e-7)
    assert (np.asarray(by)[[4, 11]] == 0).all()


def test_a_batch_without_pairs_has_no_loss() -> None:
    batch, logp = random_batch()
    batch = batch.replace(reward=jnp.ones(12))
    for loss in PAIR_LOSSES.values():
        value, by = jax.value_and_grad(lambda x, loss=loss: loss_of(pairwise(loss), batch, x))(jnp.asarray(logp))
        assert float(value) == 0
        assert (np.asarray(by) == 0).all()


def test_margins_mixtures_and_own_functions() -> None:
    batch, logp = random_batch()
    logp = jnp.asarray(logp, jnp.float32)
    own = pairwise(lambda pairs, beta: beta * (pairs.chosen_logp - pairs.rejected_logp), 2.0, against=None)
    rows = best_and_worst()(batch)
    sums = np.asarray(jnp.sum(logp * batch.action_mask, axis=1))
    at = np.flatnonzero(rows.valid)
    expected = 2 * (sums[at] - sums[np.asarray(rows.rejected)[at]]).mean()
    assert float(loss_of(own, batch, logp)) == pytest.approx(float(expected), rel=1e-5)
    shifted = pairwise(lambda pairs, beta: pairs.margin)
    margin = np.where(np.arange(12) == at[0], 3.0, np.nan)
    assert float(loss_of(shifted, batch.with_info(margin=jnp.asarray(margin)), logp)) == pytest.approx(3 / len(at))
    both = weighted_losses((robust, 1.0), (aot, 2.0))
    parts = float(loss_of(pairwise(robust), batch, logp)) + 2 * float(loss_of(pairwise(aot), batch, logp))
    assert float(loss_of(pairwise(both), batch, logp)) == pytest.approx(parts, rel=1e-5)


@pytest.mark.heavy
def test_slices_of_whole_groups_need_no_pass_over_the_batch_before() -> None:
    """The gradient in micro-batches is that of the whole batch, and the policy sees each row forward but once."""
    policy, params, _ = load_policy(Path(__file__).parents[1] / "vectors" / "llama_tied")
    random, mask = np.random.default_rng(0), np.tile(np.arange(9) >= 4, (8, 1))
    batch = batch_of(mask, -random.gamma(2.0, 1.0, (8, 9)) * mask, [1, 0] * 4, np.repeat(range(4), 2))
    tokens = random.integers(5, 60, (8, 9))
    tokens[1::2, :4] = tokens[::2, :4]
    batch = batch.replace(tokens=jnp.asarray(tokens, jnp.int32), token_mask=jnp.ones((8, 9), bool), info=None)
    seen: dict[tuple[str, int], int] = {}
    found = {}
    for name, loss in (("alone", sigmoid), ("across", aot)):
        objective = pairwise(loss, 0.1)
        assert objective.by_groups == (name == "alone")
        for parts in (1, 4):
            steps = plan_steps(batch, micro_batches=parts)
            assert steps.together
            slices = jax.tree.map(lambda x: x[0], steps.in_order)
            program = jax.jit(gradient, static_argnums=(0, 1)).lower(policy, objective, params, batch, slices).compile()
            seen[name, parts] = sum(" while(" in line for line in program.as_text().splitlines())
            found[name, parts] = program(params, batch, slices)
        for one, other in zip(*map(jax.tree.leaves, (found[name, 1], found[name, 4])), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
    assert seen["across", 4] > seen["alone", 4], "another loop over the slices"
    mixed = pairwise(sigmoid, 0.1) + 0.5 * pairwise(aot, 0.1)
    assert not mixed.by_groups
    assert (pairwise(sigmoid, 0.1) + 0.5 * pairwise(sigmoid, 0.2)).by_groups
