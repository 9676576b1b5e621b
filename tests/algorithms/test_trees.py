"""Methods of trees and of values of states, against loops and worked examples; by name in runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, gradient_of, loss_of, prepared

from jaxrl_llm import algorithms
from jaxrl_llm.advantages.trees.credit import shared_once
from jaxrl_llm.algorithms.credit.branchgrpo import branchgrpo
from jaxrl_llm.algorithms.credit.pav import best_of, pav
from jaxrl_llm.algorithms.credit.spo_segment import spo_segment
from jaxrl_llm.algorithms.credit.treepo import treepo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import Transform

NAN = np.nan


def compiled(method: Algorithm) -> Algorithm:
    """The method, whose transform is one program: the credit of a tree has hundreds of operations."""
    transform = method.transform
    return dataclasses.replace(method, transform=Transform(transform.init, jax.jit(transform.apply), transform.needs))


# Two trees: the first forks after two tokens, then two of its four leaves' parents fork again.
NODE = np.array([
    [1, 1, 11, 11, 111], [1, 1, 11, 11, 112], [1, 1, 12, 12, 12], [2, 2, 21, 0, 0],
    [1, 1, 1, 3, 3], [1, 1, 1, 4, 4], [5, 5, 5, 5, 5],
])  # fmt: skip
LENGTHS = [5, 5, 5, 3, 5, 4, 5]
GROUP = [0, 0, 0, 0, 1, 1, 1]
REWARD = [1.0, 0, 0.5, 1, 0, 1, 0]
MASK = np.arange(5) < np.array(LENGTHS)[:, None]


def two_trees(**info: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """(batch, behaviour, logp), in which what rows share is the same in both."""
    random, seen = np.random.default_rng(3), {}
    old, new = np.zeros(NODE.shape), np.zeros(NODE.shape)
    for i, t in np.argwhere(MASK):
        key = (GROUP[i], NODE[i, t], t)
        old[i, t], new[i, t] = seen.setdefault(key, (-random.gamma(1.0, 0.6), -random.gamma(1.0, 0.6)))
    batch = batch_of(MASK, REWARD, old, GROUP, reference_logp=old - 0.1 * MASK, info={"node": NODE * 1.0, **info})
    return batch, old, new


def nodes() -> dict[tuple[int, int], dict[str, Any]]:
    """(group, node) -> its value, parent, depth, and places (of its first row)."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for i in range(7):
        path = list(dict.fromkeys(NODE[i, : LENGTHS[i]].tolist()))
        for depth, node in enumerate(path):
            rows = [j for j in range(7) if GROUP[j] == GROUP[i] and node in NODE[j, : LENGTHS[j]]]
            # A place is of the first row that has it.
            places = dict[int, int]()
            for j in rows:
                for t in np.flatnonzero(MASK[j] & (NODE[j] == node)).tolist():
                    places.setdefault(t, j)
            parent = (GROUP[i], path[depth - 1]) if depth else (GROUP[i], -1)
            found[GROUP[i], node] = {"parent": parent, "depth": depth, "rows": rows, "places": places}
    for group in (0, 1):
        found[group, -1] = {"parent": None, "depth": -1, "rows": [j for j in range(7) if GROUP[j] == group],
                            "places": {}}  # fmt: skip

    def value(key: Any) -> float:
        children = [other for other, one in found.items() if one["parent"] == key]
        return float(np.mean([value(c) for c in children] if children else [REWARD[j] for j in found[key]["rows"]]))

    for key, one in found.items():
        one["children"], one["leaf_mean"] = value(key), float(np.mean([REWARD[j] for j in one["rows"]]))
    return found


def surrogate(ratio: float, A: float, low: float, high: float) -> float:
    return min(ratio * A, float(np.clip(ratio, 1 - low, 1 + high)) * A)


def test_spo_against_loops() -> None:
    """Each token of the tree once, those of the chain as they are; both of probable tokens and whitened."""
    batch, old, new = two_trees()
    found, terms = nodes(), []
    for one in found.values():
        if one["parent"] is not None:
            A = one["children"] - found[one["parent"]]["children"]
            terms += [(A, i, t) for t, i in one["places"].items() if A != 0 and np.exp(old[i, t]) < 0.9]
    for form in ("tree", "chain"):
        if form == "chain":
            value = np.where(NODE > 10, 0.25, 0.5)
            batch, old, new = two_trees(state_value=value)
            terms = []
            for i, t in np.argwhere(MASK & (np.exp(old) < 0.9)):
                later = [s for s in range(t, LENGTHS[i]) if NODE[i, s] != NODE[i, t]]
                after = value[i, later[0]] if later else REWARD[i]
                terms.append((after - value[i, t], i, t))
        advantages = np.array([A for A, _, _ in terms])
        white = (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8)
        losses, penalties = [], []
        for A, (_, i, t) in zip(white, terms, strict=True):
            losses.append(-surrogate(np.exp(new[i, t] - old[i, t]), A, 0.2, 0.2))
            gap = old[i, t] - 0.1 - new[i, t]
            penalties.append(np.exp(gap) - gap - 1)
        expected = np.mean(losses) + 0.1 * np.mean(penalties)
        method = compiled(spo_segment(form, kl_coefficient=0.1))  # type: ignore[arg-type]
        np.testing.assert_allclose(loss_of(method, batch, new), expected, rtol=2e-5)


def test_spo_worked_example() -> None:
    value = np.array([[0.5, 0.625, 0.25]])
    batch = batch_of(np.ones((1, 3)), [1.0], np.full((1, 3), -1.0), info={"node": np.arange(3.0)[None],
                     "state_value": value})  # fmt: skip
    A = np.array([0.125, -0.375, 0.75])
    found = prepared(spo_segment(), batch).advantages
    np.testing.assert_allclose(found[0], (A - A.mean()) / A.std(), rtol=1e-5)


def test_treepo_against_a_loop() -> None:
    batch, old, new = two_trees()
    found = nodes()
    for weighting in ("average", "size"):
        A = np.zeros(7)
        for i in range(7):
            path = [(GROUP[i], -1), *((GROUP[i], n) for n in dict.fromkeys(NODE[i, : LENGTHS[i]].tolist()))]
            above = [found[key] for key in path[:-1]]
            above = [one for number, one in enumerate(above) if number == 0 or len(one["rows"]) > 1]
            weight = [len(one["rows"]) if weighting == "size" else 1 for one in above]
            A[i] = np.average([REWARD[i] - one["leaf_mean"] for one in above], weights=weight)
        flat = np.concatenate([[A[i]] * LENGTHS[i] for i in range(7)])
        white = (A - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
        terms = [surrogate(np.exp(new[i, t] - old[i, t]), white[i], 0.2, 0.28) for i, t in np.argwhere(MASK)]
        method = compiled(treepo(weighting=weighting, dual_clip=None))  # type: ignore[arg-type]
        np.testing.assert_allclose(loss_of(method, batch, new), -np.mean(terms), rtol=2e-5)


def test_treepo_worked_example() -> None:
    """Leaves a/x, a/y, b/z, b/w, c/u."""
    node = np.array([[1, 11], [1, 12], [2, 21], [2, 22], [3, 31]]) * 1.0
    batch = batch_of(np.ones((5, 2)), [1.0, 1, 0, 1, 0], -np.ones((5, 2)), info={"node": node})
    found = prepared(compiled(treepo()), batch).advantages
    A = np.array([0.2, 0.2, -0.55, 0.45, -0.6])
    np.testing.assert_allclose(found[:, 0], (A - A.mean()) / np.sqrt(A.var() * 10 / 9), atol=1e-5)
    # Whitened over one token each they are these numbers; of ten tokens the unbiased variance is another.
    published = np.array([0.540087, 0.540087, -1.017856, 1.059401, -1.121718])
    np.testing.assert_allclose(found[:, 1] / found[0, 1], published / published[0], rtol=1e-4)


def test_treepo_whitens_over_the_groups_that_stay() -> None:
    """Of two groups one has equal rewards and is dropped: its tokens are in no moment."""
    alone = batch_of(np.ones((2, 2)), [1.0, 0.0], -np.ones((2, 2)))
    both = batch_of(np.ones((4, 2)), [1.0, 0.0, 1.0, 1.0], -np.ones((4, 2)), [0, 0, 1, 1])
    method = compiled(treepo())
    expected = prepared(method, alone).advantages
    np.testing.assert_allclose(expected[0, 0], np.sqrt(3 / 4), rtol=1e-5)  # of A = 1/2 and -1/2 in four tokens
    np.testing.assert_allclose(prepared(method, both).advantages[:2], expected, rtol=1e-6)


def test_a_shared_segment_weighs_once_also_beside_an_unscored_leaf() -> None:
    node = np.array([[1, 2], [1, 3], [1, 4]]) * 1.0
    batch = batch_of(np.ones((3, 2)), [1.0, 0.0, NAN], -np.ones((3, 2)), info={"node": node})
    for transform in (shared_once(), branchgrpo().transform):
        weights = np.asarray(jax.jit(transform.apply)(transform.init(), batch)[1].loss_weights)
        np.testing.assert_allclose(weights[:2], [[0.5, 1], [0.5, 1]])


def test_edges_between_equal_values_are_dropped_whatever_their_rounding() -> None:
    """Means of thirds, sevenths ... of one value are that value, up to rounding; the other group's edges stay."""
    rows = 21
    node = np.stack([np.zeros(rows), 1 + np.arange(rows) // 7, 10 + np.arange(rows)], axis=1)
    reward = np.tile([0.1, 0.7, 0.3, 0.2, 0.9, 0.6, 0.4], 3)
    method = compiled(spo_segment(form="tree", below=1.0))
    batch = batch_of(np.ones((rows, 3)), reward, -np.ones((rows, 3)), info={"node": node})
    weights = np.asarray(prepared(method, batch).loss_weights)
    assert not weights[:, :2].any()  # the mean of each seven is the mean of all
    kept = np.abs(reward - reward.mean()) > 1e-3
    np.testing.assert_array_equal(weights[:, 2] > 0, kept)


def test_branchgrpo_against_a_loop() -> None:
    batch, old, new = two_trees()
    found, losses = nodes(), []
    for key, one in found.items():
        if one["parent"] is None:
            continue
        level = [other["leaf_mean"] for k, other in found.items() if k[0] == key[0] and other["depth"] == one["depth"]]
        deviation = np.std(level, ddof=1) if len(level) > 1 else 0
        A = (one["leaf_mean"] - np.mean(level)) / deviation if deviation > 1e-6 else 0
        losses += [-surrogate(np.exp(new[i, t] - old[i, t]), A, 0.2, 0.2) for t, i in one["places"].items()]
    np.testing.assert_allclose(loss_of(compiled(branchgrpo()), batch, new), np.mean(losses), rtol=2e-5)


def test_branchgrpo_prunes_the_update_alone() -> None:
    batch, _, new = two_trees()
    weights = {
        name: np.asarray(prepared(branchgrpo(**given), batch).weights)
        for name, given in {
            "all": {}, "best": {"keep": "best"}, "extremes": {"keep": "extremes"}, "no leaves": {"skip_depths": "2"}
        }.items()
    }  # fmt: skip
    last = MASK & (np.array([row[size - 1] for row, size in zip(NODE, LENGTHS, strict=True)])[:, None] == NODE)
    # The best of 111 and 112 is the first; of 12, alone below its fork, itself; of 3 and 4 the second.
    best = np.array([True, False, False, True, False, True, False])
    assert prepared(branchgrpo(keep="best"), batch).advantages is not None
    np.testing.assert_array_equal(weights["best"][~last], weights["all"][~last])
    assert (weights["best"][1][4:] == 0).all()
    assert weights["best"][0][4] == 1
    assert (weights["best"][4][3:] == 0).all()
    assert (weights["best"][best & (np.arange(7) > 3)][:, 3] > 0).all()
    assert (weights["extremes"][2][2:] == 0).all(), "0.5 is neither the best nor the worst of its group"
    assert weights["extremes"][1][4] == 1
    np.testing.assert_array_equal(weights["no leaves"][:2, 4], [0, 0])
    assert gradient_of(branchgrpo(skip_depths="2"), batch, new)[:2, 4].tolist() == [0, 0]


def test_pav_worked_example() -> None:
    """Values 0.2, 0.35, 0.3 of the prompt and after two steps, then a right answer; the mean of the group is 0.5."""
    node = np.array([[0, 1, 2], [3, 3, 3]]) * 1.0
    value = np.array([[0.2, 0.35, 0.3], [0.2] * 3])
    batch = batch_of(np.ones((2, 3)), [1.0, 0.0], -np.ones((2, 3)), info={"node": node, "state_value": value})
    found = prepared(compiled(pav(strength=1.0)), batch).advantages
    np.testing.assert_allclose(found[0], 0.5 + np.array([0.231094, -0.061594, 0.240100]), atol=2e-6)
    np.testing.assert_allclose(found[1], -0.5 - 0.5904, atol=2e-6)
    np.testing.assert_allclose(best_of(jnp.array([0.2, 0.35, 0.3, 1.0]), 4), [0.5904, 0.821494, 0.7599, 1], atol=1e-6)
    outcome = prepared(pav(strength=0.0), batch).advantages
    np.testing.assert_allclose(outcome, [[0.5] * 3, [-0.5] * 3])


def test_pav_s_prover_is_not_the_policy() -> None:
    assert pav().rollout is not None
    assert pav().rollout.demands.reference  # type: ignore[union-attr]
    assert pav().reference is None, "the initial policy"
    rule = pav(prover="models/prover").reference
    assert rule is not None
    assert (rule.models, rule.update) == (("models/prover",), None)


@pytest.mark.parametrize("name", ["spo_segment", "treepo", "branchgrpo", "latr", "pav", "ettrl"])
def test_a_method_brings_its_rollout(name: str) -> None:
    method = algorithms.get(name)
    assert method.rollout is not None
    asked = {"node", "state_value"} & method.needs
    assert asked <= method.rollout.provides
