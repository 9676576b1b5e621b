"""How the update of an 8B model scales from 16 to 256 chips, on paper: read off programs compiled without a TPU.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python experiments/benchmarks/scaling.py [--tensor 4] [--groups 1]

Needs libtpu. Qwen3-8B in bfloat16 on v5e; every chip has as many tokens whatever their number (weak scaling): so many
groups of 16 completions of 1,024 tokens over a prompt of 1,024 for each slice of the rows. Weights and moments are
sharded over all chips. Efficiency is the time of the operations at the chip's peak over the time of the step: with
collectives behind the compiler's estimate of everything else ("hidden"), or after it ("exposed"); "compute-bound" is
what links leave of the compiler's estimate, which 1 means they hide behind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(sys.prefix) / "aot")]

from jaxrl_llm.distributed.chips import topology_of  # noqa: E402
from jaxrl_llm.learner.optimizer import OptimizerConfig  # noqa: E402
from jaxrl_llm.plan.plan import learning_costs  # noqa: E402
from jaxrl_llm.plan.shapes import shapes_of  # noqa: E402
from jaxrl_llm.plan.times import seconds_of  # noqa: E402
from jaxrl_llm.training.config import TrainConfig  # noqa: E402

SLICES = {16: "v5e:4x4", 64: "v5e:8x8", 256: "v5e:16x16"}
MODEL = ROOT / "experiments" / "plan" / "qwen3-8b.json"


def measure(chips: int, tensor: int, groups: int) -> dict[str, Any]:
    """Seconds and bytes of the update on a chip."""
    rows = chips // tensor
    config = TrainConfig(
        model=str(MODEL), dtype="bfloat16", param_dtype="bfloat16", mesh=f"fsdp={rows},tensor={tensor}",
        algorithm="dr_grpo", optimizer=OptimizerConfig(moments="bfloat16"), prompts_per_step=groups * rows,
        group_size=16, max_prompt_tokens=1024, max_new_tokens=1024, eval_size=0,
    )  # fmt: skip
    topology = topology_of(SLICES[chips])
    cost = learning_costs(shapes_of(config, topology))["update"]
    seconds = seconds_of(cost, topology.chip, 1)
    working = max(seconds.compiler, seconds.compute)
    return {
        "collectives": cost.collectives, "peak": cost.peak, "compute": seconds.compute, "compiler": seconds.compiler,
        "links": seconds.links, "hidden": seconds.compute / max(working, seconds.links),
        "exposed": seconds.compute / (working + seconds.links), "bound": min(1.0, working / seconds.links),
    }  # fmt: skip


def main() -> None:
    """Print the table, and what binds at the most chips."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--chips", nargs="+", type=int, default=list(SLICES), choices=SLICES)
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--groups", type=int, default=1, help="for each slice of the rows")
    given = parser.parse_args()
    print("| chips, fsdp x tensor | sent by a chip, GB | operations at peak, s | compiler's estimate, s | links, s "
          "| efficiency hidden, exposed | compute-bound | GiB a chip |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    found: dict[str, Any] = {}
    for chips in given.chips:
        found = measure(chips, given.tensor, given.groups)
        sent = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in sorted(found["collectives"].items()))
        print(
            f"| {chips}, {chips // given.tensor} x {given.tensor} | {sent} | {found['compute']:.3f} | "
            f"{found['compiler']:.3f} | {found['links']:.3f} | {found['hidden']:.0%}, {found['exposed']:.0%} | "
            f"{found['bound']:.0%} | {found['peak'] / 2**30:.2f} |",
            flush=True,
        )
    if found["bound"] >= 0.9:
        print(f"\nAt {given.chips[-1]} chips the update stays compute-bound: its collectives take "
              f"{found['links'] / max(found['compiler'], found['compute']):.0%} of the time of the rest.")  # fmt: skip
    else:
        most = max(found["collectives"], key=found["collectives"].get)
        print(f"\nAt {given.chips[-1]} chips the links bind: mostly {most}.")


if __name__ == "__main__":
    main()
