"""Every method by name, for two steps at its own settings on a tiny model: a signal, and another loss than GRPO's.

Only sizes differ from the method's own settings, in proportion: samples, tokens, layers, and counts of steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import by_name
import jax
import numpy as np
import pytest
import test_turn_runs as turn_runs
import tiny_runs as runs
from test_diffusion_runs import tiny_llada
from test_prefixed_runs import with_long_context

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.agents import lspo, vision_zero
from jaxrl_llm.algorithms.judged import urpo
from jaxrl_llm.algorithms.method import run_settings_of
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.environments import games
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.step import LearnedBatch, Learner
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.rewards.judges import questions
from jaxrl_llm.training import step as training_step
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import catalogue_hyperparameters, fitted

pytestmark = pytest.mark.heavy
# A policy that writes noise is right half of the time, has one of three answers, and parts of its texts are worth more.
REWARDS = """
def noted(completions, completion_ids):
    return [
        {"reward": float(sum(ids) % 2 == 0), "answer_key": str(sum(ids) % 3), "distance": ids[-1] % 5 / 5,
         "tests": [sum(ids) % 2 == 0, ids[-1] % 2 == 0], "votes": [float(ids[0] % 5), float(ids[-1] % 7)],
         "spans": [(0, 1, ids[0] % 3 / 2)] if text else []}
        for text, ids in zip(completions, completion_ids)
    ]


noted.provides = {"answer_key", "tests", "votes", "distance", "spans"}


def part(name, place):
    def score(completions, completion_ids):
        return [float(ids[place % len(ids)] % 2 == 0) for ids in completion_ids]

    score.__name__ = name
    return score


for name in ("first", "gui_action", "box_overlap"):
    globals()[name] = part(name, 0)
for name in ("last", "gui_format", "box_confidence", "one_answer", "sound"):
    globals()[name] = part(name, -1)
second, box_format = part("second", 1), part("box_format", 1)
"""
TINY, TEACHER = str(runs.MODEL), str(runs.MODEL.parent / "gemma2")  # of the same words
# Sizes in proportion to those of the run, and columns and models that a method cannot do without.
OPTIONS: dict[str, dict[str, Any]] = {
    "a2fm_apo": {"forced": 1}, "agent_r": {"width": 2}, "archer": {"critic_updates": 1, "states": 3},
    "arpo_agentic": {"initial": 2}, "branchgrpo": {"forks": 2, "spacing": 3}, "bupo": {"layer": 1},
    "cgpo_judges": {"column": "response", "judges": "last"}, "craft_gui": {"stage_steps": 1},
    "dapo_direct_advantage": {"continuations": 2, "critic_alone": 1}, "dars": {"most_samples": 8},
    "daslam": {"questions": 1, "solver_tokens": 6}, "deeptravel": {"every": 1},
    "dots_rr": {"references": 8, "units": 8, "passes": 2}, "drive_pre_grpo": {"first_steps": 1, "phases": "2x1"},
    "ettrl": {"trees": 2, "forks": 1, "branches": 1}, "latr": {"windows": "2"},
    "lspo": {"replies": 2, "iterations": 20}, "pa_rl": {"keep": 2}, "pav": {"continuations": 2}, "popri": {"rank": 1},
    "r3l": {"reflection_tokens": 8}, "relic": {"segments": 2},
    "resim": {"branches": 2, "depth": 2}, "salsa": {"other": TINY},
    "sdft": {"column": "response"}, "sgpo": {"stage_steps": 1}, "soft_grpo": {"end": "e"},
    "spear": {"replay_rows": 2}, "spo_segment": {"continuations": 2, "interval": 2}, "srgpo": {"size": 8},
    "t_ppo": {"segments": 2}, "treepo": {"segment": 2, "first_most": 2, "rounds": 1}, "tscac": {"policies": TINY},
    "v0_value": {"queries": 4, "bottleneck": 4, "value_steps": 4}, "vision_zero": {"players": 3, "rounds": 1},
    "zppo": {"words": 4},
}  # fmt: skip
TWO = ("FILE:first", "FILE:last*0.5")
GAMES = "jaxrl_llm.environments.games"
GAME: dict[str, Any] = {"rewards": ("environment",), "players": 2, "turns": 2}
# What of a run they need beside that: rewards of several components, teachers, games, and more samples of a prompt.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"teacher": TEACHER} for name in ("gkd", "iw_opd", "minillm")},
    **{name: {"rewards": TWO} for name in ("barfi", "c_morl", "dvao", "gdpo")},
    "a2fm_apo": {"max_new_tokens": 16},
    "baichuan_m2": {"environment": "jaxrl_llm.environments.patient:Patient", "turns": 3, "max_prompt_tokens": 1000},
    "cgpo_judges": {"rewards": ("FILE:noted", "FILE:last*0")},
    "conscientia_iterative_kto": {**GAME, "environment": f"{GAMES}:advice"},
    "fapo": {"rewards": ("FILE:first", "FILE:sound*0")},
    "gui_r1": {"rewards": ("FILE:gui_action", "FILE:gui_format")},
    "grpo_roc": {"rewards": ("FILE:first", "FILE:one_answer*0")},
    "likelihood_overopt_indicators": {"eval_size": 2},
    "lspo": {**GAME, "environment": f"{GAMES}:spoken_advice", "turns": 1},
    "sgpo": {"group_size": 8},
    "skywork_r1v2": {"group_size": 2},
    "shor_psro": {**GAME, "environment": f"{GAMES}:kuhn"},
    "trpa": {"rewards": TWO},
    "ui_r1": {"rewards": ("FILE:first", "FILE:second", "FILE:last")},
    "visual_rft": {"rewards": ("FILE:box_overlap", "FILE:box_confidence", "FILE:box_format")},
}
# What the policy's verdicts, which are noise, are read as.
READ = {
    "pairwise_rl": ("a", "b"), "spo_structured": ("yes", "no"), "urpo": ("1,2,3,4", "4,3,2,1"),
    "vision_zero": ("1", "2", "3"),
}  # fmt: skip
OF_ROWS = ("measured", "episode", "first_turn")  # what the plain methods read of a batch's entries
SAME: dict[str, str] = {
    "grpo": "it is GRPO",
    "sft": "it is the plain loss",
    **dict.fromkeys(
        ("craft_gui", "drive_pre_grpo", "inspo", "v0_value", "vade"),
        "its part is which prompts a step has, and how many samples; their loss is GRPO's",
    ),
    "jet_rl": "its part is how products are computed; their loss is GRPO's",
    "arpo_agentic": "its part is where episodes fork, and a bonus for calls of tools, which this world has not",
    "dgrpo_vital": "its part is a reward for calls of tools, which this world has not",
    "soft_grpo": "its part is that it thinks in mixtures of tokens; their loss is GRPO's",
    "prefixrl": "its part is that completions begin with given tokens; their loss is GRPO's",
    "spark_co_evolving": "its part is that judgements of its own answers are prompts too; their loss is GRPO's",
    "urpo": "its part is that the policy is the referee of some rows; their loss is GRPO's",
    "vspo_prs": "its part is that stored groups take the place of those without a signal, of which none is",
    "visual_rft": "its part is three rewards, whose sum is the run's reward too",
}


class Steps(NamedTuple):
    """Of each step: loss and norm of the gradient, the method's and the plain method's on its batch."""

    own: list[list[float]]
    plain: list[list[float]]
    changed: list[bool]  # whether the parameters did


def plain_of(name: str) -> Algorithm:
    """What a method is compared with: GRPO with its penalty, or, of given responses, their likelihood."""
    rollout = algorithms.get(name).rollout
    if rollout is not None and rollout.demands.given:
        return algorithms.get("sft", report_accuracy=False)  # which reward models cannot
    known = inspect.signature(algorithms.CATALOGUE[name]).parameters.get("kl_coefficient")
    penalty = 0.0 if known is None else known.default
    return algorithms.get("grpo", kl_coefficient=penalty or 0.0)


@contextlib.contextmanager
def compared(config: TrainConfig, plain: Algorithm) -> Iterator[Steps]:
    """Context manager: each update of runs inside it is also made by the plain method, from the same state."""
    inner, steps, first = training_step.learn_batch, Steps([], [], []), list[Any]()
    optimizer = make_optimizer(config.optimizer, config.gradient_steps)

    def figures(found: LearnedBatch) -> list[float]:
        return [float(found.metrics[name]) for name in ("loss", "grad_norm")]

    def learn_batch(learner: Learner, state: TrainState, memory: Any, batch: Any, seed: Any, *more: Any) -> Any:
        before = jax.tree.map(np.array, state)  # the update donates it
        start = without_critic(before)
        first.append(start.params)
        found = inner(learner, state, memory, batch, seed, *more)
        steps.own.append(figures(found))
        pairs = zip(jax.tree.leaves(before.params), jax.tree.leaves(found.state.params), strict=True)
        steps.changed.append(any(np.any(one != np.asarray(other)) for one, other in pairs))
        fresh = init_state(arrays(start.params), optimizer)
        forms: list[Any] = [jax.tree.structure(one) for one in (start, fresh)]
        by_plain = learner._replace(
            policy=dataclasses.replace(learner.policy, critic=None, hook=None), optimizer=optimizer,
            algorithm=dataclasses.replace(plain, rollout=learner.algorithm.rollout), reference=arrays(first[0]),
            policies={}, teacher=None,
        )  # fmt: skip
        info = {key: x for key, x in (batch.info or {}).items() if key in OF_ROWS}
        lean = batch.replace(feedback=None, rewards=None, info=info or None)  # so that methods share its programs
        start = arrays(start) if forms[0] == forms[1] else fresh  # outer loops have moments of their own
        steps.plain.append(figures(inner(by_plain, start, plain.transform.init(), lean, seed)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "learn_batch", learn_batch)
        yield steps


def arrays(tree: Any) -> Any:
    """A copy on the device."""
    return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), tree)


def without_critic(state: TrainState) -> TrainState:
    """The state of the policy alone, with its moments."""

    def of_policy(x: Any) -> Any:
        return {name: part for name, part in x.items() if name != "critic"} if isinstance(x, dict) else x

    return jax.tree.map(of_policy, state, is_leaf=lambda x: isinstance(x, dict))


class Models(NamedTuple):
    """Folders of tiny models."""

    causal: Path
    diffusion: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A tiny Llama with room for second prompts and a chat template, and a tiny LLaDA."""
    return made_models(tmp_path_factory.mktemp("models"))


def made_models(folder: Path) -> Models:
    causal = with_long_context(folder)
    written = json.loads((causal / "tokenizer_config.json").read_text())
    (causal / "tokenizer_config.json").write_text(json.dumps({**written, "chat_template": turn_runs.TEMPLATE}))
    return Models(causal, tiny_llada(folder / "llada"))


def given_row(name: str, i: int) -> dict[str, Any]:
    """A row of responses, in the form that the method takes."""
    prompt, labels = f"number {i:02d}:", [(i + k) % 2 for k in range(3)]
    if name in ("lipo", "process_reward_model"):
        return {"prompt": prompt, "completions": [f"{k} {'yes' if x else 'no'}" for k, x in enumerate(labels)],
                "labels": [bool(x) if name != "lipo" else x + k / 9 for k, x in enumerate(labels)]}  # fmt: skip
    if name in ("kto", "sft", "masked_sft"):
        return {"prompt": prompt, "completion": f" {i} {i % 3}", "label": bool(i % 2)}
    return {"prompt": prompt, "chosen": f" {i} {i % 3} seven", "rejected": " none" * (1 + i % 2)}


def config_of(folder: Path, name: str, models: Models) -> TrainConfig:
    """Two steps, of groups of four where the method does not say otherwise."""
    (folder / "own.py").write_text(REWARDS)
    given: dict[str, Any] = {
        "steps": 2, "eval_size": 0, "checkpoint_every": 0, "log_completions_every": 0, "top_p": 1.0,
        "rollout_time_limit": 600.0, "reward_time_limit": 300.0, "model": str(models.causal),
        "hyperparameters": OPTIONS.get(name, {}), **SETTINGS.get(name, {}),
    }  # fmt: skip
    if "rewards" in given:
        given["rewards"] = tuple(one.replace("FILE", str(folder / "own.py")) for one in given["rewards"])
    if name in turn_runs.METHODS and name != "polychromic":
        return turn_runs.config_of(folder, name, **given)
    rollout = algorithms.get(name).rollout
    responses = rollout is not None and rollout.demands.given
    rows = [{**row, "prompt": f"number {i:02d}:", "anchor": "1 2"} for i, row in enumerate(2 * by_name.rows())]
    if responses:
        rows = [given_row(name, i) for i in range(8)]
    if name == "urpo":  # which referees rows without an answer
        rows[1::2] = [{**row, "answer": ""} for row in rows[1::2]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {one.name: one for one in run_settings_of(algorithms.CATALOGUE[name])}
    usual: dict[str, Any] = {
        "rewards": (f"{folder / 'own.py'}:noted",), "prompts": str(folder / "rows.jsonl"),
        "max_new_tokens": 24 if responses else 8,
        "minibatches": 1 if "epochs" in settings else 2, "stop": tuple(string.ascii_lowercase), **given,
    }  # fmt: skip
    if algorithms.families()[name] == "diffusion":
        usual |= {"model": str(models.diffusion), "stop": ()}
    config = runs.small_config(folder, algorithm=name, **usual)
    known = catalogue_hyperparameters(config)
    own: dict[str, Any] = {
        field: getattr(TrainConfig(), field) for field, one in settings.items() if not one.fits(config, known)
    }
    return fitted(dataclasses.replace(config, **own))


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Context manager: what a policy that writes noise says as a judge, and as a player of games, can be read."""
    said = READ.get(name, ("",))
    with pytest.MonkeyPatch.context() as patch:
        for module in (questions, urpo, vision_zero) if name in READ else ():
            patch.setattr(module, "stated", lambda text: said[sum(map(ord, text)) % len(said)])
        for module in (games, lspo):
            patch.setattr(module, "action_in", lambda text, actions: sum(map(ord, text)) % len(actions))
        for asked in ("CLUE", "VOTE"):  # in fewer words
            patch.setattr(vision_zero, asked, "{player} of {players}: {scene} {clues}")
        yield


@pytest.mark.parametrize("name", algorithms.names())
def test_two_steps_by_name(name: str, tmp_path: Path, models: Models) -> None:
    """All figures are finite, there is a signal, and loss or gradient are not those of the plain method."""
    config = config_of(tmp_path, name, models)
    with readable(name), by_name.light(), compared(config, plain_of(name)) as steps:
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2
    assert len(steps.own) in (2, 4)  # a swarm of two has two updates a step
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line.get("rollout/failed_groups", 0) == 0 for line in lines)
    assert any(line["signal"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert any(steps.changed)
    same = np.allclose(steps.own, steps.plain, rtol=1e-3, atol=1e-6)
    assert same == (name in SAME), SAME.get(name, "its own part does not show")


def test_the_tables_are_of_methods() -> None:
    assert {*OPTIONS, *SETTINGS, *READ, *SAME} <= set(algorithms.names())
