"""Fronts of policies for several rewards: which runs are made, and the command with real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.cli.front import weightings_in
from jaxrl_llm.cli.program import main
from jaxrl_llm.training import front as fronts
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.front import grow_front
from jaxrl_llm.utils.errors import InputError


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "algorithm": "c_morl", "rewards": ("number_match", "length_penalty*0.5"), "output": str(folder / "front"),
        "prompts": "p.jsonl", "eval_size": 2, "steps": 3,
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Runs that take no time. A policy is two numbers: of weights w they are sqrt(w), and an extension adds 0.2 to one
    and takes 10 % of the other. The runs that were made, in order."""
    made: list[TrainConfig] = []
    points: dict[str, np.ndarray] = {}

    def train(config: TrainConfig, **options: Any) -> dict[str, Any]:
        if component := config.hyperparameters.get("component"):
            place = ("a", "b").index(component)
            before = points[Path(config.model).name]
            points[Path(config.output).name] = np.where(np.arange(2) == place, before + 0.2, 0.9 * before)
        else:
            points[Path(config.output).name] = np.sqrt([float(one.rpartition("*")[2]) for one in config.rewards])
        made.append(config)
        return {}

    def measured(config: TrainConfig, samples: int) -> dict[str, float]:
        return dict(zip(("a", "b"), points[Path(config.output).name].tolist(), strict=True))

    monkeypatch.setattr(fronts, "train", train)
    monkeypatch.setattr(fronts, "_measured", measured)
    monkeypatch.setattr(fronts, "has_begun", lambda config, accept: False)
    monkeypatch.setattr(fronts, "fitted", lambda config: config)
    monkeypatch.setattr(fronts, "_exported", lambda folder, name: str(folder / "models" / name))
    return made


def names(made: list[TrainConfig]) -> list[str]:
    return [Path(one.output).name for one in made]


def test_the_sparsest_policies_are_extended_for_every_objective(world: list[TrainConfig], tmp_path: Path) -> None:
    """By hand: the first three are (1, 0), (0, 1) and (0.71, 0.71); the ends have the largest distance."""
    found = grow_front(config_of(tmp_path), select=2, rounds=2, first_steps=9, say=lambda text: None)
    first = ["first-0", "first-1", "first-2"]
    ends = [f"0-first-{i}-{c}" for i in (0, 1) for c in "ab"]
    assert names(world)[:7] == [*first, *ends]
    assert [one.steps for one in world[:4]] == [9, 9, 9, 3]
    assert [one.algorithm for one in world[:4]] == ["grpo"] * 3 + ["c_morl"]
    assert world[2].rewards == ("number_match*0.5", "length_penalty*0.5")
    assert world[3].rewards == ("number_match", "length_penalty"), "weights are of the first runs alone"
    assert world[3].model.endswith("models/first-0")
    assert world[3].hyperparameters == {"component": "a"}
    assert len({one.seed for one in world}) == len(world)
    # (1.2, 0) and (0, 1.2) take the places of the ends, which (0.9, 0.2) and (0.2, 0.9) come between.
    assert names(world)[7:] == [f"1-0-first-{i}-{c}-{d}" for i, c in ((0, "a"), (1, "b")) for d in "ab"]
    points = {one["name"]: tuple(one["means"].values()) for one in found.policies}
    best = {
        name for name, p in points.items() if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points.values())
    }
    assert {one["name"] for one in found.members} == best
    written = json.loads((tmp_path / "front" / "front.json").read_text())
    assert set(written["front"]) == best
    assert written["figures"] == found.figures
    parents = {one["name"]: one.get("parent") for one in written["policies"]}
    assert parents["0-first-1-b"] == "first-1"


def test_it_goes_on_where_it_was(world: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same runs with the same seeds, whether it is stopped after four or not; and one more round adds to it."""
    whole = grow_front(config_of(tmp_path / "a"), select=2, rounds=2, say=lambda text: None)
    seeds = {Path(one.output).name: one.seed for one in world}
    world.clear()
    train = fronts.train

    def stopped(config: TrainConfig, **options: Any) -> dict[str, Any]:
        if len(world) == 4:
            raise KeyboardInterrupt
        return train(config, **options)

    monkeypatch.setattr(fronts, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        grow_front(config_of(tmp_path / "b"), select=2, rounds=2, say=lambda text: None)
    monkeypatch.setattr(fronts, "train", train)
    assert len(json.loads((tmp_path / "b/front/front.json").read_text())["policies"]) == 4
    grow_front(config_of(tmp_path / "b"), select=2, rounds=1, say=lambda text: None)
    again = grow_front(config_of(tmp_path / "b"), select=2, rounds=2, say=lambda text: None)
    assert again == whole
    assert {Path(one.output).name: one.seed for one in world} == seeds
    with pytest.raises(InputError, match="has a front with another select and steps: set it back"):
        grow_front(config_of(tmp_path / "b", steps=4), select=3, say=lambda text: None)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"rewards": ("number_match",)}, {}, "a front is of two rewards at least"),
        ({"eval_size": 0}, {}, "compared on held-out prompts: give eval_size"),
        ({"algorithm": "grpo"}, {}, "a hyper-parameter component, which grpo does not have"),
        ({}, {"weightings": [[1.0]]}, "a number for each of 2 rewards"),
        ({}, {"weightings": [[0.0, 0.0]]}, "not all 0"),
        ({}, {"select": 0}, "select is 0"),
    ],
)
def test_what_does_not_fit(changes: Any, options: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        grow_front(config_of(tmp_path, **changes), **options)
    with pytest.raises(InputError, match="--weightings is '1,x'"):
        weightings_in("1,x")


@pytest.mark.heavy
def test_the_command_trains_a_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two policies of weights, and one round that extends one of them for both rewards; again, it makes no run."""
    rewards = runs.write_rewards(tmp_path)
    with rewards.open("a") as file:
        file.write("\n\ndef small(completions, completion_ids):\n")
        file.write("    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]\n")
    arguments = [
        "front", "--model", str(runs.MODEL), "--prompts", str(runs.write_prompts(tmp_path / "p.jsonl")), "--rewards",
        f"{rewards}:even", f"{rewards}:small*0.5", "--algorithm", "c_morl", "--output", str(tmp_path / "front"),
        "--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "6", "--eval-size", "4",
        "--checkpoint-every", "0", "--minibatches", "1", "--optimizer.learning-rate", "2e-3", "--top-p", "0.9",
        "--weightings", "1,0;0,1", "--select", "1", "--rounds", "1", "--first-steps", "1", "--samples", "2",
    ]  # fmt: skip
    assert main(arguments) == 0
    found = json.loads((tmp_path / "front" / "front.json").read_text())
    assert found["objectives"] == ["even", "small"]
    first, second, *extended = found["policies"]
    assert (first["weights"], second["weights"]) == ([1.0, 0.0], [0.0, 1.0])
    assert [one["objective"] for one in extended] == ["even", "small"]
    assert all(0 < value < 1 for one in found["policies"] for value in one["means"].values()), "without weights"
    parent = extended[0]["parent"]
    for one in extended:
        run = tmp_path / "front" / one["folder"]
        settings = json.loads((run / "config.json").read_text())
        assert settings["model"] == str(tmp_path / "front" / "models" / parent)
        lines = runs.lines_of(run / "metrics.jsonl")
        assert len(lines) == 2
        assert all(np.isfinite(line["barrier"]) for line in lines)
    assert 0 < found["figures"]["hypervolume"] < 1
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "front").rglob("metrics.jsonl")}
    assert len(stamps) == 4
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"front of {len(found['front'])}: ")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "front").rglob("metrics.jsonl")} == stamps
