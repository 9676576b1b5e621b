"""experiments/benchmarks/rollout.py: its figures against hand-made ones, its jobs on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from benchmark_modules import CONFIG, ROOT, loaded
from compiling import optimised
from conftest import quick_compiles

from jaxrl_llm.models import Policy, init_params
from jaxrl_llm.sampling.kv_cache import empty
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights

pytestmark = pytest.mark.heavy

NAMES = ("rollout", "rollout_tables", "rollout_worker", "rollout_ours", "rollout_tail", "rollout_peers")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The benchmark's modules by name, as they are when it is started as a script."""
    with loaded(NAMES, "rollout_") as modules:
        yield modules


@pytest.fixture(scope="module")
def ours(bench: Any) -> Iterator[Any]:
    """A tiny model, whose programs are compiled with few optimisations."""
    with quick_compiles():
        yield bench.ours.Ours(Policy(CONFIG), init_params(jax.random.key(0), CONFIG), jnp.dtype("float32"))


def test_limits_have_the_tail_that_was_asked_for(bench: Any) -> None:
    limits = bench.tail.tail_limits(128, 24, 16, seed=0)
    assert max(limits) == 24 * 16
    assert min(limits) == round(24 / 16)  # the distribution of the logarithm is symmetric
    ordered = sorted(limits)
    assert ordered[63] <= 24 <= ordered[64]
    assert bench.tail.tail_sigma(128, 16) == pytest.approx(1.0424, abs=1e-4)  # ln 16 / 2.6601, the normal 127.5/128
    other = bench.tail.tail_limits(128, 24, 16, seed=1)
    assert sorted(other) == ordered
    assert other != limits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_needed_bytes_are_those_of_arrays_that_hold_no_more(bench: Any, ours: Any, dtype: str) -> None:
    prompt, new, batch, group = 5, 9, 6, 3
    needed = bench.ours.needed_bytes(
        ours._replace(cache_dtype=jnp.dtype(dtype)), batch=batch, prompt=prompt, new=new, group=group
    )
    # V x D for the unembedding; of the embedding only a few rows are read.
    assert needed["weights"] == 4 * sum(x.size for name, x in flat(ours.params) if name != "embed")
    steps = []
    for own in range(1, new):
        total = 0
        for layer, window in enumerate((6, 10**6)):
            kept = min(own, window)
            seen = max(min(prompt, window - own), 0)
            for rows, tokens in ((batch, kept), (batch // group, seen)):
                store = empty(CONFIG, rows, tokens, dtype)[layer]
                total += sum(x.nbytes for x in store if x is not None)
        steps.append(total)
    assert needed["cache"] == pytest.approx(sum(steps) / len(steps))


def flat(params: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(path[0].key, x) for path, x in leaves]


def test_static_case(bench: Any, ours: Any) -> None:
    case = {"batch": 4, "prompt": 5, "new": 7, "group": 2}
    first = bench.ours.static(ours, **case, seed=0)
    again = bench.ours.static(ours, **case, seed=1)
    assert (first["tokens"], first["steps_after"]) == (28, 5)  # 6 steps, one of which the first look waits for
    assert again["compiles"] == 0
    assert 0 < again["first_token"] < again["seconds"]


TAIL = {"slots": 3, "median": 4, "longest": 3, "prompt": 5, "group": 1, "seed": 0}


def test_long_tail_counts(bench: Any, ours: Any) -> None:
    limits = bench.tail.tail_limits(9, 4, 3, seed=0)
    static = bench.tail.long_tail(*ours, how="static", count=9, **TAIL)
    # A first token comes out of the prompt, every other one takes a step of the batch that it is in.
    steps = sum(max(limits[start : start + 3]) - 1 for start in range(0, 9, 3))
    assert static["steps"] == steps
    assert static["occupancy"] == pytest.approx((sum(limits) - 9) / (3 * steps))
    going_on = bench.tail.long_tail(*ours, how="continuous", count=9, **TAIL)
    assert going_on["tokens"] == static["tokens"] == sum(limits)
    assert going_on["steps"] < steps
    assert going_on["occupancy"] > static["occupancy"]
    assert going_on["busy_occupancy"] >= going_on["occupancy"]


def test_partial_rounds(bench: Any, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left unfinished goes on to the same tokens as if nothing had stopped it, and comes once."""
    came = []

    def recorded(policy: Any, weights: Any, requests: Any, *arguments: Any, **settings: Any) -> Any:
        for completion in stream(policy, weights, requests, *arguments, **settings):
            if not completion.unfinished:
                came.append((requests[completion.index], completion.tokens))
            yield completion

    monkeypatch.setattr(bench.tail, "stream", recorded)
    case = TAIL | {"rounds": 3, "wanted": 6, "asked": 10}
    wait = bench.tail.partial(*ours, how="wait", **case)
    assert wait["finished"] == 18
    assert wait["tokens"] == wait["drawn"] == 3 * sum(bench.tail.tail_limits(6, 4, 3, seed=0))
    assert (wait["unfinished"], wait["stale_share"]) == (0, 0.0)
    came.clear()
    enough = bench.tail.partial(*ours, how="enough", **case)
    assert enough["finished"] == len(came) >= 18
    assert enough["finished"] + enough["unfinished"] == 18 + 4
    assert enough["tail_steps"] < wait["tail_steps"]
    assert 0 < enough["stale_share"] < 1
    names = [request.prompt_id for request, _ in came]
    assert len(set(names)) == len(names)
    fresh = [request.__class__(request.prompt, request.limit, request.prompt_id, request.sample) for request, _ in came]
    whole = stream(
        ours.policy, take_weights(ours.policy, ours.params), fresh, bench.tail.endless(0), slots=3, stats=Stats()
    )
    for completion in whole:
        assert completion.tokens.token.tolist() == came[completion.index][1].token.tolist()


@optimised
def test_shared_prompts_by_xla(bench: Any, ours: Any) -> None:
    figures = bench.ours.shared(ours, rows=8, groups=2, prompt=40, new=8)
    shared, unshared = figures["shared"], figures["unshared"]
    # Two layers, keys and values of two heads of 8 numbers of four bytes; one layer keeps the last six tokens only.
    assert shared["cache_bytes"] == 2 * (6 + 40) * 2 * 2 * 8 * 4
    assert unshared["cache_bytes"] == 4 * shared["cache_bytes"]
    more = unshared["cache_bytes"] - shared["cache_bytes"]
    assert more <= unshared["argument_bytes"] - shared["argument_bytes"] < 1.5 * more
    # Each prompt's keys and values are read once a step, and the weights too.
    assert unshared["step_bytes"] - shared["step_bytes"] == pytest.approx(more, rel=0.2)
    weights = bench.ours.size_of({name: x for name, x in ours.params.items() if name != "embed"})
    assert shared["step_bytes"] > weights + shared["cache_bytes"]


def test_bandwidth_is_a_number_of_bytes(bench: Any) -> None:
    assert bench.ours.bandwidth(size=1 << 22)["bytes_per_second"] > 1e6


FAKE = """
import json, sys
tokens, log = float(sys.argv[1]), sys.argv[2]
for line in sys.stdin:
    asked = json.loads(line)
    if asked["task"] == "static":
        with open(log, "a") as file:
            file.write(f"{tokens:.0f}:{asked['seed']} ")
        print(json.dumps({
            "tokens": 100, "seconds": 100 / (tokens * (1 + asked["seed"])), "first_token": 0.0, "steps_after": 10,
            "compiles": 0, "peak_bytes": 5_000_000,
        }), flush=True)
    elif asked["task"] == "load":
        print(json.dumps({"version": f"fake {tokens:.0f}", "platform": sys.argv[3]}), flush=True)
    else:
        print(json.dumps({"weights": 300, "cache": 200.0}), flush=True)
"""


def fakes(bench: Any, log: Path, platform: str = "cpu") -> list[Any]:
    def opener(name: str, tokens: int) -> Any:
        command = [sys.executable, "-S", "-c", FAKE, str(tokens), str(log), platform]
        return lambda: bench.rollout.Column(name, command)

    return [opener(bench.tables.OURS, 20), opener("other", 10)]


def test_columns_take_turns_and_ratios_are_of_neighbours(bench: Any, tmp_path: Path) -> None:
    case = {"batch": 4, "prompt": 8, "new": 25, "group": 2}
    result = bench.rollout.static_case(fakes(bench, tmp_path / "log"), case, 3)
    assert (tmp_path / "log").read_text() == "20:0 10:0 20:1 10:1 20:2 10:2 20:3 10:3 "
    mine, other = ([cell.strip() for cell in row.split("|")] for row in bench.tables.static_rows(result, 1e4))
    # Repeats run at 40, 60 and 80 tokens a second; the first one is not counted.
    assert mine[1:5] == ["4 x (8 + 25)", "2", "fake 20", "60.0 (80.0)"]
    assert other[4] == "30.0 (40.0)"
    # 100 tokens in 5/3 s, ten steps: 166.7 ms each, in which 500 bytes are 30 % of what 10,000 bytes a second give.
    assert mine[6:8] == ["166.7", "30%"]
    assert mine[8] == "5"
    assert (mine[11], other[11]) == ("", "2.00 (2.00 to 2.00)")


def test_peers_are_not_compared_with_an_accelerator(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="JAX_PLATFORMS=cpu"):
        bench.rollout.static_case(fakes(bench, tmp_path / "log", "gpu"), {"batch": 1}, 1)


def test_a_column_that_fails_says_why(bench: Any) -> None:
    command = [sys.executable, "-S", "-c", "import package_that_is_missing"]
    said = pytest.raises(SystemExit, match=r"the column other ended at 'load': .*package_that_is_missing")
    with bench.rollout.Column("other", command) as column, said:
        column.ask("load")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tunix-python", "python"], "Hugging Face folder"),
        (["--batch", "6", "--group", "4"], "group divide batch"),
        (["--repeats", "0"], "at least 1"),
        (["--asked", "5"], "at least --requests"),
    ],
)
def test_refused_options(bench: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        bench.rollout.parse(arguments)
    assert message in capsys.readouterr().err


def test_whole_run(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }.items():
        monkeypatch.setenv(name, value)
    arguments = ["--model", str(ROOT / "tests/vectors/llama_tied"), "--batch", "2", "--prompt", "8", "--new", "4"]
    arguments += ["--repeats", "1", "--longtail", "--requests", "4", "--slots", "2", "--median", "4", "--longest", "1"]
    bench.rollout.main([*arguments, "--asked", "4", "--bandwidth", "10", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "| 2 x (8 + 4) | 1 | jaxrl_llm, JAX" in printed
    assert "continuous / static: " in printed
    written = json.loads((tmp_path / "out.json").read_text())
    answers = written["static"][0]["columns"]["jaxrl_llm"]["answers"]
    assert [answer["tokens"] for answer in answers] == [8, 8]
    assert answers[0]["compiles"] > answers[1]["compiles"] == 0
    assert set(written["long_tail"]) == {"continuous", "static"}
