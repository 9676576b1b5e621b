"""A plan as text, and as a JSON object."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.runs.plan import GIB, Plan


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object; bytes are of one chip."""
    return {
        "chips": plan.chips, "mesh": plan.mesh, "memory": plan.chip.memory * GIB, "peak": plan.peak, "fits": plan.fits,
        "held": plan.held, "sampling": plan.sampling, "learning": plan.learning, "seconds": plan.seconds,
        "programs": [cost._asdict() for cost in plan.costs],
    }  # fmt: skip


def as_text(plan: Plan, steps: int) -> str:
    """Memory of a chip by phase, collectives, and the least time of an iteration. steps: of the run."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    lines = [
        f"{plan.chips} chips ({mesh}), {plan.chip.memory:g} GiB each",
        "",
        "| a chip's memory, GiB | |",
        "|---|---|",
    ]
    parts = [
        *plan.held.items(),
        *((f"sampling: {name}", size) for name, size in plan.sampling.items()),
        *((f"learning: {name}", size) for name, size in plan.learning.items()),
        ("most at a time", plan.peak),
    ]
    lines += [f"| {name} | {size / GIB:.2f} |" for name, size in parts]
    verdict = (
        "fits" if plan.fits else "does not fit: more micro_batches, another mesh, LoRA or smaller moments need less"
    )
    lines += ["", verdict, "", "| collectives, MiB a chip | |", "|---|---|"]
    for cost in plan.costs:
        moved = ", ".join(f"{kind} {size / 2**20:,.1f}" for kind, size in sorted(cost.collectives.items()))
        lines.append(f"| {cost.name} | {moved or 'none'} |")
    total = sum(plan.seconds[name] for name in ("prefill", "decode", "learning"))
    times = ", ".join(f"{name} {value:.2f} s" for name, value in plan.seconds.items())
    lines += [
        "",
        f"at least {total:.2f} s an iteration at the chips' peak and bandwidth ({times}, which learning may hide)",
        f"{total * steps * plan.chips / 3600:.1f} chip-hours for {steps} steps, at least",
    ]
    return "\n".join(lines)
