"""Which rows each gradient step takes, and how they lie in memory: planned on the host, or drawn under jit.

E epochs, B minibatches (gradient steps) in each, m micro-batches in each of those, n rows in each slice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import Trajectories, map_rows
from jaxrl_llm.distributed.aot import place
from jaxrl_llm.learner.checks import check_count, known, mark_of
from jaxrl_llm.learner.packing import pack_rows
from jaxrl_llm.learner.prefix_trie import TokenRows
from jaxrl_llm.models.layers.packed_attention import lanes
from jaxrl_llm.models.mesh_axes import ROWS, SAMPLED_ROWS, axes_of, row_shards, token_shards
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.utils.errors import InputError, shown


class Slices(flax.struct.PyTreeNode):
    """Some rows of a batch, cut into S micro-batches of n rows."""

    rows: jax.Array  # int32[S, n]
    packing: Packing | None = None  # of each slice, arrays [S, ...]; None: every row as it is
    together: bool = flax.struct.field(pytree_node=False, default=False)  # whether no group is in two slices


class Steps(flax.struct.PyTreeNode):
    """The slices of a batch that the update goes through."""

    rows: jax.Array  # int32[E, B, m, n]: rows of the batch
    packing: Packing | None = None  # of each slice, arrays [E, B, m, ...]; None: every row as it is
    mark: jax.Array | None = None  # uint32[]: checksum of the batch's tokens, to refuse steps of another batch
    whole: bool = flax.struct.field(pytree_node=False, default=True)  # whether they take all rows of the batch
    together: bool = flax.struct.field(pytree_node=False, default=False)  # whether no group is in two slices

    @property
    def in_order(self) -> Slices:
        """The slices of each gradient step: rows int32[E * B, m, n], packings [E * B, m, ...]."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), Slices(self.rows, self.packing, self.together))

    @property
    def slices(self) -> Slices:
        """Those of the first epoch, which hold every row once."""
        return jax.tree.map(lambda x: x[0].reshape(-1, *x.shape[3:]), Slices(self.rows, self.packing, self.together))


def plan_steps(
    batch: Trajectories,
    *,
    epochs: int = 1,
    minibatches: int = 1,
    micro_batches: int = 1,
    seed: int | Sequence[int] = 0,
    mesh: Mesh | None = None,
    rows: np.ndarray | None = None,
    runs: bool = False,
) -> Steps:
    """The gradient steps of a batch, whose rows are read on the host; each slice is packed.

    Each epoch deals the groups to `minibatches` in an order of its own (from `seed`; one minibatch needs none), and
    the groups of each to `micro_batches` so that these are about as long. Groups stay together where all have as many
    rows and the slices divide them. Sizes are of a short list, so that batches of about the same lengths share a
    compiled update. On a mesh packed rows are spread over ROWS of `models.mesh_axes`, and their tokens over
    "sequence". rows: int[n], those to take; other rows of the batch are in no step. runs: count the runs of packed
    rows, which models that carry states need (`ModelConfig.recurrent`).

    Raises InputError where the rows do not split evenly, and for counts below 1.
    """
    check_batch(batch)
    for name, count in (("epochs", epochs), ("minibatches", minibatches), ("micro_batches", micro_batches)):
        check_count(name, count)
    read = {name: x for name in TokenRows._fields if (x := getattr(batch, name)) is not None}
    if not all(map(known, read.values())):
        raise InputError("steps are planned on the host, which cannot read this batch: plan them outside of jit")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise InputError(f"mesh is {type(mesh).__name__} {shown(mesh)}, but must be a jax.sharding.Mesh")
    here = TokenRows(**{name: np.asarray(x) for name, x in read.items()})
    given = np.arange(len(here.group)) if rows is None else np.asarray(rows)
    N, parts = len(given), minibatches * micro_batches
    if N % parts:
        raise InputError(
            f"{N} rows do not split evenly into {minibatches} minibatches of {micro_batches} micro_batches: change one "
            "of them"
        )
    size = np.unique(here.group[given], return_counts=True)[1]
    together = int(size[0]) if (size == size[0]).all() and len(size) % parts == 0 else 1
    units = given[np.argsort(here.group[given], kind="stable")].reshape(-1, together)
    lengths = here.token_mask.sum(axis=1)[units].sum(axis=1)
    try:
        random = np.random.default_rng(seed)
    except (TypeError, ValueError):
        raise InputError(f"seed is {shown(seed)}, but must be a whole number, or several, from 0 on") from None

    slices: list[np.ndarray] = []
    for _ in range(epochs if minibatches > 1 else 1):
        shuffled = random.permutation(len(units)) if minibatches > 1 else np.arange(len(units))
        for chosen in shuffled.reshape(minibatches, -1):
            # Units of a minibatch go to its micro-batches the longest first, back and forth.
            dealt = chosen[np.argsort(-lengths[chosen], kind="stable")].reshape(-1, micro_batches)
            dealt[1::2] = dealt[1::2, ::-1]
            # In the batch's order, so that a single slice is the batch as it is.
            slices += [units[np.sort(slice_)].reshape(-1) for slice_ in dealt.T]
    taken: Any = np.stack(slices).astype(np.int32)
    packing = pack_rows(here, slices, row_shards(mesh), token_shards(mesh), lanes(mesh), runs)

    def arranged(x: np.ndarray) -> Any:
        x = x.reshape(-1, minibatches, micro_batches, *x.shape[1:])
        return np.broadcast_to(x, (epochs, *x.shape[1:]))

    mark: Any = np.uint32(mark_of(here.tokens, here.token_mask))
    whole_groups = bool(size.max() == 1 or together > 1)
    steps = Steps(arranged(taken), jax.tree.map(arranged, packing), mark, rows is None, whole_groups)
    if mesh is None:
        return jax.tree.map(jnp.asarray, steps)
    whole = NamedSharding(mesh, PartitionSpec())
    # Numbers of all tokens are on all devices along "sequence", whose heads attend to all.
    of_rows, of_actions = (
        NamedSharding(mesh, PartitionSpec(None, None, None, axes_of(mesh, names))) for names in (ROWS, SAMPLED_ROWS)
    )
    spread = jax.tree.map(lambda x: of_rows if x.ndim == 5 else of_actions, steps.packing)
    if spread.parent is not None:
        spread = spread.replace(parent=whole)
    shardings: Any = (whole, spread, whole, steps.whole, steps.together)
    return place(steps, Steps(*shardings))


def check_steps(steps: Any, batch: Trajectories) -> None:
    """InputError unless the steps were planned for this batch, as far as can be seen."""
    if not isinstance(steps, Steps):
        raise InputError(f"steps is {shown(steps)}, but must be what plan_steps(batch, ...) gives")
    shape, rows = steps.rows.shape, batch.tokens.shape[0]
    taken = shape[1] * shape[2] * shape[3] if len(shape) == 4 else 0
    if taken != rows and (steps.whole or not 0 < taken < rows):
        raise InputError(
            f"the steps were planned for {int(np.prod(shape[1:]))} rows, but the batch has {rows}: plan them for this "
            "batch"
        )
    if steps.mark is not None and all(map(known, (steps.mark, batch.tokens, batch.token_mask))):
        found = mark_of(np.asarray(batch.tokens), np.asarray(batch.token_mask))
        if found != int(steps.mark):
            raise InputError("the steps were planned for a batch of other tokens: plan them for this batch")


def filled_share(steps: Steps) -> float:
    """The share of places in packed rows that hold a token, 0 to 1. steps: planned, so that they are packed."""
    if steps.packing is None:
        raise InputError("these steps are not packed: plan them with plan_steps(batch, ...)")
    held = [np.asarray(level.enter) > 0 for level in steps.packing.levels]
    return sum(int(x.sum()) for x in held) / sum(x.size for x in held)


def take_rows(batch: Trajectories, rows: jax.Array) -> Trajectories:
    """Some rows of a batch."""
    return map_rows(lambda x: x[rows], batch)


def by_slices(f: Callable[[Trajectories, Packing | None], Any], batch: Trajectories, steps: Steps | None) -> Any:
    """f(rows, packing) of one slice after another, put together in the order of the batch's rows.

    f gives arrays with a row axis. steps: None for the batch as one, f(batch, None). Memory is that of a slice.
    """
    if steps is None:
        return f(batch, None)
    slices = steps.slices
    found = jax.lax.map(lambda each: f(take_rows(batch, each.rows), each.packing), slices)
    at = slices.rows.reshape(-1)

    def put(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, *x.shape[2:])
        return jnp.zeros_like(x).at[at].set(x)

    return jax.tree.map(put, found)
