"""Means of last hidden states over parts of a text, by a loop over its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_llm.models.scores import pooled_states


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_it_is_the_mean_over_the_tokens_of_each_piece(vectors: Any, family: str, pieces: int) -> None:
    """Rows alone, without padding; padding on either side changes nothing, and a row of two tokens has three pieces."""
    found = vectors(family)
    policy, params = found.policy, found.params
    random = np.random.default_rng(0)
    rows = [random.integers(1, 200, size).tolist() for size in (7, 2, 11)]
    tokens, mask = np.zeros((4, 12), np.int32), np.zeros((4, 12), bool)
    for number, row in enumerate(rows):
        start = 12 - len(row) if number % 2 else 0
        tokens[number, start : start + len(row)], mask[number, start : start + len(row)] = row, True
    out = pooled_states(policy, params, tokens, mask, pieces)
    assert out.shape == (4, pieces, policy.config.hidden_size)
    for number, row in enumerate(rows):
        one = np.asarray([row], np.int32)
        states = np.asarray(policy.forward(params, one, np.arange(len(row))[None], np.ones_like(one))[0][0], float)
        for piece in range(pieces):
            first, last = len(row) * piece // pieces, -(-len(row) * (piece + 1) // pieces)
            own = [states[t] for t in range(len(row)) if first <= t < last]
            assert own
            np.testing.assert_allclose(out[number, piece], np.mean(own, axis=0), rtol=1e-4, atol=1e-5)
    assert not np.asarray(out[3]).any(), "a row without a token"
