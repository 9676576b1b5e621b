"""Skywork R1V2: the loss on a step that its buffer has filled up, against a loop over what each row was."""

from __future__ import annotations

import numpy as np
import pytest
from test_replayed import ROWS, STEPS, check, gain, last, ratios, tokens

from jaxrl_llm.algorithms.replay.skywork_r1v2 import skywork_r1v2


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_it_is_the_loop_over_refilled_steps(coefficient: float) -> None:
    """The last step has groups of 3, 2 and 2 rows, of which the first two are equal; five rows come from the buffer."""
    method = skywork_r1v2(kl_coefficient=coefficient)
    batch, texts, logp = last(method)
    past = np.asarray(batch.info["replayed"]) > 0
    assert (past.sum(), len(texts)) == (5, 7)
    assert set(np.asarray(texts)[~past]) == set(STEPS[2].texts[5:])
    A = np.zeros(len(texts))
    for i, text in enumerate(texts):
        row = ROWS[text]
        A[i] = (row.reward - row.mean) / (row.deviation + 1e-6)
    assert (np.abs(A) > 0.1).all()  # every row teaches something
    reference, rows = np.asarray(batch.reference_logp, float), range(len(texts))

    def loop(x: np.ndarray) -> float:
        rho, total = ratios(texts, x), 0.0
        for i in rows:
            own = [t for n, t in tokens(texts) if n == i]
            k3 = [np.exp(reference[i, t] - x[i, t]) - 1 - (reference[i, t] - x[i, t]) for t in own]
            total -= float(np.mean([gain(rho[i, t], A[i]) for t in own])) - coefficient * float(np.mean(k3))
        return total / len(texts)

    check(method, batch, logp, loop)


def test_stale_rows_are_not_drawn() -> None:
    """Of steps 0 and 1, only those of step 1 are young enough in step 2."""
    batch, texts, _ = last(skywork_r1v2(max_age=1))
    past = np.asarray(batch.info["replayed"]) > 0
    assert past.sum() == 5
    assert set(np.asarray(texts)[past]) <= set(STEPS[1].texts)
