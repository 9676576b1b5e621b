"""Limits of memory by cgroups of version 2, in folders that stand for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxrl_llm.environments.sandbox import guards, run, supervisor
from jaxrl_llm.environments.sandbox.inside.process import own_group

FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Groups that were made: as the kernel does, each gets the files of its controllers."""
    paths, mkdir = list[str](), os.mkdir

    def make(path: str, mode: int = 0o777) -> None:
        mkdir(path, mode)
        for name in FILES:
            Path(path, name).touch()
        paths.append(str(path))

    monkeypatch.setattr(os, "mkdir", make)
    return paths


def test_a_group_has_the_limits(tmp_path: Path, made: list[str]) -> None:
    path = own_group(str(tmp_path), 2**28, 128)
    assert made == [path]
    assert [Path(path, name).read_text() for name in FILES] == [str(2**28), "0", "1", "128"]


def test_a_group_without_a_controller_of_memory_is_none(tmp_path: Path) -> None:
    assert not supervisor._limits_memory(tmp_path / "group")
    assert not supervisor._limits_memory(tmp_path / "not" / "there")


def test_with_groups_memory_is_kept_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "memory_groups", lambda: "/sys/fs/cgroup")
    assert "memory" in guards(["namespaces", "limits"])
    monkeypatch.setattr(run, "memory_groups", lambda: None)
    assert "memory" not in guards(["namespaces", "limits"])
