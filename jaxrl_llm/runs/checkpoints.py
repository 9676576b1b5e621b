"""Checkpoints: asynchronous and atomic through orbax, verified when they are read.

A checkpoint is a folder named by its step. It holds the parameters, the rest of the state (optimiser, transforms),
arrays whose shapes vary from step to step (completions in flight), and a JSON object (data position, counters,
settings) with checksums of itself and of every array, and their structure. Orbax writes it under a temporary name and
renames it when it is complete, so a process killed at any moment leaves the previous checkpoint intact.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import InputError

logger = logging.getLogger("jaxrl_llm.checkpoints")


RESERVED = ("checksums", "arrays", "structure", "step")  # entries of the JSON object added by `Checkpoints.save`


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    step: int
    params: Any
    state: Any
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray] = {}  # noqa: RUF012 (never mutated)


def checksum(tree: Any) -> dict[str, int]:
    """crc32 of the bytes of every array, keyed by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(leaf).tobytes()) for path, leaf in leaves}


def structure(tree: Any) -> dict[str, str]:
    """Dtype and shape of every array, keyed by its path; empty containers and None are marked "empty".

    >>> structure({"a": np.zeros((2, 3), np.float32), "b": ()})
    {"['a']": 'float32[2, 3]', "['b']": 'empty'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    kinds = {path: "empty" if _is_empty(leaf) else f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
    return {jax.tree_util.keystr(path): kind for path, kind in kinds.items()}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, tuple | list | dict) and not node)


def _differences(meta: dict[str, Any], shapes: tuple[Any, Any]) -> str:
    """How the structure of a checkpoint differs from that of (params, state); an empty string if it does not."""
    if "structure" not in meta:
        return ""  # an older checkpoint, without its structure: restoring reports the mismatch
    wanted, found = structure(shapes), dict(meta["structure"])
    if shapes[1] is None:  # only the parameters are restored
        wanted, found = ({path: x for path, x in all_.items() if path.startswith("[0]")} for all_ in (wanted, found))
    differing = [
        f"{_name(path)} is {found.get(path, 'not there')} in the checkpoint, and {wanted.get(path, 'not there')} here"
        for path in dict.fromkeys([*wanted, *found])
        if wanted.get(path) != found.get(path)
    ]
    more = f" and {len(differing) - 2} more" if len(differing) > 2 else ""
    return "; ".join(differing[:2]) + more


def _name(path: str) -> str:
    """A readable form of an array's path, for messages."""
    part = "the parameter " if path.startswith("[0]") else "the state "
    return part + "/".join(re.findall(r"\w+", path)[1:])


def _check_readable(folder: Path, contents: bool = False) -> None:
    """InputError if the system cannot read a checkpoint's files (which is not damage). Missing files are fine.

    contents: also read every file to its end.
    """
    failed: list[OSError] = []
    for place, _, names in os.walk(folder, onerror=failed.append):
        for path in (Path(place) / name for name in names):
            try:
                if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe, for instance, would block forever
                    failed.append(OSError(errno.EINVAL, "not a regular file", str(path)))
                elif contents:
                    with path.open("rb") as file:
                        while file.read(2**24):
                            pass
            except OSError as error:
                failed.append(OSError(error.errno, error.strerror, str(path)))
    for found in failed:
        if found.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise InputError(
                f"checkpoint {folder} cannot be read ({found.strerror}: {found.filename}), which need not be damage: "
                "make it readable and try again; nothing was changed"
            )


class Checkpoints:
    """The checkpoints of a run; keeps the newest `keep` (at least 2, in case the newest is damaged)."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=max(keep, 2), enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._begun: int | None = None  # step of the last checkpoint whose write was started

    def save(
        self, step: int, params: Any, state: Any, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None
    ) -> None:
        """Start writing a checkpoint; arrays may be donated, and `meta` modified, as soon as this returns.

        arrays: named arrays of any shape; restoring does not need to know their shapes.
        InputError if this or the previous checkpoint could not be written, e.g. on a full disk; earlier ones are kept.
        """
        self.wait()
        # Copies: orbax writes in the background, while the next update reuses these buffers.
        params, state = jax.tree.map(lambda x: np.array(x, copy=True), (params, state))
        meta = json.loads(json.dumps(meta))
        args = self._ocp.args
        checksums, meta["structure"], meta["step"] = checksum((params, state)), structure((params, state)), step
        parts = {"params": args.StandardSave(params), "state": args.StandardSave(state)}
        if arrays:
            arrays = {name: np.array(x, copy=True) for name, x in arrays.items()}
            checksums |= checksum({"arrays": arrays})
            meta["arrays"] = {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}
            # Orbax cannot write empty arrays; their shapes are in `meta`.
            if full := {name: x for name, x in arrays.items() if x.size}:
                parts["arrays"] = args.StandardSave(full)
        parts["meta"] = args.JsonSave({**meta, "checksums": {**checksums, "meta": _checksum_of_json(meta)}})
        self._begun = step
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
            raise _not_saved(self.folder, self._begun, error) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest(
        self, params: Any, state: Any = None, check: Callable[[dict[str, Any]], object] | None = None
    ) -> Restored | None:
        """The newest intact checkpoint, or None if there are none; damaged ones are skipped with a warning.

        params, state: trees of arrays (or shapes) with the expected structure; without a state only the parameters are
        restored. check: called with a checkpoint's JSON object before its arrays are read; it may raise InputError.
        Raises InputError if a checkpoint has another structure (naming the difference), if the system cannot read it,
        or if all checkpoints are damaged. Never modifies the folder.
        """
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (params, state))
        steps = self.steps()
        for step in reversed(steps):
            _check_readable(self.folder / str(step))
            try:
                meta = self._meta(step)
                if check is not None:
                    check(meta)
                if differs := _differences(meta, shapes):
                    raise InputError(
                        f"checkpoint {self.folder}/{step} does not fit the run's settings: {differs}; set them back to "
                        "what they were, nothing was changed"
                    )
                return self._restore(step, shapes, meta)
            except InputError:
                raise
            except Exception as error:
                _check_readable(self.folder / str(step), contents=True)
                logger.warning("checkpoint %s/%d is damaged and skipped: %s", self.folder, step, _reason(error))
        if not steps:
            return None
        raise InputError(
            f"none of the {len(steps)} checkpoints in {self.folder} can be used: all are damaged; nothing was changed. "
            "Put back a good copy, or begin a new run in another folder"
        )

    def _meta(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint with its checksums; ValueError if its own checksum does not match."""
        args = self._ocp.args
        meta = dict(self._manager.restore(step, args=args.Composite(meta=args.JsonRestore()))["meta"])
        checksums = meta["checksums"]
        if checksums["meta"] != _checksum_of_json({name: x for name, x in meta.items() if name != "checksums"}):
            raise ValueError("its contents are not what was written")
        if meta.get("step", step) != step:
            raise ValueError(f"it is checkpoint {meta['step']} under another name")
        return meta

    def _restore(self, step: int, shapes: tuple[Any, Any], meta: dict[str, Any]) -> Restored:
        """The arrays of a checkpoint with this structure; ValueError if a checksum does not match."""
        args, (params, state) = self._ocp.args, shapes
        parts = {"params": args.StandardRestore(params)}
        if state is not None:
            parts["state"] = args.StandardRestore(state)
        got = self._manager.restore(step, args=args.Composite(**parts))
        rest, arrays = None if state is None else got["state"], dict[str, np.ndarray]()
        found = checksum((got["params"], rest))
        if state is not None and "arrays" in meta:
            arrays = self._arrays(step, meta["arrays"])
            found |= checksum({"arrays": arrays})
        written = meta["checksums"]
        if any(written.get(name) != value for name, value in found.items()):
            raise ValueError("its contents are not what was written")
        own = {name: value for name, value in meta.items() if name not in RESERVED}
        return Restored(step, got["params"], rest, own, arrays)

    def _arrays(self, step: int, shapes: dict[str, Any]) -> dict[str, np.ndarray]:
        """Restore the named arrays, given {name: (shape, dtype)}."""
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        full = {name: x for name, x in arrays.items() if x.size}
        if not full:
            return arrays
        got = self._manager.restore(step, args=self._ocp.args.Composite(arrays=self._ocp.args.StandardRestore(full)))
        return {**arrays, **{name: np.asarray(x) for name, x in got["arrays"].items()}}

    def set_aside_after(self, step: int) -> list[Path]:
        """Move aside checkpoints newer than `step`, which the resumed run will rewrite; returns their new paths."""
        moved = []
        for newer in [s for s in self.steps() if s > step]:
            aside = self.folder.with_name(f"{self.folder.name}-set-aside")
            aside.mkdir(exist_ok=True)
            names = (aside / (f"{newer}.{again}" if again else str(newer)) for again in itertools.count())
            place = next(name for name in names if not name.exists())
            os.rename(self.folder / str(newer), place)
            moved.append(place)
        self._manager.reload()
        return moved

    def close(self) -> None:
        """Wait for pending writes and stop the writer's threads."""
        self.wait()
        self._manager.close()


def _checksum_of_json(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _reason(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters, without object addresses."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"\s*<[^<>]* at 0x\w+>|<bound method.*", "", lines[0])[:200]


def _not_saved(folder: Path, step: int | None, error: Exception) -> InputError:
    what = f"checkpoint {step}" if step is not None else "the last checkpoint"
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    if len(reason) > 200:  # keep both ends: the operation, and the system's error
        reason = f"{reason[:90]} ... {reason[-100:]}"
    return InputError(
        f"{what} could not be written to {folder} ({reason}): free space there, then resume with --resume; "
        "earlier checkpoints are intact"
    )
