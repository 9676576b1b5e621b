"""Accelerators by name, and the devices of a topology, which need not be there.

Figures are those that Google's pages on each TPU version (docs.cloud.google.com/tpu/docs, read in 2026-11) and NVIDIA's
data sheets state. A link's rate is what a chip sends: half of a rate that counts both directions, over all its links.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.utils.errors import InputError, shown, unknown

GIB = 2**30
# What the runtime keeps for itself: programs for v5e may use 15.75 of 16 GiB, those for v6e 31.25 of 32.
RESERVED = 0.025


class Chip(NamedTuple):
    """One device, as JAX counts devices."""

    name: str
    memory: float  # GiB
    peak: float  # TFLOP/s in bfloat16; 0: not known
    bandwidth: float  # GB/s of its memory; 0: not known
    links: float  # GB/s to devices of the slice or the machine; 0: not known
    clock: float = 0.0  # GHz, in which the TPU compiler estimates cycles; 0: not known
    each: int = 1  # devices on a chip that is rented as one
    sparse_cores: bool = False
    compiler_options: tuple[tuple[str, str], ...] = ()  # of XLA, for the programs of learning

    @property
    def usable(self) -> int:
        """Bytes for programs and their arrays."""
        return int(self.memory * GIB * (1 - RESERVED))


_FUSION = "xla_tpu_enable_async_collective_fusion"
# By themselves only v5e's programs have all-gathers that products carry on beside their own work.
BESIDE_PRODUCTS = tuple(
    (name, "true") for name in (
        "xla_enable_async_all_gather", _FUSION, f"{_FUSION}_fuse_all_gather", f"{_FUSION}_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
    )
)  # fmt: skip
# Not those with which elementwise work carries collectives too (..._fuse_kloop_fusions): they save v5e 1 % of an update
# of Qwen3-8B, and the compiler aborts on one of SmolLM2. Nor Pallas kernels, whose VMEM the collectives would take.

# By default a fusion has 16 MiB of v6e's 128 MiB of VMEM: its products wait for the main memory.
_MORE_VMEM = (("xla_tpu_scoped_vmem_limit_kib", str(96 * 1024)),)
_TPUS = (
    Chip("v4", 32, 275, 1228, 300, 1.05, sparse_cores=True),
    Chip("v5e", 16, 197, 819, 200, 1.5),
    Chip("v5p", 95, 459, 2765, 600, 1.75, 1, True, BESIDE_PRODUCTS),
    Chip("v6e", 32, 918, 1638, 400, 1.75, 1, True, (*_MORE_VMEM, *BESIDE_PRODUCTS)),
    Chip("tpu7x", 96, 1153, 3690, 300, each=2, sparse_cores=True),
)
_GPUS = (
    Chip("a100", 80, 312, 2039, 300),
    Chip("h100", 80, 989, 3350, 450),
    Chip("h200", 139, 989, 4800, 450),
    Chip("b200", 179, 2250, 8000, 900),
)
TPUS, GPUS = ({chip.name: chip for chip in chips} for chips in (_TPUS, _GPUS))
KINDS = {"v5 lite": "v5e", "v5": "v5p", "v6 lite": "v6e"}  # of TPUs whose `device_kind` has another name
NETWORK = 6.25  # GB/s between slices for each chip (v5p: 50 Gbit/s; the others are near it)


class Topology(NamedTuple):
    """The devices that a run is planned for."""

    chip: Chip
    devices: list[Any]
    platform: str  # "tpu", "cuda" or "cpu", whose programs are lowered
    slices: int = 1

    @property
    def hosts(self) -> int:
        """Processes of a run: the machines that the devices are on."""
        return len({device.process_index for device in self.devices})

    def alone(self, own: Mesh) -> Mesh:
        """The mesh of one host, or of hosts that sample together, on devices that programs can be compiled for.

        libtpu compiles for a whole topology only: for one of several hosts, the topology of a host stands in.
        """
        if self.platform != "tpu" or own.size == len(self.devices):
            return own
        from jax.experimental import topologies

        shape = "2x2" if self.chip.name in ("v5e", "v6e") else "2x2x1"
        name = f"{self.chip.name}:{shape}"
        devices: Any = np.array(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
        if devices.size != own.size:
            raise InputError(f"{own.size} devices sample together, but a host of this topology has {devices.size}")
        return Mesh(devices.reshape(own.devices.shape), own.axis_names, axis_types=own.axis_types)

    @property
    def rented(self) -> int:
        """Chips as they are rented."""
        return -(-len(self.devices) // self.chip.each)


def chip_of_kind(kind: str) -> Chip | None:
    """The accelerator that a device of JAX is, by its `device_kind`; None for one that is not known here.

    >>> [chip_of_kind(kind).name for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU7x", "NVIDIA H100 80GB HBM3")]
    ['v4', 'v5e', 'v5p', 'tpu7x', 'h100']
    """
    own = kind.lower().removeprefix("tpu ")
    if chip := TPUS.get(KINDS.get(own, own)):
        return chip
    return next((chip for name, chip in GPUS.items() if name in own.replace("-", " ").split()), None)


def compiler_options(*trees: Any) -> dict[str, str]:
    """XLA's options for the devices of some arrays, or shapes with shardings; without any, for JAX's own devices."""
    leaves = (getattr(x, "sharding", None) for x in jax.tree.leaves(trees))
    sharding = next((found for found in leaves if found is not None), None)
    chip = chip_of_kind(next(iter(jax.devices() if sharding is None else sharding.device_set)).device_kind)
    return dict(chip.compiler_options) if chip else {}


def simulated(topology: str) -> int:
    """How many CPU devices a topology of GPUs or CPUs needs in JAX, such as 8 for "h100:8"; 0 for a TPU's.

    InputError for a malformed one.
    """
    name, _, count = topology.partition(":")
    if name in TPUS:
        return 0
    if name not in GPUS and name != "cpu":
        raise unknown("accelerator", name, [*TPUS, *GPUS, "cpu"])
    if not re.fullmatch(r"[1-9]\d{0,3}", count):
        raise InputError(f"the topology {topology!r} names no number of devices: give one, such as {name}:8")
    return int(count)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what libtpu writes to the process's standard error where it finds no TPU; its errors are raised."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@checked
def topology_of(topology: str, slices: Count = 1) -> Topology:
    """The devices of a topology: "v5e:4x4", "h100:8", "cpu:1". InputError where it is malformed or not known here.

    TPUs are libtpu's, which compiles for them with none attached. CPU devices stand in for GPUs, to lower and to shard.
    """
    count, name = simulated(topology), topology.partition(":")[0]
    if count:
        if slices > 1:
            raise InputError(f"--slices is {slices}, but only TPUs have slices: give the number of devices alone")
        devices = jax.devices("cpu")
        if len(devices) < count:
            raise InputError(
                f"{topology} needs {count} CPU devices, but JAX has {len(devices)}: set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / count
        chip = GPUS.get(name) or Chip("cpu", memory, 0, 0, 0)
        return Topology(chip, list(devices[:count]), "cuda" if name in GPUS else "cpu")
    from jax.experimental import topologies

    if not re.fullmatch(r"\w+:[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise InputError(f"the topology is {shown(topology)}, but must be a slice such as v5e:4x4 or v5p:2x2x2")
    options = {"num_slices": slices} if slices > 1 else {}
    try:
        with _quiet():
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except Exception as error:  # JAX raises several, also where libtpu is missing
        said = [line.strip() for line in str(error).splitlines() if line.strip()][:1]
        raise InputError(
            f"cannot compile for {topology} ({': '.join([type(error).__name__, *said])}): it needs libtpu (pip install "
            "libtpu) and a topology that exists, such as v5e:4x4"
        ) from None
    return Topology(TPUS[name], list(found.devices), "tpu", slices)
