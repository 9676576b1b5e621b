"""How many devices are to sample, and how many to learn, where a run does both at the same time (`max_staleness`).

An iteration takes the larger of sampling on the ones and learning on the others, both estimated by arithmetic. In
simulated runs with a staleness of 4 (`experiments/benchmarks/asynchronous.py`) a learner that is the slower one waits
little: an iteration takes 1.0 to 1.1 times its seconds. Sampling that is the slower one takes 1.2 to 1.4 times what it
takes with all rows busy, since long completions are decoded with few others until they are too stale to wait for.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxrl_llm.distributed.chips import GIB, Topology
from jaxrl_llm.plan.choose_mesh import with_chosen_meshes
from jaxrl_llm.plan.plan import SAMPLING, Plan, estimated_plan
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

TAILS = 1.3  # seconds of sampling over those with all rows busy
EIGHTHS = 8  # of the devices, of which shares are tried


class _Split(NamedTuple):
    """Devices that sample only, and devices that learn."""

    devices: int  # that sample
    sampler: Plan  # of a run that samples on these, of which learning is left out
    learner: Plan  # of a run that learns on the others, of which sampling is left out

    @property
    def sampling(self) -> float:
        """Seconds of an iteration's sampling, with all rows busy."""
        return sum(max(each) for name, each in self.sampler.seconds.items() if name in SAMPLING)

    @property
    def learning(self) -> float:
        """Seconds of an iteration's update."""
        return sum(max(each) for name, each in self.learner.seconds.items() if name not in SAMPLING)

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return max(TAILS * self.sampling, self.learning)

    @property
    def bytes(self) -> tuple[int, int]:
        """The most on a device that samples, and on one that learns."""
        sampling = max(sum(parts.values()) for name, parts in self.sampler.phases.items() if name in _PHASES)
        learning = [sum(parts.values()) for name, parts in self.learner.phases.items() if name not in _PHASES]
        return sampling, sum(self.learner.held.values()) + max(learning)

    @property
    def fits(self) -> bool:
        """Whether both are no more than a chip has for programs."""
        return max(self.bytes) <= self.learner.chip.usable


_PHASES = ("sampling", "convert", "evaluation")  # of `Plan.phases`, those of the sampler


def splits(config: TrainConfig, topology: Topology) -> list[_Split]:
    """The splits that are tried: eighths of the devices, as many of each host; or the `sampler_devices` alone.

    InputError for one device, where nothing can be split, and for what the run would refuse of all of them.
    """
    total, hosts = len(topology.devices), topology.hosts
    shares = {hosts * max(round(total * part / EIGHTHS / hosts), 1) for part in range(1, EIGHTHS)}
    counts = [config.sampler_devices] if config.sampler_devices else sorted(shares)
    found, refused = list[_Split](), f"{total} devices of {hosts} hosts cannot be split: plan without max_staleness"
    for count in counts:
        if count % hosts or not hosts <= count <= total - hosts:
            continue
        try:
            found.append(_split(config, topology, count))
        except InputError as error:
            refused = str(error)
    if not found:
        raise InputError(refused)
    return found


def best(found: list[_Split]) -> _Split:
    """The fastest that fits, else the one that needs the least memory."""
    fitting = [one for one in found if one.fits]
    return min(fitting, key=lambda one: one.seconds) if fitting else min(found, key=lambda one: max(one.bytes))


def _split(config: TrainConfig, topology: Topology, count: int) -> _Split:
    """The plan of a split; each part as a run of its own, whose meshes are chosen as a run would."""
    hosts, alone = topology.hosts, dict[str, Any](max_staleness=0, sampler_devices=0, replay_order=None)
    own: list[list[Any]] = [[], []]
    for host in sorted({device.process_index for device in topology.devices}):
        mine = [device for device in topology.devices if device.process_index == host]
        own[0] += mine[len(mine) - count // hosts :]
        own[1] += mine[: len(mine) - count // hosts]
    # The groups in flight have a prompt each in the sampler's cache.
    each = count // math.gcd(count, config.group_size)  # the engine fills up its rows; a run of its own would not
    samples = dataclasses.replace(
        config, **alone, mesh="", oversample=config.max_staleness + 1.0, minibatches=1, micro_batches=1,
        prompts_per_step=-(-config.prompts_per_step // each) * each,
    )  # fmt: skip
    learns = dataclasses.replace(config, **alone, sampling_mesh="")
    plans = []
    for part, devices in zip((samples, learns), own, strict=True):
        there = topology._replace(devices=devices)
        plans.append(estimated_plan(with_chosen_meshes(part, there), there))
    return _Split(count, *plans)


def as_json(found: list[_Split]) -> dict[str, Any]:
    """The splits as a JSON object; bytes are of one device."""
    chosen = best(found)
    lines = [
        {
            "sampler_devices": one.devices, "learning_devices": one.learner.devices,
            "sampling_mesh": one.sampler.sampler, "mesh": one.learner.mesh, "sampling_seconds": one.sampling,
            "learning_seconds": one.learning, "sampling_bytes": one.bytes[0], "learning_bytes": one.bytes[1],
            "fits": one.fits,
        }
        for one in found
    ]  # fmt: skip
    own = {"sampler_devices": chosen.devices, "iteration_seconds": chosen.seconds}
    return {"fits": chosen.fits, **own, "splits": lines}


def as_text(found: list[_Split], command: str) -> str:
    """A line for each split, and the command of the best one. command: of the run as it was given."""
    chosen, chip = best(found), found[0].learner.chip
    lines = [
        f"Sampling beside updates, by arithmetic: seconds of an iteration, and GiB of {chip.usable / GIB:.1f} on a "
        f"{chip.name}.",
        "",
        "   sample    learn   sampling s   learning s   GiB to sample   GiB to learn",
    ]
    for one in found:
        sampling, learning = (size / GIB for size in one.bytes)
        mark = "*" if one is chosen else " "
        seconds = f"{one.sampling:12.1f} {one.learning:12.1f}"
        lines.append(f"{mark} {one.devices:7d} {one.learner.devices:8d} {seconds} {sampling:15.1f} {learning:14.1f}")
    if not chosen.fits:
        return "\n".join([*lines, "", "No split fits: raise --micro-batches, or take more devices."])
    return "\n".join([*lines, "", f"{command} --sampler-devices {chosen.devices}"])
