"""What an attack on the sandbox once found, each as a test; `experiments/attack.py --only sandbox` makes many more."""

# ruff: noqa: E501  (programs of one line)
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_llm.environments.sandbox import LAYERS, Limits, Session, available, guards, run_code
from jaxrl_llm.rewards.code import case_of, passed
from jaxrl_llm.utils.errors import InputError

ROOT = Path(__file__).parents[2]
LIMITS = Limits(seconds=3, memory=128, processes=8, output=100_000, disk=4)
ALONE = ("landlock", "seccomp", "limits")
BEGIN = """
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, b"%s", 0, 0, 0)
"""


def needs(*layers: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not set(layers) <= available(), reason=f"this system has not all of {', '.join(layers)}")


@pytest.fixture
def mark() -> str:
    """A name for the processes of a test."""
    return f"sbxt{os.getpid() % 10**6}_{time.monotonic_ns() % 1000}"


def named(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == mark and state(int(path.parent.name)) not in "ZX":
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def come(condition: object, seconds: float = 20.0) -> bool:
    """Whether something comes true in time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(condition())  # type: ignore[operator]


@pytest.fixture
def victim() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


CHANGES = {
    "chmod": "os.chmod(path, 0o777)", "utime": "os.utime(path, (1, 1))", "xattr": "os.setxattr(path, 'user.a', b'1')",
    "chown": "os.chown(path, os.getuid(), os.getgid())", "by descriptor": "os.fchmod(os.open(path, os.O_RDONLY), 0o777)",
}  # fmt: skip


@pytest.mark.parametrize(
    "layers", [pytest.param(LAYERS, marks=needs(*LAYERS)), pytest.param(ALONE, marks=needs(*ALONE))]
)
@pytest.mark.parametrize("change", CHANGES)
def test_metadata_of_files_outside_are_not_changed(change: str, layers: tuple[str, ...], tmp_path: Path) -> None:
    """Nor of those that it may read."""
    (tmp_path / "read").write_text("x")
    code = f"import os\npath = {str(tmp_path / 'read')!r}\n{CHANGES[change]}\nprint('out')"
    for readable in ([], [str(tmp_path)]):
        assert run_code(code, limits=LIMITS, layers=layers, readable=readable).stdout == ""


@needs("namespaces")
def test_files_outside_are_not_seen(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    code = f"import os\nprint(os.path.exists({str(tmp_path / 'secret')!r}), os.path.exists('/proc/1'))"
    assert run_code(code, limits=LIMITS).stdout == "False False\n"


HELD = {
    "memfds": "for _ in range(55):\n    fd = os.memfd_create('m')\n    for _ in range(4): os.write(fd, b'1' * 2**20); os.write(1, b'x')",
    "System V": "libc.shmat.restype = ctypes.c_void_p\nfor _ in range(250):\n    p = libc.shmat(libc.shmget(0, 2**20, 0o1600), None, 0)\n"
    "    ctypes.memset(p, 1, 2**20); libc.shmdt(ctypes.c_void_p(p)); os.write(1, b'x')",
    "shared memory that is not mapped": "import mmap\nh = []\nfor _ in range(4):\n    m = mmap.mmap(-1, 80 * 2**20)\n"
    "    for n in range(80): m[n << 20 : (n + 1) << 20] = b'1' * 2**20; os.write(1, b'x')\n"
    "    libc.munmap(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m)) + 4096), 79 << 20)",
    "forks": "h = []\nfor _ in range(4):\n    if os.fork() == 0:\n        try:\n"
    "            for _ in range(100): h.append(bytearray(b'1') * 2**20); os.write(1, b'x'); time.sleep(0.01)\n"
    "        except MemoryError: pass\n        time.sleep(60)\ntime.sleep(60)",
}  # fmt: skip


@needs(*LAYERS)
@pytest.mark.parametrize("kind", HELD)
def test_memory_of_every_kind_counts(kind: str) -> None:
    """The code writes an x for each mebibyte that it holds."""
    found = run_code(BEGIN % "held" + HELD[kind], limits=LIMITS)
    assert found.stdout.count("x") <= 1.1 * LIMITS.memory


MANY = {
    LAYERS: "for _ in range(20):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)",
    ALONE: "threading.stack_size(65536)\nfor _ in range(100): threading.Thread(target=time.sleep, args=(60,)).start()",
}


@pytest.mark.parametrize("layers", [pytest.param(layers, marks=needs(*layers)) for layers in MANY])
def test_it_is_watched_without_its_streams(layers: tuple[str, ...]) -> None:
    code = BEGIN % "many" + "for n in range(3): os.close(n)\n" + MANY[layers]
    assert run_code(code, limits=LIMITS, layers=layers).stopped == "processes"


OTHERS = {
    "limits": "import resource; resource.prlimit({pid}, resource.RLIMIT_NOFILE, (5, 5))",
    "affinity": "os.sched_setaffinity({pid}, [0])", "priority": "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "scheduling": "os.sched_setscheduler({pid}, os.SCHED_BATCH, os.sched_param(0))",
    "a signal by a pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 8, {pid}); fcntl.fcntl(r, 10, 9); "
    "fcntl.fcntl(r, 4, 0o20000); os.write(w, b'x'); time.sleep(0.1); raise OSError",
}  # fmt: skip


@needs(*ALONE)
@pytest.mark.parametrize("how", OTHERS)
def test_without_namespaces_nothing_is_done_to_other_processes(how: str, victim: int) -> None:
    found = run_code(BEGIN % "x" + OTHERS[how].format(pid=victim) + "\nprint('out')", limits=LIMITS, layers=ALONE)
    assert found.stdout == ""
    assert state(victim) not in "ZX"


@needs(*ALONE)
def test_without_namespaces_nothing_lives_on(mark: str) -> None:
    code = (
        BEGIN % mark + "try:\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(60)\nexcept OSError: pass"
    )
    run_code(code, limits=LIMITS, layers=ALONE)
    assert not named(mark)


@needs("namespaces", "landlock", "limits")
def test_without_a_filter_no_socket_in_the_file_system_is_reached(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})\nprint('out')"
    found = run_code(code, limits=LIMITS, layers=("namespaces", "landlock", "limits"), weak=True)
    listening.close()
    assert found.stdout == ""


@needs(*ALONE)
@pytest.mark.parametrize("layers", [pytest.param(LAYERS, marks=needs(*LAYERS)), ALONE])
def test_a_session_stands_still_between_blocks(layers: tuple[str, ...], mark: str) -> None:
    session = Session(LIMITS, layers)
    try:
        session.run(BEGIN % mark + "n = 0\ndef count():\n    global n\n    while True: n += 1\n")
        session.run("threading.Thread(target=count, daemon=True).start()")
        (pid,) = named(mark)
        assert come(lambda: state(pid) == "T")
        assert session.run("type(n)").stdout == "<class 'int'>\n", "and goes on with the next"
    finally:
        session.close()


FORGED = (
    # What earlier versions, and this one, would have taken for the end of a block.
    "f = sys._getframe()\nwhile f:\n    for v in list(f.f_locals.values()):\n"
    "        if isinstance(v, dict) and 'end' in v: os.write(1, (v['end'] + '\\n').encode())\n    f = f.f_back\n"
    "for fd in range(3, 64):\n    try: os.write(fd, (5).to_bytes(8, 'little') + b'\\xe9\\x01\\x00\\x00\\x00')\n"
    "    except OSError: pass\nwhile True: pass"
)


def test_an_end_that_the_code_tells_hangs_nothing(mark: str) -> None:
    session, said = Session(LIMITS), list[str]()

    def use() -> None:
        session.run(BEGIN % mark + FORGED)
        session.run("'" + "x" * 300_000 + "'")
        session.run("a = 20")
        said.append(session.run("a + 22").stdout)
        session.close()

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    for pid in named(mark):
        os.kill(pid, signal.SIGKILL)
    assert said == ["42\n"]
    assert not thread.is_alive()


OWNER = """
import json, sys, threading, time
from jaxrl_llm.environments.sandbox import Limits, Session, run_code
kind, layers, code = json.loads(sys.stdin.readline())
if kind == "run":
    threading.Thread(target=run_code, args=(code + "time.sleep(60)",), kwargs=dict(limits=Limits(seconds=60), layers=layers)).start()
else:
    session = Session(Limits(seconds=60), layers)
    session.run(code)
print("begun", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "layers", [pytest.param(LAYERS, marks=needs(*LAYERS)), pytest.param(ALONE, marks=needs(*ALONE))]
)
@pytest.mark.parametrize("kind", ["run", "session"])
def test_nothing_outlives_the_program_that_started_it(
    kind: str, layers: tuple[str, ...], mark: str, tmp_path: Path
) -> None:
    """Neither processes nor folders."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write(json.dumps([kind, layers, BEGIN % mark + "open('f', 'w').write('x')\n"]) + "\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "begun\n"
    assert come(lambda: named(mark))
    owner.kill()
    owner.wait()
    gone = come(lambda: not named(mark))
    for pid in named(mark):
        os.kill(pid, signal.SIGKILL)
    assert gone
    assert come(lambda: not os.listdir(tmp_path))


@needs(*ALONE)
def test_no_folder_stays_however_it_was_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os\nfor n in range(1100): os.mkdir('d' * 20); os.chdir('d' * 20)\nos.mkdir('closed', 0)"
    run_code(code, limits=LIMITS, layers=ALONE)
    assert not os.listdir(tmp_path)


def test_a_text_is_no_list_of_folders() -> None:
    with pytest.raises(InputError, match=r"must be a list of folders: write \['/etc'\]"):
        run_code("print(1)", readable="/etc")
    with pytest.raises(InputError, match="would show too much"):
        run_code("print(1)", readable=["/tmp/.."])
    with pytest.raises(InputError, match="does not exist"):
        Session(readable=["/no/such/folder"])


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "", "a\0b", "a//b"])
def test_files_lie_within_the_folder(name: str) -> None:
    with pytest.raises(InputError, match="by a name within the sandbox's folder"):
        run_code("print(1)", files={name: "x"})
    with pytest.raises(InputError, match="the limit `disk` is 4 MiB"):
        run_code("print(1)", files={"a": "x" * 5 * 2**20}, limits=LIMITS)


@pytest.mark.parametrize("size", [200_000, 2_000_000])
def test_long_programs_run(size: int) -> None:
    """More than one argument of a command can hold."""
    text = f"# {'x' * size}\n"
    assert run_code(text + "print(len(open('f').read()))", files={"f": "x" * 200_000}).stdout == "200000\n"
    assert passed(text + "print(int(input()) + 1)", [case_of({"stdin": "1", "stdout": "2"})]) == [1.0]
    session = Session()
    assert session.run(text + "1").stdout == session.run(text + "1").stdout == "1\n"
    session.close()


RIGHT = {
    "annotations are those of the program": "def f(a: int): pass\nassert f.__annotations__ == {'a': int}",
    "its module is __main__": "import pickle\nclass P: pass\nassert type(pickle.loads(pickle.dumps(P()))) is P",
    "temporary files": "import os, tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/f', 'w')\nassert not os.path.exists(d)",
    "asyncio": "import asyncio\nassert asyncio.run(asyncio.sleep(0.01, 5)) == 5",
}  # fmt: skip
OF_PROCESSES = {
    "a pool": "import multiprocessing as m\ndef f(n): return n * n\nwith m.get_context('fork').Pool(3) as p: assert p.map(f, range(9))[8] == 64",
    "a pipe of programs": "import subprocess\nassert subprocess.check_output('echo a | tr a b', shell=True) == b'b\\n'",
    "modes of its own files": "import os, shutil\nopen('f', 'w'); os.chmod('f', 0o600); os.utime('f', (1, 1)); shutil.copy2('f', 'g')",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT | OF_PROCESSES)
def test_right_programs_run(name: str) -> None:
    if name in OF_PROCESSES and "namespaces" not in available():
        pytest.skip("processes are allowed with namespaces alone")
    found = run_code((RIGHT | OF_PROCESSES)[name] + "\nprint('right')", limits=Limits(seconds=30))
    assert found.stdout == "right\n", found.stderr


def test_a_promise_that_is_missing_is_named() -> None:
    assert "metadata" not in guards(ALONE)
    assert not guards(["namespaces", "landlock", "limits"]) & {"network", "memory"}
    with pytest.raises(InputError) as error:
        run_code("print(1)", layers=["namespaces", "landlock", "limits"])
    assert str(error.value).startswith("code of the policy would not be kept from network, memory: ")
    assert "\n" not in str(error.value)
