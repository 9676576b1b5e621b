"""Decoding with weights and caches of eight bits: bytes of a step on a TPU, time on a CPU, effect on log-probabilities.

    python experiments/benchmarks/quantised_decode.py bytes    Qwen3-8B on a chip, compiled ahead of time (libtpu)
    python experiments/benchmarks/quantised_decode.py time     SmolLM2-135M on this CPU
    python experiments/benchmarks/quantised_decode.py effect   SmolLM2-135M: trainer against sampler

Each prints a table for RESULTS.md. For `bytes` the programs of two and four layers are compiled, and those of the
others are added: layers are alike. Bytes moved are those of one turn of the loop to and from the chip's main memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "sampling"), str(Path(sys.prefix) / "aot")]

ASKED = [
    f"What is {a} {sign} {b}? Explain it in one sentence."
    for a, sign, b in ((3, "plus", 4), (19, "minus", 7), (6, "times", 7), (40, "divided by", 5))
]


def table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print a table in Markdown."""
    for row in (heads, ("---",) * len(heads), *rows):
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def of_bytes(options: argparse.Namespace) -> None:
    """A decode step of Qwen3-8B: rows in groups of 16, 1,024 + 1,024 tokens."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    from decode_bytes import measured
    from jax.experimental import topologies

    from jaxrl_llm.plan.models import config_of

    chip = topologies.get_topology_desc(platform="tpu", topology_name=options.chip).devices[0]
    model, counts = config_of(str(ROOT / "experiments" / "plan" / "qwen3-8b.json")), ("arguments", "step", "counted")
    lines = []
    for rows in (16, 64):
        wide: dict[str, float] = {}
        for weights, caches in ((None, None), ("int8", None), ("int8", "int8"), ("int8", "float8_e4m3fn")):
            two, four = (
                measured(chip, model.first(layers), rows, weights, caches, group=16, prompt=1024, new=1024)
                for layers in (2, 4)
            )
            found = {name: four[name] + (model.num_layers - 4) // 2 * (four[name] - two[name]) for name in counts}
            wide = wide or found
            names = (rows, weights or "bfloat16", caches or "bfloat16")
            lines.append((*names, *(f"{found[n] / 1e9:.2f} ({found[n] / wide[n]:.2f})" for n in counts)))
    table(("rows", "weights", "caches", "arguments, GB", "moved in a step, GB", "XLA's count, GB"), lines)


def of_time(options: argparse.Namespace) -> None:
    """Seconds of a decode step of SmolLM2-135M on this CPU, the best of some."""
    import jax

    from jaxrl_llm import load_policy, sample
    from jaxrl_llm.sampling import Stats

    rows = []
    for dtype, activations, weights in (
        ("float32", None, None), ("float32", None, "int8"), ("bfloat16", None, None), ("bfloat16", None, "int8"),
        ("bfloat16", None, "float8"), ("bfloat16", "float32", None), ("bfloat16", "float32", "int8"),
    ):  # fmt: skip
        policy, params, _ = load_policy("smollm2-135m", dtype=dtype)
        policy = dataclasses.replace(policy, activations=activations)
        each = []
        for number in range(options.repeats + 1):
            stats, seconds = Stats(), []
            for tokens in (8, 72):  # the difference is of 64 steps
                start = time.perf_counter()
                sample(
                    policy, params, ASKED, jax.random.key(number), group_size=4, max_new_tokens=tokens,
                    stop_token_ids=[], weight_dtype=weights, stats=stats, slots=16,
                )  # fmt: skip
                seconds.append(time.perf_counter() - start)
            each.append((seconds[1] - seconds[0]) / 64)
        rows.append((dtype, activations or dtype, weights or dtype, f"{1e3 * min(each[1:]):.0f}"))
    table(("dtype", "activations", "weights", "a step of 16 rows, ms"), rows)


def of_effect(options: argparse.Namespace) -> None:
    """Of 16 completions of 64 tokens: |log-probability in the trainer - in the sampler|, and the ratio's distance."""
    import jax
    import numpy as np

    from jaxrl_llm import load_policy, sample
    from jaxrl_llm.models.outputs import policy_outputs

    outputs = jax.jit(policy_outputs, static_argnums=0)
    loaded = {dtype: load_policy("smollm2-135m", dtype=dtype)[:2] for dtype in ("float32", "bfloat16")}
    rows = []
    for dtype, activations, weights, both, caches in (
        ("float32", None, None, False, None), ("float32", None, None, False, "bfloat16"),
        ("float32", None, None, False, "int8"), ("float32", None, None, False, "float8_e4m3fn"),
        ("float32", None, "int8", False, None), ("float32", None, "float8", False, None),
        ("bfloat16", None, None, False, None), ("bfloat16", None, "int8", False, None),
        ("bfloat16", None, "int8", True, None), ("bfloat16", "float32", None, False, None),
        ("bfloat16", "float32", "int8", False, None), ("bfloat16", "float32", "int8", True, None),
        ("bfloat16", "float32", "float8", True, None),
    ):  # fmt: skip
        policy, params = loaded[dtype]
        policy = dataclasses.replace(policy, activations=activations, rounding=weights if both else None)
        batch = sample(
            policy, params, ASKED, jax.random.key(0), group_size=4, max_new_tokens=64, weight_dtype=weights,
            cache_dtype=caches,
        )  # fmt: skip
        action = np.asarray(batch.action_mask)
        gap = np.asarray(outputs(policy, params, batch).logp - batch.behaviour_logp)[action]
        rows.append((
            dtype, activations or dtype, weights or dtype, weights if both else dtype,
            caches or activations or dtype, f"{np.abs(gap).mean():.1e}", f"{np.abs(np.expm1(gap)).max():.1e}",
        ))  # fmt: skip
    heads = ("dtype", "activations", "sampler's weights", "trainer's weights", "caches", "mean", "largest |ratio - 1|")
    table(heads, rows)


def main() -> None:
    """Run one part."""
    parts = {"bytes": of_bytes, "time": of_time, "effect": of_effect}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--chip", default="v5e:2x2")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    parts[options.part](options)


if __name__ == "__main__":
    main()
