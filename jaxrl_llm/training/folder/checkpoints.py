"""Checkpoints: asynchronous and atomic through orbax, verified when they are read, independent of the mesh.

A checkpoint is a folder named by its step. It holds the parameters, the rest of the state (optimiser, transforms),
arrays whose shapes vary from step to step (completions in flight), and a JSON object (data position, counters,
settings) with checksums of itself and of every array, and their structure. Orbax writes it under a temporary name and
renames it when it is complete, so a process killed at any moment leaves the previous checkpoint intact.

Every process writes its own shards of the arrays and, on restoring, reads its part of what the new shardings ask for:
on another number of devices or hosts, and never a whole array of what is sharded. What is not sharded (the JSON object,
arrays of NumPy) is written by process 0. All processes see the same folder: it is on a shared file system, or a URL
gs://BUCKET/..., the only one that orbax supports besides paths.
"""

import errno
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxrl_llm.distributed.hosts import all_hosts
from jaxrl_llm.training.folder.checksums import checksum_of_json, checksums, checksums_on_host, differences, structure
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.storage import is_url, unreadable

logger = logging.getLogger("jaxrl_llm.checkpoints")

FORMAT = 2  # of checkpoints: 1 had other checksums
RESERVED = ("checksums", "arrays", "structure", "step", "format")  # entries of the JSON object that `save` adds
T = TypeVar("T")
Check = Callable[[dict[str, Any]], object]  # of a checkpoint's JSON object
Arrays = dict[str, np.ndarray]  # by name


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    step: int
    params: Any
    state: Any
    meta: dict[str, Any]
    arrays: Arrays = {}  # noqa: RUF012 (never mutated)


def _check_readable(folder: epath.Path, contents: bool = False) -> None:
    """InputError if the system cannot read a checkpoint's files (which is not damage). Missing files are fine.

    contents: also read every file to its end. Of files at a URL, nothing is checked.
    """
    for found in [] if is_url(folder) else unreadable(folder, contents):
        if found.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise InputError(
                f"checkpoint {folder} cannot be read ({found.strerror}: {found.filename}), which need not be damage: "
                "make it readable and try again; nothing was changed"
            )


class Checkpoints:
    """The checkpoints of a run; keeps the newest `keep` (at least 2, in case the newest is damaged).

    In a run of several processes, all of them make it and call its methods, in the same order.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        import orbax.checkpoint as ocp

        self.folder = epath.Path(folder if is_url(folder) else Path(folder).absolute())
        self._ocp, self._hosts = ocp, all_hosts()
        options = ocp.CheckpointManagerOptions(max_to_keep=max(keep, 2), enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._reader = ocp.StandardCheckpointHandler()  # the manager's own would wait for processes that have failed
        self._begun: int | None = None  # step of the last checkpoint whose write was started

    def save(self, step: int, params: Any, state: Any, meta: dict[str, Any], arrays: Arrays | None = None) -> None:
        """Start writing a checkpoint; arrays may be donated, and `meta` modified, as soon as this returns.

        params, state: jax.Arrays of any sharding, in a run of several processes on the devices of all. meta, arrays:
        the same in every process; named arrays of any shape, which restoring does not need to know.
        InputError if this or the previous checkpoint could not be written, e.g. on a full disk; earlier ones are kept.
        """
        self.wait()
        params, state = tree = jax.tree.map(_as_saved, (params, state))
        meta = json.loads(json.dumps(meta))
        args = self._ocp.args
        meta |= {"structure": structure(tree), "step": step, "format": FORMAT}
        sums = checksums(tree)
        # Orbax has copied the shards to the host when its `save` returns. On CPUs the copy is the buffer itself, which
        # an update that donates it then leaves alone: XLA copies a donated buffer that is referenced elsewhere.
        parts = {"params": args.StandardSave(params), "state": args.StandardSave(state)}
        if arrays:
            arrays = {name: np.array(x, copy=True) for name, x in arrays.items()}
            sums |= checksums_on_host(arrays)
            meta["arrays"] = {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}
            # Orbax cannot write empty arrays; their shapes are in `meta`.
            if full := {name: x for name, x in arrays.items() if x.size}:
                parts["arrays"] = args.StandardSave(full)
        parts["meta"] = args.JsonSave({**meta, "checksums": {**sums, "meta": checksum_of_json(meta)}})
        self._begun = step
        with self._writing():
            if not self._manager.save(step, args=args.Composite(**parts)):
                raise ValueError(f"the folder holds {self.steps()}, and a new checkpoint must be later")

    def wait(self) -> None:
        """Wait until everything is on disk. InputError as for `save`."""
        with self._writing():
            self._manager.wait_until_finished()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """InputError, with what to do, if the write that was started last fails."""
        try:
            yield
        except jax.errors.JaxRuntimeError:  # between processes or on a device, which has nothing to do with the disk
            raise
        except Exception as error:
            what = f"checkpoint {self._begun}" if self._begun is not None else "the last checkpoint"
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            if len(reason) > 200:  # keep both ends: the operation, and the system's error
                reason = f"{reason[:90]} ... {reason[-100:]}"
            raise InputError(
                f"{what} could not be written to {self.folder} ({reason}): free space there, then resume with "
                "--resume; earlier checkpoints are intact"
            ) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest(self, params: Any, state: Any = None, check: Check | None = None) -> Restored | None:
        """The newest intact checkpoint, or None if there are none; damaged ones are skipped with a warning.

        params, state: trees of arrays (or shapes) with the expected structure and shardings, in which the arrays are
        restored (without a sharding: on the first local device); without a state only the parameters are restored.
        check: called with a checkpoint's JSON object before its arrays are read; it may raise InputError.
        Raises InputError if a checkpoint has another structure (naming the difference), if the system cannot read it,
        or if all checkpoints are damaged. Never modifies the folder. All processes get the same checkpoint: one that
        some process cannot read is skipped, or refused, by all.
        """
        target = jax.tree.map(_target, (params, state))
        steps = self._hosts.gather(self.steps())[0]
        for step in reversed(steps):
            read = self._attempt(step, partial(self._read, step, target, check))
            if read is not None and self._attempt(step, partial(_verify, *read)):
                return read[0]
        if not steps:
            return None
        raise InputError(
            f"none of the {len(steps)} checkpoints in {self.folder} can be used: all are damaged; nothing was changed. "
            "Put back a good copy, or begin a new run in another folder"
        )

    def _attempt(self, step: int, attempt: Callable[[], T]) -> T | None:
        """The result of an attempt, which must succeed in every process; None, with a warning, if it found damage."""
        folder, found = self.folder / str(step), None
        caught: Exception | None = None
        try:
            found = attempt()
        except InputError as error:
            caught = error
        except Exception as error:
            caught = error
            try:
                _check_readable(folder, contents=True)
            except InputError as unreadable:
                caught = unreadable
        problems = self._hosts.gather(caught and (isinstance(caught, InputError), _message(caught)))
        if isinstance(caught, InputError):
            raise caught
        wrong = [(index, *problem) for index, problem in enumerate(problems) if problem]
        for index, refused, message in wrong:
            if refused:
                raise InputError(f"process {index}: {message}")
        if wrong and self._hosts.first:
            logger.warning("checkpoint %s is damaged and skipped: %s", folder, wrong[0][2])
        return None if wrong else found

    def _read(self, step: int, target: tuple[Any, Any], check: Check | None) -> tuple[Restored, dict[str, int]]:
        """A checkpoint and its checksums, which are still to be verified for arrays on the devices.

        InputError if the checkpoint cannot be read or does not fit; other exceptions mean damage.
        """
        folder, (params, state) = self.folder / str(step), target
        _check_readable(folder)
        meta = _read_meta(folder, step)
        if check is not None:
            check(meta)
        if differs := differences(meta, target):
            raise InputError(
                f"checkpoint {folder} does not fit the run's settings: {differs}; set them back to what they were, "
                "nothing was changed"
            )
        restore = self._ocp.args.StandardRestore
        got_params = self._reader.restore(folder / "params", args=restore(params))
        got_state = None
        arrays = Arrays()
        if state is not None:
            got_state = self._reader.restore(folder / "state", args=restore(state))
            arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in meta.get("arrays", {}).items()}
            if full := {name: x for name, x in arrays.items() if x.size}:
                got = self._reader.restore(folder / "arrays", args=restore(full))
                arrays |= {name: np.asarray(x) for name, x in got.items()}
            _compare(checksums_on_host(arrays), meta["checksums"])
        own = {name: value for name, value in meta.items() if name not in RESERVED}
        return Restored(step, got_params, got_state, own, arrays), meta["checksums"]

    def set_aside_after(self, step: int) -> list[epath.Path]:
        """Move aside checkpoints newer than `step`, which the resumed run will rewrite; returns their new paths."""
        moved = []
        for newer in [s for s in self.steps() if s > step] if self._hosts.first else []:
            aside = self.folder.parent / f"{self.folder.name}-set-aside"
            aside.mkdir(exist_ok=True)
            names = (aside / (f"{newer}.{again}" if again else str(newer)) for again in itertools.count())
            place = next(name for name in names if not name.exists())
            (self.folder / str(newer)).rename(place)
            moved.append(place)
        moved = self._hosts.gather(moved)[0]
        self._manager.reload()
        return moved

    def close(self) -> None:
        """Wait for pending writes and stop the writer's threads."""
        self.wait()
        self._manager.close()
        self._reader.close()


def _as_saved(x: Any) -> Any:
    """An array as orbax saves it: each process its shards, or process 0 what every process has by itself."""
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return np.asarray(x) if jax.process_count() > 1 and x.is_fully_addressable else x


def _target(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array to be restored."""
    place = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _read_meta(folder: epath.Path, step: int) -> dict[str, Any]:
    """The JSON object of a checkpoint with its checksums; ValueError if its own checksum does not match.

    InputError if it was written by another version.
    """
    meta = json.loads((folder / "meta" / "metadata").read_text())
    own = {name: x for name, x in meta.items() if name != "checksums"}
    if meta["checksums"]["meta"] != checksum_of_json(own):
        raise ValueError("its contents are not what was written")
    if (found := meta.get("format", 1)) != FORMAT:
        raise InputError(
            f"checkpoint {folder} has format {found}, and this version of jaxrl_llm reads {FORMAT}: go on with the "
            "version that wrote it"
        )
    if meta["step"] != step:
        raise ValueError(f"it is checkpoint {meta['step']} under another name")
    return dict(meta)


def _verify(restored: Restored, written: dict[str, int]) -> bool:
    """True; ValueError if the arrays on the devices are not those that were saved. Every process must call it."""
    _compare(checksums((restored.params, restored.state)), written)
    return True


def _compare(found: dict[str, int], written: dict[str, int]) -> None:
    if any(written.get(name) != value for name, value in found.items()):
        raise ValueError("its contents are not what was written")


def _message(error: Exception) -> str:
    """Of errors that are not an InputError the first line, at most 200 characters, without object addresses."""
    if isinstance(error, InputError):
        return str(error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"\s*<[^<>]* at 0x\w+>|<bound method.*", "", lines[0])[:200]
