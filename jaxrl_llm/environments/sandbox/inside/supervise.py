"""The supervisor: it starts the code's process, hands on what it reads and writes, and ends it at its limits.

It is a process of its own, outside of the sandbox, where the code cannot reach it: `supervise.main()` reads settings
and a request from stdin and writes a result to stdout, for a session one after another. When the process that started
it ends, it ends everything. Messages are those of `interpret`; a result is a line of ASCII with bytes after it.
"""

from __future__ import annotations

import os
import select
import time

from . import interpret
from .process import Box, start
from .watch import KILL, signalled

CHUNK, GRACE = 65_536, 0.1
READABLE, WRITABLE = select.POLLIN | select.POLLHUP | select.POLLERR, select.POLLOUT | select.POLLERR


def main() -> None:
    """Read settings and a request, run it, and answer; see the module."""
    settings = interpret.read_message(0)
    if settings is None:
        return
    box = Box(settings)
    if os.getppid() != settings["owner"]:
        return
    try:
        within = start(box)
    except OSError as error:
        box.close()
        answer(f"failed {len(str(error).encode())}\n", str(error).encode())
        return
    if within:
        interpret.write_files(settings["files"])
        if settings["session"]:
            interpret.serve()
        else:
            interpret.run_program(settings["code"])
        return
    try:
        serve(box)
    finally:
        box.close()
        os._exit(0)


def serve(box: Box) -> None:
    """Answer requests until the code's process has ended, or there are no more."""
    settings, number = box.settings, 0
    data = memoryview(interpret.message(settings["code"]) if settings["session"] else settings["stdin"])
    while True:
        number += 1
        began = time.monotonic()
        out, stopped, told = attend(box, data, began + settings["seconds"], number)
        seconds = time.monotonic() - began
        status: int | str = 0
        if not told:
            failed, status = _end_of(box)
            if failed:
                answer(f"failed {len(failed)}\n", failed)
                return
            if box.group is not None and stopped is None and "oom_kill 0" not in _events(box.group):
                stopped = "memory"
            box.close()
        if stopped is not None:
            status = "-"
        answer(
            f"{status} {stopped or '-'} {seconds} {int(told)} {len(out['stdout'])} {len(out['stderr'])}\n",
            bytes(out["stdout"] + out["stderr"]),
        )
        if not told:
            return
        if not box.watch.stop():
            box.close()
        code = next_request(box)
        if code is None:
            return
        if box.child:
            box.watch.go_on()
        data = memoryview(interpret.message(code))


def _events(group: str) -> str:
    try:
        with open(f"{group}/memory.events") as opened:
            return opened.read()
    except OSError:
        return "oom_kill 0"


def _end_of(box: Box) -> tuple[bytes, int]:
    """Why the process did not start, if it did not, and its exit code; ends it if it has not ended."""
    if not box.child:
        return b"", -KILL
    signalled(box.child, KILL)
    code = os.waitstatus_to_exitcode(os.waitpid(box.child, 0)[1])
    box.child = 0
    try:
        told = os.read(box.ours["status"], CHUNK)
    except BlockingIOError:
        told = b""
    if told.startswith(b"failed "):
        return told[7:], 1
    if box.settings["namespaces"]:
        code = int(told) if told else -KILL
    return b"", code


def attend(box: Box, data: memoryview, deadline: float, number: int) -> tuple[dict[str, bytearray], str | None, bool]:
    """Write data to the code and read what it writes, until its process or its block ends, or it exceeds a limit.

    Returns what it wrote, the limit, and whether the block of this number has ended.
    """
    out, most = {"stdout": bytearray(), "stderr": bytearray()}, box.settings["output"]
    session, stopped, told, ended = box.settings["session"], None, b"", not box.child
    inward, end = box.ours["ask" if session else "stdin"], interpret.message(number)
    waiting = select.poll()
    streams = {box.ours[name]: name for name in out}
    for descriptor in (*streams, box.ended, box.owner, *([box.ours["tell"]] if session else [])):
        waiting.register(descriptor, READABLE)
    waiting.register(inward, WRITABLE)
    while not ended and len(told) < len(end):
        left = deadline - time.monotonic()
        stopped = "seconds" if left <= 0 else box.watch.over()
        if stopped is not None:
            break
        until = box.watch.next - time.monotonic()
        for descriptor, _ in waiting.poll(max(0.0, min(left, until)) * 1000 + 0.5):
            if descriptor == inward:
                data = data[_wrote(inward, data) :]
                if not data:
                    waiting.unregister(inward)
                    if not session:
                        os.close(inward)
            elif descriptor in streams:
                if not _took(descriptor, out[streams[descriptor]], most):
                    waiting.unregister(descriptor)
            elif descriptor == box.owner:
                box.close()
                os._exit(0)
            elif descriptor == box.ended:
                ended = True
            elif not (more := _read(descriptor)):
                waiting.unregister(descriptor)
            else:
                told += more
    if stopped is not None:
        box.watch.kill()
    for descriptor, name in streams.items():  # what is in the pipes
        until = time.monotonic() + GRACE
        while _took(descriptor, out[name], most) and time.monotonic() < until:
            pass
    return out, stopped, told == end and stopped is None


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK)
    except OSError:
        return b""


def _took(descriptor: int, into: bytearray, most: int) -> bool:
    """Read from a pipe, and keep no more than `most` bytes of all; False at its end, or if there is nothing now."""
    data = _read(descriptor)
    into += data[: max(0, most - len(into))]
    return bool(data)


def _wrote(descriptor: int, data: memoryview) -> int:
    """How much was written; all where nobody reads."""
    try:
        return os.write(descriptor, data[:CHUNK]) if data else 0
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def next_request(box: Box) -> str | None:
    """The next block; None where there is none, or the process that would send it has ended."""
    waiting = select.poll()
    waiting.register(0, READABLE)
    waiting.register(box.owner, READABLE)
    ready = {descriptor for descriptor, _ in waiting.poll()}
    found = interpret.read_message(0) if 0 in ready else None
    return None if found is None else str(found)


def answer(head: str, data: bytes) -> None:
    """Write a result, a line and bytes, to whoever asked."""
    view = memoryview(head.encode() + data)
    try:
        while view:
            view = view[os.write(1, view) :]
    except OSError:
        pass
