"""Trees of completions: values of their nodes, and advantages of segments, of depths, and of leaves among all subtrees.

Rows of a group that have a node in common share the tokens of its segment. info["node"] f32[N, L] is the number of the
node of each action, unique in its group. A segment is a run of actions with one node, and the rows that have a node are
its leaves. The root of a group is the state after its prompt, before all segments. Rows without a score (NaN) are left
out of all values, and their advantages are 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.core.annotations import Divisor, NonNegative
from jaxrl_llm.core.needs.placeholders import no_state_values, own_nodes
from jaxrl_llm.core.parts import Array, Trajectories, Transform, batch_part, part, stateless, stateless_part

NODE = frozenset({"node"})
EQUAL = 1e-6  # standard deviations and differences of values below are 0


class Tree(NamedTuple):
    """Segments of rows, and numbers of their nodes from 0 to `bound` - 1, roots of groups among them; arrays [N, L]."""

    mask: Array  # bool, the actions
    first: Array  # bool, the first action of each segment
    last: Array  # bool, the actions of the last segment of each row
    key: Array  # int32, number of the node of each action
    parent: Array  # int32, that of the node before it
    root: Array  # int32[N], that of the row's root
    before: Array  # int32, position of the action before the segment; -1: none
    depth: Array  # int32, from 0 for the first segment of a row
    single: Array  # bool, first actions of which each node has one

    @property
    def bound(self) -> int:
        """Above all numbers of nodes."""
        return self.key.size + self.key.shape[0]


def _or(stand_in: Callable[[Trajectories, float | None], Array], batch: Trajectories, name: str) -> Array:
    """An entry of the batch's info, or what stands in for it where a run goes without."""
    found = (batch.info or {}).get(name)
    return stand_in(batch, None) if found is None else found


def tree_of(batch: Trajectories, rows: Array | None = None) -> Tree:
    """The tree of a batch, of those rows alone where bool[N] is true; None: of all.

    Without info["node"] every row is a tree of its own, which does not fork.
    """
    mask = batch.action_mask if rows is None else batch.action_mask & rows[:, None]
    N, L = mask.shape
    node = jnp.where(mask, jnp.nan_to_num(_or(own_nodes, batch, "node")), -1.0)
    place = jnp.broadcast_to(jnp.arange(L), (N, L))
    upto = jax.lax.cummax(jnp.where(mask, place, -1), axis=1)
    previous = jnp.pad(upto, ((0, 0), (1, 0)), constant_values=-1)[:, :L]
    first = mask & ((previous < 0) | (node != _at(node, previous)))
    before = _at(previous, jax.lax.cummax(jnp.where(first, place, 0), axis=1))
    depth = jnp.cumsum(first, axis=1) - 1
    _, group = jnp.unique(batch.group, return_inverse=True, size=N)
    key = _ranks(jnp.broadcast_to(group[:, None], (N, L)), node)
    root = N * L + group
    parent = jnp.where(before < 0, root[:, None], _at(key, before))
    flat = jnp.arange(N * L).reshape(N, L)
    lowest = jax.ops.segment_min(jnp.where(first, flat, N * L).reshape(-1), key.reshape(-1), num_segments=N * L)
    last = mask & (depth == jnp.max(depth, axis=1, keepdims=True))
    return Tree(mask, first, last, key, parent, root, before, depth, first & (flat == lowest[key]))


def _at(values: Array, places: Array) -> Array:
    """Values [N, L] at places [N, L] of the same row; at the first place where they are -1."""
    return jnp.take_along_axis(values, jnp.maximum(places, 0), axis=1)


def _ranks(*columns: Array) -> Array:
    """Numbers from 0 on, equal where all columns are: int32 of their shape."""
    flat = [column.reshape(-1) for column in columns]
    order = jnp.lexsort(flat[::-1])
    in_order = [x[order] for x in flat]
    new = jnp.any(jnp.stack([x[1:] != x[:-1] for x in in_order]), axis=0)
    numbers = jnp.pad(jnp.cumsum(new), (1, 0)).astype(jnp.int32)
    return jnp.zeros(flat[0].shape, jnp.int32).at[order].set(numbers).reshape(columns[0].shape)


def sums(tree: Tree, values: Array, where: Array, keys: Array) -> Array:
    """f32[bound]: for each node the sum of values [N, L] over the places `where` whose key it is."""
    found = jnp.where(where, values, 0.0).astype(jnp.float32)
    return jax.ops.segment_sum(found.reshape(-1), keys.reshape(-1), num_segments=tree.bound)


def leaves(tree: Tree) -> Array:
    """f32[bound]: the number of rows that have each node."""
    return _of_rows(tree, jnp.where(tree.first, 1.0, 0.0), jnp.any(tree.mask, axis=1) * 1.0)


def _of_rows(tree: Tree, at_first: Array, at_root: Array, how: Callable[..., Array] = jax.ops.segment_sum) -> Array:
    """f32[bound]: for each node the sum of at_first f32[N, L], for each root that of at_root f32[N]."""
    keys = jnp.concatenate([tree.key.reshape(-1), tree.root])
    return how(jnp.concatenate([at_first.reshape(-1), at_root]), keys, num_segments=tree.bound)


def shares(tree: Tree, evidence: Array | None = None) -> tuple[Array, Array]:
    """How much of a node's value is each child's: log shares [N, L], and those of the rows that end there, [N].

    All children of a node have equal shares; a row that ends at a node is a child of it. evidence f32[N, L], of first
    actions: the children's shares are instead proportional to exp(evidence).
    """
    children = sums(tree, jnp.ones(tree.key.shape), tree.single, tree.parent)
    rows = jnp.any(tree.mask, axis=1)
    final = jnp.max(jnp.where(tree.last, tree.key, -1), axis=1)
    ends = jax.ops.segment_sum(rows * 1.0, jnp.where(rows, final, tree.root), num_segments=tree.bound)
    whole = jnp.maximum(children + ends, 1.0)
    if evidence is None:
        child = -jnp.log(whole)[tree.parent]
    else:
        score = jnp.where(tree.single, evidence, -jnp.inf).reshape(-1)
        top = jax.ops.segment_max(score, tree.parent.reshape(-1), num_segments=tree.bound)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        mass = sums(tree, jnp.exp(jnp.minimum(evidence - top[tree.parent], 0.0)), tree.single, tree.parent)
        child = evidence - (top + jnp.log(jnp.maximum(mass, 1e-30)))[tree.parent]
        child = child + jnp.log(jnp.maximum(children, 1.0) / whole)[tree.parent]
    return jnp.where(tree.first, child, 0.0), -jnp.log(whole)[jnp.maximum(final, 0)]


def node_values(tree: Tree, scores: Array, shared: tuple[Array, Array] | None = None) -> Array:
    """f32[bound]: the value of each node, a mean of the scores f32[N] of its leaves.

    shared: None: all leaves count alike. Else `shares`, with which a node's value is the mean of its children's, from
    the leaves up. Equal scores give exactly that value.
    """
    known = jnp.any(tree.mask, axis=1) & ~jnp.isnan(scores)
    first = tree.first & known[:, None]
    weight, from_root = jnp.ones(tree.key.shape), jnp.ones(known.shape)
    if shared is not None:
        child, end = shared
        after = jnp.sum(child, axis=1, keepdims=True) - jnp.cumsum(child, axis=1)
        weight, from_root = jnp.exp(after + end[:, None]), jnp.exp(jnp.sum(child, axis=1) + end)

    def total(by: Array) -> Array:
        at_first = jnp.where(first, weight * by[:, None], 0.0)
        return _of_rows(tree, at_first, jnp.where(known, from_root * by, 0.0))

    best = jnp.where(known, scores, -jnp.inf)
    top = jax.ops.segment_max(best, tree.root, num_segments=tree.bound)[tree.root]  # of the group
    level = _of_rows(tree, jnp.where(first, top[:, None], -jnp.inf), top, jax.ops.segment_max)
    mass, below = total(jnp.ones(known.shape)), total(jnp.where(known, scores - top, 0.0))
    return jnp.where(mass > 0, level + below / jnp.maximum(mass, 1e-30), 0.0)


def scored_tree(batch: Trajectories) -> Tree:
    """The tree of the rows with a score."""
    return tree_of(batch, ~jnp.isnan(batch.scores))


def state_values(batch: Trajectories, most: Callable[[Array], Array] = lambda value: value) -> tuple[Array, Array]:
    """(before, after): the values of the states at the beginning and the end of each action's segment, f32[N, L].

    From info["state_value"], which is the value at the beginning; that at the end of a row is its score. `most` maps
    values of the policy to those that are wanted. NaN where a value is not known.
    """
    tree = tree_of(batch)
    L = batch.tokens.shape[1]
    value = jnp.where(tree.mask, most(_or(no_state_values, batch, "state_value")), jnp.nan)
    began = jnp.where(tree.first, jnp.broadcast_to(jnp.arange(L), value.shape), L)
    following = jax.lax.cummin(jnp.pad(began, ((0, 0), (0, 1)), constant_values=L)[:, 1:], axis=1, reverse=True)
    after = jnp.where(following < L, _at(value, jnp.minimum(following, L - 1)), most(batch.scores)[:, None])
    return value, after


def gains(before: Array, after: Array) -> Array:
    """after - before where both are known, else 0; elementwise.

    >>> print(gains(jnp.array([0.5, 0.625, 0.25]), jnp.array([0.625, 0.25, 1.0])))
    [ 0.125 -0.375  0.75 ]
    """
    return jnp.where(jnp.isnan(before) | jnp.isnan(after), 0.0, after - before)


@batch_part
def edges(batch: Trajectories, scale: Divisor = "none", epsilon: NonNegative = 1e-8) -> Array:
    """A function of the batch: V(node) - V(node before it) on the actions of each segment, f32[N, L]; V of children.

    scale "std": divided by the standard deviation (ddof 0) of the values of all children of the node before, plus
    epsilon; 0 where these are equal.
    """
    tree = scored_tree(batch)
    V = node_values(tree, batch.scores, shares(tree))
    gain = V[tree.key] - V[tree.parent]
    gain = jnp.where(jnp.abs(gain) > EQUAL * jnp.maximum(jnp.abs(V[tree.key]), 1.0), gain, 0.0)  # means round
    if scale == "std":
        count = jnp.maximum(sums(tree, jnp.ones(gain.shape), tree.single, tree.parent), 1.0)
        mean = sums(tree, gain, tree.single, tree.parent) / count
        squares = sums(tree, (gain - mean[tree.parent]) ** 2, tree.single, tree.parent) / count
        deviation = jnp.sqrt(squares)[tree.parent]
        gain = jnp.where(deviation > EQUAL, gain / (deviation + epsilon), 0.0)
    return jnp.where(tree.mask, gain, 0.0)


@part
def tree_credit(credit: Callable[[Trajectories], Array], needs: frozenset[str] = NODE) -> Transform:
    """Write credit(batch) f32[N] or f32[N, L] as the advantages of the actions of scored rows."""

    def apply(batch: Trajectories) -> Trajectories:
        found = credit(batch)
        found = found[:, None] if found.ndim == 1 else found
        return batch.replace(advantages=jnp.where(scored_actions(batch), found, 0.0))

    return stateless(apply, needs)


@stateless_part(NODE)
def shared_once(batch: Trajectories) -> Trajectories:
    """Divide the weight of each action by the number of scored rows that share it: it counts once in token means."""
    tree = scored_tree(batch)
    return batch.replace(weights=batch.loss_weights / jnp.maximum(leaves(tree)[tree.key], 1.0))
