"""Values and advantages in trees, against loops over explicit nodes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.trees import credit
from jaxrl_llm.algorithms.credit import branchgrpo, treepo
from jaxrl_llm.core.trajectory import Trajectories

NAN = np.nan
# Each a program, as in an update: one by one their operations are hundreds.
depth_advantages = jax.jit(branchgrpo.depth_advantages())
edge_advantages = jax.jit(credit.edges())
tree_of, shares, node_values = map(jax.jit, (credit.tree_of, credit.shares, credit.node_values))


def batch_of(paths: list[list[int]], reward: list[float], group: Any = None, **info: Any) -> Trajectories:
    """Rows whose actions have these nodes, one token each."""
    N, L = len(paths), max(map(len, paths)) + 2
    mask, node = np.zeros((N, L), bool), np.full((N, L), NAN, np.float32)
    for i, path in enumerate(paths):
        mask[i, 1 : 1 + len(path)], node[i, 1 : 1 + len(path)] = True, path
    groups = jnp.asarray(np.zeros(N) if group is None else group, jnp.int32)
    zeros = jnp.zeros((N, L))
    return Trajectories(
        tokens=zeros.astype(jnp.int32), token_mask=jnp.asarray(mask), action_mask=jnp.asarray(mask),
        behaviour_logp=zeros, policy_step=zeros.astype(jnp.int32), turn=zeros.astype(jnp.int32), group=groups,
        prompt_id=groups, truncated=jnp.zeros(N, bool), reward=jnp.asarray(reward, jnp.float32),
        info={"node": jnp.asarray(node), **info},
    )  # fmt: skip


# leaves a/x, a/y, b/z, b/w, c/u
PATHS, REWARD = [[1, 11], [1, 12], [2, 21], [2, 22], [3, 31]], [1.0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("weighting", "drop_equal", "expected"),
    [
        ("average", False, [0.2, 0.2, -0.55, 0.45, -0.6]),
        ("average", True, [0.4, 0.4, -0.55, 0.45, -0.6]),
        ("size", False, [0.285714, 0.285714, -0.571429, 0.428571, -0.6]),
    ],
)
def test_a_leaf_against_the_subtrees_of_its_ancestors(weighting: Any, drop_equal: bool, expected: list[float]) -> None:
    found = jax.jit(treepo.subtree_advantages(weighting, drop_equal))(batch_of(PATHS, REWARD))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def children_of(paths: list[list[int]]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for path in paths:
        for parent, child in zip([0, *path], path, strict=False):
            if child != parent and child not in children.setdefault(parent, []):
                children[parent].append(child)
    return children


def loop_values(paths: list[list[int]], reward: list[float]) -> dict[int, float]:
    """V of each node from its children's, that of a leaf its reward."""
    children = children_of(paths)
    of_leaf = {path[-1]: r for path, r in zip(paths, reward, strict=True)}

    def value(node: int) -> float:
        return of_leaf[node] if node not in children else float(np.mean([value(child) for child in children[node]]))

    return {node: value(node) for node in {0, *(node for path in paths for node in path)}}


RAGGED = [[1, 1, 11, 111], [1, 1, 11, 112], [1, 1, 12], [1, 1, 13, 13], [2, 21], [2, 22], [3]]


def test_edges_are_differences_of_the_means_of_children() -> None:
    reward = [1.0, 0, 1, 0, 0.5, 0, 1]
    V, children = loop_values(RAGGED, reward), children_of(RAGGED)
    # A second group of the same numbers must not mix with the first, nor a row without a score count.
    both = batch_of([*RAGGED, *RAGGED, [1, 1, 12]], [*reward, *[5.0] * 7, NAN], [0] * 7 + [1] * 7 + [0])
    for scale in ("none", "std"):
        found = np.asarray(jax.jit(credit.edges(scale))(both))  # type: ignore[arg-type]
        for i, path in enumerate(RAGGED):
            for t, node in enumerate(path):
                parent = ([0] + [one for one in path[:t] if one != node])[-1]
                deviation = np.std([V[one] for one in children[parent]])
                expected = (V[node] - V[parent]) / (deviation + 1e-8 if scale == "std" else 1)
                np.testing.assert_allclose(found[i, 1 + t], expected, atol=1e-6)
        assert not found[7:].any()


def test_depths_are_normalised_each_on_its_own() -> None:
    paths, reward = [[1, 11], [1, 12], [2, 21], [2, 22]], [1.0, 0.6, 0.2, 0.0]
    found = np.asarray(depth_advantages(batch_of(paths, reward)))
    np.testing.assert_allclose(found[:, 1], [0.707107] * 2 + [-0.707107] * 2, atol=1e-6)
    np.testing.assert_allclose(found[:, 2], [1.240216, 0.338241, -0.563735, -1.014722], atol=1e-6)


def test_children_count_by_their_probability() -> None:
    """Two children with the log-probabilities -1 and -2 and rewards 1 and 0.6."""
    batch = batch_of([[1, 11], [1, 12]], [1.0, 0.6])
    logp = jnp.zeros(batch.tokens.shape).at[0, 2].set(-1.0).at[1, 2].set(-2.0)
    tree = tree_of(batch)
    V = node_values(tree, batch.scores, shares(tree, logp))
    np.testing.assert_allclose(V[tree.key[0, 1]], 0.892423, atol=1e-6)
    np.testing.assert_allclose(V[tree.root[0]], 0.892423, atol=1e-6)


def test_a_tree_without_forks_is_a_group() -> None:
    reward = np.array([1.0, 0, 0, 0.5], np.float32)
    lone = batch_of([[1, 1], [2], [3, 3], [4]], reward.tolist())
    centred = reward - reward.mean()
    np.testing.assert_allclose(jax.jit(treepo.subtree_advantages())(lone), centred, atol=1e-6)
    np.testing.assert_allclose(edge_advantages(lone)[:, 1], centred, atol=1e-6)
    np.testing.assert_allclose(depth_advantages(lone)[:, 1], centred / reward.std(ddof=1), atol=1e-5)


def test_gains_of_nodes_add_up_to_the_reward_minus_the_value_of_the_root() -> None:
    batch = batch_of(RAGGED, [1.0, 0, 1, 0, 0.5, 0, 1])
    tree = tree_of(batch)
    V = node_values(tree, batch.scores, shares(tree))
    summed = np.where(tree.first, edge_advantages(batch), 0).sum(axis=1)
    np.testing.assert_allclose(summed, batch.scores - V[tree.root], atol=1e-6)


def test_segments_against_subtrees() -> None:
    """u by hand: leaves of 1, size-weighted over root (5), node (2 or 1) and the leaf itself (1)."""
    found = np.asarray(jax.jit(treepo.segment_advantages())(batch_of(PATHS, REWARD)))
    r, inner, size = np.array(REWARD), np.array([1, 1, 0.5, 0.5, 0]), np.array([2, 2, 2, 2, 1])
    u = (5 * (r - 0.6) + size * (r - inner)) / (5 + size + 1)
    parent = np.array([u[:2].mean(), u[:2].mean(), u[2:4].mean(), u[2:4].mean(), u[4]])
    np.testing.assert_allclose(found[:, 1], parent, atol=1e-6)
    np.testing.assert_allclose(found[:, 2], u - parent, atol=1e-6)
    decayed = np.asarray(jax.jit(treepo.segment_advantages(0.5))(batch_of(PATHS, REWARD)))
    np.testing.assert_allclose(decayed[:, 2], u - 0.5 * parent, atol=1e-6)


def test_what_is_shared_counts_once() -> None:
    weights = jax.jit(credit.shared_once().apply)((), batch_of(RAGGED, [0.0] * 7))[1].weights
    assert weights is not None
    np.testing.assert_allclose(np.asarray(weights).sum(), 12, atol=1e-5)


def test_values_of_states_and_the_score_at_the_end() -> None:
    value = jnp.asarray([[NAN, 0.5, 0.5, 0.625, 0.25, NAN, NAN], [NAN, NAN, 0.5, NAN, NAN, NAN, NAN]])
    batch = batch_of([[1, 1, 2, 3, 3], [4, 5]], [1.0, 0.0], state_value=value.at[0, 5].set(0.25))
    before, after = credit.state_values(batch)
    found = np.asarray(credit.gains(before, after))
    np.testing.assert_allclose(found[0], [0, 0.125, 0.125, -0.375, 0.75, 0.75, 0], atol=1e-6)
    np.testing.assert_allclose(found[1], [0, 0, -0.5, 0, 0, 0, 0], atol=1e-6)
