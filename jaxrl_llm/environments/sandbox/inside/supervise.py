"""The supervisor: it starts the code's process, hands on what it reads and writes, and ends it at its limits.

It is a process of its own, outside of the sandbox, where the code cannot reach it: `supervise.main()` reads settings
and a request from stdin and writes a result to stdout, for a session one after another. When the process that started
it ends, it ends everything. Messages are those of `interpret`; a result is a line of ASCII with bytes after it.
"""

from __future__ import annotations

import os
import select
import time

from . import confine, interpret
from .watch import KILL, Watch, signalled

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any

CHUNK, GRACE = 65_536, 0.1
READABLE, WRITABLE = select.POLLIN | select.POLLHUP | select.POLLERR, select.POLLOUT | select.POLLERR


class Box:
    """The code's process as the supervisor holds it: its pipes, and what watches it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """settings: see `run.Box.settings`."""
        self.settings, self.owner = settings, os.pidfd_open(settings["owner"])
        self.child, self.ended = 0, -1
        self.theirs, self.ours = dict[str, int](), dict[str, int]()
        names = ("ask", "tell") if settings["session"] else ("stdin",)
        for name in (*names, "stdout", "stderr", "status"):
            read, write = os.pipe()
            inward = name in ("ask", "stdin")
            self.theirs[name], self.ours[name] = (read, write) if inward else (write, read)
            os.set_blocking(self.ours[name], False)
        self.group: str | None = None
        self.watch = Watch({os.getpid()}, settings)

    def started(self, child: int) -> None:
        """Keep what is needed of the child. child: its number."""
        self.child, self.ended = child, os.pidfd_open(child)
        for descriptor in self.theirs.values():
            os.close(descriptor)
        if self.settings["namespaces"]:
            self.watch.outside.add(child)

    def close(self) -> None:
        """End all processes of the code, and remove what they leave."""
        if self.child:
            signalled(self.child, KILL)
            os.waitpid(self.child, 0)
            self.child = 0
            for _ in range(0 if self.settings["namespaces"] else 1000):  # they may have left the family of the first
                left = self.watch.members()
                if not left:
                    break
                for pid in left:
                    signalled(pid, KILL)
                _reap()
        # Otherwise the owner does. That of a session may be about to end: its pipes close first.
        if not self.settings["namespaces"] and (self.settings["session"] or os.getppid() != self.settings["owner"]):
            remove(self.settings["folder"])
        if self.group is not None:
            for _ in range(100):
                try:
                    os.rmdir(self.group)
                    break
                except OSError:
                    time.sleep(0.01)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def remove(folder: str) -> None:
    """Remove a folder that code has filled, however deep, and whatever may not be looked into."""
    import shutil
    import subprocess

    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            subprocess.run(command, check=False, stdin=-3, stdout=-3, stderr=-3)


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


def start(box: Box) -> bool:
    """Start the code's process. True in that process, with all layers around it; False in the supervisor.

    OSError where that fails before there is one; one that fails later tells why on its pipe "status".
    """
    settings, user = box.settings, box.settings["user"]
    confine.control(confine.SUBREAPER, 1)  # orphans become the supervisor's children
    if settings["group"] is not None:
        box.group = own_group(settings["group"], settings["memory"], settings["tasks"])
    if settings["namespaces"]:
        confine.own_users() if user is None else confine.separate(confine.NEW_PIDS)
    else:
        os.mkdir(settings["folder"], 0o700)
    child = os.fork()
    if child:
        if user is not None:  # by that it may set their limits
            os.setresgid(user, -1, -1)
            os.setresuid(user, -1, -1)
        box.started(child)
        return False
    try:
        for descriptor in box.ours.values():
            os.close(descriptor)
        if box.group is not None:
            with open(f"{box.group}/cgroup.procs", "w") as opened:
                opened.write("0")
        confine.end_with_parent(box.theirs["status"])
        if settings["namespaces"]:
            _be_first(box)
        os.setsid()  # signals to the process's own group reach nobody outside
        confine.own_keys()
        os.chdir(settings["folder"])
        _own_descriptors(box)
        if "limits" in settings["layers"]:
            confine.limit(settings["limits"])
        confine.become(user if settings["namespaces"] else None)
        if "landlock" in settings["layers"]:
            own = settings["namespaces"]
            confine.confine_files(["/"] if own else settings["readable"], [confine.BOX if own else settings["folder"]])
        if "seccomp" in settings["layers"]:
            confine.filter_calls(settings["filter"], settings["own_pid"])
        os.close(box.theirs["status"])
    except OSError as error:
        os.write(box.theirs["status"], b"failed " + str(error).encode())
        os._exit(1)
    return True


def own_group(parent: str, memory: int, tasks: int) -> str:
    """A new cgroup below one, with limits of memory and of tasks."""
    path = f"{parent}/sandbox-{os.getpid()}"
    os.mkdir(path)
    for name, value in (("memory.max", memory), ("memory.swap.max", 0), ("memory.oom.group", 1), ("pids.max", tasks)):
        if os.path.exists(f"{path}/{name}"):
            with open(f"{path}/{name}", "w") as opened:
                opened.write(str(value))
    return path


def _be_first(box: Box) -> None:
    """In the first process of new namespaces: make their root, start the code's process there, and wait for its end.

    Returns in the code's process alone. When the first one ends, the kernel ends all others.
    """
    settings = box.settings
    confine.separate(
        confine.NEW_MOUNTS | confine.NEW_NETWORK | confine.NEW_IPC | confine.NEW_NAMES | confine.NEW_CGROUP
    )
    confine.own_root(settings["readable"], settings["disk"], settings["user"])
    child = os.fork()
    if not child:
        return
    status = box.theirs.pop("status")
    os.closerange(0, status)
    os.closerange(status + 1, 256)
    confine.control(confine.DUMPABLE, 0)  # nobody within may trace it
    while True:
        pid, found = os.wait()
        if pid == child:
            os.write(status, f"{os.waitstatus_to_exitcode(found)}".encode())
            os._exit(0)


def _own_descriptors(box: Box) -> None:
    """Have the standard streams, and the pipes of a session, and no other descriptor but the pipe "status"."""
    theirs = box.theirs
    kept = os.dup2(theirs["status"], 61, inheritable=False)
    moved = {name: os.dup2(theirs[name], 40 + place) for place, name in enumerate(theirs) if name != "status"}
    for name, place in (("stdin", 0), ("stdout", 1), ("stderr", 2), ("ask", interpret.ASK), ("tell", interpret.TELL)):
        if name in moved:
            os.dup2(moved[name], place, inheritable=place < 3)
    if "stdin" not in moved:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.closerange(3, 61)
    os.closerange(64, 4096)
    box.theirs = {"status": kept}


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
    """Write a result."""
    view = memoryview(head.encode() + data)
    try:
        while view:
            view = view[os.write(1, view) :]
    except OSError:
        pass
