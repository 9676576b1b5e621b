"""Responses that come back to be measured, and what the policy's move since then is."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from stored_rows import facts, scored_of

from jaxrl_llm.algorithms.score_function.spo_single_stream import last_responses
from jaxrl_llm.core.needs.computed import drift_of
from jaxrl_llm.rewards.scoring import Scored

PROMPTS = [[3, 1], [1, 2], [3, 2], [1, 3]]


def steps_of(prompts: list[list[int]]) -> list[Scored]:
    return [scored_of([[1.0]] * len(ids), ids, step) for step, ids in enumerate(prompts)]


def old_logp(step: int, shape: tuple[int, ...]) -> np.ndarray:
    return -np.random.default_rng([9, step]).gamma(2.0, 0.5, shape).astype(np.float32)


def test_the_drift_of_a_run_is_the_loop() -> None:
    """Each prompt's response of its last visit, its log-probabilities by the learner at that visit and now."""
    replay, then = last_responses(), dict[int, tuple[list[int], np.ndarray]]()
    state = replay.init()
    for step, scored in enumerate(steps_of(PROMPTS)):
        found, state = replay.mix(state, scored, step, step)
        b: Any = found.batch
        n = len(scored.texts)
        assert [facts(found, i) for i in range(n)] == [facts(scored, i) for i in range(n)]
        assert b.info["measured"].tolist() == b.info["replayed"].tolist() == [0.0] * n + [1.0] * (len(b.group) - n)
        assert len(b.group) == n + len(set(then) & set(PROMPTS[step]))
        logp = np.where(b.action_mask, old_logp(step, b.tokens.shape), 0)
        drift = np.asarray(drift_of(jnp.asarray(logp), b))
        for i, prompt in enumerate(PROMPTS[step]):
            if prompt not in then:
                assert np.isnan(drift[i])
                continue
            tokens, before = then[prompt]
            (row,) = [j for j in range(n, len(b.group)) if b.prompt_id[j] == prompt]
            assert b.tokens[row][b.action_mask[row]].tolist() == tokens
            np.testing.assert_allclose(b.behaviour_logp[row][b.action_mask[row]], before)
            moved = [abs(now - was) for now, was in zip(logp[row][b.action_mask[row]], before, strict=True)]
            np.testing.assert_allclose(drift[i], sum(moved) / len(moved), rtol=1e-5)
        # The learner adds rows at the end, and its log-probabilities are those to compare with next time.
        full = np.concatenate([logp, np.full((2, logp.shape[1]), 7.0)])
        rows = np.concatenate([np.arange(len(logp)), [0, 0]])
        state = replay.on_update(state, _rows(b, rows).replace(old_logp=full))
        for i, prompt in enumerate(PROMPTS[step]):
            then[prompt] = b.tokens[i][b.action_mask[i]].tolist(), logp[i][b.action_mask[i]]
        assert sorted(state["row:prompt_id"].tolist()) == sorted(then)


def _rows(batch: Any, rows: np.ndarray) -> Any:
    return batch.replace(tokens=batch.tokens[rows], token_mask=batch.token_mask[rows])


def test_the_store_has_the_prompts_that_were_answered_last() -> None:
    replay, state = last_responses(2), None
    for step, scored in enumerate(steps_of(PROMPTS)):
        _, state = replay.mix(replay.init() if state is None else state, scored, step, step)
    assert state is not None
    assert sorted(state["row:prompt_id"].tolist()) == [1, 3]
    assert last_responses(0).mix({}, steps_of(PROMPTS)[0], 0, 0)[1] == {}


def test_of_several_responses_the_last_is_kept_and_rows_without_tokens_never() -> None:
    scored = scored_of([[1.0, 0.0], [1.0]], [5, 6], 0)
    action: Any = np.array(scored.batch.action_mask)
    action[2] = False
    scored = scored._replace(batch=scored.batch.replace(action_mask=action))
    replay = last_responses()
    _, state = replay.mix(replay.init(), scored, 0, 0)
    again, _ = replay.mix(state, scored_of([[0.0], [0.0]], [6, 5], 1), 1, 1)
    assert [facts(again, 2)[:5]] == [facts(scored, 1)[:5]]
    assert len(again.texts) == 3
