"""The compile cache's folder and the count of compilations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.process import compiles, count_compiles, default_cache_folder, use_compile_cache


@pytest.fixture
def cache_setting() -> Iterator[None]:
    """Puts the process's setting back."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


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
