"""experiments/benchmarks/update.py: its figures against hand-made ones, its work against plain formulas."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_modules import CONFIG, ROOT, loaded
from conftest import quick_compiles

from jaxrl_llm.models import Policy, init_params

pytestmark = pytest.mark.heavy

PARTS = ("update", "update_tables", "update_worker", "update_ours", "update_fused", "update_peers")
SHARED = ("rollout", "rollout_tables", "rollout_worker", "rollout_ours", "rollout_tail", "rollout_peers")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The benchmark's modules by name, as they are when it is started as a script."""
    with loaded(PARTS, "update_", SHARED) as modules:
        yield modules


@pytest.fixture(scope="module", autouse=True)
def few_optimisations() -> Iterator[None]:
    with quick_compiles():
        yield


def tiny(bench: Any, **settings: Any) -> Any:
    return bench.ours.new_learner(Policy(CONFIG), init_params(jax.random.key(0), CONFIG, scale=0.3), **settings)


@pytest.mark.parametrize("group, micro_batches, remat", [(1, 1, True), (2, 2, False)])
def test_a_step_has_the_gradient_of_the_plain_formula(bench: Any, group: int, micro_batches: int, remat: bool) -> None:
    """At the policy that sampled, GRPO's gradient is that of the mean of -A logp over tokens, then rows."""
    batch, prompt, new = 4, 5, 3
    work = bench.worker.random_work(batch, prompt, new, CONFIG.vocab_size, group)
    tokens = jnp.asarray([p + c for p, c in zip(work.prompts, work.completions, strict=True)])

    def loss(params: Any) -> jax.Array:
        logp = jax.nn.log_softmax(Policy(CONFIG).logits(params, tokens))[:, prompt - 1 : -1]
        chosen = jnp.take_along_axis(logp, tokens[:, prompt:, None], axis=2)[..., 0]
        return -jnp.mean(jnp.asarray(work.advantages) * chosen.mean(axis=1))

    gradients = jax.grad(loss)(init_params(jax.random.key(0), CONFIG, scale=0.3))
    expected = float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(gradients))))
    case = {"batch": batch, "prompt": prompt, "new": new, "group": group, "micro_batches": micro_batches}
    learner, answer = bench.ours.steps(tiny(bench, remat=remat), **case, count=2)
    first, second = answer["answers"]
    assert first["grad_norm"] == pytest.approx(expected, rel=1e-4)
    assert (first["compiles"], second["compiles"], second["finite"]) == (1, 0, 1.0)
    assert answer["tokens"] == 4 * 8
    assert int(learner.state.step) == 2
    assert 0 < second["planned"] < second["seconds"]


def test_iterations(bench: Any) -> None:
    sizes = {"prompts": 2, "samples": 2, "prompt": 5, "new": 3, "micro_batches": 2}
    learner, answer = bench.ours.iterations(tiny(bench), **sizes, count=2)
    assert answer["tokens"] == 12
    assert int(learner.state.step) == 2
    for one in answer["answers"]:
        assert 0 < one["sampled"] < one["seconds"]
        assert 1 / 3 <= one["reward"] <= 1  # distinct ids of three


@pytest.mark.parametrize("group", [1, 2])
def test_needed_operations_are_those_counted_one_by_one(bench: Any, group: int) -> None:
    batch, prompt, new = 4, 5, 3
    D, F, H, K, h, V = 16, 32, 4, 2, 8, 60
    layer = D * H * h + 2 * D * K * h + H * h * D + 3 * D * F
    expected = 0
    for row in range(batch):
        for token in range(prompt + new):
            if token < prompt and row % group:
                continue  # another row has had it
            expected += 6 * (2 * layer + (V * D if token >= prompt else 0))
            for window in (6, 10**9):
                # Forward a product with each key and one with each value, and twice that backward.
                expected += 3 * 2 * 2 * H * h * min(token + 1, window)
    sizes = {"batch": batch, "prompt": prompt, "new": new, "group": group}
    learner = SimpleNamespace(policy=Policy(CONFIG), frozen=None)
    assert bench.ours.needed_flops(learner, **sizes) == expected


def test_needed_operations_of_experts_and_of_adapters(bench: Any) -> None:
    sizes = {"batch": 1, "prompt": 1, "new": 1, "group": 1}
    whole = bench.ours.needed_flops(SimpleNamespace(policy=Policy(CONFIG), frozen=None), **sizes)
    mixture = Policy(dataclasses.replace(CONFIG, family="mixtral", num_experts=4, experts_per_token=2))
    found = bench.ours.needed_flops(SimpleNamespace(policy=mixture, frozen=None), **sizes)
    # Two layers, two tokens: a second expert, and a router.
    assert found - whole == 6 * 2 * 2 * (3 * 16 * 32 + 16 * 4)
    frozen = bench.ours.needed_flops(tiny(bench, rank=2), **sizes)
    matrices = 2 * 2 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32) + 60 * 16
    adapters = 2 * 2 * 2 * (2 * (16 + 32) + 2 * (16 + 16) + 3 * (16 + 32))
    assert frozen - whole == 6 * adapters - 2 * matrices


def test_adapters_learn_alone(bench: Any) -> None:
    learner = tiny(bench, rank=2)
    before = jax.tree.map(np.asarray, learner.params)
    case = {"batch": 2, "prompt": 3, "new": 2, "group": 1, "micro_batches": 1}
    after = bench.ours.steps(learner, **case, count=1)[0].params
    for name, x in after["layers"].items():
        same = np.array_equal(x, before["layers"][name])
        assert same == (not name.endswith("_lora_out")), name  # at first A has no gradient, for B is 0
    np.testing.assert_array_equal(after["embed"], before["embed"])


def test_memory_by_xla_is_at_least_the_state(bench: Any) -> None:
    learner = tiny(bench)
    found = bench.ours.xla_memory(learner, batch=2, prompt=3, new=2, group=1, micro_batches=1)
    state = sum(x.nbytes for x in jax.tree.leaves(learner.state))
    assert found["temporaries"] > 0
    # The new state takes the place of the old one.
    assert state + found["temporaries"] <= found["whole"] < 1.5 * state + found["temporaries"]


def test_fused_against_plain(bench: Any) -> None:
    case = {"rows": 64, "hidden": 8, "vocabulary": 4096, "blocks": [512], "dtype": "float32", "repeats": 2}
    ways = bench.fused.fused(**case)
    assert list(ways) == ["plain", "fused", "fused, blocks of 512"]
    assert ways["plain"]["temporaries"] >= 64 * 4096 * 4
    assert ways["fused, blocks of 512"]["temporaries"] < ways["plain"]["temporaries"] / 2
    for name, way in ways.items():
        assert len(way["seconds"]) == 2
        assert way["difference"] == 0 if name == "plain" else way["difference"] < 1e-5


def test_products_of_matrices_give_a_number(bench: Any) -> None:
    assert bench.ours.matrix_flops("float32", size=64)["flops_per_second"] > 1e6


def test_work_is_the_same_in_every_column(bench: Any) -> None:
    work, again = (bench.worker.random_work(6, 4, 3, 60, group) for group in (3, 3))
    assert work == again
    assert work.prompts[0] == work.prompts[2] != work.prompts[3]
    assert work.completions == bench.worker.random_work(6, 4, 3, 60).completions
    assert bench.worker.questions(4)[:2] == bench.worker.questions(2)
    assert len({len(text) for text in bench.worker.questions(50)}) == 1
    assert [bench.worker.variety(text) for text in ("", "abab", [5, 5, 5])] == [0, 0.5, pytest.approx(1 / 3)]


def test_laps_split_what_is_sampled_from_the_rest(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(bench.peers, "time", SimpleNamespace(perf_counter=lambda: now))

    class Sampler:
        def sample(self, fail: bool = False) -> str:
            nonlocal now
            now += 2
            if fail:
                raise ValueError
            return "done"

    sampler = Sampler()
    laps = bench.peers.Laps(bench.peers.Timer(sampler, "sample"))
    laps.start()
    assert sampler.sample() == "done"
    now += 5
    laps.end()
    with pytest.raises(ValueError):
        sampler.sample(fail=True)
    sampler.sample()
    laps.end()
    now += 1
    laps.end()
    found = [(lap["seconds"], lap["sampled"]) for lap in laps.answers]
    assert found == [(7, 2), (4, 4), (1, 0)]


FAKE = """
import json, sys
seconds, log, platform = float(sys.argv[1]), sys.argv[2], sys.argv[3]
for line in sys.stdin:
    asked = json.loads(line)
    with open(log, "a") as file:
        file.write(f"{seconds:g}:{asked['task']} ")
    if asked["task"] == "load":
        print(json.dumps({"platform": platform}), flush=True)
    elif asked["task"] == "needed_flops":
        print(json.dumps({"flops": 1e9}), flush=True)
    elif asked["task"] == "xla_memory":
        print(json.dumps({"temporaries": 3e6, "whole": 8e6}), flush=True)
    else:
        answers = [{"seconds": seconds * (1 + (i == 0)), "sampled": seconds / 4, "compiles": int(i == 0)}
                   for i in range(asked["count"])]
        answers[0]["grad_norm"] = 2.5
        print(json.dumps({"answers": answers, "tokens": 100, "peak_bytes": seconds * 1e7}), flush=True)
"""


def fakes(bench: Any, log: Path, platform: str = "cpu") -> list[Any]:
    def line(label: str, name: str, seconds: float) -> Any:
        command = [sys.executable, "-S", "-c", FAKE, str(seconds), str(log), platform]
        return bench.update.Line(label, name, command, {}, {})

    return [line("ours", "jaxrl_llm", 2), line("other", "trl", 5)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_processes_take_turns_and_the_table_compares_them(bench: Any, tmp_path: Path) -> None:
    options = SimpleNamespace(rounds=2, repeats=2)
    case = {"batch": 4, "prompt": 8, "new": 8}
    found = bench.update.rounds(fakes(bench, tmp_path / "log"), "steps", case, options)
    ours, other = "2:load 2:steps 2:needed_flops ", "5:load 5:steps "
    assert (tmp_path / "log").read_text() == ours + "2:xla_memory " + other + ours + other
    table = bench.tables.step_table({"case": case, "lines": found, "flops_per_second": 1e9})
    mine, theirs = cells(table[-2]), cells(table[-1])
    # 100 tokens in 2 s; 1e9 operations in 2 s are half of what 1e9 a second give.
    assert mine == [
        "ours", "50.0 (50.0)", "2.000 (2.000)", "50.0%", "20", "3, 8", "4.0, 4.0", "1, 0", "2.5", "", "",
    ]  # fmt: skip
    assert theirs[1:6] == ["20.0 (20.0)", "5.000 (5.000)", "20.0%", "50", ""]
    assert theirs[-2:] == ["2.50 (2.50 to 2.50)", "2.50"]
    case = {"prompts": 2, "samples": 2, "new": 25}
    mine, theirs = map(cells, bench.tables.iteration_table({"case": case, "lines": found})[-2:])
    assert mine[1:5] == ["2.00 (2.00)", "0.50", "1.50", "50.0"]
    assert theirs[1:4] == ["5.00 (5.00)", "1.25", "3.75"]


def test_fused_table_compares_neighbours(bench: Any) -> None:
    ways = {
        "plain": {"seconds": [0.004, 0.008], "temporaries": 40e6, "difference": 0.0},
        "fused": {"seconds": [0.002, 0.008], "temporaries": 10e6, "difference": 2e-7},
    }
    lines = bench.tables.fused_table({"rows": 1, "hidden": 2, "vocabulary": 3}, ways)
    assert cells(lines[-1]) == ["fused", "5.00 (2.00)", "10.0", "0.75 (0.50 to 1.00)", "0.250", "2.0e-07"]


def test_peers_are_not_compared_with_an_accelerator(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="JAX_PLATFORMS=cpu"):
        bench.update.rounds(fakes(bench, tmp_path / "log", "gpu"), "steps", {}, SimpleNamespace(rounds=1, repeats=1))


def test_tunables_are_set_for_every_process(bench: Any) -> None:
    model = str(ROOT / "tests/vectors/llama_tied")
    given = ["--model", model, "--trl-python", "t", "--tunix-python", "x", "--trl", "float32", "defaults"]
    options = bench.update.parse(["step", *given, "--tunables", "glibc.malloc.hugetlb=1", "--keep-activations"])
    lines = bench.update.step_lines(bench.update.Commands(options, "cache"))
    assert [line.name for line in lines] == ["jaxrl_llm"] * 4 + ["trl", "trl", "tunix"]
    assert len({line.label for line in lines}) == 7
    assert [line.case["group"] for line in lines[:4]] == [1, 1, 8, 8]
    assert all(line.command[:2] == ["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"] for line in lines)
    assert lines[4].settings == {"bf16": False, "gradient_checkpointing": False}
    assert lines[5].settings == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tunix-python", "python"], "Hugging Face folder"),
        (["--batch", "6", "--group", "4"], "--group divide --batch"),
        (["--repeats", "0"], "at least 1"),
        (["--micro-batches", "3"], "--micro-batches must divide"),
        (["--iteration-micro-batches", "5"], "--iteration-micro-batches must divide"),
        (["--peer-micro-batches", "3"], "--peer-micro-batches must divide"),
    ],
)
def test_refused_options_of_the_update(
    bench: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        bench.update.parse(["step", *arguments])
    assert message in capsys.readouterr().err


def test_whole_run_of_the_update(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}.items():
        monkeypatch.setenv(name, value)
    arguments = ["step", "--model", str(ROOT / "tests/vectors/llama_tied"), "--batch", "2", "--prompt", "8"]
    arguments += ["--new", "4", "--group", "1", "--rounds", "1", "--repeats", "1", "--peak-flops", "1"]
    bench.update.main([*arguments, "--tunables", "glibc.malloc.hugetlb=1", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "GLIBC_TUNABLES glibc.malloc.hugetlb=1" in printed
    assert "the peak is 1 TFLOP/s" in printed
    written = json.loads((tmp_path / "out.json").read_text())
    (runs,) = written["step"]["lines"].values()
    assert [answer["compiles"] for answer in runs[0]["answers"]] == [1, 0]
    assert runs[0]["peak_bytes"] > 1e7
    assert runs[0]["xla"]["temporaries"] > 0
