"""Methods by name on SmolLM2: the options that a run of a few short completions needs, and such runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models import load_policy
from jaxrl_llm.training import run_model, running
from jaxrl_llm.training.config import TrainConfig

OF_REWARDS = (
    "gdro", "brorl", "brain", "open_rs", "carl_multiplicative_reward", "p3o_pairwise", "srpo_self_referential",
    "subpo", "c_morl", "ui_r1", "ttrl", "ettrl", "polychromic", "verpo", "trpa", "degrpo", "pa_rl", "gui_r1",
    "visual_rft", "baichuan_m2", "popri", "barfi", "fgaif",
)  # fmt: skip
MODEL = "smollm2-135m"
REWARDS = """
def checks(completions, answer):
    found = [{"reward": float(a in one), "tests": [a in one, "=" in one]} for one, a in zip(completions, answer)]
    return found


checks.provides = {"tests"}


def voted(completions):
    return [{"reward": 0.0, "votes": [float(len(one)), float(one.count("="))]} for one in completions]


voted.provides = {"votes"}


def judge(completions, answer):
    return [float(a in one) for one, a in zip(completions, answer)]
"""
# A sum that the model can do, and one that it cannot, whose groups are repaired: a step has one of each.
SUMS = [(2, 3), (4718, 2956), (4, 1), (3864, 4579)]


@dataclass(frozen=True)
class Case:
    """How a method is run, and what shows that all of it is there."""

    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    """Metrics that are above 0 in one of the steps."""
    logged: tuple[str, ...] = ()
    """Metrics that the run has, 0 or not."""
    info: tuple[str, ...] = ()
    """What the batch has beside its usual fields."""
    more: bool = False
    """A step has more rows than it has prompts times samples."""


def experience_methods() -> list[str]:
    """Methods that name a rollout, a curriculum, a replay or a reference, and methods of rewards; only whole ones.

    Those of responses that the data set gives have runs of their own, in test_preference_runs.py, those that ask a
    judge in test_judged_runs.py, and those of masked-diffusion models in test_diffusion_runs.py.
    """
    families = algorithms.families()

    def of_experience(one: algorithms.Algorithm) -> bool:
        if one.rollout is not None and (one.rollout.demands.given or "judged" in one.rollout.name):
            return False
        return any(part is not None for part in (one.rollout, one.prompts, one.replay, one.reference))

    names = [name for name in algorithms.names() if families[name] != "diffusion"]
    names = [name for name in names if name in OF_REWARDS or of_experience(algorithms.get(name))]
    return [name for name in names if name in OF_REWARDS or not missing(name)]


HINTS = ("rollout/guided", "rollout/unhinted")
METHODS: dict[str, Case] = {
    "a2fm_apo": Case({"forced": 1}, metrics=("rollout/prefixed",), info=("mode",)),
    "a2pr": Case(metrics=("replay/share", "replay/age", "imitation")),
    "aepo_arbitrary_entropy": Case({"tempered_share": 1.0}, info=("tempered",), more=True),
    "ampo_multi_guidance": Case(metrics=("rollout/guided", "off_prompt/share"), info=("reference_span",)),
    "arpo_replay": Case(metrics=("replay/rows",), logged=("replay/share",)),
    "barfi": Case(settings={"rewards": ("number_match", "exact_match")}, metrics=("blend/exact_match",)),
    "brain": Case(metrics=("listwise",)),
    "branchgrpo": Case({"forks": 2, "spacing": 3}, metrics=("rollout/leaves", "rollout/shared_tokens")),
    "brorl": Case(metrics=("kl",), logged=("rounds",)),
    "c_morl": Case(settings={"rewards": ("number_match", "exact_match")}, metrics=("barrier",)),
    "carl_multiplicative_reward": Case(metrics=("value/loss",)),
    "cgpo_judges": Case(
        {"column": "response", "judges": "exact_match"}, {"rewards": ("number_match", "exact_match*0")},
        logged=("constraints/met",), info=("task", "feasible", "baseline_reward"),
    ),
    "clpo": Case({"limit": 24}, logged=("rollout/unhinted",), info=("hard", "rewritten")),
    "baichuan_m2": Case(
        {"slices": True},
        {"environment": "jaxrl_llm.environments.patient:Patient", "turns": 3}, metrics=("rollout/turns",)
    ),
    "craft_gui": Case(
        {"stage_steps": 1},
        {"num_prompts": 4, "rewards": ("gui_format", "gui_kind*0.5", "gui_parameter*0.5", "FOLDER/own.py:judge")},
        metrics=("curriculum/stage", "curriculum/tried"),
    ),
    "dapo_direct_advantage": Case(
        {"continuations": 2, "critic_alone": 1}, {"epochs": 2}, logged=("value/loss",), info=("line_tokens",)
    ),
    "dars": Case({"most_samples": 8}, more=True),
    "daslam": Case({"questions": 1, "solver_tokens": 6}, metrics=("value/loss",), info=("decomposition",)),
    "degrpo": Case(settings={"rewards": ("by_mode(number_match)",)}),
    "dots_rr": Case({"units": 8, "passes": 2}, logged=("curriculum/prediction_error",)),
    "drive_pre_grpo": Case(settings={"num_prompts": 4}),
    "drpo_dataset_reset": Case(metrics=("rollout/prefixed", "value/loss")),
    "eggroll": Case({"sigma": 0.01}, {"temperature": 1.0, "top_p": 1.0}, info=("member", "member_seed")),
    "ettrl": Case({"trees": 2, "forks": 1, "branches": 1}, metrics=("rollout/leaves",), info=("node", "answer_key")),
    "fgaif": Case(settings={"rewards": ("coverage(items)",)}, metrics=("value/loss",)),
    "ghpo": Case(metrics=("rollout/guided",), logged=HINTS),
    "gui_r1": Case(settings={"rewards": ("gui_action", "gui_format")}),
    "hapo_heterogeneous": Case({"rounds": 1}, info=("level_tau",)),
    "hbpo": Case(info=("budget",)),
    "hila": Case(
        metrics=("choice/entropy", "choice/reward", "expert/loss"), logged=("kl",), info=("demonstrated",), more=True
    ),
    "icpo_in_context": Case({"reject": False}, metrics=("rollout/guided", "off_prompt/share")),
    "latr": Case({"windows": "2", "absolute": 0.001, "relative": 0.5}, info=("node",)),
    "lspo": Case(
        {"replies": 2, "iterations": 20},
        {
            "environment": "jaxrl_llm.environments.games:spoken_advice", "players": 2, "turns": 1,
            "rewards": ("environment",),
        },
    ),
    "masa": Case(metrics=("rollout/parts",), more=True),
    "nurl": Case({"hints_from": 0}, metrics=("rollout/guided",), logged=(*HINTS, "curriculum/left_out/solved")),
    "otr": Case(settings={"group_size": 1}, info=("demonstrated",)),
    "pa_rl": Case({"keep": 2}),
    "popri": Case({"rank": 1}, {"rewards": ("FOLDER/own.py:voted",)}, info=("votes",)),
    "prefixrl": Case(metrics=("rollout/parts", "rollout/prefixed"), more=True),
    "r2vpo": Case(metrics=("replay/share", "replay/age")),
    "rapo_reward_aware": Case(logged=("replay/share",)),
    "remix": Case(settings={"epochs": 2, "epochs_until": 50}),
    "rlgf": Case(metrics=("rollout/prefixed", "value/loss")),
    "sage_self_hint": Case(logged=HINTS),
    "salsa": Case({"other": MODEL}, metrics=("value/loss",)),
    "sapo_swarm": Case(logged=("swarm/reward_1", "replay/share")),
    "scaf_grpo": Case({"hints_from": 0}, logged=HINTS),
    "sdft": Case({"column": "response", "top_k": 8, "beta": 0.5}, metrics=("distillation",), info=("teacher_tokens",)),
    "seppo": Case(
        settings={"rewards": ("given",), "group_size": 2, "same_task": "row"}, logged=("sampled/better",)
    ),
    "sgpo": Case(settings={"num_prompts": 4, "group_size": 8}),
    "soft_grpo": Case({"end": "."}, {"temperature": 1.0, "top_p": 1.0}),
    "spark_co_evolving": Case({"share": 1.0}, metrics=("rollout/parts",), more=True),
    "spear": Case({"replay_rows": 2, "surplus": 1.0}, logged=("replay/share",)),
    "spo_segment": Case({"continuations": 2, "interval": 2}, metrics=("rollout/leaves",), info=("state_value",)),
    "spo_single_stream": Case(settings={"group_size": 1}),
    "srpo_self_referential": Case({"rounds": 1}, {"rewards": ("distances(number_match)",)}, info=("distance",)),
    "subpo": Case(settings={"rewards": ("coverage(items)",)}),
    "symphony_fading_replay": Case(metrics=("replay/share", "replay/age")),
    "treepo": Case({"segment": 2, "first_most": 2, "rounds": 1}, metrics=("rollout/leaves",), info=("node",)),
    "trpa": Case(settings={"rewards": ("tagged_levels",)}),
    "tscac": Case({"policies": MODEL}),
    "ttrl": Case(info=("answer_key",)),
    "ui_r1": Case({"right": 3.0}, {"rewards": ("answer_tags", "gui_kind", "gui_click")}),
    "ui_s1": Case({"patches": -1, "turns": 2}, {"rewards": ("environment",)}, info=("first_turn",), more=True),
    "v0_value": Case({"queries": 4, "bottleneck": 4, "value_steps": 4}, {"num_prompts": 4}),
    "vade": Case(settings={"num_prompts": 4}),
    "verpo": Case(settings={"rewards": ("FOLDER/own.py:checks",)}, info=("tests",)),
    "visual_rft": Case(settings={"rewards": ("box_overlap", "box_confidence", "box_format")}),
    "vision_zero": Case(settings={"rewards": ("environment",)}, metrics=("rollout/parts",), more=True),
    "vspo_prs": Case(logged=("replay/share",)),
    "wmar_reservoir_replay": Case(metrics=("replay/share",)),
    "zppo": Case({"words": 4}, metrics=("rollout/parts", "curriculum/buffer"), more=True),
}  # fmt: skip


@cache
def _read(*arguments: Any) -> tuple[Any, Any, Any]:
    options = dict(arguments)
    policy, params, tokenizer = load_policy(options.pop("name"), **options)
    return policy, jax.tree.map(np.asarray, params), tokenizer


def _load(name: str, **options: Any) -> tuple[Any, Any, Any]:
    """`load_policy` that reads a model's file once in a process."""
    policy, params, tokenizer = _read(("name", name), *options.items())
    return policy, jax.tree.map(lambda x: jax.numpy.array(x, copy=True), params), tokenizer


@contextlib.contextmanager
def light() -> Iterator[None]:
    """Runs inside it read the model once, and leave out the last checkpoint, which would be 1.6 GB each."""
    before = run_model.load_policy, running.save
    run_model.load_policy, running.save = _load, lambda *arguments: None
    try:
        yield
    finally:
        run_model.load_policy, running.save = before


def rows() -> list[dict[str, Any]]:
    """The sums, with a column for everything that a method asks for."""
    return [
        {
            "prompt": f"What is {a} + {b}? Please answer with the number only.", "answer": str(a + b),
            "stage": int(a > 9), "solution": f"The sum of {a} and {b} is {a + b}.",
            "hints": [["add"], [f"{a} + {b} is", f"{a + b}"]], "examples": ["What is 1 + 1? 2", "What is 2 + 2? 4"],
            "teachers": [f"{a + b}", f"It is {a + b}"],
            "peers": [f"{a + b}", "0", "1"], "expert": f"It is {a + b}",
            "response": f"{a} + {b} = {a + b}", "trace": f"{a} + {b} = {a + b}" if a > 9 else "",
            "steps": [{"observation": str(x), "action": {"action": "add", "number": x}} for x in (a, b)],
            "teacher": [f"It is {a + b}"], "guide": f"{a} + {b} = {a + b}", "items": [str(a), str(b), str(a + b)],
            "action": {"action": "type", "input_text": str(a + b)}, "boxes": [[0, 0, a, b]],
            "scene": f"{a} red cubes", "spy_scene": f"{b} red cubes",
            "complaint": f"I have {a} spots.", "facts": {"a": "Since Monday.", "e": "No."}, "diagnosis": "measles",
        }
        for a, b in SUMS
    ]  # fmt: skip


def config_of(folder: Path, name: str) -> TrainConfig:
    """Two steps of two groups of four completions of 12 tokens."""
    case = METHODS.get(name, Case())
    (folder / "own.py").write_text(REWARDS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    settings: dict[str, Any] = {
        "rewards": ("number_match",), "steps": 2, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 12,
        "temperature": 0.7, "num_prompts": 2, "eval_size": 0, "checkpoint_every": 0, "log_completions_every": 1,
        "tensorboard": False,
        "optimizer": OptimizerConfig(learning_rate=1e-5), **case.settings,
    }  # fmt: skip
    settings["rewards"] = tuple(one.replace("FOLDER", str(folder)) for one in settings["rewards"])
    return TrainConfig(
        model=MODEL, output=str(folder / "run"), prompts=str(folder / "rows.jsonl"), algorithm=name,
        hyperparameters=dict(case.options), **settings,
    )  # fmt: skip


def trained(folder: Path, name: str) -> tuple[list[dict[str, Any]], list[runs.Taken]]:
    """The metrics of a run by name, and what its source gave."""
    taken: list[runs.Taken] = []
    with light(), runs.watched(taken):
        runs.train(config_of(folder, name))
    return runs.lines_of(folder / "run" / "metrics.jsonl"), taken
