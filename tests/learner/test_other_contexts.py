"""What the policy says of an answer before each turn, and of a turn after a blank, against whole logits of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.outputs import after_turns, with_blank
from jaxrl_llm.models import load_policy

MODEL = Path(__file__).resolve().parents[1] / "vectors" / "llama_tied"
NEEDS = frozenset({"answer_logp", "blanked_logp", "old_logp"})
ROWS = [  # lengths: prompt, turn, observation, turn ...
    [3, 2, 2, 3, 1, 1],
    [2, 2, 3, 2],
    [3, 1, 2, 2, 2, 2],
    [2, 4],
]
ANSWERS = [[-2 - 9, 5, 6], [7, 8, 9], [], [-2 - 4, 3]]


def made() -> Trajectories:
    """Rows of up to three turns whose first token of an observation stays; one row has no answer."""
    random, L = np.random.default_rng(0), max(map(sum, ROWS))
    tokens, turn = np.zeros((4, L), np.int32), np.full((4, L), -1, np.int32)
    blanked, answers = np.full((4, L), np.nan, np.float32), np.full((4, 4), -1.0, np.float32)
    for i, (sizes, answer) in enumerate(zip(ROWS, ANSWERS, strict=True)):
        tokens[i, : sum(sizes)] = random.integers(3, 200, sum(sizes))
        answers[i, : len(answer)] = answer
        place = 0
        for k, size in enumerate(sizes):
            if k % 2:
                turn[i, place : place + size] = k // 2
            elif k and size > 1:
                blanked[i, place + 1 : place + size] = 11 + k
            place += size
    mask = np.arange(L) < np.asarray(list(map(sum, ROWS)))[:, None]
    rows: Any = np.arange(4, dtype=np.int32)
    zeros = np.zeros((4, L), np.float32)
    batch = Trajectories(
        tokens=tokens, token_mask=mask, action_mask=turn >= 0, behaviour_logp=zeros,
        policy_step=zeros.astype(np.int32), turn=turn, group=rows // 2, prompt_id=rows, truncated=rows < 0,
        temperature=np.full(4, 0.8, np.float32), state_key=np.zeros((4, 4), np.uint32), reward=zeros[:, 0],
        info={"answer_tokens": answers, "blanked": blanked},
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch)


def test_rows_after_turns_are_what_came_before_and_the_answer() -> None:
    batch = made()
    tokens, (L, A) = np.asarray(batch.tokens), (batch.tokens.shape[1], 4)
    rows = after_turns(batch, batch.info["answer_tokens"], 1)  # type: ignore[index]
    assert rows.tokens.shape == (4, L + A)
    known = np.asarray(rows.token_mask)
    assert np.asarray(rows.tokens)[0][known[0]].tolist() == [*tokens[0, :7].tolist(), 9, 5, 6]
    assert np.flatnonzero(rows.action_mask[0]).tolist() == [8, 9], "what opens the answer does not count"
    assert np.asarray(rows.tokens)[1][known[1]].tolist() == [*tokens[1, :7].tolist(), 7, 8, 9]
    assert not rows.action_mask[2:].any(), "no answer, and no such turn"


def test_a_blank_changes_one_observation_and_counts_its_turn_alone() -> None:
    batch = made()
    rows = with_blank(batch, batch.info["blanked"], 1)  # type: ignore[index]
    changed = np.asarray(rows.tokens != batch.tokens)
    assert [np.flatnonzero(row).tolist() for row in changed] == [[6], [5, 6], [5], []]
    assert [int(x) for x in rows.action_mask.sum(axis=1)] == [3, 2, 2, 0]
    rows = with_blank(batch, batch.info["blanked"], 2)  # type: ignore[index]
    assert [np.flatnonzero(row).tolist() for row in np.asarray(rows.tokens != batch.tokens)] == [[], [], [9], []]
    assert [int(x) for x in rows.action_mask.sum(axis=1)] == [0, 0, 2, 0]


def log_probabilities(policy: Any, params: Any, ids: list[int]) -> np.ndarray:
    """Of each token after the first, given those before it."""
    z = np.asarray(policy.logits(params, jnp.asarray([ids], jnp.int32)), np.float64)[0] / 0.8
    z = z - z.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return np.asarray([np.nan, *(logp[t - 1, ids[t]] for t in range(1, len(ids)))])


@pytest.mark.heavy
def test_they_are_those_of_rows_written_out() -> None:
    policy, params, _ = load_policy(MODEL)
    batch = made()
    found = provide(policy, NEEDS, params, None, batch)
    answers, blanks = (np.asarray(found.info[name]) for name in ("answer_logp", "blanked_logp"))  # type: ignore[index]
    assert answers.shape == (4, 4)
    tokens, turn = np.asarray(batch.tokens), np.asarray(batch.turn)
    blanked = np.asarray(batch.info["blanked"])  # type: ignore[index]
    for i, (sizes, answer) in enumerate(zip(ROWS, ANSWERS, strict=True)):
        for k in range(4):
            start = int(np.argmax(turn[i] == k))
            if not answer or k >= len(sizes) // 2:
                assert np.isnan(answers[i, k])
                continue
            ids = [*tokens[i, :start].tolist(), *(t if t >= 0 else -2 - t for t in answer)]
            counted = [start + j for j, t in enumerate(answer) if t >= 0]
            expected = log_probabilities(policy, params, ids)[counted].mean()
            np.testing.assert_allclose(answers[i, k], expected, atol=2e-5)
        for k in range(1, len(sizes) // 2):
            ids, start = tokens[i, : sum(sizes)].copy(), sum(sizes[: 2 * k + 1])
            place = slice(start - sizes[2 * k], start)
            ids[place] = np.where(np.isnan(blanked[i, place]), ids[place], np.nan_to_num(blanked[i, place]))
            expected = log_probabilities(policy, params, ids.tolist())
            own = slice(start, start + sizes[2 * k + 1])
            np.testing.assert_allclose(blanks[i, own], expected[own], atol=2e-5)
    first = np.asarray(turn == 0)
    np.testing.assert_array_equal(blanks[first], np.asarray(found.old_logp)[first])
    # Slice by slice, as the update goes through the batch.
    steps = plan_steps(batch, minibatches=2, micro_batches=1, seed=0)
    again = provide(policy, NEEDS, params, None, batch, steps)
    for name in ("answer_logp", "blanked_logp"):
        np.testing.assert_allclose(again.info[name], found.info[name], atol=2e-5)  # type: ignore[index]
