"""Recurrent layers against attention alone, on this CPU: Qwen3.5's proportions at some 135M parameters.

    python experiments/benchmarks/recurrent.py [decode] [update] [--repeats 3]

Two models with random weights, of as many parameters: three layers of the gated delta rule to one of gated attention,
and attention alone. In turns: sampling of 16 rows of 64 + 512 tokens (seconds a token of the loop), and an update of 16
rows of 512. Prints seconds, the best of some, and their ratios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from update_ours import made_batch, new_learner, one_step  # noqa: E402

from jaxrl_llm import sample  # noqa: E402
from jaxrl_llm.learner.microbatches import plan_steps  # noqa: E402
from jaxrl_llm.models import Policy, from_hf, init_params  # noqa: E402
from jaxrl_llm.models.policy import parameter_count  # noqa: E402

COMMON = {
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 24, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip
RECURRENT = COMMON | {
    "model_type": "qwen3_5_text", "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 144, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 72,
    "linear_value_head_dim": 72, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
ATTENTION = COMMON | {
    "model_type": "qwen3", "intermediate_size": 2304, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64,
}  # fmt: skip
P, T, ROWS, MICRO_BATCHES = 64, 512, 16, 1
Made = tuple[Policy, Any]


def made(raw: dict[str, Any]) -> Made:
    """A policy of a configuration, with random weights."""
    config = from_hf(raw, where="config")
    return Policy(config), init_params(jax.random.key(0), config)


def decoding(policy: Policy, params: Any) -> Callable[[], float]:
    """A function that samples, and returns the seconds of a token of the loop."""
    prompts = jax.random.randint(jax.random.key(1), (ROWS, P), 1, policy.config.vocab_size).tolist()

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        rows = sample(policy, params, prompts, jax.random.key(2), max_new_tokens=tokens, stop_token_ids=[])
        jax.block_until_ready(rows)
        return time.perf_counter() - start

    return lambda: (seconds(T) - seconds(8)) / (T - 8)


def updating(policy: Policy, params: Any) -> Callable[[], float]:
    """A function that takes a gradient step with all that belongs to it, and returns the seconds."""
    learner = new_learner(policy, params)
    rows = made_batch(ROWS, P, T - P, policy.config.vocab_size, ROWS)
    steps = plan_steps(rows, micro_batches=MICRO_BATCHES, runs=policy.config.recurrent)
    state = [learner]

    def seconds() -> float:
        start = time.perf_counter()
        state[0], _ = one_step(state[0], rows, steps)
        return time.perf_counter() - start

    return seconds


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", nargs="*", choices=["decode", "update", []], default=["decode", "update"])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    models = {"recurrent": made(RECURRENT), "attention": made(ATTENTION)}
    print(", ".join(f"{name}: {parameter_count(params) / 1e6:.1f}M parameters" for name, (_, params) in models.items()))
    for what, make in (("decode", decoding), ("update", updating)):
        if what not in given.what:
            continue
        measured = {name: make(*model) for name, model in models.items()}
        found: dict[str, list[float]] = {name: [] for name in models}
        for number in range(given.repeats + 1):
            for name, seconds in measured.items():
                taken = seconds()
                if number:  # the first compiles
                    found[name].append(taken)
        best = {name: min(each) for name, each in found.items()}
        ratio = best["recurrent"] / best["attention"]
        print(
            f"{what}: " + ", ".join(f"{name} {s:.4g} s" for name, s in best.items()) + f"; ratio {ratio:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
