"""Checkpoints: asynchronous and atomic through orbax, verified when they are read.

A checkpoint is a folder named by its step with the parameters, the rest of the state (optimiser, transforms), arrays
whose shapes are another at each step (the pool of begun completions), and a JSON object (data position, counters,
configuration) that also holds checksums of itself and of every array. Orbax
writes it under a temporary name and renames it when it is complete, so a process killed at any moment leaves the one
before it.
"""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import InputError

logger = logging.getLogger("jaxrl_llm.checkpoints")


class Restored(NamedTuple):
    """What a checkpoint held."""

    step: int
    params: Any
    state: Any
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray] = {}  # noqa: RUF012 (nobody changes it)


def checksum(tree: Any) -> dict[str, int]:
    """crc32 of the bytes of every array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(leaf).tobytes()) for path, leaf in leaves}


class Checkpoints:
    """The checkpoints of a run, newest last; keeps the last `keep` (at least 2, in case the newest is damaged)."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=max(keep, 2), enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(
        self, step: int, params: Any, state: Any, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None
    ) -> None:
        """Begin to write a checkpoint; arrays may be donated, and `meta` changed, as soon as this returns.

        arrays: by name, of any shapes; who reads the checkpoint need not know them.
        InputError where an earlier one could not be written, e.g. on a full disk; what was saved before it stands.
        """
        # Own copies: the writer works in the background, while the next update reuses these very buffers.
        params, state = jax.tree.map(lambda x: np.array(x, copy=True), (params, state))
        meta = json.loads(json.dumps(meta))
        args = self._ocp.args
        checksums = {**checksum((params, state)), "meta": _checksum_of_json(meta)}
        parts = {"params": args.StandardSave(params), "state": args.StandardSave(state)}
        if arrays:
            arrays = {name: np.array(x, copy=True) for name, x in arrays.items()}
            checksums |= checksum({"arrays": arrays})
            meta["arrays"] = {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}
            checksums["meta"] = _checksum_of_json(meta)
            # Empty arrays cannot be written; their shapes say all.
            if full := {name: x for name, x in arrays.items() if x.size}:
                parts["arrays"] = args.StandardSave(full)
        parts["meta"] = args.JsonSave({**meta, "checksums": checksums})
        try:
            if not self._manager.save(step, args=args.Composite(**parts)):
                raise ValueError(f"the folder holds {self.steps()}, and a new checkpoint must be later")
        except Exception as error:
            raise _not_saved(self.folder, step, error) from error

    def wait(self) -> None:
        """Wait until everything is on disk. InputError as for `save`."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise _not_saved(self.folder, None, error) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest(self, params: Any, state: Any = None) -> Restored | None:
        """The newest checkpoint that can be read and is what was written; damaged ones are skipped with a warning.

        params, state: trees of arrays (or shapes) of the same structure; without a state only the parameters are read.
        None where there is no good checkpoint.
        """
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (params, state))
        args = self._ocp.args
        for step in reversed(self.steps()):
            try:
                parts = {"params": args.StandardRestore(shapes[0]), "meta": args.JsonRestore()}
                if state is not None:
                    parts["state"] = args.StandardRestore(shapes[1])
                got = self._manager.restore(step, args=args.Composite(**parts))
                meta, rest = dict(got["meta"]), None if state is None else got["state"]
                written = meta.pop("checksums")
                found = {**checksum((got["params"], rest)), "meta": _checksum_of_json(meta)}
                arrays = {}
                if state is not None and "arrays" in meta:
                    arrays = self._arrays(step, meta["arrays"])
                    found |= checksum({"arrays": arrays})
                if any(written.get(name) != value for name, value in found.items()):
                    raise ValueError("its contents are not what was written")
                meta.pop("arrays", None)
                return Restored(step, got["params"], rest, meta, arrays)
            except Exception as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                logger.warning("checkpoint %s/%d is damaged and skipped: %s", self.folder, step, reason[:200])
        return None

    def _arrays(self, step: int, shapes: dict[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of these shapes and dtypes."""
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        full = {name: x for name, x in arrays.items() if x.size}
        if not full:
            return arrays
        got = self._manager.restore(step, args=self._ocp.args.Composite(arrays=self._ocp.args.StandardRestore(full)))
        return {**arrays, **{name: np.asarray(x) for name, x in got["arrays"].items()}}

    def forget_after(self, step: int) -> None:
        """Delete checkpoints newer than `step` (damaged ones, before a resumed run writes them again)."""
        for newer in [s for s in self.steps() if s > step]:
            self._manager.delete(newer)

    def close(self) -> None:
        """Wait and release the writer's threads."""
        self.wait()
        self._manager.close()


def _checksum_of_json(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _not_saved(folder: Path, step: int | None, error: Exception) -> InputError:
    what = f"checkpoint {step}" if step is not None else "the last checkpoint"
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    if len(reason) > 200:  # what was being done, and at the end what the system said to it
        reason = f"{reason[:90]} ... {reason[-100:]}"
    return InputError(
        f"{what} could not be written to {folder} ({reason}): free space there, then go on with --resume; "
        "the checkpoints before it are whole"
    )
