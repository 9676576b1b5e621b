"""Samplers in programs of their own: whose weights drew each token, repetition, programs that are killed, devices."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import test_agent_runs
import test_asynchronous_runs as in_thread
import tiny_runs as runs
from compiling import with_devices

from jaxrl_llm.algorithms import dr_grpo
from jaxrl_llm.cli.program import main
from jaxrl_llm.distributed.peers import KEY, Peer, PeerListener, dial
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models import load_policy, lora
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.training import asynchrony, loop, running
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.run_model import WEIGHTS
from jaxrl_llm.utils.errors import InputError

SECRET = "of these tests"
PLAYS = """
import json
from urllib.request import Request, urlopen


def play(base_url, api_key, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        answer = json.load(urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=60))
        reply = answer["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    return float(len(reply) % 2)
"""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """A run whose samplers dial at a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    return in_thread.config_of(folder, **{"samplers": 2, "sampler_address": address, **changes})


def start(config: TrainConfig, folder: Path, number: int = 0, devices: int = 1) -> subprocess.Popen[bytes]:
    """A sampler, whose output is in a file."""
    env = runs.environment(XLA_FLAGS=with_devices(devices))
    command = [sys.executable, "-m", "jaxrl_llm.cli", "sampler", config.sampler_address, "--wait", "100"]
    with (folder / f"sampler{number}.log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


@contextlib.contextmanager
def sampling(config: TrainConfig, folder: Path, devices: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The samplers of a run, which end with the context."""
    found = [start(config, folder, number, devices) for number in range(config.samplers)]
    try:
        yield found
    finally:
        for one in found:
            one.kill()
            one.wait()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[runs.Taken]]:
    """A run of two samplers."""
    folder, steps = tmp_path_factory.mktemp("programs"), list[runs.Taken]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, SECRET)
        config = config_of(folder)
        with sampling(config, folder), runs.watched(steps):
            runs.train(config)
    return config, steps


@pytest.mark.heavy
def test_each_token_is_of_the_learners_weights_at_its_step(finished: tuple[TrainConfig, list[runs.Taken]]) -> None:
    config, steps = finished
    in_thread.assert_bounded(config.output)
    old, policy = 0, load_policy(runs.MODEL, dtype="float32")[0]
    recompute = jax.jit(policy_outputs, static_argnums=0)
    for step, collected in enumerate(steps):
        batch = collected.scored.batch
        action, drawn = np.asarray(batch.action_mask), np.asarray(batch.policy_step)
        old += int((drawn[action] < step).sum())
        for of in np.unique(drawn[action]):
            logp = np.asarray(recompute(policy, steps[of].params, batch).logp)
            here = action & (drawn == of)
            np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[here], logp[here], rtol=0, atol=1e-4)
    assert old >= 100, "no token is stale: this test shows nothing"
    entered = [line["entered"] for line in in_thread.order_of(config.output)]
    assert all(len(turns) == 2 for turns in entered)
    assert all(sum(len(turns[number]) for turns in entered) > len(entered) // 2 for number in (0, 1))


@pytest.mark.heavy
def test_their_order_is_repeated_bit_by_bit(finished: tuple[TrainConfig, list[runs.Taken]], tmp_path: Path) -> None:
    config = config_of(tmp_path, replay_order=finished[0].output)
    with sampling(config, tmp_path):
        runs.train(config)
    assert in_thread.taken_by(config.output) == in_thread.taken_by(finished[0].output)
    runs.assert_equal_trees(*(runs.final_params(Path(run.output)) for run in (config, finished[0])))
    with pytest.raises(InputError, match="is of 2 samplers on each host: start as many"):
        runs.train(in_thread.config_of(tmp_path / "thread", replay_order=finished[0].output))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["kept caches", "adapters", "agents", "harness"])
def test_one_program_is_the_sampler_in_a_thread(kind: str, tmp_path: Path) -> None:
    """In the same order, tokens and parameters are the same bit by bit. Of adapters, these alone are sent."""
    rank = 4 * (kind == "adapters")
    kinds: dict[str, dict[str, Any]] = {"adapters": {"lora_rank": rank}, "kept caches": {"stale_cache": "keep"}}
    make, more = in_thread.config_of, kinds.get(kind, {})
    if kind in ("agents", "harness"):
        make, more = test_agent_runs.config_of, {"max_staleness": 2, "steps": 5, "eval_size": 0}
    if kind == "harness":  # which plays in the sampler's program
        pytest.importorskip("aiohttp")
        (tmp_path / "plays.py").write_text(PLAYS)
        more |= {"environment": None, "harness": f"{tmp_path / 'plays.py'}:play"}
    for name in ("thread", "program"):
        (tmp_path / name).mkdir()
    first = make(tmp_path / "thread", **more)
    runs.train(first)
    address = config_of(tmp_path).sampler_address
    more |= {"samplers": 1, "sampler_address": address, "replay_order": first.output}
    config = make(tmp_path / "program", **more)
    with sampling(config, tmp_path):
        runs.train(config)
    assert in_thread.taken_by(config.output) == in_thread.taken_by(first.output)
    found, wanted = (load_run(run.output)[2] for run in (config, first))
    runs.assert_equal_trees(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted))
    frozen, adapters = (sum(x.nbytes for x in jax.tree.leaves(part)) for part in lora.split(found))
    whole, own = (frozen, adapters) if rank else (frozen, frozen)  # the adapters' scales are with the frozen weights
    sent = [line["rollout/moved_bytes"] for line in runs.lines_of(Path(config.output) / "metrics.jsonl")]
    first, *later = (size for size in sent if size)
    assert first <= whole + 2 * own
    assert max(later) <= 2 * own, "all weights first, then those of a step, or of two"
    assert rank == 0 or own < whole / 4


@pytest.mark.heavy
def test_another_program_goes_on_for_one_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No group is lost or taken twice, and none is too old; the order until then can be repeated."""
    config, others = config_of(tmp_path), list[subprocess.Popen[bytes]]()
    inner = running.next_batch

    def next_batch(run: Any, step: int) -> Any:
        if step == 3:
            first.kill()
            others.append(start(config, tmp_path, 2))
        return inner(run, step)

    monkeypatch.setattr("jaxrl_llm.training.loop.next_batch", next_batch)
    with sampling(config, tmp_path) as (first, _):
        try:
            runs.train(config)
        finally:
            for one in others:
                one.kill()
                one.wait()
    assert others
    in_thread.assert_bounded(config.output)
    first_step, again = (line["step"] for line in in_thread.order_of(config.output) if line["began"])
    assert (first_step, again >= 3) == (0, True), "a step that needed the groups of the one that was killed"
    assert runs.lines_of(Path(config.output) / "metrics.jsonl")[-1]["rollout/pool"] == 0


@pytest.mark.heavy
def test_samplers_stay_while_the_learner_is_killed_and_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint_every=1)
    metrics = Path(config.output) / "metrics.jsonl"
    with sampling(config, tmp_path) as samplers:
        learner = runs.start("train", *runs.as_arguments(config))
        until = time.monotonic() + 200
        while len(runs.lines_of(metrics)) < 3:
            assert learner.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        learner.kill()
        learner.communicate()
        loop.resume(config.output)
        assert [one.poll() for one in samplers] == [None, None]
    in_thread.assert_taken_once(config.output)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("learner", "sampler", "more"),
    [(4, 2, {"mesh": "fsdp=2,data=2", "sampling_mesh": "tensor=2"}), (2, 4, {"mesh": "tensor=2", "lora_rank": 2})],
    ids=["sharded parameters to sharded heads", "sharded heads to rows"],
)
def test_programs_have_devices_of_their_own_mesh(
    learner: int, sampler: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """With updates too small to matter, what is drawn has the learner's log-probabilities in all steps."""
    still = {"optimizer": OptimizerConfig(learning_rate=1e-12), "steps": 4, "slots": 8}
    config = config_of(tmp_path, **more, **still)
    with sampling(config, tmp_path, sampler):
        process = runs.start("train", *runs.as_arguments(config), XLA_FLAGS=with_devices(learner))
        _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert all(line["mismatch"] < 1e-4 for line in lines)
    assert any(line["rollout/stale_tokens"] > 0 for line in lines)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing beside": ({"max_staleness": 0}, "samplers is given, but max_staleness is 0"),
    "devices too": ({"sampler_devices": 1}, "samplers is 2, whose devices are their own, and sampler_devices is 1"),
    "no port": ({"sampler_address": "here"}, "the address is 'here', but must be HOST:PORT"),
}


@pytest.mark.parametrize(("changes", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        runs.train(config_of(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_secret_or_with_python_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="other programs, which cannot have Python values of this one"):
        runs.train(config_of(tmp_path), algorithm=dataclasses.replace(dr_grpo()))
    monkeypatch.delenv(KEY)
    with pytest.raises(InputError, match=f"{KEY} is not set"):
        runs.train(config_of(tmp_path))


@pytest.mark.heavy
def test_a_sampler_with_another_model_ends_the_run(tmp_path: Path) -> None:
    """And says on both sides what differs."""
    model = tmp_path / "model"
    shutil.copytree(runs.MODEL, model)
    config = config_of(tmp_path, samplers=1, model=str(model))
    inner = asynchrony.samplers_of

    def samplers_of(config: TrainConfig, parts: Any) -> Any:
        found = parts._replace(digests={**parts.digests, WEIGHTS: "others"})
        return inner(config, found)

    with sampling(config, tmp_path) as (one,), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl_llm.training.source.samplers_of", samplers_of)
        with pytest.raises(InputError, match="a sampler differs in the model's weights: learner and samplers need"):
            runs.train(config)
        assert one.wait(60) == 2
    assert "a sampler differs in the model's weights" in (tmp_path / "sampler0.log").read_text()


def test_what_the_command_line_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = config_of(tmp_path).sampler_address
    assert main(["sampler", address, "--wait", "0"]) == 2
    assert f"no learner listens at {address}" in capsys.readouterr().err
    monkeypatch.delenv(KEY)
    assert main(["sampler", "here", "--wait", "-1"]) == 2
    said = capsys.readouterr().err
    assert [words in said for words in ("must be HOST:PORT", f"{KEY} is not set", "--wait is -1.0")] == [True] * 3
    asked = ["--topology", "cpu:1", "--max-staleness", "1", "--samplers", "1"]
    assert main(["plan", "--model", str(runs.MODEL), *asked]) == 2
    assert "plans are of one program's devices: leave out samplers" in capsys.readouterr().err


def test_peers() -> None:
    """Answers, errors, what is said unasked, an end that is noticed, and callers without the key, who wait for none."""
    listener = PeerListener(("127.0.0.1", 0), SECRET.encode())
    said, lost = list[Any](), threading.Event()
    with socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2]))):  # says nothing
        with pytest.raises(InputError, match="has another key"):
            dial(listener.address, b"another", 10)
        other = dial(listener.address, SECRET.encode(), 10)
        assert other is not None
    until = time.monotonic() + 10
    while (connection := listener.next()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    peer = Peer(connection, said.append, lost.set)
    peer.ask("add", 1, 2)
    assert other.recv() == ("add", (1, 2))
    for message in (("said", "first"), ("answer", 3), ("raised", InputError("no"))):
        other.send(message)
    assert (peer.answer(), said, peer.host) == (3, ["first"], "127.0.0.1")
    with pytest.raises(InputError, match="no"):
        peer.answer()
    other.close()
    assert lost.wait(10)
    assert peer.gone
    for _ in range(2):
        with pytest.raises(EOFError):
            peer.answer()
    peer.close()
    listener.close()
    assert dial(listener.address, SECRET.encode(), 0.1) is None
