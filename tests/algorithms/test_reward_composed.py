"""Methods of composed rewards against loops and worked examples."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    advantages,
    batch_of,
    finite_differences,
    gradient_of,
    loss_of,
    outputs_of,
    prepared,
    random_batch,
)
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.online_preferences.p3o_pairwise import p3o_pairwise
from jaxrl_llm.algorithms.rewards.brain import brain
from jaxrl_llm.algorithms.rewards.c_morl import c_morl
from jaxrl_llm.algorithms.rewards.carl_multiplicative_reward import carl_multiplicative_reward
from jaxrl_llm.algorithms.rewards.open_rs import open_rs
from jaxrl_llm.algorithms.rewards.srpo_self_referential import srpo_self_referential
from jaxrl_llm.algorithms.rewards.subpo import subpo
from jaxrl_llm.algorithms.rewards.ui_r1 import ui_r1
from jaxrl_llm.core.trajectory import with_totals
from jaxrl_llm.rewards.graded import by_mode, cluster_centres, coverage, distances, tagged_levels
from jaxrl_llm.rewards.verifiers import number_match
from jaxrl_llm.utils.errors import InputError

BATCH, LOGP = random_batch(3)
X = arrays(BATCH)


def of_group(values: Any, group: Any = X.group) -> np.ndarray:
    """A = (r - mean) / (std + 1e-6) of each group."""
    out = np.zeros(len(values))
    for g in np.unique(group):
        mine = values[group == g]
        out[group == g] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
    return out


def test_open_rs_is_the_loop() -> None:
    """The cosine of right and wrong answers, and the format reward beside it."""
    form = np.arange(len(X.reward)) % 3 / 2.0
    batch = BATCH.replace(rewards={"answer": BATCH.reward, "form": jnp.asarray(form, jnp.float32)})
    method = open_rs(accuracy="answer", max_length=8, kl_coefficient=0.0)
    lengths, wanted = X.mask.sum(axis=1), []
    for right, length, extra in zip(X.reward, lengths, form, strict=True):
        fall = (1 + np.cos(np.pi * length / 8)) / 2
        wanted.append(2 * (0.5 + 0.5 * fall if right else -0.5 * (1 - fall)) + extra)
    np.testing.assert_allclose(np.asarray(prepared(method, batch).reward), wanted, rtol=1e-5)
    A = of_group(np.asarray(wanted))

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.behaviour)
        terms = -np.minimum(rho * A[:, None], np.clip(rho, 0.8, 1.2) * A[:, None]) * X.mask
        return float(np.mean(terms.sum(axis=1) / lengths))

    assert_matches_loop(learn(method, batch, LOGP), loss, LOGP)


def test_open_rs_worked_example_and_limit() -> None:
    """Lengths 0, 1/2 and 1 of the limit; with a reward that no length changes it is GRPO."""
    mask = np.arange(4) < np.asarray([[2], [4], [2], [4]])
    batch = batch_of(mask, [1.0, 1, 0, 0], np.zeros((4, 4)))
    found = prepared(open_rs(max_length=4), batch).reward
    np.testing.assert_allclose(np.asarray(found), [1.5, 1.0, -0.5, -1.0], atol=1e-6)
    flat = open_rs(right=1.0, worst=0.0, accuracy_weight=1.0, kl_coefficient=0.0)
    assert loss_of(flat, BATCH, LOGP) == loss_of(grpo(kl_coefficient=0.0), BATCH, LOGP)


def test_carl_is_ppo_of_the_product() -> None:
    """A factor above 1 is 1, one that did not score is 1, and a hard infraction replaces all."""
    rewards = {
        "progress": np.array([0.5, 1.0, 1.0, 0.8]), "form": np.array([0.5, 2.0, np.nan, 1.0]),
        "length": np.array([0.5, 0.4, 1.0, -1.0]), "hard": np.array([0.0, 0, 1, 0]),
    }  # fmt: skip
    batch = batch_of(reward=np.ones(4), values=np.zeros((4, 3)), rewards=rewards, reference_logp=np.zeros((4, 3)))
    method = carl_multiplicative_reward("progress", "hard", penalty=2.0, kl_coefficient=0.0)
    product = np.array([0.125, 0.4, -2.0, 0.0])
    plain = ppo(kl_coefficient=0.0)
    np.testing.assert_allclose(np.asarray(prepared(method, batch).reward), product, atol=1e-6)
    wanted = advantages(plain, batch.replace(reward=jnp.asarray(product, jnp.float32)))
    np.testing.assert_array_equal(advantages(method, batch), wanted)
    alone = batch.replace(rewards={"only": batch.reward})
    same = carl_multiplicative_reward(kl_coefficient=0.0)
    np.testing.assert_array_equal(advantages(same, alone), advantages(plain, alone))
    found = prepared(carl_multiplicative_reward(terminal="hard", kl_coefficient=0.0), batch).reward
    np.testing.assert_allclose(np.asarray(found), [0.125, 0.4, -1, 0], atol=1e-6)
    with pytest.raises(InputError, match="unknown reward component 'progres': did you mean 'progress'"):
        prepared(carl_multiplicative_reward("progres"), batch)


def test_brain_worked_example_and_loop() -> None:
    log_p, r = np.array([-10.0, -11, -9.5])[:, None], np.array([1.0, 2, -1])
    logp = np.array([-10.2, -10.8, -9.6])[:, None]
    batch = batch_of(np.ones((3, 1)), r, log_p, reference_logp=log_p)
    found = learn(brain(), batch, logp)
    assert found.loss == pytest.approx(0.994433, abs=1e-6)
    np.testing.assert_allclose(found.gradient[:, 0], [0.018513, -0.290643, 0.272129], atol=1e-6)
    # Two samples of the reference, one of them good beyond measure: DPO with beta 1.
    batch = batch_of(np.ones((2, 1)), [100.0, 0], np.zeros((2, 1)), reference_logp=np.zeros((2, 1)))
    assert loss_of(brain(), batch, [[0.3], [-0.2]]) == pytest.approx(0.474077, abs=1e-6)

    def loss(logp: np.ndarray) -> float:
        total = []
        for g in np.unique(X.group):
            mine = X.group == g
            log_q = (X.behaviour * X.mask)[mine].sum(axis=1)
            target = (X.reference * X.mask)[mine].sum(axis=1) + X.reward[mine] / 2 - log_q
            own = 0.3 * ((logp * X.mask)[mine].sum(axis=1) - log_q)
            a = np.exp(target - target.max()) / np.exp(target - target.max()).sum()
            total.append(-np.sum(a * (own - np.log(np.exp(own).sum()))))
        return float(np.mean(total))

    assert_matches_loop(learn(brain(2.0, 0.3), BATCH, LOGP), loss, LOGP)


@pytest.mark.parametrize("clip", ["separate", "joint", "none"])
def test_p3o_is_the_loop_over_pairs(clip: Any) -> None:
    """The other response's ratio is without gradient: a number of the point where the loop is differentiated."""
    fixed = np.exp(((LOGP - X.behaviour) * X.mask).sum(axis=1))
    R = X.reward - 0.1 * ((X.behaviour - X.reference) * X.mask).sum(axis=1)

    def loss(logp: np.ndarray) -> float:
        l = ((logp - X.behaviour) * X.mask).sum(axis=1)
        w, terms = np.exp(l), []
        for i in range(len(R)):
            for j in range(i):
                if X.group[i] != X.group[j]:
                    continue
                D = R[i] - R[j]
                if clip == "separate":
                    gains = [(w[i], D * fixed[j]), (w[j], -D * fixed[i])]
                    terms.append(sum(min(x * a, np.clip(x, 0.8, 1.2) * a) for x, a in gains) / 2)
                else:
                    u, c = l[i] - l[j], D * fixed[i] * fixed[j]
                    terms.append((min(c * u, c * np.clip(u, -0.2, 0.2)) if clip == "joint" else c * u) / 2)
        return float(-np.mean(terms))

    assert_matches_loop(learn(p3o_pairwise(0.1, 0.2, clip), BATCH, LOGP), loss, LOGP)


@pytest.mark.parametrize("clip", ["separate", "joint", "none"])
def test_p3o_worked_example_and_invariance(clip: Any) -> None:
    """On policy the gradient is -D/2 (1, -1); rewards may be shifted; with two samples it is half of RLOO's."""
    logp = np.array([[-20.0], [-23.0]])
    method = p3o_pairwise(0.0, 0.2, clip)
    for shift in (0.0, 5.0):
        batch = batch_of(np.ones((2, 1)), np.array([1.2, 0.4]) + shift, logp)
        np.testing.assert_allclose(gradient_of(method, batch, logp)[:, 0], [-0.4, 0.4], atol=1e-6)


def test_srpo_is_the_loop() -> None:
    """The card's grades; prompts with too many or too few successes are left out; no distance gives 0."""
    reward = np.array([1.0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    group = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    distance = np.array([np.nan, 2, 3, 5, 1, 2, 3, np.nan, np.nan, np.nan])
    mask = np.ones((10, 2))
    batch = batch_of(mask, reward, np.zeros((10, 2)), group, info={"distance": distance})
    method = srpo_self_referential()
    found = prepared(method, batch)
    grades = [1, 0.595984, 0.504679, 0.004016]
    np.testing.assert_allclose(np.asarray(found.reward)[:4], grades, atol=1e-6)
    assert np.isnan(np.asarray(found.reward)[4:]).all()
    wanted = of_group(np.asarray(grades), np.zeros(4))
    np.testing.assert_allclose(np.asarray(found.advantages)[:4, 0], wanted, rtol=1e-4)
    assert not np.asarray(found.loss_weights)[4:].any()
    assert method.resampling is not None
    assert np.asarray(method.resampling.informative(batch)).tolist() == [True] * 4 + [False] * 6
    without = batch.replace(info=None)
    np.testing.assert_array_equal(np.asarray(prepared(method, without).reward)[:4], [1, 0, 0, 0])
    # Without distances and limits it is GRPO.
    plain = srpo_self_referential(least_rate=0.0, most_rate=1.0, clip_high=0.2, average="sequence")
    assert loss_of(plain, BATCH, LOGP) == loss_of(grpo(kl_coefficient=0.0), BATCH, LOGP)


def test_subpo_is_the_loop() -> None:
    """Gains still to come, minus what the mates still get at the same token number."""
    gains = np.random.default_rng(0).integers(0, 3, X.mask.shape) / 2.0
    batch = BATCH.replace(token_rewards=jnp.asarray(gains, jnp.float32))
    wanted = np.zeros(X.mask.shape)
    lengths = X.mask.sum(axis=1)
    to_go = np.zeros(X.mask.shape)
    for i, n in enumerate(lengths):
        for t in range(n):
            to_go[i, t] = gains[i, t:n].sum() + X.reward[i]
    for i, n in enumerate(lengths):
        mates = [j for j in range(len(lengths)) if j != i and X.group[j] == X.group[i]]
        for t in range(n):
            wanted[i, t] = to_go[i, t] - np.mean([to_go[j, t] for j in mates])
    np.testing.assert_allclose(advantages(subpo(), batch), wanted, atol=1e-5)

    def loss(logp: np.ndarray) -> float:
        return float(-(wanted * logp * X.mask).sum() / len(lengths))

    np.testing.assert_allclose(gradient_of(subpo(), batch, LOGP), finite_differences(loss, LOGP), atol=1e-5)


def test_subpo_coverage_example() -> None:
    """Items {1, 2}, {2, 3}, {1, 3}, {4}: gains 2, 1, 0, 1, and what is to come 4, 2, 1, 1."""
    text = "1 2; 2 3; 1 3; 4;"
    found = coverage("items")([text, ""], items=[["1", "2", "3", "4"], ["a"]])
    ends = [text.index(";", n) for n in (0, 5, 9, 14)]
    gains = np.zeros(4)
    for _, end, value in found["spans"][0]:
        gains[np.searchsorted(ends, end)] += 4 * value
    assert gains.tolist() == [2, 1, 0, 1]
    assert found["share"] == [1.0, 0.0]
    batch = batch_of(np.ones((1, 4)), [0.0], np.zeros((1, 4)), token_rewards=gains[None])
    assert advantages(subpo(), batch).tolist() == [[4, 2, 1, 1]]  # no mates, no baseline


def test_modes_and_levels() -> None:
    """The tables of the papers."""
    answer = ["4"] * 5
    texts = ["<short>4", "<think>so 4", "<short>5", "<think>5", "4"]
    found = by_mode(number_match)(texts, answer=answer)
    assert found["reward"] == [1.0, 0.5, -1.0, -1.0, -1.0]
    texts = [
        "<think>a</think>\n<answer>4</answer>", "a</think><answer> 5 </answer>", "<think>a</think><answer>?</answer>",
        "<answer>4</answer>", "<think>a</think><answer></answer>",
    ]  # fmt: skip
    assert tagged_levels(texts, answer) == [1.0, 0.4, 0.2, 0.0, 0.2]
    assert tagged_levels(["<think></think><answer>a  dog</answer>"], ["a dog"]) == [1.0]


def test_distances_are_to_the_successes_of_the_prompt() -> None:
    texts = ["the sum is 4", "the sum is 5", "no idea at all 7", "4", "", "5 5"]
    prompts = ["a", "a", "a", "b", "a", "c"]
    found = distances(number_match)(texts, prompts=prompts, answer=["4"] * 6)
    d = found["distance"]
    assert found["reward"] == [1, 0, 0, 1, 0, 0]
    assert d[0] is None  # a success
    assert d[3] is None
    assert d[4] is None  # no words
    assert d[5] is None  # no success
    assert 0 < d[1] < d[2]
    assert (
        found["distance"][1] == distances(number_match)(texts[:2], prompts=prompts[:2], answer=["4"] * 2)["distance"][1]
    )


def test_centres_of_clusters() -> None:
    """Two pairs and a point on its own; without pairs the mean; against the definition by brute force."""
    points = np.array([[0.0, 0], [0.1, 0], [5, 5], [5.1, 5], [20, -20]])
    centres = cluster_centres(points)
    np.testing.assert_allclose(sorted(centres.tolist()), [[0.05, 0], [5.05, 5]])
    far = np.array([[0.0, 0], [10, 0], [0, 10]])
    np.testing.assert_allclose(cluster_centres(far), [far.mean(axis=0)])


def test_ui_r1_is_its_worked_example_and_loop() -> None:
    reward, length = np.array([3.0, 3, 2, 0]), np.array([2, 4, 3, 8])  # the card's lengths by 50
    batch = batch_of(np.arange(8) < length[:, None], reward, np.zeros((4, 8)))
    method = ui_r1(right=3.0, kl_coefficient=0.0)
    wanted = np.array([3.818182, 3.636364, 1.490909, -0.1])
    np.testing.assert_allclose(np.asarray(prepared(method, batch).reward), wanted, atol=1e-5)
    np.testing.assert_allclose(advantages(method, batch)[:, 0], of_group(wanted, np.zeros(4)), rtol=1e-4)


def test_c_morl_is_the_loop() -> None:
    """Two constraints, one of them violated, against their starting means; then the same batch as the first."""
    random = np.random.default_rng(5)
    parts = {"goal": random.uniform(0, 1, len(X.group)), "a": X.reward, "b": random.uniform(0, 0.5, len(X.group))}
    batch = BATCH.replace(rewards={name: jnp.asarray(x, jnp.float32) for name, x in parts.items()})
    method = c_morl("goal", share=0.8, sharpness=4.0)
    first = batch.replace(rewards={**batch.rewards, "b": batch.rewards["b"] + 1.0})
    state, _ = method.transform.apply(method.transform.init(), first)
    start = {"a": X.reward.mean(), "b": parts["b"].mean() + 1}
    A = of_group(parts["goal"])

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - X.behaviour)
        terms = -np.minimum(rho * A[:, None], np.clip(rho, 0.8, 1.2) * A[:, None]) * X.mask
        s = (np.clip(rho, 0.8, 1.2) * X.mask).sum(axis=1) / X.mask.sum(axis=1)
        out = terms.sum() / X.mask.sum()
        for name in ("a", "b"):
            r = parts[name]
            c = np.mean(s * (r - r.mean())) + r.mean() - 0.8 * start[name]
            assert (c > 0.001) == (name == "a")
            log = np.log(c) if c > 0.001 else np.log(0.001) + (c - 0.001) / 0.001
            out -= log / 2 / 4
        return float(out)

    ready = method.transform.apply(state, batch)[1]
    ready = method.objective.refreshed(outputs_of(LOGP), with_totals(ready))

    def found(logp: Any) -> Any:
        return method.objective.function(outputs_of(logp), ready)[0]

    value, slope = jax.value_and_grad(found)(jnp.asarray(LOGP, jnp.float32))
    assert float(value) == pytest.approx(loss(LOGP), rel=1e-4)
    np.testing.assert_allclose(slope, finite_differences(loss, LOGP), rtol=2e-3, atol=2e-4)


def test_c_morl_without_constraints_is_grpo_on_the_component() -> None:
    batch = BATCH.replace(rewards={"goal": BATCH.reward})
    plain = grpo(kl_coefficient=0.0, average="token")
    np.testing.assert_array_equal(gradient_of(c_morl("goal"), batch, LOGP), gradient_of(plain, BATCH, LOGP))
    with pytest.raises(InputError, match="unknown reward component 'gaol': did you mean 'goal'"):
        prepared(c_morl("gaol"), batch)
    many = BATCH.replace(rewards={f"r{i}": BATCH.reward for i in range(17)})
    with pytest.raises(InputError, match="17 components to constrain, but at most 16"):
        prepared(c_morl(), many)
