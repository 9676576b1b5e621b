"""Profiles on demand, in which phases and the parts of programs have names."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_runs as runs

from jaxrl_llm.learner import step as learner
from jaxrl_llm.sampling import engine, prefill
from jaxrl_llm.training import step as training_step
from jaxrl_llm.training.health.profiling import profiled


@pytest.mark.heavy
def test_a_signal_or_a_file_profiles_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.small_config(tmp_path, eval_size=0, steps=5)
    run, inner = Path(config.output), training_step.learn

    def learn(*arguments: Any) -> Any:
        step = arguments[4]
        if step == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        if step == 2:
            (run / "profile").touch()
        return inner(*arguments)

    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(training_step, "learn", learn)
    runs.train(config)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert sorted(path.name for path in (run / "profiles").iterdir()) == ["step-2", "step-4"]
    assert not (run / "profile").exists()
    out = capsys.readouterr().out
    for step in (2, 4):
        assert f"profile of step {step}: {run}/profiles/step-{step}\n" in out
        (trace,) = (run / "profiles" / f"step-{step}").rglob("*.xplane.pb")
        content = trace.read_bytes()
        for phase in (b"sample", b"score", b"update"):
            assert phase in content
    runs.assert_equal_trees(runs.final_params(run), unprofiled(tmp_path))


def unprofiled(folder: Path) -> Any:
    """Parameters of the same run without a profile."""
    config = runs.small_config(folder, eval_size=0, steps=5, output=str(folder / "plain"))
    runs.train(config)
    return runs.final_params(Path(config.output))


def test_a_profile_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "profile").touch()
    with jax.profiler.trace(tmp_path / "own"), profiled(tmp_path, said.append) as begin:
        begin(0)
        begin(1)
    assert len(said) == 1
    assert said[0].startswith("no profile of step 1: ")
    assert "already" in said[0]


PARTS = {
    "update": "gradient objective optimizer embedding norm projection rotation attention mlp head",
    "decode": "embedding norm projection rotation attention mlp draw filters head append",
    "prefill": "embedding projection attention mlp cache",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The lowered programs of a step, by name."""
    found: dict[str, Any] = {}

    def lowering(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found[name] = function.lower(*arguments, **options)
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "update", lowering("update", learner.update))
        patch.setattr(engine, "decode", lowering("decode", engine.decode))
        patch.setattr(prefill, "prefill", lowering("prefill", prefill.prefill))
        runs.train(runs.small_config(tmp_path_factory.mktemp("lowered"), steps=1, eval_size=0))
    return found


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_programs_have_names(programs: dict[str, Any], name: str) -> None:
    """Only in locations, which are no part of what is compiled, nor of the compilation cache's keys."""
    located, plain = (programs[name].as_text(debug_info=shown) for shown in (True, False))
    scopes = {scope for path in re.findall(r'loc\("([^"]*)"', located) for scope in re.split(r"[/()]", path)}
    assert set(PARTS[name].split()) <= scopes
    plain = re.sub(r'"[^"]*"', "", plain)  # of results
    assert not re.search(rf"\b({'|'.join(PARTS[name].split())})\b", plain)
