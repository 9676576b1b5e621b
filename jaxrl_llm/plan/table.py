"""A plan as text, as a JSON object and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.distributed.chips import GIB, RESERVED
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.search import SearchResult, train_options
from jaxrl_llm.plan.shapes import RunShapes, bytes_on_a_device
from jaxrl_llm.plan.times import Seconds
from jaxrl_llm.utils.errors import optional_package

COLAB = 12.0  # GiB of host memory, near which a free Colab machine ends the process
ASSUMPTIONS = (
    "every completion is of full length; a program takes as long as its most loaded resource alone: operations at the "
    "peak of bfloat16, bytes at the memory's bandwidth, collectives over rings at the rate of all links together, or "
    "the TPU compiler's estimate, with the collectives that nothing runs beside by its schedule; rewards, loading, "
    "evaluations and checkpoints are left out"
)
PARTS = (
    "parameters", "frozen", "optimiser", "reference", "rewards", "teachers", "padding", "sampler's weights", "caches",
    "batch", "temporaries",
)  # fmt: skip


def as_json(found: SearchResult) -> dict[str, Any]:
    """What a search found, as a JSON object; bytes are of one device, unless they are the host's."""
    return {
        "fits": (found.best or found.first) is not None and (found.best or found.first).fits,  # type: ignore[union-attr]
        "refused": found.refused or None,
        "plan": None if found.first is None else plan_json(found.first),
        "changes": found.changes,
        "changed_plan": None if found.best is None else plan_json(found.best),
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """One plan as a JSON object."""
    return {
        "chip": plan.chip._asdict(), "devices": plan.devices, "chips": plan.rented, "mesh": plan.mesh,
        "sampling_mesh": plan.sampler, "compiled": plan.compiled,
        "usable": plan.chip.usable, "peak": plan.peak, "fits": plan.fits, "held": plan.held,
        "phases": plan.phases, "peaks": plan.peaks, "host": plan.host,
        "programs": {name: cost._asdict() for name, cost in plan.costs.items()},
        "seconds": {name: {**each._asdict(), "binds": each.binds} for name, each in plan.seconds.items()},
        "iteration_seconds": plan.iteration, "tokens": plan.new_tokens, "chip_hours": plan.chip_hours,
    }  # fmt: skip


def as_text(found: SearchResult, command: str) -> str:
    """What a search found. command: of the run as it was given."""
    lines = []
    if found.first is not None:
        lines += [plan_text(found.first), ""]
    if found.refused:
        lines += [f"It cannot run as it is: {found.refused}", ""]
    if found.best is not None:
        lines += [f"It fits with {train_options(found.changes)}", "", plan_text(found.best), ""]
        lines += [f"{command} {train_options(found.changes)}"]
    elif found.first is not None and found.first.fits:
        lines += [command]
    else:
        lines += ["No mesh, micro-batch, precision, cache or adapter that was tried makes it fit: take more chips."]
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """Memory by phase, programs with what they cost, time, the run's price and the host's memory."""
    mesh = _axes(plan.mesh) + (f"; sampled on {_axes(plan.sampler)}" if plan.sampler != plan.mesh else "")
    how = "compiled" if plan.compiled else "estimated, not compiled"
    phase = max(plan.peaks, key=lambda name: plan.peaks[name])
    sizes = _memory(plan.held, plan.phases)
    memory = [[part, *(f"{size:.2f}" if size else "" for size in own)] for part, own in sizes.items()]
    memory += [["all", *(f"{size / GIB:.2f}" for size in plan.peaks.values())]]
    lines = [
        f"{plan.rented} {plan.chip.name} (mesh {mesh}), {plan.chip.memory:.4g} GiB each, of which the runtime keeps "
        f"{RESERVED:.1%}; {how}",
        "",
        *_table(["GiB on a device", *plan.phases], memory),
        "",
        f"{'fits' if plan.fits else 'does not fit'}: {plan.peak / GIB:.2f} of {plan.chip.usable / GIB:.2f} GiB, "
        f"most in {phase}",
        "",
        *_table(
            ["program", "TFLOP", "GB of memory", "MB sent", *(f"{name} s" for name in Seconds._fields), "binds"],
            _program_rows(plan),
        ),
        "",
    ]
    if plan.iteration:
        slowest = max(plan.seconds, key=lambda name: max(plan.seconds[name]))
        lines += [
            f"At least {plan.iteration:.3g} s an iteration, {plan.new_tokens / plan.iteration:,.0f} new tokens/s; most "
            f"of it is {slowest}, bound by {plan.seconds[slowest].binds}.",
            f"At least {plan.chip_hours:,.3g} chip-hours for {plan.config.steps} steps.",
            f"Assumed: {ASSUMPTIONS}.",
        ]
    host = sum(plan.host.values()) / GIB
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.host.items() if size)
    warning = f" More than {COLAB:.0f} GiB: a free Colab machine would end the run." if host > COLAB else ""
    return "\n".join([*lines, f"Host memory: about {host:.1f} GiB on each host ({parts}).{warning}"])


def _axes(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.items())


def _memory(held: Mapping[str, int], phases: Mapping[str, Mapping[str, int]]) -> dict[str, list[float]]:
    """GiB on a device in each phase, by what takes them."""
    sizes = {part: [(held.get(part, 0) + one.get(part, 0)) / GIB for one in phases.values()] for part in PARTS}
    return {part: found for part, found in sizes.items() if any(found)}


def _program_rows(plan: Plan) -> list[list[str]]:
    rows = []
    for name, cost in plan.costs.items():
        sent = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in sorted(cost.collectives.items()))
        times = [f"{value:.3g}" if value else "" for value in plan.seconds[name]]
        binds = plan.seconds[name].binds if any(plan.seconds[name]) else ""
        rows.append([name, f"{cost.flops / 1e12:.4g}", f"{cost.traffic / 1e9:.4g}", sent, *times, binds])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def shardings_text(rows: Sequence[_Row]) -> str:
    """The table of a run's arrays: shape, sharding, bytes on a device."""
    said = [
        [name, f"{dtype}[{', '.join(map(str, shape))}]", spec, f"{size:,}"] for name, shape, dtype, spec, size in rows
    ]
    said.append(["all", "", "", f"{sum(row.bytes for row in rows):,}"])
    return "\n".join(_table(["array", "shape", "sharding", "bytes on a device"], said))


def write_picture(plan: Mapping[str, Any], path: str | Path) -> None:
    """Draw a device's memory in each phase, stacked by what takes it, beside what the chip has.

    plan: as `plan_json` gives it. path: its ending decides the format. Needs matplotlib.
    """
    with optional_package("matplotlib", "run", "the picture of a plan"):
        from matplotlib.figure import Figure
    phases = list(plan["phases"])
    figure = Figure(figsize=(1.6 + 1.3 * len(phases), 4.2), layout="constrained")
    axes: Any = figure.subplots()
    below = [0.0] * len(phases)
    for part, sizes in _memory(plan["held"], plan["phases"]).items():
        axes.bar(phases, sizes, bottom=below, label=part)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.axhline(plan["usable"] / GIB, color="black", linestyle="--", label="usable")
    axes.set_ylabel("GiB on a device")
    axes.set_title(f"{plan['chips']} {plan['chip']['name']}, mesh {_axes(plan['mesh'])}", fontsize="medium")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path)


class _Row(NamedTuple):
    """An array in the table of shardings."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    bytes: int  # on a device


def sharding_table(shapes: RunShapes) -> list[_Row]:
    """Every array that a run keeps on its devices: parameters, moments, reference, the sampler's weights and caches."""
    engine = shapes.engine()
    trees = {
        "parameters": shapes.state.params, "frozen": shapes.learner.frozen, "optimiser": shapes.state.optimizer,
        "reference": shapes.copied_reference if shapes.config.reference_memory == "device" else None,
        **shapes.learner.policies,
        "sampler": engine.weights, "prompt cache": engine.prefix_cache, "ring cache": engine.ring_cache,
        "conversations": engine.parked,
    }  # fmt: skip
    rows = []
    for part, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            spec = tuple(getattr(x.sharding, "spec", ()))
            said = ", ".join("+".join(s) if isinstance(s, tuple) else str(s or "-") for s in spec)
            name = "/".join([part, jax.tree_util.keystr(path, simple=True, separator="/")])
            rows.append(_Row(name, x.shape, str(x.dtype), said or "replicated", bytes_on_a_device(x)))
    return rows
