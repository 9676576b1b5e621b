"""What methods need of the host loop: more prompts, greedy completions, a critic, feedback, further policy outputs.

One method for each need; that every method runs by name is the table of experiments/RESULTS.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from heavy import few

from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.core.needs import NEEDS, value_of
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.method_checks import check_groups
from jaxrl_llm.training.setup import set_up
from jaxrl_llm.utils.errors import InputError

# By the method's name, and after a colon what tells several of one apart.
METHODS: dict[str, dict[str, Any]] = {
    "remax": {},
    "ppo": {"kl_coefficient": 0.05},
    "safe_entropy_aware": {},
    "r2vpo": {"replay_share": 0.0},
    "dgpo_distribution_guided": {},
    "capo_curvature": {"change_limit": 0.5, "kl_limit": 0.05},
    "capo_curvature:gradient": {"model": "gradient"},
    "rover": {},
    "bupo": {"layer": 1},
    "verl_velocity_rank": {},
    "dcpo_distribution_centric": {},
    "ravl": {"heads": 3},
}


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "algorithm": name.partition(":")[0], "hyperparameters": METHODS.get(name, {}), "steps": 2, "eval_size": 0,
        "minibatches": 1, "top_p": 1.0, "checkpoint_every": 1, "max_new_tokens": 6,
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


def lines_of(config: TrainConfig) -> list[dict[str, Any]]:
    return runs.lines_of(Path(config.output) / "metrics.jsonl")


def test_every_need_is_tried() -> None:
    methods = [
        make_algorithm(TrainConfig(algorithm=name.partition(":")[0], hyperparameters=METHODS[name])) for name in METHODS
    ]
    asked = {value_of(need)[0] for method in methods for need in method.needs}
    computed = {name for name, need in NEEDS.items() if need.provider is None}
    # See test_steered_methods.py, test_moving_references.py, test_replayed_runs.py, test_hinted_runs.py,
    # test_turn_runs.py, test_preference_runs.py, test_reward_model_runs.py, test_teacher_runs.py,
    # test_evolution_runs.py and test_diffusion_runs.py.
    elsewhere = {"heated_logp", "previous_logp", "drift", "top_tokens", "top_logp", "greedy", "scores"}
    elsewhere |= {"perturbation", "elbo_terms"}
    elsewhere |= {name for name in computed if name.startswith("teacher_")}
    assert asked == computed - elsewhere - {"answer_logp", "blanked_logp", "implicit_logp"} | {"greedy_reward"}


RESTARTED = ("r2vpo", "ppo")


def assert_learned(config: TrainConfig) -> None:
    for line in lines_of(config):
        assert np.isfinite(line["loss"])
        assert line["grad_norm"] > 0
        assert line["mismatch"] < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in METHODS if name not in RESTARTED])
def test_the_loop_gives_what_is_needed(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, name)
    runs.train(config)
    assert_learned(config)


@pytest.mark.heavy
def test_feedback_and_a_critic_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """r2vpo's multiplier goes by the metrics of the last update; PPO's critic is among the parameters."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    for name in RESTARTED:
        (tmp_path / name).mkdir()
        config = config_of(tmp_path / name, name, steps=3, keep_checkpoints=3)
        runs.train(config)
        assert_learned(config)
        whole, cut = Path(config.output), tmp_path / f"{name}-cut"
        shutil.copytree(whole, cut)
        for step in ("2", "3"):
            shutil.rmtree(cut / "checkpoints" / step, ignore_errors=True)
        loop.resume(str(cut))
        assert runs.reproducible(cut / "metrics.jsonl") == runs.reproducible(whole / "metrics.jsonl")
    policy, params = load_run(str(cut))[1:3]
    assert "critic" not in params
    assert policy.config.vocab_size == params["embed"].shape[0]


@pytest.mark.heavy
def test_a_critic_of_lines_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of three tokens: in the first step the critic alone learns, and the policy from what it says after that."""

    def starts(tools: Any, episode: Any) -> list[int]:
        return list(range(3, episode.size + 1, 3))

    monkeypatch.setattr("jaxrl_llm.algorithms.credit.dapo_direct_advantage.line_starts", starts)
    settings = {"continuations": 2, "critic_alone": 1, "gap": 0.0}
    config = config_of(
        tmp_path, "dapo_direct_advantage", hyperparameters=settings, steps=3, epochs=2, reward="even",
        keep_checkpoints=3, max_new_tokens=12,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = lines_of(config)
    for one, line in zip(taken, lines, strict=True):
        ends, actions = np.asarray((one.scored.batch.info or {})["line_tokens"]) == 0, one.scored.batch.action_mask
        assert (np.asarray(actions).sum(axis=1)[~ends] == 4).all(), "three tokens, and one for the critic"
        assert (np.asarray(actions).sum(axis=1)[ends] <= 3).all()
        assert not ends.all()
        assert line["value/loss"] > 0
    assert [line["log_ratio/sum"] == 0 for line in lines] == [True, False, False]
    whole, cut = Path(config.output), tmp_path / "cut"
    shutil.copytree(whole, cut)
    for step in ("2", "3"):
        shutil.rmtree(cut / "checkpoints" / step, ignore_errors=True)
    loop.resume(str(cut))
    assert runs.reproducible(cut / "metrics.jsonl") == runs.reproducible(whole / "metrics.jsonl")


@pytest.mark.heavy
def test_a_critic_may_learn_first_and_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, "ppo", steps=1, critic_steps=1, critic="shared")
    parts, before, _ = set_up(config)
    before = jax.tree.map(np.array, before.params)
    assert parts.policy.critic.kind == "shared"
    runs.train(config)
    after = Checkpoints(Path(config.output) / "checkpoints").latest(before)
    assert after is not None
    for name, was in before.items():
        same = all(
            np.array_equal(a, b) for a, b in zip(jax.tree.leaves(was), jax.tree.leaves(after.params[name]), strict=True)
        )
        assert same == (name != "critic"), name


@pytest.mark.heavy
def test_uninformative_groups_are_replaced(tmp_path: Path) -> None:
    """`starts_even` is 0 or 1 and often alike in a group of four; more prompts are drawn until four groups differ."""
    config = config_of(tmp_path, "dapo", reward="starts_even", steps=3)
    runs.train(config)
    lines = lines_of(config)
    assert max(line["rounds"] for line in lines) > 1
    for line in lines:
        rows = [row for row in runs.lines_of(Path(config.output) / "completions.jsonl") if row["step"] == line["step"]]
        rewards = np.asarray([row["reward"] for row in rows]).reshape(4, 4)
        informative = (np.ptp(rewards, axis=1) > 0).sum()
        assert informative == 4 or line["rounds"] == 10
        assert line.get("trained/uniform", line["groups/uniform"]) == 1 - informative / 4


def test_what_cannot_be_had_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    deep = config_of(tmp_path, "bupo", hyperparameters={"layer": 99})
    with pytest.raises(InputError, match="layer is 99, but the model has layers 1 to"):
        runs.train(deep)
    assert not Path(deep.output).exists()


@pytest.mark.heavy
@pytest.mark.parametrize("name", few(["grpo", "rloo", "passk_grpo", "gdpo", "drpo_decoupled_reward"], ["grpo"]))
def test_a_method_that_compares_samples_wants_more_than_one(name: str, tmp_path: Path) -> None:
    lone = config_of(tmp_path, name, group_size=1)
    with pytest.raises(InputError, match=f"{name} compares .* group_size is 1, but must be at least 2"):
        runs.train(lone)
    assert not Path(lone.output).exists()


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", few(["reinforce", "reinforce_plus_plus", "ppo", "spo_single_stream", "remax"], ["ppo"])
)
def test_others_do_not(name: str, tmp_path: Path) -> None:
    without = {"without": ",".join(missing(name))} if missing(name) else {}
    config = config_of(tmp_path, name, group_size=1, hyperparameters=METHODS.get(name, {}) | without)
    check_groups(config, make_algorithm(config))
