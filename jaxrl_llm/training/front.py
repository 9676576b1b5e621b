"""A front of policies for several rewards: runs for fixed weights of them, and runs that extend the front where it is
sparse."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.signatures import hyperparameters
from jaxrl_llm.models import save_policy
from jaxrl_llm.rewards.specs import unweighted
from jaxrl_llm.selection.front import expected_utility, hypervolume, non_dominated, sparsest, sparsity
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import fitted
from jaxrl_llm.training.evaluation.evaluate import evaluate_as
from jaxrl_llm.training.folder.files import has_begun
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.inputs import encode_for, evaluation_inputs
from jaxrl_llm.training.loop import train
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.storage import replace_file

COMPONENT = "component"  # the hyper-parameter of a method that names the objective which it raises
FILE = "front.json"


class Front(NamedTuple):
    """The policies of a front so far."""

    objectives: tuple[str, ...]
    """Names of the rewards."""
    policies: list[dict[str, Any]]
    """Of each run its name, folder, means (of each objective, on held-out prompts), and parent and objective, or
    weights."""

    @property
    def points(self) -> list[list[float]]:
        """The means of each policy, in the order of the objectives."""
        return [[one["means"][name] for name in self.objectives] for one in self.policies]

    @property
    def members(self) -> list[dict[str, Any]]:
        """The policies that no other dominates."""
        return [self.policies[i] for i in non_dominated(self.points)] if self.policies else []

    @property
    def figures(self) -> dict[str, float]:
        """Hypervolume above 0, sparsity, and expected utility over weights that add up to 1."""
        x = self.points
        return {"hypervolume": hypervolume(x), "sparsity": sparsity(x), "expected_utility": expected_utility(x)}


def grow_front(
    config: TrainConfig, *, weightings: Sequence[Sequence[float]] = (), first_algorithm: str = "grpo",
    first_steps: int | None = None, select: int = 5, rounds: int = 1, samples: int = 4,
    say: Callable[[str], object] = print,
) -> Front:  # fmt: skip
    """Train a front of policies for the rewards of a configuration, in folders of its `output`.

    First a run of `first_algorithm` for each weighting of the rewards, of `first_steps` steps (None: as many as the
    configuration has). Then, `rounds` times, the `select` policies of the front in its sparsest regions
    (`selection.front.sparsest`) are extended: from each a run of the configuration's method for every objective, whose
    hyper-parameter `component` names it. Each run's last policy is measured on the held-out prompts, `samples`
    completions of each, as the means of the rewards; the front is all policies so far that no other dominates.

    weightings: lists of a weight for each reward; default: each reward alone, and all with equal weights. Those of the
    configuration count in none of them. say: told of each policy.

    front.json has all of it after every run, so that the same call again goes on after a run that was stopped.
    Raises InputError for fewer than two rewards, no held-out prompts, a method without the hyper-parameter, weightings
    of another length, and an output that has a front of other settings.
    """
    specs = tuple(unweighted(spec) for spec in config.rewards)
    n = len(specs)
    weightings = [list(map(float, one)) for one in weightings] or [*np.eye(n).tolist(), [1 / n] * n]
    _check(config, n, weightings, select, rounds)
    folder = Path(config.output)
    settings = {
        "rewards": specs, "weightings": weightings, "algorithm": config.algorithm, "first_algorithm": first_algorithm,
        "select": select, "model": config.model, "seed": config.seed, "steps": config.steps, "first_steps": first_steps,
    }  # fmt: skip
    objectives, known = _read(folder, json.loads(json.dumps(settings)))
    front = Front(objectives, list(known.values()))

    def add(name: str, one: TrainConfig, facts: Mapping[str, Any]) -> None:
        """The run of this name, which is not made again where it is known."""
        nonlocal front
        if name in known:
            return
        one = fitted(replace(one, output=str(folder / name), seed=config.seed + len(known)))
        train(one, resume=has_begun(one, False))
        means = _measured(one, samples)
        known[name] = {"name": name, "folder": name, **facts, "means": means}
        front = Front(tuple(means), list(known.values()))
        _write(folder, settings, front)
        say(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in means.items()))

    first = replace(config, algorithm=first_algorithm, hyperparameters={}, steps=first_steps or config.steps)
    for number, weights in enumerate(weightings):
        weighted = tuple(f"{spec}*{weight:g}" for spec, weight in zip(specs, weights, strict=True))
        add(f"first-{number}", replace(first, rewards=weighted), {"weights": weights})
    for number in range(rounds):
        before = Front(front.objectives, [one for one in front.policies if one.get("round", -1) < number])
        for place in sparsest(before.points, select):
            parent = before.policies[place]["name"]
            model = _exported(folder, parent)
            for objective in front.objectives:
                given = {**config.hyperparameters, COMPONENT: objective}
                extended = replace(config, model=model, rewards=specs, hyperparameters=given, adapter=None)
                facts = {"round": number, "parent": parent, "objective": objective}
                add(f"{number}-{parent}-{objective}", extended, facts)
    _write(folder, settings, front)
    names = ", ".join(one["name"] for one in front.members)
    say(f"front of {len(front.members)}: {names}")
    say("  ".join(f"{name} {value:.4g}" for name, value in front.figures.items()))
    return front


def _measured(config: TrainConfig, samples: int = 1) -> dict[str, float]:
    """The mean of each reward of a finished run's policy on its held-out prompts, by name.

    samples: of each prompt, greedy if there is one, else at temperature 1. NaN where a reward scored nothing.
    """
    with evaluation_inputs(config, None, None) as (rows, rewards):
        _, policy, params, tokenizer = load_run(config.output)
        prompts = encode_for(config, tokenizer, policy.config.max_positions, rows, vocabulary=policy.config.vocab_size)
        found = evaluate_as(config, policy, params, prompts, rewards, samples=samples, temperature=float(samples > 1))
        components = found.scored.batch.rewards or {}
        return {reward.name: float(np.nanmean(np.asarray(components[reward.name]))) for reward in rewards}


def _check(config: TrainConfig, n: int, weightings: Sequence[Sequence[float]], select: int, rounds: int) -> None:
    if n < 2:
        raise InputError("a front is of two rewards at least: give more, --rewards ONE OTHER")
    if not config.eval_size:
        raise InputError("policies of a front are compared on held-out prompts: give eval_size")
    if COMPONENT not in {one.name for one in hyperparameters(config.algorithm)}:
        raise InputError(
            f"policies are extended by a method that raises one reward, with a hyper-parameter {COMPONENT}, which "
            f"{config.algorithm} does not have: see jaxrl algorithms --find front"
        )
    if wrong := [one for one in weightings if len(one) != n or not all(np.isfinite(one)) or not any(one)]:
        raise InputError(f"a weighting has a number for each of {n} rewards, not all 0, unlike {shown(wrong[0])}")
    if select < 1 or rounds < 0:
        raise InputError(f"select is {select} and rounds {rounds}: give at least 1 and 0")


def _exported(folder: Path, name: str) -> str:
    """A folder with the model of a run, for the runs that begin with it."""
    target = folder / "models" / name
    if not target.is_dir():
        _, policy, params, tokenizer = load_run(str(folder / name))
        save_policy(target, policy, params, tokenizer)
    return str(target)


def _read(folder: Path, settings: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """The objectives, and the policies by name, of the front in a folder; none where there is no front yet."""
    try:
        found = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return (), {}
    if differs := " and ".join(sorted(name for name in settings if found["settings"].get(name) != settings[name])):
        raise InputError(f"{folder} has a front with another {differs}: set it back, or give another output")
    return tuple(found["objectives"]), {one["name"]: one for one in found["policies"]}


def _write(folder: Path, settings: Mapping[str, Any], front: Front) -> None:
    """Write the file whole or not at all."""
    text = {
        "settings": settings, "objectives": front.objectives, "policies": front.policies,
        "front": [one["name"] for one in front.members], "figures": front.figures,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FILE, json.dumps(text, indent=2) + "\n")
