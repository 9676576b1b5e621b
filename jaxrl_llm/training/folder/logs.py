"""Whether the logs of a run still are what they were at a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl_llm.reporting.logging.writers import read_jsonl


def log_digests(files: Sequence[Path]) -> dict[str, list[int]]:
    """Size in bytes and crc32 of each log that holds anything, by its name."""
    return {file.name: [size, _crc(file, size)] for file in files if (size := _size(file))}


def log_problems(
    files: Sequence[Path], first: int, checkpoint_every: int, digests: Mapping[str, Sequence[int]], checkpoints: Path
) -> list[str]:
    """Problems with the logs of a run that resumes at step `first`; InputError if they cannot be read.

    files: metrics and completions, of one folder. digests: sizes and checksums at the checkpoint (see `log_digests`):
    each file must still begin with those bytes. Without a checkpoint (`first` is 0), logs of more than two checkpoint
    intervals mean that those in the folder `checkpoints` were lost, since a checkpoint is complete before the next but
    one is started; starting over would drop those steps.
    """
    steps = [len(read_jsonl(file)) if file.exists() else 0 for file in files]  # finds damage before it is cut off
    folder = files[0].parent
    wrong = [
        f"{folder / name} does not begin with the {size} bytes it had at the checkpoint"
        for name, (size, crc) in digests.items()
        if _size(folder / name) < size or _crc(folder / name, size) != crc
    ]
    if not first and checkpoint_every and steps[0] > 2 * checkpoint_every:
        wrong.append(
            f"{files[0]} has {steps[0]} steps, but there are no checkpoints in {checkpoints}: put them back, or start "
            "a new run in another folder"
        )
    return wrong


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _crc(path: Path, size: int) -> int:
    """crc32 of the first `size` bytes."""
    crc, left = 0, size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**24))):
            crc, left = zlib.crc32(block, crc), left - len(block)
    return crc
