"""How often a run's programs run in an iteration, and the least seconds that this takes."""

import math
from typing import NamedTuple

from jaxrl_llm.distributed.chips import NETWORK, Chip
from jaxrl_llm.plan.program.collectives import BETWEEN
from jaxrl_llm.plan.program.cost import Cost
from jaxrl_llm.plan.program.cycles import Kernel
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.prefill import prompts_together
from jaxrl_llm.training.config import TrainConfig


class Seconds(NamedTuple):
    """The least seconds of a program in an iteration by each resource; 0 where the resource's rate is not known."""

    compute: float
    memory: float
    links: float
    compiler: float  # by the TPU compiler's estimate, Pallas kernels by the operations and bytes that they declare
    scheduled: float  # the same, with the collectives that nothing runs beside by the compiler's schedule

    @property
    def binds(self) -> str:
        """The resource that takes longest."""
        return self._fields[self.index(max(self))]


def program_calls(config: TrainConfig, size: Size, hosts: int, devices: int, name: str) -> int:
    """How often a program runs in an iteration, of "decode" the steps of its loop, if all completions are long.

    hosts, devices: as for `engine_sizes`.
    """
    prompts = math.ceil(config.prompts_per_step / hosts)
    rounds = math.ceil(prompts * config.group_size / size.shape.rows)
    if name == "decode":
        return rounds * config.max_new_tokens
    if name == "prefill":
        return math.ceil(prompts / prompts_together(size.width, size.shape.prompts, devices))
    # Passes of speculation take the place of decode steps.
    return {"begin": rounds, "verify": 0}.get(name, 1)


def seconds_of(cost: Cost, chip: Chip, times: int) -> Seconds:
    """The least seconds of so many calls of a program."""

    def per(number: float, rate: float) -> float:
        return times * number / rate if rate else 0.0

    kernels = [Kernel(name, *declared).seconds(chip) for name, declared in cost.kernels.items()]
    between = sum(size for kind, size in cost.collectives.items() if kind.endswith(BETWEEN))
    compiler = per(cost.cycles, chip.clock * 1e9) + times * (sum(kernels) if chip.clock else 0.0)
    return Seconds(
        per(cost.flops, chip.peak * 1e12),
        per(cost.traffic, chip.bandwidth * 1e9),
        per(cost.sent - between, chip.links * 1e9) + per(between, NETWORK * 1e9 if chip.links else 0.0),
        compiler,
        compiler + times * cost.exposed,
    )
