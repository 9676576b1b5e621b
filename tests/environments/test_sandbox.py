"""The sandbox: every way out that code may try, with all layers, with each alone, and with none."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.environments.sandbox import (
    GUARDS,
    LAYERS,
    Limits,
    Result,
    Session,
    available,
    guards,
    require_guards,
    run_code,
)
from jaxrl_llm.environments.sandbox.run import family
from jaxrl_llm.utils.errors import InputError

QUICK = Limits(seconds=3, memory=256, processes=8, output=10_000, disk=4)

# What escapes prints "out"; {...} are targets on the host. Beside each, the layers that stop it alone.
ESCAPES: dict[str, tuple[str, set[str]]] = {
    "a file of the host": ("print('out' if open({secret!r}).read() == 'secret' else '')", {"namespaces", "landlock"}),
    "a file written on the host": ("open({new!r}, 'w').write('x'); print('out')", {"namespaces", "landlock"}),
    "the environment of another process": (
        "print('out' if b'SECRET=1' in open('/proc/{other}/environ', 'rb').read() else '')",
        {"namespaces", "landlock"},
    ),
    "its own environment": ("import os; print('out' if 'SECRET' in os.environ else '')", {*LAYERS, "none"}),
    "a signal to the parent": ("import os; os.kill({pid}, 0); print('out')", {"namespaces", "landlock", "seccomp"}),
    "a trace of another process": (
        "import ctypes; print('out' if ctypes.CDLL(None).ptrace(16, {other}, 0, 0) == 0 else '')",
        {"namespaces", "landlock", "seccomp"},
    ),
    "TCP on the loopback": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('out')",
        {"namespaces", "landlock", "seccomp"},
    ),
    "a socket in the file system": (
        "import socket; socket.socket(socket.AF_UNIX).connect({unix!r}); print('out')",
        {"namespaces", "seccomp"},
    ),
    "an abstract socket": (
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r}); print('out')",
        {"namespaces", "landlock", "seccomp"},
    ),
    "an inherited descriptor": ("import os; print('out' if os.read({descriptor}, 6) else '')", {*LAYERS, "none"}),
    "namespaces within": (
        "import ctypes; print('out' if ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0 else '')",
        {"seccomp"},
    ),
    "a mount": (
        "import ctypes; mount = ctypes.CDLL(None).mount\n"
        "print('out' if mount(b'none', {mounted!r}.encode(), b'tmpfs', 0, None) == 0 else '')",
        {*LAYERS, "none"},
    ),
}  # fmt: skip


class Host:
    """What code might reach for."""

    def __init__(self, folder: Path) -> None:
        (folder / "secret").write_text("secret")
        (folder / "mounted").mkdir()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.local, self.nameless = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        path, abstract = str(folder / "s"), f"sandbox-test-{os.getpid()}"
        self.local.bind(path)
        self.nameless.bind("\0" + abstract)
        for one in (self.local, self.nameless):
            one.listen()
        self.read, self.write = os.pipe()
        os.set_inheritable(self.read, True)
        os.write(self.write, b"secret")
        self.other = subprocess.Popen(["sleep", "600"])
        self.targets: dict[str, Any] = {
            "mounted": str(folder / "mounted"), "secret": str(folder / "secret"), "new": str(folder / "new"),
            "pid": os.getpid(), "unix": path, "other": self.other.pid, "port": self.listener.getsockname()[1],
            "abstract": abstract, "descriptor": self.read,
        }  # fmt: skip

    def close(self) -> None:
        for one in (self.listener, self.local, self.nameless):
            one.close()
        os.close(self.read)
        os.close(self.write)
        self.other.kill()
        self.other.wait()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("SECRET", "1")
    made = Host(tmp_path)
    yield made
    made.close()


def tried(name: str, host: Host, *layers: str) -> bool:
    """Whether the escape succeeds with these layers alone."""
    code = ESCAPES[name][0].format(**host.targets)
    found = run_code(code, layers=layers, limits=QUICK, weak=True).stdout.strip() == "out"
    if os.path.ismount(host.targets["mounted"]):
        subprocess.run(["umount", host.targets["mounted"]], check=True)
    return found


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape_with_all_layers(name: str, host: Host) -> None:
    assert not tried(name, host, *available())


@pytest.mark.parametrize("name", ESCAPES)
def test_what_each_layer_stops_alone(name: str, host: Host) -> None:
    """Also that the attempt is a real one: without any layer it succeeds, unless no code ever gets so far."""
    stopped = ESCAPES[name][1]
    if name in ("a trace of another process", "the environment of another process") and not tried(name, host):
        pytest.skip("this system lets no process without capabilities look into another of this user")
    if name == "namespaces within" and not tried(name, host):
        pytest.skip("this system lets no user make namespaces")
    assert tried(name, host) == ("none" not in stopped)
    for layer in sorted(available()):
        assert tried(name, host, layer) == (layer not in stopped), layer


def run(code: str, limits: Limits = QUICK) -> Result:
    return run_code(textwrap.dedent(code), limits=limits)


@pytest.mark.parametrize(
    ("code", "stopped"),
    [
        ("while True: pass", "seconds"),
        ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "seconds"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "processes"),
    ],
    ids=["a loop", "no SIGTERM", "a fork bomb"],
)
def test_limits_that_end_it(code: str, stopped: str) -> None:
    if stopped == "processes" and "namespaces" not in available():
        pytest.skip("without namespaces code may not start processes")
    found = run(code)
    assert (found.stopped, found.status) == (stopped, None)
    assert found.seconds < 10


def test_processes_share_the_limit_of_memory() -> None:
    """Eight want 60 MiB each. Which of them is refused, or whether all are ended first, is up to their order."""
    if "namespaces" not in available():
        pytest.skip("without namespaces code may not start processes")
    code = """
    import os, time
    for _ in range(3): os.fork()
    x = bytearray(60 * 2**20)
    os.write(1, b"x")
    time.sleep(60)
    """
    found = run(code, Limits(seconds=2.0, memory=256))
    assert len(found.stdout) * 60 <= 1.1 * 256
    assert found.stopped in ("memory", "seconds") or "MemoryError" in found.stderr
    assert found.seconds < 10


def test_limits_that_it_meets() -> None:
    assert "MemoryError" in run("bytearray(2**30)").stderr
    assert "File too large" in run("open('f', 'w').write('x' * 10**8)").stderr
    full = run("for n in range(100): open(str(n), 'w').write('x' * 10**6)")
    if "namespaces" in available():
        assert "No space left" in full.stderr
    flood = run("import sys\nfor _ in range(100): print('x' * 10**5)\nprint('end', file=sys.stderr)")
    assert len(flood.stdout) == QUICK.output
    assert (flood.stderr, flood.status) == ("end\n", 0)


def test_nothing_lives_on() -> None:
    """A daemon that holds the pipes neither delays the answer nor, with a process namespace, survives it."""
    mark = f"sandbox_daemon_{os.getpid()}"
    found = run(f"""
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                {mark} = time.sleep(60)
            os._exit(0)
        print("gone", flush=True)
        os._exit(0)
    """)
    assert (found.stdout, found.status) == ("gone\n", 0)
    assert found.seconds < 2
    if "namespaces" in available():
        time.sleep(0.1)
        lines = [Path("/proc", one, "cmdline") for one in os.listdir("/proc") if one.isdigit()]
        assert not any(mark in line.read_bytes().decode("utf-8", "replace") for line in lines if line.exists())


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import builtins, sys; sys.exit(0)",
        "class Equal:\n    def __eq__(self, other): return True\nprint(Equal())",
    ],
)
def test_a_clean_exit_is_not_an_answer(code: str) -> None:
    """What is wanted is not in the sandbox, and is compared outside with what was written."""
    found = run(code)
    assert found.status == 0
    assert found.stdout.strip() != "42"


def test_it_runs_what_is_usual() -> None:
    found = run_code(
        "import sys, json, math, helper, threading, subprocess\n"
        "t = threading.Thread(target=lambda: print(helper.value)); t.start(); t.join()\n"
        "print(json.dumps([int(input()), math.comb(5, 2)]))\n"
        "print(open('data.txt').read(), file=sys.stderr)\n"
        "print(subprocess.run(['/bin/echo', 'ho'], capture_output=True, text=True).stdout.strip())\n"
        "sys.exit(3)",
        stdin="7\n", files={"helper.py": "value = 'hey'", "data.txt": "some"}, limits=QUICK,
    )  # fmt: skip
    assert (found.stdout, found.stderr, found.status) == ("hey\n[7, 10]\nho\n", "some\n", 3)


def test_errors_name_the_line() -> None:
    found = run("a = 1\nb = a / 0")
    assert found.status == 1
    assert 'File "main.py", line 2' in found.stderr
    assert "SyntaxError" in run("a = = 1").stderr


def test_a_session_keeps_its_names() -> None:
    session = Session(limits=QUICK)
    try:
        assert session.run("import math\na = 3").stdout == ""
        assert session.run("print(a + math.floor(2.5))").stdout == "5\n"
        assert session.run("raise ValueError('no')").stdout.strip().endswith("ValueError: no")
        assert session.run("print(input())").stdout.strip().endswith("EOFError: EOF when reading a line")
        late = session.run("import time\ntime.sleep(60)")
        assert late.stopped == "seconds"
        assert "NameError" in session.run("print(a)").stdout, "it began anew"
        assert session.run("import os\nos._exit(4)").status == 4
        assert session.run("import os\nos._exit(0)").status == 0
        assert session.run("print('x' * 10**6)").stdout.startswith("xxx")
        assert session.run("print(1)").stdout == "1\n"
    finally:
        session.close()


def test_a_session_outlives_the_thread_that_began_it() -> None:
    session, said = Session(limits=QUICK), []
    for code in ("a = 3", "a"):
        thread = threading.Thread(target=lambda code=code: said.append(session.run(code).stdout))
        thread.start()
        thread.join()
    session.close()
    assert said == ["", "3\n"]


def test_a_session_writes_in_order_and_shows_a_last_value() -> None:
    session = Session(limits=QUICK)
    try:
        assert session.run("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)\n4").stdout == "1\n2\n3\n4\n"
        assert session.run("import sys\nfor _ in range(10**5): print('x', file=sys.stderr)\nNone").stopped is None
        assert session.run("1\nNone").stdout == ""
        assert session.run("'a'\nb = 1").stdout == ""
    finally:
        session.close()


def test_sets_have_one_order() -> None:
    code = "print(hash('a'), {chr(n) for n in range(65, 90)})"
    assert run(code).stdout == run(code).stdout


def test_many_at_once() -> None:
    found: dict[int, str] = {}

    def one(number: int) -> None:
        found[number] = run(f"print({number} ** 2)").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number**2}\n" for number in range(8)}


def test_what_holds_is_said_and_too_little_is_refused() -> None:
    assert guards(["limits"]) == guards(["landlock"]) == frozenset()
    assert guards(["seccomp", "landlock", "limits"]) == set(GUARDS) - {"metadata"}
    assert guards(["namespaces", "seccomp", "limits"]) == set(GUARDS)
    with pytest.raises(InputError, match="would not be kept from files, network, processes, memory, resources, end: "):
        run_code("print(1)", layers=["limits"])
    with pytest.raises(InputError, match="layer of the sandbox"):
        require_guards(["luck"])
    assert run_code("print(1)", layers=["limits"], weak=True).stdout == "1\n"


def test_a_family_is_a_process_and_its_descendants() -> None:
    assert os.getpid() in family(os.getpid())
