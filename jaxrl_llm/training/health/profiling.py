"""Profiles of a running run, on demand."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

REQUEST = "profile"  # a file of this name in the run's folder asks for a profile
FOLDER = "profiles"


@contextmanager
def profiled(folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Context manager for the loop; it yields a function to call at the beginning of each step.

    After SIGUSR1, or once a file named "profile" is put into the run's folder, the next step is traced by jax.profiler,
    from its beginning to that of the step after it, into profiles/step-N (N counts from 1). Of several processes, the
    signal reaches one and the file all; the first process removes it. Python's own calls are not traced: phases and the
    parts of each program are named. Outside the main thread there is the file only.
    """
    asked = list[int]()  # signals since the last profile
    running = ExitStack()  # the profile under way
    seen: int | None = None  # modification time of the last request by file, which another process may be yet to remove
    file = folder / REQUEST

    def begin(step: int) -> None:
        nonlocal seen
        running.close()
        found = _modified(file)
        if not asked and found in (None, seen):
            return
        asked.clear()
        seen, place = found, folder / FOLDER / f"step-{step + 1}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(place, profiler_options=options)
        except Exception as error:  # e.g. the user's own profile is under way
            say(f"no profile of step {step + 1}: {error}")
            return
        running.callback(finish, step, place)
        running.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step))

    def finish(step: int, place: Path) -> None:
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # e.g. the disk is full, which must not end the run
            say(f"no profile of step {step + 1}: {error}")
            return
        say(f"profile of step {step + 1}: {place}")
        if jax.process_index() == 0 and _modified(file) == seen:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    with running, _on_signal(lambda: asked.append(1)):
        yield begin


def _modified(file: Path) -> int | None:
    """Modification time in nanoseconds; None if there is no file."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


@contextmanager
def _on_signal(heard: Callable[[], Any]) -> Iterator[None]:
    """Call `heard` on SIGUSR1, where there is that signal and this is the main thread."""
    if not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)
