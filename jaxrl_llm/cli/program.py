"""The command line: jaxrl demo | agent-demo | train | eval | sample | reward-eval | serve | algorithms | ..."""

import errno
import inspect
import logging
import signal
import sys
import traceback
from typing import Any

from jaxrl_llm.cli.commands import COMMANDS
from jaxrl_llm.cli.info import help_command, version_line
from jaxrl_llm.cli.peer_options import unknown_command
from jaxrl_llm.utils.errors import InputError, InputErrors
from jaxrl_llm.utils.process import PREEMPTED, Preempted, complain, end_within, kill_children, send_to_null

STOPPED, ENDED = 2.0, 60.0  # seconds that others' threads may go on after a signal, and after any other end


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors that a user can act on are one line on stderr and status 2."""
    try:
        status = _main(arguments)
    except Exception:
        if arguments is None and (hosts := _joined()):
            traceback.print_exc()
            hosts.end(1)
        raise
    if status and arguments is None and (hosts := _joined()):
        hosts.end(status)
    if arguments is None:
        stopped = status in (PREEMPTED, 130)
        if stopped:
            kill_children()  # some belong to calls that were left
        end_within(STOPPED if stopped else ENDED, status)
    return status


def _joined() -> Any:
    """The module by which this process has joined the hosts of a run, at whose end they need not be waited for."""
    module = sys.modules.get("jaxrl_llm.distributed.connect")
    return module if module is not None and module.is_joined() else None


def _main(arguments: list[str] | None) -> int:
    as_command = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.raiseExceptions = False  # drop warnings that cannot be written
    for name in ("absl", "asyncio"):  # orbax logs errors, with tracebacks, that it raises too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable
    if not arguments or arguments[0] in ("-h", "--help"):
        arguments = ["help"]
    try:
        status = _run(arguments[0], arguments[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)
    except Preempted as stop:
        complain(str(stop) or "stopped by SIGTERM, the steps taken are saved: resume with jaxrl train --resume RUN")
        return PREEMPTED
    except KeyboardInterrupt as stop:
        if as_command:  # a further Ctrl-C during exit would print a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        complain(str(stop) or "interrupted; resume a training run with jaxrl train --resume RUN")
        return 130
    except BrokenPipeError:  # the reader of the output has gone
        send_to_null(sys.stdout)
        return 1
    except (InputError, OSError) as error:
        if show:
            traceback.print_exc()
        for problem in error.problems if isinstance(error, InputErrors) else [_message(error)]:
            complain(f"error: {_one_line(problem)}")
        return 2


def _run(command: str, arguments: list[str]) -> int:
    if command == "help":
        return help_command(arguments, COMMANDS)
    if command in ("--version", "-V"):
        print(version_line())
        return 0
    if command not in COMMANDS:
        raise unknown_command(command, [*COMMANDS, "help"])
    return COMMANDS[command](arguments)


def _message(error: Exception) -> str:
    """The message of an error; for a full disk, with what to do."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left to write {error.filename or 'a file of the run'}: free some, then resume with --resume"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or 'a file'}"
    return str(error)


def _one_line(text: str, most: int = 1000) -> str:
    """A message on one line; a very long word, such as a path, and a very long line are cut in the middle."""
    text = " ".join(word if len(word) <= 400 else f"{word[:240]}...{word[-120:]}" for word in text.split())
    return text if len(text) <= most else f"{text[: most - 250]} ... {text[-240:]}"


def _unraisable(report: Any) -> None:
    """Print unraisable errors, except those that follow from failed reads and writes, which were raised already."""
    closed = isinstance(report.exc_value, RuntimeError) and "Event loop is closed" in str(report.exc_value)
    if not closed and not inspect.iscoroutine(report.object):
        sys.__unraisablehook__(report)
