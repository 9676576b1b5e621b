"""Attacks on lasting interpreters and by orphans: functions that say whether the attack got what it wanted.

Each takes `make`, which starts a session with the layers of the attack, and the name that its processes are to have.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from experiments.attacks.sandbox_host import named, resident, still_there
from jaxrl_llm.environments.sandbox import Session

Make = Callable[[], Session]
MARK = "import ctypes, os, sys, time, threading, signal\nctypes.CDLL(None).prctl(15, b'%s', 0, 0, 0)\n"
COUNT = """
n = 0
def count():
    global n
    while True: n += 1
"""
ROOT = Path(__file__).resolve().parents[2]


def _usable(session: Session) -> bool:
    """Whether the next blocks work as those of a new session or of one that goes on."""
    for _ in range(3):  # what goes on in it may take one or the other
        session.run("a = 20")
        if session.run("print(a + 22)").stdout == "42\n":
            return True
    return False


def _between(code: str, wait: float = 0.4) -> Callable[[Make, str], bool]:
    """Whether the code's processes run on between two blocks."""

    def attack(make: Make, mark: str) -> bool:
        session = make()
        try:
            session.run(MARK % mark + COUNT + code)
            session.run("print(n)")
            time.sleep(0.05)
            used = _processor(mark)
            time.sleep(wait)
            return _processor(mark) - used > 0.1
        finally:
            session.close()

    return attack


def _processor(mark: str) -> float:
    """Seconds of processor time that processes of this name have had."""
    total = 0
    for pid in named(mark):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def _breaks(code: str) -> Callable[[Make, str], bool]:
    """Whether the session cannot be used, or not be closed, after a block."""

    def attack(make: Make, mark: str) -> bool:
        session, began = make(), time.monotonic()
        try:
            session.run(MARK % mark + code)
            session.run("'" + "x" * 300_000 + "'")  # more than a pipe holds, which may be lost
            fine = _usable(session)
        finally:
            session.close()
        return not fine or time.monotonic() - began > 20

    return attack


def _memory_between(make: Make, mark: str) -> bool:
    """Whether forks take more memory than is allowed after their block has ended."""
    session = make()
    try:
        session.run(
            MARK % mark + "h = []\ndef take():\n    time.sleep(0.05)\n"
            "    for _ in range(150): h.append(bytearray(b'1') * 2**20); time.sleep(0.001)\n    time.sleep(60)\n"
            "for _ in range(5):\n    if os.fork() == 0: take()"
        )
        most = 0
        for _ in range(40):
            time.sleep(0.03)
            most = max(most, resident(named(mark)))
        return most > 1.1 * 256 * 2**20
    finally:
        session.close()


def _left_after_close(make: Make, mark: str) -> bool:
    session = make()
    session.run(
        MARK % mark + "if os.fork() == 0:\n    os.setsid(); os.closerange(0, 64)\n"
        "    for n in range(1, 65):\n        try: signal.signal(n, signal.SIG_IGN)\n"
        "        except (OSError, ValueError): pass\n    time.sleep(60)"
    )
    session.close()
    return bool(still_there(mark))


def _left_after_stop(make: Make, mark: str) -> bool:
    session = make()
    found = session.run(MARK % mark + "if os.fork() == 0:\n    os.setsid(); time.sleep(60)\nwhile True: pass")
    left = found.stopped is not None and bool(still_there(mark))
    session.close()
    return left


# A program that starts a sandbox and says so, for one that is killed. Read from stdin: layers and code.
OWNER = """
import json, sys, threading
from jaxrl_llm.environments.sandbox import Limits, Session, run_code
kind, layers, code = json.loads(sys.stdin.readline())
limits = Limits(seconds=30, memory=256, processes=8, output=100_000, disk=4)
if kind == "run":
    threading.Thread(target=run_code, args=(code,), kwargs=dict(limits=limits, layers=layers, weak=True)).start()
else:
    session = Session(limits, layers, True)
    session.run(code)
    if kind == "fork":
        import os, time
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    if kind == "block":
        threading.Thread(target=session.run, args=("time.sleep(60)",)).start()
print("begun", flush=True)
import time
time.sleep(60)
"""


def _owner_killed(kind: str, how: int = signal.SIGKILL, code: str = "") -> Callable[[Make, str], bool]:
    """Whether processes, or a temporary folder, outlive the program that started the sandbox."""

    def attack(make: Make, mark: str) -> bool:
        layers = sorted(make()._settings.layers)
        wait = "time.sleep(60)" if kind == "run" else ""
        with tempfile.TemporaryDirectory(prefix="sandbox-attack-") as folder:
            owner = subprocess.Popen(
                [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": folder},
            )  # fmt: skip
            assert owner.stdin is not None
            assert owner.stdout is not None
            owner.stdin.write(
                json.dumps([kind, layers, MARK % mark + "open('f', 'w').write('x')\n" + code + wait]) + "\n"
            )
            owner.stdin.flush()
            owner.stdout.readline()
            until = time.monotonic() + 10
            while not named(mark) and time.monotonic() < until:
                time.sleep(0.02)
            there = bool(named(mark))
            owner.send_signal(how)
            owner.wait()
            left = still_there(mark, 2.0)
            until = time.monotonic() + 2
            while os.listdir(folder) and time.monotonic() < until:
                time.sleep(0.02)
            return bool(left) or bool(os.listdir(folder)) or not there

    return attack


SESSIONS: dict[str, dict[str, Callable[[Make, str], bool]]] = {
    "resources": {
        "a thread that counts between blocks": _between("threading.Thread(target=count, daemon=True).start()"),
        "a child that counts between blocks": _between("if os.fork() == 0: count()"),
        "children that count in groups of their own": _between(
            "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid(); count()"
        ),
        "one that wakes the other": _between(
            "a = os.getpid()\nif os.fork() == 0:\n    while True: os.kill(a, signal.SIGCONT)"
        ),
        "a timer between blocks": _between(
            "def tick(*_):\n    for _ in range(10**5): pass\nsignal.signal(signal.SIGALRM, tick)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)"
        ),
        "an end that is told by the code": _breaks(
            "for fd in range(3, 64):\n    try: os.write(fd, (5).to_bytes(8, 'little') + b'\\xe9\\x01\\x00\\x00\\x00')\n"
            "    except OSError: pass\nwhile True: pass"
        ),
        "ends that are told again and again": _breaks(
            "def tell():\n  while True:\n    for fd in range(1, 64):\n"
            "      try: os.write(fd, b'end of\\n' + (5).to_bytes(8, 'little') + b'\\xe9\\x01\\x00\\x00\\x00')\n"
            "      except OSError: pass\nthreading.Thread(target=tell, daemon=True).start()"
        ),
        "an end that was read from frames": _breaks(
            "f = sys._getframe()\nwhile f:\n    for v in list(f.f_locals.values()):\n"
            "        if isinstance(v, dict) and 'end' in v: os.write(1, (v['end'] + '\\n').encode())\n"
            "    f = f.f_back\n"
            "while True: pass"
        ),
        "all descriptors closed": _breaks("os.closerange(0, 64)"),
        "questions that are read away": _breaks(
            "def read():\n  while True:\n    for fd in (62, 3, 4, 5):\n      try: os.read(fd, 10**6)\n"
            "      except OSError: pass\nthreading.Thread(target=read, daemon=True).start()"
        ),
        "no stdout": _breaks("sys.stdout = None"),
        "stdout closed": _breaks("sys.stdout.close()"),
        "no builtins": _breaks(
            "import builtins\nfor name in ('print', 'compile', 'exec', 'eval'): delattr(builtins, name)"
        ),
        "no os.write": _breaks("os.write = os.read = None"),
        "no marshal": _breaks("import marshal; marshal.loads = marshal.dumps = None"),
        "an exit": _breaks("os._exit(0)"),
        "a kill": _breaks("os.kill(os.getpid(), signal.SIGKILL)"),
        "a stop": _breaks("os.kill(os.getpid(), signal.SIGSTOP)"),
        "an exception that shows itself": _breaks("class A(Exception):\n    def __str__(self): os._exit(0)\nraise A"),
        "a recursion": _breaks("sys.setrecursionlimit(10**8)\ndef f(): f()\nf()"),
        "an interrupt": _breaks("raise KeyboardInterrupt"),
    },
    "memory": {"forks between blocks": _memory_between},
    "end": {
        "a daemon after a session": _left_after_close,
        "a daemon after a stop": _left_after_stop,
        "a run whose owner is killed": _owner_killed("run"),
        "a run whose owner ends": _owner_killed("run", signal.SIGTERM),
        "a daemon of a run whose owner is killed": _owner_killed(
            "run", code="try:\n    if os.fork() == 0: os.setsid(); time.sleep(60)\nexcept OSError: pass\n"
        ),
        "a session whose owner is killed": _owner_killed("session"),
        "a session whose owner has forked": _owner_killed("fork"),
        "a block whose owner is killed": _owner_killed("block"),
        "a session that counts, whose owner is killed": _owner_killed(
            "session", code=COUNT + "threading.Thread(target=count, daemon=True).start()\n"
        ),
    },
}
