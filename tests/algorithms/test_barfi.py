"""BARFI: slopes against inner products of gradients of a small policy, the order of updates, and a decoy unlearnt."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import batch_of, gradient_of, prepared

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.rewards.barfi import barfi, stepped
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.in_jax.settings import LabSettings
from jaxrl_llm.in_jax.tasks import Task, get_task
from jaxrl_llm.in_jax.train import QUICK_COMPILE, make_train
from jaxrl_llm.utils.errors import InputError

N, L, WIDTH, TOKENS = 8, 3, 4, 5
GROUPS = np.array([0, 0, 0, 0, 5, 5, 5, 5])


def rewarded(seed: int, **fields: Any) -> Trajectories:
    """Two groups with three components of the reward, of which the reward is the second."""
    random = np.random.default_rng(seed)
    rewards = {name: random.normal(size=N) for name in ("a", "goal", "z")}
    mask = np.arange(L) < random.integers(2, L + 1, N)[:, None]
    old = -random.gamma(2.0, 0.5, (N, L)) * mask
    given = {"rewards": rewards, "old_logp": old, "previous_logp": old, **fields}
    return batch_of(mask, rewards["goal"], old, GROUPS, **given)


def linear_policy(seed: int) -> Any:
    """weights [WIDTH, TOKENS] -> log-probabilities f32[N, L] of fixed tokens in fixed states."""
    random = np.random.default_rng(seed)
    states, tokens = random.normal(size=(N, L, WIDTH)), random.integers(0, TOKENS, (N, L, 1))

    def logp(weights: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(jnp.asarray(states) @ weights), jnp.asarray(tokens), axis=-1)[
            ..., 0
        ]

    return logp


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("inner", [1, 2])
def test_slopes_are_inner_products_of_gradients_by_a_policy_s_own_parameters(momentum: float, inner: int) -> None:
    """After updates of Adam's form, whose rates P differ by parameter; the gradients one component at a time. What the
    last update changed is another number where it had momentum."""
    batch, logp, rate = rewarded(1), linear_policy(2), 3e-3
    P = jnp.asarray(np.random.default_rng(3).uniform(0.5, 2.0, (WIDTH, TOKENS)), jnp.float32)
    method = barfi("goal", inner_updates=inner, smoothing=0.0, rate=0.3, adam_beta1=momentum)
    optimizer = optax.ema(momentum, debias=True)
    weights = previous = jnp.zeros((WIDTH, TOKENS))
    memory, moments = method.transform.init(), optimizer.init(weights)

    def at(w: jax.Array) -> Trajectories:
        return batch.replace(old_logp=logp(w), previous_logp=logp(previous), behaviour_logp=logp(w))

    def component_gradient(name: str, w: jax.Array) -> np.ndarray:
        r, mask = np.asarray(batch.rewards[name], np.float64), np.asarray(batch.action_mask)  # type: ignore[index]
        centred = r - np.array([r[g == GROUPS].mean() for g in GROUPS])
        slopes = jax.jacobian(logp)(w)
        return np.einsum("nt,ntij->ij", centred[:, None] * mask, np.asarray(slopes, np.float64)) / mask.sum()

    for _ in range(2 * (inner + 1)):  # the last is by the primary reward
        memory, ready = method.transform.apply(memory, at(weights))

        def loss(w: jax.Array, ready: Trajectories = ready) -> jax.Array:
            return method.objective(PolicyOutputs(logp(w), jnp.zeros((N, L))), ready)[0]

        steps, moments = optimizer.update(jax.grad(loss)(weights), moments)
        previous, weights = weights, weights - rate * P * steps
    memory, _ = method.transform.apply(memory, at(weights))
    direction = np.asarray(P) * component_gradient("goal", previous)
    wanted = np.array([np.sum(component_gradient(name, weights) * direction) for name in ("a", "goal", "z")])
    found = np.asarray(memory[0]["slopes"])[:3] / rate
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())
    naive = np.asarray(memory[0]["before"])[:3] / rate
    assert (np.abs(naive - wanted).max() > 0.1 * np.abs(wanted).max()) == (momentum > 0)


def test_updates_by_the_blend_and_by_the_primary_reward_take_turns() -> None:
    """The weights step along the slopes after each of the second kind, and else stay; they keep their length."""
    method = barfi("goal", "a=2,z=0.5", rate=0.4, inner_updates=2, smoothing=0.5, adam_beta1=0.0)
    memory, phi, slopes = method.transform.init(), np.array([2.0, 1.0, 0.5]), np.zeros(3)
    names, length = ("a", "goal", "z"), np.sqrt(4 + 1 + 0.25)
    for n in range(8):
        old = np.asarray(rewarded(n).old_logp)
        moved = np.random.default_rng(n).normal(size=old.shape) * (old < 0)
        batch = rewarded(n, previous_logp=old - moved)
        r = np.stack([np.asarray(batch.rewards[name], np.float64) for name in names])  # type: ignore[index]
        if n in (3, 6):
            centred = r - np.stack([r[:, g == GROUPS].mean(axis=1) for g in GROUPS], axis=1)
            c = (centred[:, :, None] * moved).sum(axis=(1, 2)) / (old < 0).sum()
            slopes = 0.5 * slopes + 0.5 * c
            phi = phi + 0.4 * slopes / np.linalg.norm(slopes)
            phi = phi * length / np.linalg.norm(phi)
        memory, ready = method.transform.apply(memory, batch)
        np.testing.assert_allclose([ready.controls[f"blend/{name}"] for name in names], phi, atol=1e-5)
        np.testing.assert_allclose(ready.reward, r[1] if n % 3 == 2 else phi @ r, atol=1e-5)
        metrics = method.objective(PolicyOutputs(batch.old_logp, jnp.zeros(old.shape)), ready)[1]
        np.testing.assert_allclose([metrics[f"blend/{name}"] for name in names], phi, atol=1e-5)
    assert np.abs(phi - [2.0, 1.0, 0.5]).max() > 0.1


def test_without_components_or_before_it_learns_it_is_grpo() -> None:
    """Without components the blend is the reward, and with them the sum; only its mean is taken off."""
    plain = get("grpo", kl_coefficient=0.0, scale="none", average="token")
    batch = rewarded(0)
    total = batch.replace(reward=sum(batch.rewards.values()), rewards=None)  # type: ignore[union-attr]
    logp = np.asarray(batch.old_logp) + 0.05
    found = gradient_of(barfi(), batch, logp)
    np.testing.assert_allclose(found, gradient_of(plain, total, logp), atol=1e-6)
    assert np.abs(found - gradient_of(plain, batch, logp)).max() > 1e-3
    np.testing.assert_allclose(gradient_of(barfi(), total, logp), gradient_of(plain, total, logp), atol=1e-6)


def test_rows_without_scores_teach_nothing() -> None:
    batch = rewarded(0).replace(reward=jnp.full(N, jnp.nan))
    method = barfi()
    memory = method.transform.init()
    for _ in range(3):
        memory, ready = method.transform.apply(memory, batch)
    assert not np.any(ready.advantages)
    assert np.isnan(ready.reward).all()
    np.testing.assert_array_equal(memory[0]["slopes"], 0)


def with_a_decoy() -> Task:
    """A lock whose reward is the share of right symbols, and twice the share of symbols that are 0: more in the sum."""
    lock = get_task("sequence_lock", length=2, symbols=3)

    def score(prompt: jax.Array, completion: jax.Array) -> Any:
        right = jnp.mean(completion[:2] == prompt[:2])
        return {"decoy": 2 * jnp.mean(completion[:2] == 0), "right": right}, right

    return lock._replace(score=score)


@pytest.mark.heavy
def test_in_the_laboratory_a_decoy_loses_its_weight() -> None:
    """With weights that stay the policy learns the decoy, which pays more in the sum, and is right by chance."""
    settings = LabSettings(iterations=150, prompts=16, group_size=8, layers=1, learning_rate=3e-3)
    ends = dict[float, dict[str, float]]()
    for rate in (0.3, 0.0):
        given = {"rate": rate, "smoothing": 0.0}
        run = jax.jit(partial(make_train(with_a_decoy(), "barfi", settings), hyperparameters=given),
                      compiler_options=QUICK_COMPILE)(jax.random.key(0))  # fmt: skip
        ends[rate] = {name: float(np.mean(x[-50:])) for name, x in run.metrics.items()}
    assert ends[0.3]["blend/decoy"] < 0.4 < 1 < ends[0.3]["blend/right"]
    assert ends[0.3]["reward"] > 0.5
    assert ends[0.0]["reward"] < 0.4


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="unknown reward component 'gaol'"):
        prepared(barfi("gaol"), rewarded(0))
    with pytest.raises(InputError, match="17 components to blend, but at most 16"):
        prepared(barfi(), rewarded(0).replace(rewards={str(i): jnp.zeros(N) for i in range(17)}))
    np.testing.assert_allclose(stepped(jnp.ones(2), jnp.zeros(2), 1.0), [1, 1])
