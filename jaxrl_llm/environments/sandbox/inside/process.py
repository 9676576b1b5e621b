"""The code's process: its pipes, the layers around it, and its end.

`start` forks. In the process of the code it returns with all layers in place, in the supervisor with the process begun.
"""

from __future__ import annotations

import os
import time

from . import confine, interpret
from .watch import KILL, Watch, signalled

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any


class Box:
    """The code's process as the supervisor holds it: its pipes, and what watches it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """settings: what `supervisor.Supervisor` sends."""
        self.settings, self.owner = settings, os.pidfd_open(settings["owner"])
        self.child, self.ended = 0, -1
        self.theirs, self.ours = dict[str, int](), dict[str, int]()
        names = ("ask", "tell") if settings["session"] else ("stdin",)
        for name in (*names, "stdout", "stderr", "status"):
            read, write = os.pipe()
            self.theirs[name], self.ours[name] = (read, write) if name in ("ask", "stdin") else (write, read)
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


def start(box: Box) -> bool:
    """Start the code's process. True in that process, with all layers around it; False in the supervisor.

    OSError where that fails before there is one; one that fails later tells why on its pipe "status".
    """
    settings, user = box.settings, box.settings["user"]
    confine.control(confine.SUBREAPER, 1)  # orphans become the supervisor's children
    if settings["group"] is not None:
        box.group = own_group(settings["group"], settings["memory"], settings["tasks"])
    if settings["namespaces"]:
        confine.own_users() if user is None else confine.c("unshare", confine.NEW_PIDS)
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
    spaces = confine.NEW_MOUNTS | confine.NEW_NETWORK | confine.NEW_IPC | confine.NEW_NAMES | confine.NEW_CGROUP
    confine.c("unshare", spaces)
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
