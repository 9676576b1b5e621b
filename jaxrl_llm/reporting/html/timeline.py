"""Who waits for whom in an asynchronous run: what the learner and the sampler did in each step, as an SVG element."""

from typing import NamedTuple

import numpy as np

from jaxrl_llm.reporting.html.run_data import RunData

SHOWN = 40  # steps, the last of the run
# Phases of the learner, in their order within a step, and what the sampler did; the metric of each, in seconds.
LEARNER = {
    "transfer": "seconds/transfer", "waits for groups": "seconds/groups", "waits for hosts": "seconds/wait",
    "score": "seconds/score", "update": "seconds/update",
}  # fmt: skip
SAMPLER = {"decodes": "sampler/decoding_seconds", "waits at the bound": "sampler/idle_seconds"}
REST = "other"
COLOURS = {"update": 0, "decodes": 0, "waits for groups": 1, "waits at the bound": 1, "transfer": 2, "score": 3}
COLOURS |= {"waits for hosts": 4, REST: 7}  # of the page's variables --line
_WIDTH, _LANE, _GAP = 1000.0, 22.0, 6.0


class Timeline(NamedTuple):
    """The drawing, its legend, and the shares of the time."""

    svg: str
    legend: list[tuple[int, str]]  # (colour, name)
    first: int  # of the steps that are shown
    waits: float  # share of the time for which the learner waits for groups
    idle: float  # share for which the sampler waits at the bound


def timeline(run: RunData) -> Timeline | None:
    """The last steps of a run that samples beside its updates; None of another."""
    if SAMPLER["decodes"] not in run.metrics:
        return None
    steps = len(run.metrics[SAMPLER["decodes"]])
    first = max(steps - SHOWN, 0)

    def of(name: str) -> np.ndarray:
        return np.nan_to_num(run.metrics.get(name, np.zeros(steps)))[first:]

    every = sum((of(name) for name in run.metrics if name.startswith("seconds/")), np.zeros(steps - first))
    total = float(every.sum())
    if not total > 0:
        return None
    learner = {phase: of(name) for phase, name in LEARNER.items()}
    learner[REST] = every - sum(learner.values())
    sampler = {what: of(name) for what, name in SAMPLER.items()}
    # Of several hosts the sampler's are means, and its time since the last step is not quite that of the step.
    scale = np.minimum(every / np.maximum(sum(sampler.values()), 1e-9), 1.0)
    sampler = {what: seconds * scale for what, seconds in sampler.items()}
    begins, parts = np.concatenate([[0.0], np.cumsum(every)]), list[str]()
    for lane, phases in enumerate((sampler, learner)):
        at = begins[:-1].copy()
        for phase, seconds in phases.items():
            for number in np.flatnonzero(seconds > 0):
                x, width = _WIDTH * at[number] / total, _WIDTH * seconds[number] / total
                said = f"step {first + int(number) + 1}: {phase}, {seconds[number]:.3g} s"
                parts.append(
                    f'<rect x="{x:.2f}" y="{lane * (_LANE + _GAP):g}" width="{width:.2f}" height="{_LANE:g}" '
                    f'style="fill:var(--line{COLOURS[phase]})"><title>{said}</title></rect>'
                )
            at = at + seconds
    height = 2 * _LANE + _GAP
    svg = (
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" width="100%" preserveAspectRatio="none" role="img" '
        f'aria-label="Sampler above, learner below">{"".join(parts)}</svg>'
    )
    used = [phase for phase in (*sampler, *learner) if {**sampler, **learner}[phase].sum() > 0]
    shares = [float(part.sum()) / total for part in (learner["waits for groups"], sampler["waits at the bound"])]
    return Timeline(svg, [(COLOURS[phase], phase) for phase in used], first, *shares)
