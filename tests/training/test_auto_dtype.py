"""`--dtype auto`: which dtype, on which processor, and that a run keeps it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import pytest
import tiny_runs as runs

from jaxrl_llm.training.config import TrainConfig, auto_dtype
from jaxrl_llm.training.config.auto_dtype import half_instructions, with_dtype, with_kept_dtype
from jaxrl_llm.training.folder.files import RunFolder, has_begun

INTEL = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16 amx_int8\n\n"
ZEN4 = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n"
OLDER = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16x\nbugs\t\t: avx512_bf16\n"


@pytest.mark.parametrize(("text", "expected"), [(INTEL, "amx_bf16"), (ZEN4, "avx512_bf16"), (OLDER, ""), ("", "")])
def test_the_instructions_are_read_from_the_processors_flags(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert half_instructions(tmp_path / "cpuinfo") == expected
    assert half_instructions(tmp_path / "not_there") == ""


@pytest.mark.parametrize(
    ("found", "dtype", "says"), [("amx_bf16", "bfloat16", "amx_bf16"), ("", "float32", "no instr")]
)
def test_a_run_begins_with_the_dtype_of_its_processor_and_keeps_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: str,
    dtype: str,
    says: str,
) -> None:
    monkeypatch.setattr(auto_dtype, "half_instructions", lambda: found)
    config = runs.small_config(tmp_path, dtype="auto", steps=1)
    runs.train(config)
    said = capsys.readouterr().out
    assert f"dtype {dtype}" in said
    assert says in said
    assert RunFolder(config.output).read_config().dtype == dtype
    # Another processor goes on with the same dtype, whether by its folder or by all settings.
    monkeypatch.setattr(auto_dtype, "half_instructions", lambda: "" if found else "amx_bf16")
    assert has_begun(config, False)
    assert with_kept_dtype(config).dtype == dtype
    runs.train(dataclasses.replace(config, steps=2), resume=True)
    assert f"dtype {dtype}, as before" in capsys.readouterr().out
    rows = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


def test_hosts_take_bfloat16_only_where_all_are_fast_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxrl_llm.distributed import hosts

    monkeypatch.setattr(auto_dtype, "half_instructions", lambda: "amx_bf16")
    two = hosts.Hosts(0, 2, gather=lambda value: [value, False])
    monkeypatch.setattr(hosts, "all_hosts", lambda: two)
    config, line = with_dtype(TrainConfig(dtype="auto"), False)
    assert config.dtype == ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    assert "some host's processor" in line


def test_another_dtype_is_left_alone() -> None:
    config = TrainConfig(dtype="bfloat16")
    assert with_dtype(config, False) == (config, "")
    assert with_kept_dtype(config) is config
