"""Reports phases of a run that hang: which, where, and what all threads are doing."""

import faulthandler
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from time import monotonic

import jax

from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.health.goodput import Clock

logger = logging.getLogger("jaxrl_llm.training")
HUNG = 75  # exit code of a process that ends itself with `hang_exit`: EX_TEMPFAIL of sysexits.h, "try again"
WRITING = 10.0  # seconds that writing the stacks may take: the disk may be what hangs


@contextmanager
def watched(config: TrainConfig, clock: Clock) -> Iterator[None]:
    """Context manager in which a phase that hangs is reported once, in one line, by a thread of its own.

    A phase hangs where no phase ends or begins, and no program is compiled, for `hang_seconds`, and for `hang_factor`
    times the median that the phase took so far. The stacks of all threads are appended to hang-PROCESS.txt in the run's
    folder. With `hang_exit` the process then ends with the exit code `HUNG`, and no clean-up: checkpoints and logs are
    safe against that, and rewards' processes end with it. Otherwise a second line says when the phase goes on.
    """
    if not config.hang_seconds:
        yield
        return
    done = threading.Event()
    # Asked here, where JAX may still find its devices: later, a thread might wait for a runtime that hangs.
    number = jax.process_index()
    here = f"process {number} of {jax.process_count()}, pid {os.getpid()} on {socket.gethostname()}"
    path = Path(config.output) / f"hang-{number}.txt"
    thread = threading.Thread(target=_watch, args=(config, clock, here, path, done), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(config: TrainConfig, clock: Clock, here: str, path: Path, done: threading.Event) -> None:
    mark, since, reported = clock.mark, monotonic(), False
    while not done.wait(min(config.hang_seconds / 4, 1.0)):
        now, late = monotonic(), max(config.hang_seconds, config.hang_factor * clock.typical(mark.phase))
        if clock.mark != mark:
            if reported:
                logger.warning("%s went on after %.3g s (%s)", mark.phase, now - since, here)
            mark, since, reported = clock.mark, now, False
        elif not reported and now - since > late:
            reported = True
            step = "before the first step" if clock.step is None else f"step {clock.step + 1}"
            said = f"{clock.mark.phase} hangs: no progress for {now - since:.3g} s, {step} ({here})"
            end = f"; ending with exit code {HUNG}" if config.hang_exit else ""
            logger.warning("%s; stacks of all threads in %s%s", said, path, end)
            writer = threading.Thread(target=_write_stacks, args=(path, said), name="stacks", daemon=True)
            writer.start()
            writer.join(WRITING)
            if config.hang_exit:
                os._exit(HUNG)


def _write_stacks(path: Path, said: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {said}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
    except OSError as error:
        logger.warning("the stacks could not be written to %s: %s", path, error.strerror)
