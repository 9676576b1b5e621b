"""How sampling runs beside updates, and which runs cannot have it so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.rollouts.asynchronous.step_order import StepOrder
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.utils.errors import InputError


@dataclass(frozen=True)
class Asynchrony:
    """How sampling runs beside updates."""

    bound: int
    """Most staleness, at least 1: the learner's step less that of the weights with which a group was admitted."""
    steps: int
    """Of the run."""
    record: Path | None = None
    """The file of the order in which weights came in and groups were taken."""
    repeat: Sequence[StepOrder] = ()
    """Such an order, which is repeated."""
    keep: bool = False
    """Whether caches outlive the weights that filled them; else they are computed again."""
    turns: bool = False
    """Whether sampler and learner take turns, since both run programs on the same several devices."""


def check_setup(setup: Experience, keep: bool) -> None:
    """InputError for a run whose sampling cannot go on beside its updates. keep: see `Asynchrony`."""
    units, what = setup.hosts.units, ""
    if setup.hosts.together > 1:
        what = "needs hosts that sample alone, but several of them sample as one here"
    elif setup.prompts_per_step % units:
        what = f"gives each of {units} hosts as many groups, which prompts_per_step = {setup.prompts_per_step} does not"
    elif setup.partial is not None:
        what = "leaves unfinished groups to later steps itself"
    elif setup.stream_rewards:
        what = "scores groups when a step takes them, so that stream_rewards changes nothing"
    elif setup.rollout.demands.given:
        what = "samples, but all episodes of this rollout are given"
    elif setup.rollout.demands.league:
        what = "has the weights of one policy, but this rollout draws from a league"
    elif setup.rollout.hook is not None and not setup.rollout.hook.lasting:
        what = f"continues episodes under new weights, but the hook {setup.rollout.hook.name} is of one step"
    elif setup.rollout.population is not None:
        what = f"continues episodes under new weights, but the members of {setup.rollout.name} are of one step"
    elif keep and setup.policy.config.unmasking is not None:
        what = "of a masked-diffusion model has no caches that stale_cache could keep"
    if what:
        raise InputError(f"max_staleness is above 0, but asynchronous sampling {what}: leave one of the two out")
