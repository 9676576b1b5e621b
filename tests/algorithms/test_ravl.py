"""RAVL: a loop, its diversity against cosines of weights of heads, and values beyond what is trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import batch_of, finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.policy_loss.ravl import mean_cosine, ravl, steps_over_the_edge
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

HEADS, GAMMA, LAM = 3, 0.9, 0.8


def ensemble(seed: int = 0, heads: int = HEADS) -> tuple[Trajectories, np.ndarray, np.ndarray]:
    """Ragged rows, half of them cut, one without a score; the policy's and the critic's words now."""
    random = np.random.default_rng(seed + 70)
    before, target = random.normal(size=(2, 11, 6, heads))
    batch, logp = random_batch(seed, values=before)
    reward = np.where(np.arange(11) == 4, np.nan, np.asarray(batch.reward))
    batch = batch.replace(truncated=jnp.asarray(np.arange(11) % 2 == 0), reward=jnp.asarray(reward, jnp.float32))
    batch = batch.with_info(target_values=jnp.asarray(target, jnp.float32))
    return batch, logp, before + 0.3 * random.normal(size=before.shape)


def loop_of(batch: Trajectories, diversity: float, coefficient: float) -> Any:
    """(logp, V) -> loss, row by row and token by token."""
    mask, reward, cut = np.asarray(batch.action_mask), np.asarray(batch.reward), np.asarray(batch.truncated)
    old, before = np.asarray(batch.behaviour_logp, np.float64), np.asarray(batch.values, np.float64)
    target = np.asarray(batch.need("target_values"), np.float64)

    def loss(logp: np.ndarray, V: np.ndarray) -> float:
        policy, squares, steps = list[float](), list[float](), list[np.ndarray]()
        for n in np.flatnonzero(~np.isnan(reward)):
            places = list(np.flatnonzero(mask[n]))
            after, A = (target[n, places[-1]].min() if cut[n] else 0.0), 0.0
            for i in reversed(range(len(places))):
                t = places[i]
                last = i + 1 == len(places)
                A = (reward[n] if last else 0.0) + GAMMA * after - before[n, t].mean() + GAMMA * LAM * A
                R, after = A + before[n, t].mean(), before[n, t].mean()
                rho = np.exp(logp[n, t] - old[n, t])
                policy.append(-min(rho * A, min(max(rho, 0.8), 1.2) * A))
                if not (last and cut[n]):
                    squares.append(float(np.mean((V[n, t] - R) ** 2) / 2))
            if cut[n]:
                steps.append(V[n, places[-1]] - V[n, places[-2]])
        D = np.asarray(steps)
        cosines = [D[:, i] @ D[:, j] / np.linalg.norm(D[:, i]) / np.linalg.norm(D[:, j])
                   for i in range(HEADS) for j in range(HEADS) if i != j]  # fmt: skip
        return float(np.mean(policy) + coefficient * (np.mean(squares) + diversity * np.mean(cosines)))

    return loss


@pytest.mark.parametrize("diversity", [0.0, 0.6])
def test_it_is_the_loop(diversity: float) -> None:
    """Loss and both gradients."""
    batch, logp, V = ensemble()
    method = ravl(HEADS, diversity, gamma=GAMMA, lam=LAM, whiten=False, value_coefficient=0.7)
    loop, values = loop_of(batch, diversity, 0.7), np.asarray(V, np.float32)
    assert loss_of(method, batch, logp, values=values) == pytest.approx(loop(logp, V), rel=1e-5)
    found = gradient_of(method, batch, logp, values=values)
    np.testing.assert_allclose(found, finite_differences(lambda x: loop(x, V), logp), atol=2e-6)
    ready = prepared(method, batch)
    by_values = jax.grad(lambda v: method.objective(outputs_of(logp, values=v), ready)[0])(jnp.asarray(values))
    np.testing.assert_allclose(by_values, finite_differences(lambda x: loop(logp, x), V), atol=2e-6)


def test_nothing_cut_is_ppo_with_the_mean_of_the_heads() -> None:
    batch, logp, V = ensemble()
    batch = batch.replace(truncated=jnp.zeros(11, bool))
    alone = batch.replace(values=jnp.mean(batch.need("values"), axis=-1))
    plain = get("ppo", kl_coefficient=0.0, value_coefficient=0.0)
    mine = ravl(HEADS, value_coefficient=0.0)
    found = gradient_of(mine, batch, logp, values=V.astype(np.float32))
    np.testing.assert_allclose(found, gradient_of(plain, alone, logp, values=V[..., 0].astype(np.float32)), atol=1e-6)
    metrics = ravl(HEADS).objective(outputs_of(logp, values=V.astype(np.float32)), prepared(ravl(HEADS), batch))[1]
    assert float(metrics["value/cosine"]) == 0


def test_a_cut_response_has_less_than_by_any_head_alone() -> None:
    batch, _, _ = ensemble()
    method, cut = ravl(HEADS, whiten=False), np.asarray(batch.truncated & ~jnp.isnan(batch.scores))
    found = np.asarray(prepared(method, batch).advantages)
    others = []
    for head in range(HEADS):
        target = jnp.broadcast_to(batch.need("target_values")[..., head, None], batch.values.shape)  # type: ignore[union-attr]
        others.append(np.asarray(prepared(method, batch.with_info(target_values=target)).advantages))
    least = np.min(others, axis=0)
    np.testing.assert_allclose(found[cut], least[cut], atol=1e-6)
    assert (np.max(others, axis=0)[cut].sum(axis=1) > found[cut].sum(axis=1) + 0.1).all()
    np.testing.assert_array_equal(found[~cut], others[0][~cut])


def cut_rows(before: np.ndarray, after: np.ndarray, reward: float = 0.0) -> tuple[Trajectories, Any]:
    """Rows of two actions that were cut, and a function from weights [D, H] of heads to their values, by states."""
    states = jnp.asarray(np.stack([before, after], axis=1), jnp.float32)
    N = len(before)
    batch = batch_of(np.ones((N, 2)), np.full(N, reward), -np.ones((N, 2)), truncated=np.ones(N, bool))
    return batch, lambda weights: states @ weights


def test_the_cosine_is_that_of_the_heads_weights() -> None:
    """The paper's term of gradients by what heads read, N times the mean cosine of the weights of linear heads, where
    steps have no preferred direction; with its gradient by the weights. Otherwise it is in the metric of the steps."""
    random = np.random.default_rng(3)
    D, H = 4, 5
    weights, before = random.normal(size=(D, H)), random.normal(size=(D, D))
    even = 0.3 * np.linalg.qr(random.normal(size=(D, D)))[0]

    def gradients(w: np.ndarray) -> float:
        """sum_{i != j} g_i . g_j / (N - 1) of unit gradients, over N."""
        g = [w[:, i] / np.linalg.norm(w[:, i]) for i in range(H)]
        return float(sum(g[i] @ g[j] for i in range(H) for j in range(H) if i != j) / (H - 1) / H)

    for steps in (even, random.normal(size=(7, D))):
        batch, read = cut_rows(np.resize(before, (len(steps), D)), np.resize(before, (len(steps), D)) + steps)
        value, slope = jax.value_and_grad(lambda w, b=batch, r=read: mean_cosine(steps_over_the_edge(r(w), b)))(
            jnp.asarray(weights, jnp.float32)
        )
        root = np.linalg.cholesky(steps.T @ steps).T  # the metric
        assert float(value) == pytest.approx(gradients(root @ weights), abs=1e-5)
        wanted = finite_differences(lambda w, m=root: gradients(m @ w), weights)
        np.testing.assert_allclose(slope, wanted, atol=1e-5)
        assert (abs(float(value) - gradients(weights)) < 1e-5) == (steps is even)


def taught(diversity: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [rows, heads] of linear heads at trained and at cut states after learning rewards of 0.5 from both.

    The states before the cut fill half of the dimensions, those at it have a share in others too. All that is right is
    0.5, which heads that begin much alike learn only where they are trained.
    """
    random = np.random.default_rng(seed)
    D, H, N = 8, 6, 24
    before = np.concatenate([np.ones((N, 1)), random.normal(size=(N, 3)), np.zeros((N, 4))], axis=1)
    after = before + np.concatenate([np.zeros((N, 4)), random.normal(size=(N, 4))], axis=1)
    batch, read = cut_rows(before, after)
    method = ravl(H, diversity, lam=0.0, whiten=False)
    batch = batch.replace(reward=jnp.zeros(N), behaviour_logp=jnp.zeros((N, 2)) - 1.0)
    alike = random.normal(size=(D, 1)) + 0.1 * random.normal(size=(D, H))
    weights = jnp.asarray(alike, jnp.float32)
    ready = prepared(method, batch.replace(values=read(weights)).with_info(target_values=read(weights))).replace(
        returns=jnp.full((N, 2), 0.5)
    )
    adam = optax.adam(0.02)

    def loss(w: Any) -> Any:
        return method.objective(outputs_of(batch.behaviour_logp, values=read(w)), ready)[0]

    def step(carry: Any, _: Any) -> Any:
        w, memory = carry
        updates, memory = adam.update(jax.grad(loss)(w), memory)
        return (optax.apply_updates(w, updates), memory), None

    (weights, _), _ = jax.jit(lambda start: jax.lax.scan(step, start, length=600))((weights, adam.init(weights)))
    values = np.asarray(read(weights))
    return values[:, 0], values[:, 1]


def test_diverse_heads_agree_where_they_are_trained_and_are_low_beyond() -> None:
    """Heads that are alike by chance say far too much at some states that nothing trains, and so does their minimum;
    those that the diversity has parted never do, and say what is right where they are trained."""
    for seed in range(4):
        (known, alike), (trained, parted) = (taught(diversity, seed) for diversity in (0.0, 1.0))
        assert np.abs(np.stack([known, trained]) - 0.5).max() < 0.05
        assert alike.min(axis=1).max() > 1.5
        assert parted.min(axis=1).max() < 0.5


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="heads is 1, but must be at least 2"):
        ravl(heads=1)
    with pytest.raises(InputError, match="diversity"):
        ravl(diversity=-1.0)
