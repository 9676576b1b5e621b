"""Methods that bound the step, against their worked examples and loops in double precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import batch_of, outputs_of, prepared, random_batch
from method_step import arrays, assert_matches_loop, learn, one_row

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.policy_loss.bapo_adaptive_clip import bapo_adaptive_clip
from jaxrl_llm.algorithms.policy_loss.capo_curvature import capo_curvature
from jaxrl_llm.algorithms.policy_loss.clip_cov import clip_cov
from jaxrl_llm.algorithms.policy_loss.gbpo import gbpo
from jaxrl_llm.algorithms.policy_loss.kl_cov import kl_cov
from jaxrl_llm.algorithms.policy_loss.mdpo_mirror_descent import mdpo_mirror_descent
from jaxrl_llm.algorithms.policy_loss.r2vpo import r2vpo
from jaxrl_llm.algorithms.policy_loss.remix import remix
from jaxrl_llm.core.transform import control
from jaxrl_llm.learner.moments import with_moments
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import update
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

BATCH, LOGP = random_batch(1)
X = arrays(BATCH)
A = X.advantages()
A_COV = [1, 1, -1, -1, 1, -1]
LOGP_COV = np.array([-0.1, -3, -0.2, -4, -0.5, -1])
RATIO_COV = np.array([0.05, -0.1, 0.02, 0.1, 0.4, -0.3])


def clipped(rho: float, a: float, low: float = 0.8, high: float = 1.2) -> float:
    return min(rho * a, min(max(rho, low), high) * a)


def covariances(logp: np.ndarray) -> np.ndarray:
    n = X.mask.sum()
    a, l = A * X.mask, logp * X.mask
    return (a - a.sum() / n) * (l - l.sum() / n) * X.mask


def test_clip_cov_worked_example() -> None:
    batch = one_row(6, behaviour=LOGP_COV - RATIO_COV, advantages=A_COV)
    losses = [
        float(clip_cov().objective(outputs_of(LOGP_COV[None]), batch.with_controls(batches=jnp.float32(salt)))[0])
        for salt in range(8)
    ]
    expected = {0.136756, -0.222651}  # token 0 or token 3 is drawn
    for value in expected:
        assert min(abs(value - x) for x in losses) < 2e-6
    assert all(min(abs(value - x) for value in expected) < 2e-6 for x in losses)


def test_clip_cov_by_loop() -> None:
    method = clip_cov(share=0.1, covariance_low=0.2, covariance_high=1.5)
    found = learn(method, BATCH, LOGP)
    drawn, cov = np.asarray(found.batch.need("detached")), covariances(LOGP)
    rho = np.exp(LOGP - X.behaviour)
    free = {(i, t) for i, t in X.tokens() if clipped(rho[i, t], A[i, 0]) == rho[i, t] * A[i, 0]}
    candidates = {(i, t) for i, t in free if 0.2 < cov[i, t] < 1.5}
    assert {(int(i), int(t)) for i, t in np.argwhere(drawn)} <= candidates
    assert drawn.sum() == min(max(1, int(0.1 * X.mask.sum())), len(candidates)) >= 2

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.behaviour)
        kept = [(i, t) for i, t in X.tokens() if not drawn[i, t]]
        return -sum(clipped(rho[i, t], A[i, 0]) for i, t in kept) / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)
    again = learn(method, BATCH, LOGP, state=found.state)
    assert (np.asarray(again.batch.need("detached")) != drawn).any(), "another batch, other chance"


def test_kl_cov_worked_example() -> None:
    batch = one_row(6, behaviour=LOGP_COV - RATIO_COV, advantages=A_COV)
    for coefficient, expected in [(1.0, -0.080290), (0.0, -0.096957)]:
        value = kl_cov(share=0.2, kl_coefficient=coefficient).objective(outputs_of(LOGP_COV[None]), batch)[0]
        assert float(value) == pytest.approx(expected, abs=1.5e-6)


def test_kl_cov_by_loop() -> None:
    found = learn(kl_cov(share=0.1), BATCH, LOGP)
    order = sorted(X.tokens(), key=lambda place: -covariances(LOGP)[place])
    top = set(order[: max(1, int(0.1 * X.mask.sum()))])

    def loss(logp: np.ndarray) -> float:
        l, moved = logp - X.behaviour, logp - X.old
        terms = [-np.exp(l[i, t]) * A[i, 0] + abs(moved[i, t]) * ((i, t) in top) for i, t in X.tokens()]
        return sum(terms) / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)


def share_of_good(logp: np.ndarray, low: float, high: float, statistic: str) -> float:
    good = bad = 0.0
    for i, t in X.tokens():
        rho, a, q = np.exp(logp[i, t] - X.behaviour[i, t]), A[i, 0], np.exp(X.behaviour[i, t])
        if statistic == "gradient":
            size = rho * (rho <= high if a >= 0 else rho >= low)
        else:
            size = min(rho, high) if a >= 0 else max(rho, low)
        good, bad = good + q * size * a * (a > 0), bad - q * size * a * (a < 0)
    return good / (good + bad)


@pytest.mark.parametrize(("statistic", "dual"), [("value", None), ("gradient", 1.02)])
def test_bapo_by_loop(statistic: str, dual: float | None) -> None:
    numbers: dict[str, Any] = {
        "low_start": 0.6,
        "low_end": 0.95,
        "low_step": 0.1,
        "high_start": 0.9,
        "high_end": 1.3,
        "high_step": 0.1,
    }
    starts = share_of_good(LOGP, 0.6, 0.9, statistic), share_of_good(LOGP, 0.6, 1.1, statistic)
    target = 0.5 * (starts[0] + starts[1])
    found = learn(bapo_adaptive_clip(target, **numbers, statistic=statistic, dual_clip=dual), BATCH, LOGP)
    low, high = 0.6, 0.9
    while share_of_good(LOGP, low, high, statistic) < target and low + 0.1 <= 0.95 + 1e-9:
        if high + 0.1 <= 1.3 + 1e-9:
            high += 0.1
        else:
            low += 0.1
    assert high > 0.95, "the search moved"
    assert float(control(found.batch, "clip_low")) == pytest.approx(low)
    assert float(control(found.batch, "clip_high")) == pytest.approx(high)

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.behaviour)
        terms = [clipped(rho[i, t], A[i, 0], low, high) for i, t in X.tokens()]
        if dual is not None:
            terms = [max(x, dual * A[i, 0]) if A[i, 0] < 0 else x for x, (i, _) in zip(terms, X.tokens(), strict=True)]
        return -sum(terms) / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)


def test_bapo_of_the_paper() -> None:
    """With q = 1 good tokens contribute c_high + 0.8, bad ones 3.55: a share of 0.4 needs c_high >= 1.567, so eight
    steps of 0.05. Without good tokens both bounds reach their ends."""
    rho, a = np.array([2.0, 0.8, 0.8, 1.0, 1.75]), [1.0, 1, -1, -1, -1]
    batch = one_row(5, behaviour=np.zeros(5), advantages=a)
    objective = bapo_adaptive_clip().objective
    refreshed = objective.refreshed(outputs_of(np.log(rho)[None]), batch)
    assert float(control(refreshed, "clip_low")) == pytest.approx(0.6)
    assert float(control(refreshed, "clip_high")) == pytest.approx(1.6)
    loss = objective(outputs_of(np.log(rho)[None]), batch)[0]
    assert float(loss) == pytest.approx(-(1.6 + 0.8 - 0.8 - 1.0 - 1.75) / 5, abs=1e-6)
    of_code = bapo_adaptive_clip(preset="code").objective.refreshed(outputs_of(np.log(rho)[None]), batch)
    found = [float(control(of_code, name)) for name in ("clip_low", "clip_high")]
    assert found == pytest.approx([0.8, 2.0]), "good tokens never contribute as much as bad ones"
    bad = batch.replace(advantages=-jnp.ones((1, 5)))
    refreshed = objective.refreshed(outputs_of(np.log(rho)[None]), bad)
    assert float(control(refreshed, "clip_low")) == pytest.approx(0.9)
    assert float(control(refreshed, "clip_high")) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("reward", "temperature", "target", "value"),
    [
        ([1, 0, 0, 0], 1e-4, [1.3, 1, 1, 1], 0.1125),
        ([1, 1, 0, 0], 1e-4, [1.3, 1.3, 0.7, 0.7], 0.259807),
        ([1, 1, 1, 0], 1e-4, [1, 1, 1, 0.7], None),
        ([1, 0, 0, 0], 1.0, [1.228478, 1, 1, 1], None),
    ],
)
def test_gbpo_worked_example(reward: list[float], temperature: float, target: list[float], value: float | None) -> None:
    batch, logp = batch_of(np.ones((4, 1)), np.array(reward, float), -np.ones((4, 1))), -np.ones((4, 1))
    method = gbpo(temperature=temperature)
    ready = prepared(method, batch)
    np.testing.assert_allclose(ready.need("ratio_target"), target, atol=1e-6)
    if value is not None:
        assert float(method.objective(outputs_of(logp), ready)[0]) == pytest.approx(value, abs=1e-6)


def test_gbpo_by_loop() -> None:
    found = learn(gbpo(temperature=0.7), BATCH, LOGP)
    target = np.zeros(len(X.reward))
    for g in set(X.group):
        mine = X.group == g
        r = X.reward[mine]
        target[mine] = 0.7 + 0.6 / (1 + np.exp(-(r - np.median(r)) / (r.std(ddof=1) + 1e-6) / 0.7))

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.old)
        return sum(abs((rho[i, t] - target[i]) * A[i, 0]) for i, t in X.tokens()) / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)


def test_r2vpo_worked_example() -> None:
    method = r2vpo(variance_limit=0.04, multiplier=0.5)
    logp = np.log([0.8, 1, 1.25, 2])
    batch = one_row(4, behaviour=np.zeros(4), advantages=[1, -1, 1, 1])
    batch = batch.with_controls(variance_multiplier=jnp.float32(0.5))
    value, metrics = method.objective(outputs_of(logp[None]), batch)
    assert float(value) == pytest.approx(-0.6446875, abs=1e-6)
    assert float(metrics["ratio/variance"]) == pytest.approx(0.275625, abs=1e-6)
    batch = BATCH.replace(feedback={"updates": jnp.float32(1), "ratio/excess": metrics["ratio/excess"]})
    assert float(control(prepared(method, batch), "variance_multiplier")) == pytest.approx(0.5235625, abs=1e-6)


def test_r2vpo_by_loop_and_its_soft_clip() -> None:
    found = learn(r2vpo(variance_limit=0.01, multiplier=0.7), BATCH, LOGP)

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.behaviour)
        terms = [-rho[i, t] * A[i, 0] + 0.7 * ((rho[i, t] - 1) ** 2 - 0.01) for i, t in X.tokens()]
        return sum(terms) / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)
    rho = np.exp(LOGP - X.behaviour)
    coefficients = rho * (A - 2 * 0.7 * (rho - 1)) * X.mask
    np.testing.assert_allclose(-X.mask.sum() * found.gradient, coefficients, rtol=1e-4, atol=1e-5)


def test_mdpo_worked_example() -> None:
    """Ten tokens, each action as often as the policy of the batch draws it."""
    old, new, a = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.25, 0.15]), np.array([1, -0.5, -0.5])
    drawn = np.repeat([0, 1, 2], [5, 3, 2])
    batch = one_row(10, behaviour=np.log(old)[drawn], advantages=a[drawn]).with_controls(proximity=jnp.float32(2))
    for estimator in ("k1", "k3"):
        value, metrics = mdpo_mirror_descent(estimator=estimator).objective(outputs_of(np.log(new)[drawn][None]), batch)
        assert float(value) == pytest.approx(-0.358680, abs=1.5e-6)
        assert float(metrics["kl"]) == pytest.approx(0.020660, abs=1e-6)


def test_mdpo_by_loop_and_its_step_sizes() -> None:
    method = mdpo_mirror_descent(step_size=0.5, total_steps=4, estimator="k1")
    state, steps = method.transform.init(), []
    for _ in range(5):
        state, ready = method.transform.apply(state, BATCH)
        steps.append(float(1 / control(ready, "proximity")))
    np.testing.assert_allclose(steps, [0.5, 0.375, 0.25, 0.125, 0.125], rtol=1e-6)
    found = learn(method, BATCH, LOGP, state=method.transform.apply(method.transform.init(), BATCH)[0])
    centred = np.broadcast_to(X.advantages("none"), X.mask.shape)[X.mask]
    standard = (X.advantages("none") - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8)

    def loss(logp: np.ndarray) -> float:
        l = logp - X.behaviour
        return sum(np.exp(l[i, t]) * (l[i, t] / 0.375 - standard[i, 0]) for i, t in X.tokens()) / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)
    calm = mdpo_mirror_descent(step_size=0.5, total_steps=4)
    found = learn(calm, BATCH, LOGP, state=calm.transform.apply(calm.transform.init(), BATCH)[0])

    def surplus(logp: np.ndarray) -> float:
        return (np.exp(logp - X.behaviour) - 1)[X.mask].sum() / 0.375 / X.mask.sum()

    assert_matches_loop(found, lambda logp: loss(logp) - surplus(logp), LOGP)


def test_remix_worked_example() -> None:
    batch = one_row(3, behaviour=np.zeros(3), advantages=[1, 1, -1], old_logp=np.log([1.1] * 3))
    value = remix(kl_coefficient=0.0).objective(outputs_of(np.log([[1.0, 1.5, 0.6]])), batch)[0]
    assert float(value) == pytest.approx(-0.466667, abs=1e-6)


def test_remix_by_loop() -> None:
    previous = X.old + 0.1 * np.random.default_rng(5).normal(size=X.old.shape) * X.mask
    batch = BATCH.replace(previous_logp=jnp.asarray(previous, jnp.float32))
    found = learn(remix(kl_coefficient=0.1, entropy_coefficient=0.01, hold=0, every=1), batch, LOGP, X.entropy)
    c = np.exp(X.old - X.behaviour)

    def loss(logp: np.ndarray) -> float:
        total = 0.0
        for i, t in X.tokens():
            total -= clipped(np.exp(logp[i, t] - X.behaviour[i, t]), A[i, 0], c[i, t] - 0.2, c[i, t] + 0.2)
            for share, other in ((0.9, X.reference), (0.1, previous)):
                l = logp[i, t] - other[i, t]
                total += 0.1 * share * (np.exp(-l) - 1 + l)
            total -= 0.01 * X.entropy[i, t]
        return total / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)


CURVED = {
    "squared_probability": np.random.default_rng(2).uniform(0.3, 0.9, LOGP.shape),
    "cubed_probability": np.random.default_rng(3).uniform(0.1, 0.3, LOGP.shape),
    "hidden_square": np.random.default_rng(4).gamma(2.0, 1.0, LOGP.shape),
}


def test_capo_by_loop() -> None:
    batch = BATCH.with_info(**{name: jnp.asarray(value, jnp.float32) for name, value in CURVED.items()})
    method = capo_curvature(change_limit=0.06, kl_limit=0.004, learning_rate=0.1, model="gradient")
    found = learn(method, batch, LOGP)
    a, kept = X.advantages("none"), np.zeros(X.mask.shape, bool)
    squares, cubes, h2 = CURVED.values()
    for i, t in X.tokens():
        p, s2, s3, h, w = np.exp(X.old[i, t]), squares[i, t], cubes[i, t], h2[i, t], a[i, 0]
        vv = 1 - 2 * p + s2
        uu = w**2 * h**2 * (p * (1 - p) ** 2 + s3 - p**3 - (p * (1 - p) - s2 + p**2) ** 2)
        change = 0.1 * w * w * h * vv + 0.005 * w * ((w * h * vv) ** 2 - uu)
        kept[i, t] = abs(change) < 0.06 and 0.005 * (w * h * vv) ** 2 < 0.004
    assert 0 < kept.sum() < X.mask.sum()

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.behaviour)
        rows = [[clipped(rho[i, t], a[i, 0]) for t in range(len(kept[i])) if kept[i, t]] for i in range(len(kept))]
        return -sum(sum(row) / max(len(row), 1) for row in rows) / len(rows)

    assert_matches_loop(found, loss, LOGP)


def test_capo_is_adams_step_by_loop() -> None:
    """After two steps of Adam: the update is that of the plain loss on the tokens that full arrays keep."""
    random, (N, L, V, rate) = np.random.default_rng(0), (4, 7, 11, 0.02)
    config = ModelConfig(
        family="llama", vocab_size=V, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=4, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0,), window_of_layer=(0,),
        query_scale=0.5,
    )  # fmt: skip
    policy, optimizer = Policy(config, remat=False), optax.adam(rate, b1=0.8, b2=0.9, eps=1e-3)
    mask = (np.arange(L) >= 2) & (np.arange(L) < random.integers(4, L + 1, N)[:, None])
    batch = batch_of(mask, [1.0, 0.0, 0.5, 0.2], -np.ones((N, L)), np.arange(N) // 2)
    batch = batch.replace(tokens=jnp.asarray(random.integers(0, V, (N, L)), jnp.int32))
    given = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    method = capo_curvature(change_limit=0.05, kl_limit=0.02, learning_rate=rate, clip_low=0.9, clip_high=9.0, **given)
    free = capo_curvature(change_limit=0.0, kl_limit=0.0, clip_low=0.9, clip_high=9.0, model="gradient")
    state = init_state(init_params(jax.random.key(0), config, scale=0.5), optimizer)
    _, ready = method.transform.apply(method.transform.init(), batch)
    for _ in range(2):
        state, _ = update(policy, free.objective, optimizer, state, ready)
    P, Q = (np.asarray(x["unembed"], np.float64) for x in (state.optimizer[0].mu, state.optimizer[0].nu))
    hidden = policy_outputs(policy, state.params, ready, wanted=Wanted(("hidden",))).extras["hidden"]
    kept, a = np.zeros((N, L), bool), np.asarray(ready.advantages, np.float64)
    for i, t in zip(*np.nonzero(mask), strict=True):
        h = np.asarray(hidden[i, t], np.float64)
        z = np.asarray(state.params["unembed"], np.float64) @ h
        pi = np.exp(z) / np.exp(z).sum()
        v = np.eye(V)[int(ready.tokens[i, t])] - pi
        g = a[i, t] * np.outer(v, h)
        G = (0.8 * P + 0.2 * g) / (1 - 0.8**3) / (np.sqrt((0.9 * Q + 0.1 * g**2) / (1 - 0.9**3)) + 1e-3)
        u = G @ h
        H = a[i, t] * ((v @ u) ** 2 - u @ (np.diag(pi) - np.outer(pi, pi)) @ u)
        m_H, m_F = rate * np.sum(g * G) + 0.5 * rate**2 * H, 0.5 * rate**2 * (v @ u) ** 2
        kept[i, t] = abs(m_H) < 0.05 and m_F < 0.02
    assert 0 < kept.sum() < mask.sum()
    copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    found, metrics = update(policy, method.objective, optimizer, copies[0], ready)
    chosen = ready.replace(weights=jnp.asarray(kept, jnp.float32))
    expected, _ = update(policy, free.objective, optimizer, copies[1], chosen)
    assert float(metrics["adam_step/kept"]) == pytest.approx(kept.sum() / mask.sum())
    for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_adams_step_is_refused_without_its_moments() -> None:
    config = ModelConfig(
        family="llama", vocab_size=5, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=4, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0,), window_of_layer=(0,), query_scale=0.5,
    )  # fmt: skip
    policy, params, needs = Policy(config), {"embed": jnp.zeros((5, 4)), "layers": {}}, {"adam_step"}
    with pytest.raises(InputError, match="has no moments of Adam"):
        with_moments(policy, needs, None, optax.sgd(0.1).init(params))
    with pytest.raises(InputError, match="which does not learn here: train all weights"):
        with_moments(policy, needs, None, optax.adam(0.1).init({"layers": {}}))
    assert with_moments(policy, {"old_logp"}, None, None) is None


def test_members_of_the_family_at_their_limits() -> None:
    plain = BATCH.replace(old_logp=BATCH.behaviour_logp)
    clip_only = learn(remix(kl_coefficient=0.0), plain, LOGP)
    fixed = learn(bapo_adaptive_clip(low_start=0.8, low_end=0.8, high_start=1.2, high_end=1.2), BATCH, LOGP)
    never = learn(clip_cov(covariance_low=1e9), BATCH, LOGP)
    for other in (fixed, never):
        np.testing.assert_allclose(other.gradient, clip_only.gradient, rtol=1e-5, atol=1e-7)
    free = learn(kl_cov(kl_coefficient=0.0), BATCH, LOGP)
    unbound = learn(r2vpo(multiplier=0.0), BATCH, LOGP)
    first = [learn(method, plain, X.behaviour).gradient for method in (kl_cov(share=0.3), r2vpo())]
    for gradient in first:
        np.testing.assert_allclose(gradient, -A * X.mask / X.mask.sum(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(unbound.gradient, free.gradient, rtol=1e-5, atol=1e-7)
    batch = BATCH.with_info(**{name: jnp.asarray(value, jnp.float32) for name, value in CURVED.items()})
    everything = learn(capo_curvature(change_limit=0, kl_limit=0, model="gradient"), batch, LOGP)
    ordinary = learn(grpo(kl_coefficient=0, scale="none"), BATCH, LOGP)
    np.testing.assert_allclose(everything.gradient, ordinary.gradient, rtol=1e-5, atol=1e-7)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="share"):
        clip_cov(share=2)
    with pytest.raises(InputError, match="temperature"):
        gbpo(temperature=0.0)
    with pytest.raises(InputError, match="unknown average"):
        capo_curvature(average="tokens")
