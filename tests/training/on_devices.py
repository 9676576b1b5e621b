"""A program that saves and restores checkpoints on all devices of its processes; `test_elastic` starts it.

    python on_devices.py FOLDER MESH ACTION... [--coordinator HOST:PORT --processes N --process I]

MESH: sizes of the axes rows and columns, such as 2x4. Actions, in order: save:STEP; restore, which prints the step and
compares every shard with what was saved; refuse, in which only the last process refuses what it finds; damage:STEP, in
which the last process finds damage that the others do not. Each process prints lines that begin with the action.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

META = {"prompts": {"position": 3}}


def tree_of(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and state of a step, as NumPy arrays; the rest of the name says along which axes they are sharded."""
    big = np.arange(16 * 24, dtype=np.float32).reshape(16, 24) + step
    params = {"both rows columns": big, "bf16 columns": np.asarray(jnp.asarray(big[:8], jnp.bfloat16)), "whole": big[0]}
    state = {"moments": ({"inner - rows": -big}, ()), "count": np.int32(step), "uneven": np.arange(7) < step}
    return params, state


def placed(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """The tree as global arrays on the mesh."""

    def place(path: Any, x: np.ndarray) -> jax.Array:
        names = str(getattr(path[-1], "key", "")).split()[1:]
        spec = PartitionSpec(*(None if name == "-" else name for name in names))
        return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])

    return jax.tree_util.tree_map_with_path(place, tree)


def check(found: Any, wanted: Any, placed_as: Any) -> None:
    """Every shard has the bits that were saved, in the sharding that was asked for."""
    for x, whole, like in zip(*map(jax.tree.leaves, (found, wanted, placed_as)), strict=True):
        assert x.sharding == like.sharding, (x.sharding, like.sharding)
        for shard in x.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(np.asarray(whole)[shard.index]).tobytes()


class _Damaged:
    """A reader that finds one checkpoint damaged."""

    def __init__(self, reader: Any, folder: Path) -> None:
        self.reader, self.folder = reader, folder

    def restore(self, folder: Any, args: Any) -> Any:
        if str(folder).startswith(str(self.folder)):
            raise ValueError("damaged")
        return self.reader.restore(folder, args=args)

    def close(self) -> None:
        self.reader.close()


def main() -> None:
    """Do the actions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("mesh")
    parser.add_argument("actions", nargs="+")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    args = parser.parse_args()
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)

    from jaxrl_llm.training.folder.checkpoints import Checkpoints
    from jaxrl_llm.utils.errors import InputError

    sizes = tuple(int(size) for size in args.mesh.split("x"))
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(sizes, ("rows", "columns"), axis_types=types)
    like = placed(tree_of(0), mesh)
    forget = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    checkpoints = Checkpoints(args.folder, keep=9)
    for action in args.actions:
        name, _, step = action.partition(":")
        if name == "save":
            tree = placed(tree_of(int(step)), mesh)
            checkpoints.save(int(step), *tree, META, {"tokens": np.arange(int(step)), "none": np.zeros((0, 2))})
            jax.block_until_ready(forget(tree))  # as the next update does
            checkpoints.wait()
            print("saved", checkpoints.steps(), flush=True)
        elif name == "restore":
            found = checkpoints.latest(*like)
            assert found is not None
            check((found.params, found.state), tree_of(found.step), like)
            assert found.meta == META
            assert found.arrays["tokens"].tolist() == list(range(found.step))
            assert found.arrays["none"].shape == (0, 2)
            print("restored", found.step, flush=True)
        elif name == "damage":
            if args.process == args.processes - 1:
                checkpoints._reader = _Damaged(checkpoints._reader, args.folder / step)
        else:

            def no(meta: dict[str, Any]) -> None:
                if args.process == args.processes - 1:
                    raise InputError("this process does not want it")

            try:
                checkpoints.latest(*like, check=no)
            except InputError as error:
                print("refused", error, flush=True)
    checkpoints.close()


if __name__ == "__main__":
    main()
