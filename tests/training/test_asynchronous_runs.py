"""Runs that sample beside their updates: whose weights drew each token, the bound, repetition, kills, devices."""

from __future__ import annotations

import dataclasses
import json
import os
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import test_agent_runs
import tiny_runs as runs
from compiling import with_devices

from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models import load_policy, lora
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.rollouts.asynchronous import sampler
from jaxrl_llm.rollouts.asynchronous.rule import FILE, StepOrder, of_host, read_order, turns_of, write_order
from jaxrl_llm.rollouts.runtime import engines
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training import loop, running
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import Preempted

STEPS, GROUPS = 8, 4
# Some 20 of the 257 tokens end a completion: two in five reach the limit.
LONG_TAIL: dict[str, Any] = {
    "max_new_tokens": 12, "stop": tuple(string.ascii_letters[:20]), "slots": 6, "minibatches": 1, "steps": STEPS,
    "eval_size": 0, "keep_checkpoints": 99, "optimizer": OptimizerConfig(learning_rate=3e-4),
}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    return runs.small_config(folder, **{**LONG_TAIL, "max_staleness": 2, **changes})


def order_of(run: Path | str) -> list[dict[str, Any]]:
    return runs.lines_of(Path(run) / FILE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[runs.Taken]]:
    config, steps = config_of(tmp_path_factory.mktemp("asynchronous")), list[runs.Taken]()
    with runs.watched(steps):
        runs.train(config)
    return config, steps


def test_log_probabilities_are_those_of_the_weights_of_each_token(
    finished: tuple[TrainConfig, list[runs.Taken]],
) -> None:
    policy, _, _ = load_policy(runs.MODEL, dtype="float32")
    recompute = jax.jit(policy_outputs, static_argnums=0)
    old = 0
    for step, collected in enumerate(finished[1]):
        batch = collected.scored.batch
        action, drawn = np.asarray(batch.action_mask), np.asarray(batch.policy_step)
        old += int((drawn[action] < step).sum())
        for of in np.unique(drawn[action]):
            logp = np.asarray(recompute(policy, finished[1][of].params, batch).logp)
            here = action & (drawn == of)
            np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[here], logp[here], rtol=0, atol=1e-4)
    assert old >= 100, "no token is stale: this test shows nothing"


def test_an_interpolated_policy_stands_for_that_before_the_update(
    finished: tuple[TrainConfig, list[runs.Taken]], tmp_path: Path
) -> None:
    """With the staleness of each token, and without a forward pass of its own; a synchronous run has none."""
    config, taken = config_of(tmp_path, stale_correction="interpolate"), list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    stale = [(step - np.asarray(one.scored.batch.policy_step))[np.asarray(one.scored.batch.action_mask)]
             for step, one in enumerate(taken)]  # fmt: skip
    assert max(map(np.max, stale)) >= 1
    weights = [line["proximal/weight"] for line in runs.lines_of(Path(config.output) / "metrics.jsonl")]
    for ages, weight in zip(stale, weights, strict=True):
        assert (weight == 1) == (not ages.any()), "tokens of the current weights have a weight of 1"
    assert "proximal/weight" not in runs.lines_of(Path(finished[0].output) / "metrics.jsonl")[-1]


def assert_bounded(run: Path | str, bound: int = 2, steps: int = STEPS) -> None:
    """Each step took as many groups as it wants, none twice, none too old, and none was dropped."""
    every = assert_taken_once(run, bound, steps)
    # What was admitted was taken, and each step had groups of the next ones in flight: of one, and of `bound` at most.
    first = [sum(key[1] == step for key in every) for step in range(steps)]
    flight = [sum(first[: step + 1]) - GROUPS * step for step in range(steps)]
    assert flight[0] == 2 * GROUPS
    for step, groups in enumerate(flight):
        assert GROUPS * min(2, steps - step) <= groups <= GROUPS * min(bound + 1, steps - step)


def assert_taken_once(run: Path | str, bound: int = 2, steps: int = STEPS) -> list[tuple[int, ...]]:
    """The keys of all groups: each step took as many as it wants, none twice and none too old, and none is left."""
    taken = taken_by(run)
    assert [len(groups) for groups in taken] == [GROUPS] * steps
    return assert_in_time(run, taken, bound)


def taken_by(run: Path | str) -> list[list[tuple[int, ...]]]:
    """The keys of the groups that each step took, of all hosts."""
    return [[tuple(key) for keys in line["groups"] for key in keys] for line in order_of(run)]


def assert_in_time(run: Path | str, taken: list[list[tuple[int, ...]]], bound: int) -> list[tuple[int, ...]]:
    """The keys of all groups: none was taken twice, none too old, and none is left."""
    every = [key for groups in taken for key in groups]
    assert len(set(every)) == len(every)
    assert all(step - first <= bound for step, groups in enumerate(taken) for _, first, _ in groups)
    for line in runs.lines_of(Path(run) / "metrics.jsonl"):
        assert line["rollout/oldest"] <= bound
        assert sum(line[f"staleness/{age}"] for age in range(bound + 1)) == pytest.approx(1.0)
    assert line["rollout/pool"] == 0
    return every


def test_staleness_is_bounded_and_no_group_is_lost(finished: tuple[TrainConfig, list[runs.Taken]]) -> None:
    assert_bounded(finished[0].output)
    admitted = [sum(line["admitted"]) for line in order_of(finished[0].output)]
    keys = [key for groups in taken_by(finished[0].output) for key in groups]
    assert admitted == [sum(first == step for _, first, _ in keys) for step in range(STEPS)]
    lines = runs.lines_of(Path(finished[0].output) / "metrics.jsonl")
    assert lines[0]["mismatch"] < 1e-4
    assert all(line["mismatch"] > 1e-2 for line in lines[1:]), "to what tokens were sampled with, though ratios are not"


def test_the_order_of_a_run_can_be_repeated_bit_by_bit(
    finished: tuple[TrainConfig, list[runs.Taken]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rewards that take time, which would change the order."""
    monkeypatch.setenv("REWARD_SECONDS", "0.02")
    first, again = Path(finished[0].output), config_of(tmp_path, replay_order=finished[0].output)
    runs.train(again)
    assert [line["groups"] for line in order_of(again.output)] == [line["groups"] for line in order_of(first)]
    runs.assert_equal_trees(runs.final_params(Path(again.output)), runs.final_params(first))
    timed = ("seconds/", "sampler/", "rollout/", "goodput")
    kept = [
        [
            {k: v for k, v in line.items() if not k.startswith(timed)}
            for line in runs.reproducible(run / "metrics.jsonl")
        ]
        for run in (first, Path(again.output))
    ]
    assert kept[0] == kept[1]


@pytest.mark.heavy
def test_an_order_of_other_settings_is_refused(finished: tuple[TrainConfig, list[runs.Taken]], tmp_path: Path) -> None:
    """And a run that repeats one cannot be resumed, since what was in flight is not what it was."""
    with pytest.raises(InputError, match="the order to repeat is of"):
        runs.train(config_of(tmp_path / "other", replay_order=finished[0].output, max_new_tokens=3, stop=()))
    again = config_of(tmp_path / "again", replay_order=finished[0].output, checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 3, killed)
        with pytest.raises(ConnectionError):
            runs.train(again)
    with pytest.raises(InputError, match="cannot be resumed: begin it anew"):
        loop.resume(again.output)


@pytest.mark.heavy
def test_a_run_may_end_earlier_but_not_go_on_with_another_bound(
    finished: tuple[TrainConfig, list[runs.Taken]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups in flight that no step is left for stay in the checkpoint."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    config = config_of(tmp_path, checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 3, killed)
        with pytest.raises(ConnectionError):
            loop.train(config)
    for bound in (0, 1):
        with pytest.raises(InputError, match=f"max_staleness was 2, and is now {bound}"):
            loop.train(dataclasses.replace(config, max_staleness=bound), resume=True)
    loop.train(dataclasses.replace(config, steps=4), resume=True)
    assert [len(groups) for groups in taken_by(config.output)] == [GROUPS] * 4
    loop.train(config, resume=True)
    assert_taken_once(config.output)


def stopped_at(monkeypatch: pytest.MonkeyPatch, at: int, how: Callable[[], None]) -> None:
    """Let a run's update of step `at`, counted from 0, end it."""
    inner = loop.learn_from

    def learn_from(run: Any, found: Any, step: int) -> Any:
        if step == at:
            how()
        return inner(run, found, step)

    monkeypatch.setattr(loop, "learn_from", learn_from)


def killed() -> None:
    raise ConnectionError("killed")


def preempted() -> None:
    raise Preempted


@pytest.mark.parametrize("how", [killed, preempted])
def test_a_run_that_is_killed_again_and_again_loses_no_group(
    tmp_path: Path, how: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    config = config_of(tmp_path, checkpoint_every=1, keep_checkpoints=99)
    for at in (1, 2, 4, 7):
        with pytest.MonkeyPatch.context() as patch:
            stopped_at(patch, at, how)
            with pytest.raises((ConnectionError, Preempted)):
                loop.train(config) if at == 1 else loop.resume(config.output)
    loop.resume(config.output)
    assert_bounded(config.output)
    with pytest.raises(InputError, match="was resumed after step 1"):
        read_order(config.output, STEPS)


def test_a_step_that_is_left_while_it_waits_for_groups_is_saved_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts are drawn and its groups taken, but nothing was learned from them."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    config, inner = config_of(tmp_path, checkpoint_every=0), running.stop_if

    def stop_if(told: bool) -> None:
        if len(order_of(config.output)) == 3:
            raise Preempted
        inner(told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "stop_if", stop_if)
        with pytest.raises(Preempted):
            loop.train(config)
    assert len(runs.lines_of(Path(config.output) / "metrics.jsonl")) == 2
    loop.resume(config.output)
    assert_bounded(config.output)


@pytest.mark.parametrize("failures", [1, 2, 4])
def test_a_sampler_that_fails_is_started_again(
    finished: tuple[TrainConfig, list[runs.Taken]], failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with what it had drawn: groups and parameters are those of a run without failures."""
    inner, calls = Engine.step, [0]

    def step(engine: Any, chunk: int) -> Any:
        calls[0] += 1
        if calls[0] % 5 == 0 and calls[0] <= 5 * failures:
            raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost\nand more")
        return inner(engine, chunk)

    monkeypatch.setattr(Engine, "step", step)
    config = config_of(tmp_path, replay_order=finished[0].output)
    if failures > 3:
        with pytest.raises(jax.errors.JaxRuntimeError, match="device is lost"):
            runs.train(config)
        return
    with pytest.MonkeyPatch.context() as patch:
        told = list[Any]()
        patch.setattr(sampler.logger, "warning", lambda *said: told.append(said))
        runs.train(config)
    assert [said[1] for said in told] == ["INTERNAL: the device is lost"] * failures
    assert taken_by(config.output) == taken_by(finished[0].output)
    found, wanted = (runs.final_params(Path(run.output)) for run in (config, finished[0]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), found, wanted)


def test_groups_without_a_signal_are_replaced_beside_updates(tmp_path: Path) -> None:
    """DAPO: what a step lacks comes in with its weights, and it takes others that are complete; repeated bit by bit."""
    more = {"algorithm": "dapo", "hyperparameters": {"rounds": 3}, "group_size": 2, "max_new_tokens": 4}
    (tmp_path / "again").mkdir()
    config = config_of(tmp_path, **more)
    runs.train(config)
    taken, lines = taken_by(config.output), runs.lines_of(Path(config.output) / "metrics.jsonl")
    every = assert_in_time(config.output, taken, 2)
    replaced = [len(groups) - GROUPS for groups in taken]
    assert sum(replaced) > STEPS, "few groups are replaced: this test shows nothing"
    assert [count > 0 for count in replaced] == [line["rounds"] > 1 for line in lines]
    # What came in with the weights of a step: the groups that keep the sampler ahead, and those that it replaced.
    first = [sum(key[1] == step for key in every) for step in range(STEPS)]
    admitted = [sum(line["admitted"]) for line in order_of(config.output)]
    assert first == [came + lost for came, lost in zip(admitted, replaced, strict=True)]
    assert sum(admitted) == GROUPS * STEPS
    again = config_of(tmp_path / "again", **more, replay_order=config.output)
    runs.train(again)
    assert taken_by(again.output) == taken
    runs.assert_equal_trees(runs.final_params(Path(again.output)), runs.final_params(Path(config.output)))


@pytest.mark.heavy
@pytest.mark.parametrize("speculative_tokens", [0, 2])
def test_caches_that_are_kept(speculative_tokens: int, tmp_path: Path) -> None:
    """Nothing but prompts is computed, and the order can be repeated bit by bit."""
    found = list[Stats]()
    (tmp_path / "again").mkdir()
    more: dict[str, Any] = {"stale_cache": "keep", "speculative_tokens": speculative_tokens}
    config = config_of(tmp_path, **more)
    with pytest.MonkeyPatch.context() as patch:
        make = engines.renewed
        patch.setattr(engines, "renewed", lambda *given: found.append(given[-1]) or make(*given))
        runs.train(config)
    assert_bounded(config.output)
    assert len(found) >= STEPS - 1
    assert sum(one.tokens for one in found) > 0
    assert speculative_tokens or all(one.continued_tokens == 0 for one in found)
    again = config_of(tmp_path / "again", **more, replay_order=config.output)
    runs.train(again)
    assert taken_by(again.output) == taken_by(config.output)
    runs.assert_equal_trees(runs.final_params(Path(again.output)), runs.final_params(Path(config.output)))


@pytest.mark.heavy
def test_a_run_that_replaces_groups_is_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    more: dict[str, Any] = {"algorithm": "dapo", "hyperparameters": {"rounds": 3}, "group_size": 2}
    config = config_of(tmp_path, **more, max_new_tokens=4, checkpoint_every=1)
    for at in range(1, STEPS):
        with pytest.MonkeyPatch.context() as patch:
            stopped_at(patch, at, preempted if at % 2 else killed)
            with pytest.raises((ConnectionError, Preempted)):
                loop.train(config) if at == 1 else loop.resume(config.output)
    loop.resume(config.output)
    taken = taken_by(config.output)
    assert_in_time(config.output, taken, 2)
    assert all(len(groups) >= GROUPS for groups in taken)


@pytest.mark.heavy
def test_twenty_steps_are_repeated_and_stand_ten_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    long: dict[str, Any] = {"steps": 20, "max_staleness": 3, "checkpoint_every": 2}
    first = config_of(tmp_path / "first", **long)
    runs.train(first)
    assert_bounded(first.output, bound=3, steps=20)
    again = config_of(tmp_path / "again", **long, replay_order=first.output)
    runs.train(again)
    runs.assert_equal_trees(runs.final_params(Path(again.output)), runs.final_params(Path(first.output)))
    config = config_of(tmp_path / "killed", **long)
    for number, at in enumerate((1, 2, 3, 5, 8, 10, 11, 15, 17, 19)):  # some of them before anything new was saved
        with pytest.MonkeyPatch.context() as patch:
            stopped_at(patch, at, preempted if number % 3 == 2 else killed)
            with pytest.raises((ConnectionError, Preempted)):
                loop.train(config) if number == 0 else loop.train(config, resume=True)
    loop.resume(config.output)
    assert_taken_once(config.output, bound=3, steps=20)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", test_agent_runs.KINDS)
def test_conversations_are_sampled_beside_updates(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their order is repeated bit by bit, though environments take longer."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    kinds: dict[str, Any] = test_agent_runs.KINDS
    more = kinds[kind] | {"max_staleness": 2, "steps": 5, "eval_size": 0, "checkpoint_every": 5}
    more["stale_cache"] = "keep" if kind == "agents" else "recompute"
    (tmp_path / "again").mkdir()
    config = test_agent_runs.config_of(tmp_path, **more)
    runs.train(config)
    assert_bounded(config.output, steps=5)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert not any("rollout/failed_groups" in line for line in lines)
    assert all(line["rollout/oldest"] > 0 for line in lines[1:3])
    monkeypatch.setenv("WORLD_SECONDS", "0.02")
    again = test_agent_runs.config_of(tmp_path / "again", **more, replay_order=config.output)
    runs.train(again)
    runs.assert_equal_trees(runs.final_params(Path(again.output)), runs.final_params(Path(config.output)))


DEVICES = """
import json, sys
from pathlib import Path
import tiny_runs as runs
from test_asynchronous_runs import config_of
folder, more = Path(sys.argv[1]), json.loads(sys.argv[2])
runs.train(config_of(folder, **more))
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("own", "rank"), [(4, 0), (0, 0), (4, 2)])
def test_sampler_and_learner_on_devices_of_their_own_or_by_turns(tmp_path: Path, own: int, rank: int) -> None:
    def run(name: str, **more: Any) -> Path:
        more |= {"slots": 8, "sampler_devices": own, "eval_size": 4, "eval_every": 3, "lora_rank": rank}
        done = subprocess.run(
            [sys.executable, "-c", DEVICES, str(tmp_path / name), json.dumps(more)],
            env={**os.environ, "XLA_FLAGS": with_devices(8), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return tmp_path / name / "run"

    first = run("first")
    assert_bounded(first)
    again = run("again", replay_order=str(first))
    params = load_run(str(first))[2]
    runs.assert_equal_trees(load_run(str(again))[2], params)
    if own:  # in float32, each of the 4 devices has all weights of each of the steps that came in, or all adapters
        weights, adapters = (sum(x.size * 4 for x in jax.tree.leaves(some)) for some in lora.split(params))
        moved = sum(line["rollout/moved_bytes"] for line in runs.lines_of(first / "metrics.jsonl"))
        assert 0 < moved <= 4 * (weights + STEPS * adapters if rank else STEPS * weights)
        assert rank or moved % weights == 0


BAD = {
    "a bound below 0": ({"max_staleness": -1}, "max_staleness is -1, but must be at least 0"),
    "devices without": ({"max_staleness": 0, "sampler_devices": 1}, "sampler_devices is given, but max_staleness is 0"),
    "cache without": ({"max_staleness": 0, "stale_cache": "keep"}, "stale_cache is given, but max_staleness is 0"),
    "order without": ({"max_staleness": 0, "replay_order": "x"}, "replay_order is given, but max_staleness is 0"),
    "no learner": ({"sampler_devices": 1}, "there is 1 device, one of which must learn"),
    "no order": ({"replay_order": "nowhere"}, "nowhere has no order.jsonl"),
    "oversampling": ({"oversample": 2.0}, "leaves unfinished groups to later steps itself"),
    "meetings": ({"algorithm": "xrpo"}, "max_staleness leaves some of them to later steps: leave it out"),
    "streams": ({"stream_rewards": True}, "scores groups when a step takes them"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(InputError, match=message):
        runs.train(config_of(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_a_source_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has a source of its own"):
        runs.train(config_of(tmp_path), source=lambda parts: None)


def test_order_files(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for step in (0, 1, 2):
        write_order(path, StepOrder(step, [4, 4], [[7 * step], [step]], [[], []], step == 0))
    assert of_host(read_order(tmp_path, 3), 1) == [[], [], []]
    assert turns_of(read_order(tmp_path, 3), host=1, samplers=1) == [[0, 1, 2]]
    with pytest.raises(InputError, match="is of 1 sampler on each host: start as many"):
        turns_of(read_order(tmp_path, 3), host=0, samplers=2)
    with pytest.raises(InputError, match="is of 2 hosts: start as many"):
        of_host(read_order(tmp_path, 3), 2)
    with pytest.raises(InputError, match="has the order of 3 steps, but this run has 4"):
        read_order(tmp_path, 4)
    write_order(path, StepOrder(2, [4, 4], [[0], [0]], [[], []], True))
    assert [line["step"] for line in runs.lines_of(path)] == [0, 1, 2]
    with pytest.raises(InputError, match="was resumed after step 2"):
        read_order(tmp_path, 3)
    assert len(read_order(tmp_path, 2)) == 2
    path.write_text(path.read_text() + '{"step": 3, "ente')  # a kill
    write_order(path, StepOrder(3, [4, 4], [], [], True))
    assert [line["step"] for line in runs.lines_of(path)] == [0, 1, 2, 3]
    path.write_text("{}\n")
    with pytest.raises(InputError, match="is no order of steps"):
        read_order(tmp_path, 1)
