"""Reward models of pairs: a whole step against TRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import algorithms, load_reward_model
from jaxrl_llm.core.shapes import pad_rows
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.update import gradient, prepare
from jaxrl_llm.models.io.huggingface import to_tensors

MODEL = Path(__file__).parents[1] / "reward_models" / "llama_1"


def scored_batch(ids: np.ndarray, real: np.ndarray, pad: int, **info: np.ndarray) -> Any:
    """The rows of pairs, chosen before rejected, without the padding's id at their ends, and with an action there."""
    rows = [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]
    rows = [one[: max(n for n in range(1, len(one) + 1) if one[n - 1] != pad)] for one in rows]
    length = max(map(len, rows)) + 1
    tokens, real = pad_rows([[*one, pad] for one in rows], length)
    action = np.arange(length) == np.array([[len(one)] for one in rows])
    zeros, N = np.zeros(tokens.shape, np.float32), len(rows)
    group = np.repeat(np.arange(N // 2), 2).astype(np.int32)
    return Trajectories(
        tokens=tokens.astype(np.int32), token_mask=real, action_mask=action, behaviour_logp=zeros,
        policy_step=zeros.astype(np.int32), turn=np.where(action, 0, -1).astype(np.int32),
        group=group, prompt_id=group,
        truncated=np.zeros(N, bool), reward=np.tile([1.0, 0.0], N // 2).astype(np.float32), info=info or None,
    )  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["plain", "margin_center0.1"])
def test_loss_and_gradients_are_trls(case: str) -> None:
    model, params, _ = load_reward_model(MODEL)
    with np.load(MODEL / "vectors.npz") as file:
        ids, real, margin = (file[f"bt/{name}"] for name in ("ids", "mask", "margin"))
        loss, chosen = float(file[f"bt/{case}/loss"]), file["bt/rewards_chosen"]
        expected = {key.split("/grad/")[1]: file[key] for key in file.files if key.startswith(f"bt/{case}/grad/")}
    order = np.arange(8).reshape(2, 4).T.reshape(-1)
    info = {} if case == "plain" else {"margin": np.repeat(margin, 2).astype(np.float32)}
    assert model.config.score is not None
    batch = scored_batch(ids[order], real[order] > 0, model.config.score.pad_token_id or 0, **info)
    method = algorithms.get("reward_model", centring=0.0 if case == "plain" else 0.1)
    steps = plan_steps(batch)
    batch = provide(model, method.needs, params, None, jax.tree.map(jnp.asarray, batch), steps)
    _, batch = prepare(method.transform, method.transform.init(), batch)
    grads, metrics = gradient(model, method.objective, params, batch, jax.tree.map(lambda x: x[0], steps.in_order))
    assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-5)
    assert float(metrics["rewards/chosen"]) == pytest.approx(chosen.mean(), rel=2e-5)
    if case == "plain":
        return  # its gradients are not kept
    found = to_tensors(grads, model.config)
    assert set(found) == set(expected)
    scale = max(np.abs(x).max() for x in expected.values())
    for key, x in expected.items():
        np.testing.assert_allclose(np.asarray(found[key]), x, rtol=2e-3, atol=2e-5 * scale, err_msg=key)
