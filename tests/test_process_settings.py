"""What the library sets in its process: the C library's heap (only glibc has arenas to count) and the compile cache."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.utils import process
from jaxrl_llm.utils.process import compiles, compiling, count_compiles, default_cache_folder, use_compile_cache

PROGRAM = """
import ctypes, sys, threading
from jaxrl_llm.utils import process

if sys.argv[1] == "share":
    process.limit_heap()
libc, meeting, kept = ctypes.CDLL(None), threading.Barrier(4), []
libc.malloc.restype = ctypes.c_void_p

def take():
    meeting.wait()
    kept.extend(libc.malloc(1000) for _ in range(100))
    meeting.wait()

threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
out = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fclose(ctypes.c_void_p(out))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
def test_threads_share_a_heap(tmp_path: object) -> None:
    def arenas(how: str, **environment: str) -> int:
        path = f"{tmp_path}/{how}.xml"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        subprocess.run([sys.executable, "-c", PROGRAM, how, path], check=True, env=clean | environment)
        with open(path) as file:
            return file.read().count("<heap nr=")

    assert arenas("share") == 1
    assert arenas("each") > 1
    # What the user has set counts.
    assert arenas("share", MALLOC_ARENA_MAX="4") > 1


def test_what_a_compilation_leaves_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    process.limit_heap()
    monkeypatch.setattr(process, "trim_heap", lambda: times.append(1))
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3))
    compiled = len(times)
    double(jnp.ones(3))
    assert compiled >= 1
    assert len(times) == compiled


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="not Linux")
def test_freed_pages_go_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    size, count = 2**16, 2000  # small enough to be of the heap
    pieces = [libc.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    full, last = resident(), libc.malloc(64)  # stands behind the pieces, so that freeing them does not end the heap
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))
    process.trim_heap()
    assert resident() < full - size * count // 2
    libc.free(ctypes.c_void_p(last))


@pytest.fixture
def cache_setting() -> Iterator[None]:
    """Puts the process's setting back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # whether there is one is found out once


def test_the_folder_follows_the_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "jaxrl_llm" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache_folder() == Path.home() / ".cache" / "jaxrl_llm" / "xla"


@pytest.mark.usefixtures("cache_setting")
def test_the_cache_is_on_unless_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    use_compile_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxrl_llm" / "xla")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    use_compile_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


@pytest.mark.usefixtures("cache_setting")
@pytest.mark.parametrize("before, after", [(1.0, 0.0), (0.5, 0.5)])
def test_small_programs_are_kept_too_unless_configured(before: float, after: float, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    use_compile_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == after
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    use_compile_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0, "a folder that is configured is left as it is"


@pytest.mark.usefixtures("cache_setting")
def test_it_is_known_when_a_program_is_compiled(tmp_path: Path) -> None:
    """With a cache, which the shell may have turned off."""
    seen, hear = list[bool](), jax.monitoring.register_event_listener
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()

    def heard(event: str, **_: str | int) -> None:
        if event in ("/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"):
            seen.append(compiling())

    count_compiles()
    hear(heard)
    assert not compiling()
    jax.jit(lambda x: x * 17 + 3)(jax.numpy.arange(5.0))
    assert seen
    assert all(seen)
    assert not compiling()


def test_each_new_program_counts_once() -> None:
    count_compiles()
    count_compiles()
    x = jnp.ones(3)
    program = jax.jit(lambda x: x * 1.25 - 7.5)
    before, seconds_before = compiles()
    program(x)
    once, seconds = compiles()
    assert once == before + 1
    assert seconds > seconds_before
    program(x)
    assert compiles()[0] == once, "a second call runs the same program"
    y = jnp.ones(4)
    before = compiles()[0]
    program(y)
    assert compiles()[0] == before + 1, "another shape is another program"
