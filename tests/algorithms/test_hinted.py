"""Methods with hints and rewritten prompts: worked examples, loops, and the limits in which they are GRPO."""

from __future__ import annotations

from math import comb
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, finite_differences, gradient_of, loss_of, prepared, random_batch
from reward_loops import assert_like_loop, group_scores, rows_of

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.guidance.ampo_multi_guidance import ampo_multi_guidance
from jaxrl_llm.algorithms.guidance.clpo import clpo
from jaxrl_llm.algorithms.guidance.ghpo import ghpo
from jaxrl_llm.algorithms.guidance.icpo_in_context import icpo_in_context
from jaxrl_llm.algorithms.guidance.nurl import nurl
from jaxrl_llm.algorithms.guidance.sage_self_hint import sage_self_hint
from jaxrl_llm.algorithms.guidance.scaf_grpo import scaf_grpo
from jaxrl_llm.algorithms.rewards.hbpo import hbpo
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.utils.errors import InputError

BATCH, LOGP = random_batch(11)
GROUP, REWARD = np.asarray(BATCH.group), np.asarray(BATCH.reward, np.float64)
N = len(GROUP)
MASK = np.asarray(BATCH.action_mask)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (ghpo(), {"epsilon": 1e-4}),
        (scaf_grpo(), {}),
        (nurl(), {"ddof": 0}),
        (sage_self_hint(), {"ddof": 0, "high": 0.28}),
        (ghpo(kl_coefficient=0.1, average="sequence"), {"epsilon": 1e-4, "kl": 0.1, "average": "sequences"}),
    ],
)
def test_hinted_groups_against_a_loop(method: Any, options: dict[str, Any]) -> None:
    A = group_scores(REWARD, GROUP, options.pop("ddof", 1), options.pop("epsilon", 1e-6))
    assert_like_loop(method, BATCH, LOGP, A, **options)


def test_one_rescued_sample_of_eight() -> None:
    found = advantages(scaf_grpo(), rows_of([1, 0, 0, 0, 0, 0, 0, 0]))
    np.testing.assert_allclose(found[:8, 0], [2.474867, *[-0.353552] * 7], atol=2e-6)


def test_seven_hinted_samples_of_eight_are_right() -> None:
    found = advantages(nurl(epsilon=0.0), rows_of([1] * 7 + [0]))
    np.testing.assert_allclose(found[:8, 0], [*[0.377963] * 7, -2.645743], atol=1.5e-5)
    found = advantages(nurl(epsilon=0.0), rows_of([1] + [0] * 7))
    np.testing.assert_allclose(found[:8, 0], [2.645743, *[-0.377963] * 7], atol=1.5e-5)


def test_the_chance_that_a_group_teaches() -> None:
    """u(p) = 1 - (1 - p)^8 - p^8, summed over the groups that the credit tells apart."""
    teaches = [bool(np.any(advantages(sage_self_hint(), rows_of([1] * k + [0] * (8 - k))))) for k in range(9)]
    for p, u in ((0.01, 0.077255), (0.1, 0.569533), (0.5, 0.992188)):
        chance = sum(comb(8, k) * p**k * (1 - p) ** (8 - k) for k in range(9) if teaches[k])
        assert abs(chance - u) < 1e-6


def test_without_hints_they_are_grpo() -> None:
    """The loss and credit are GRPO's own; that programs without hints are plain groups is a test of the programs."""
    for method, same in (
        (ghpo(), grpo(kl_coefficient=0.0, epsilon=1e-4, average="token")),
        (scaf_grpo(), grpo(kl_coefficient=0.0, average="token")),
        (nurl(), grpo(kl_coefficient=0.0, ddof=0, average="token")),
        (sage_self_hint(), grpo(kl_coefficient=0.0, clip_high=0.28, ddof=0, average="token")),
    ):
        assert (repr(method.transform), repr(method.objective)) == (repr(same.transform), repr(same.objective))
    plain = BATCH.with_info(rewritten=jnp.zeros(N), hard=jnp.zeros(N))
    same = grpo(kl_coefficient=0.001, average="token")
    np.testing.assert_allclose(gradient_of(clpo(), plain, LOGP), gradient_of(same, BATCH, LOGP), atol=1e-7)


def test_when_hints_begin() -> None:
    def start(method: Any) -> str:
        assert isinstance(method.rollout, Rollout)
        return repr(method.rollout).rpartition(", ")[2].rstrip(")")

    assert start(scaf_grpo()) == "50"
    assert start(scaf_grpo(total_steps=400)) == "60"
    assert start(scaf_grpo(hints_from=3, total_steps=400)) == "3"
    assert nurl(drop_solved=False).curriculum is None
    assert nurl(source="column").rollout.columns == ("hint",)  # type: ignore[union-attr]
    assert nurl().rollout.columns == ("answer",)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="source"):
        nurl(source="mine")  # type: ignore[arg-type]


def test_clpo_against_a_loop() -> None:
    """Old and new prompts are groups of their own, uniform ones are left out, hard ones have half the penalty."""
    new = np.isin(np.arange(N), [1, 3, 5, 8, 9])
    reward = np.where((GROUP == 1) & ~new, 1.0, REWARD)
    reward[[1, 3]] = [0.0, 1.0]
    hard = GROUP != 2
    group = 2 * GROUP + new
    kept = np.array([len({reward[j] for j in range(N) if group[j] == group[i]}) > 1 for i in range(N)])
    assert 0 < kept.sum() < N
    A = group_scores(np.where(kept, reward, np.nan), group)
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
    batch = batch.with_info(rewritten=jnp.asarray(new, jnp.float32), hard=jnp.asarray(hard, jnp.float32))
    method = clpo(kl_coefficient=0.2)
    np.testing.assert_allclose(advantages(method, batch), A[:, None] * MASK, rtol=2e-5, atol=3e-6)
    np.testing.assert_array_equal(prepared(method, batch).group, BATCH.group)
    old, reference = (np.asarray(x, np.float64) for x in (BATCH.behaviour_logp, BATCH.reference_logp))

    def loop(logp: np.ndarray) -> float:
        total, tokens = 0.0, 0
        for i, t in zip(*np.nonzero(MASK & kept[:, None]), strict=True):
            rho, l = np.exp(logp[i, t] - old[i, t]), logp[i, t] - reference[i, t]
            total -= min(rho * A[i], min(max(rho, 0.8), 1.2) * A[i])
            total += 0.2 * (0.5 if hard[i] else 1.0) * (np.exp(-l) - 1 + l)
            tokens += 1
        return total / tokens

    assert abs(loss_of(method, batch, LOGP) - loop(LOGP)) < 2e-6
    np.testing.assert_allclose(gradient_of(method, batch, LOGP), finite_differences(loop, LOGP), atol=2e-6)


def test_clpo_with_nothing_to_learn_keeps_the_batch() -> None:
    batch = BATCH.replace(reward=jnp.zeros(N)).with_info(rewritten=jnp.zeros(N), hard=jnp.ones(N))
    ready = prepared(clpo(), batch)
    assert not np.any(ready.advantages)
    assert np.asarray(ready.loss_weights)[MASK].all()


def test_ampo_chooses_the_teachers_whose_reasoning_fits() -> None:
    """Four teachers' answers; two have the likeliest reference answer, by a loop over its tokens."""
    random, helped = np.random.default_rng(3), np.isin(np.arange(N), [0, 1, 2, 3])
    # Rows 0 to 3 are the first group, whose own samples were left out by the rollout.
    lengths = MASK.sum(axis=1)
    span = np.array([[max(n - 2, 0), n] for n in lengths], np.float32)
    span[2] = 0.0
    old = -random.gamma(2.0, 0.5, MASK.shape) * MASK
    batch = BATCH.replace(old_logp=jnp.asarray(old, jnp.float32)).with_info(
        guided=jnp.asarray(helped), reference_span=jnp.asarray(span)
    )
    favour = [np.mean([np.exp(old[i, t]) for t in range(int(a), int(b))] or [0]) for i, (a, b) in enumerate(span[:4])]
    best = set(np.argsort(favour)[-2:].tolist())
    weights = np.asarray(prepared(ampo_multi_guidance(), batch).loss_weights)
    assert {i for i in range(4) if weights[i].any()} == best
    assert 2 not in best, "its text does not have the reference answer"
    assert weights[4:][MASK[4:]].all()
    every = np.asarray(prepared(ampo_multi_guidance(replaced=4), batch).loss_weights)
    assert every[MASK].all()


def test_what_they_sample_is_part_of_them() -> None:
    assert repr(icpo_in_context().rollout) == 'in_context("examples", 1, reaches(1.0))'
    assert repr(icpo_in_context(reject=False).rollout) == "in_context()"
    assert repr(hbpo(max_length=4096).rollout) == "with_budgets(512, 1024, 2048, 2560)"
    assert repr(hbpo(max_length=8).rollout) == "with_budgets(1, 2, 4, 5)"
    for wrong in ("", "0", "1", "a few"):
        with pytest.raises(InputError, match=r"hbpo: shares is .*, but must be numbers between 0 and 1"):
            hbpo(shares=wrong)
