"""What a compiled program costs each device: memory, operations, bytes of its memory, and bytes that collectives send.

All of it is read off the compiled program, but for the operations, which are those of its jaxpr. Loops count as often
as they run, see `program_text.executed`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed.aot import Program
from jaxrl_llm.plan.flops import matrix_flops
from jaxrl_llm.plan.program_cycles import cycles_in, kernels_in
from jaxrl_llm.plan.program_text import Executed, executed, sizes, turn_of
from jaxrl_llm.plan.traffic import traffic_in

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
BETWEEN = " between slices"  # after the kind of a collective that does not stay within a slice
_KIND = re.compile(rf"({'|'.join(KINDS)})(-start)?")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_AXIS = re.compile(r"['\"]([^'\"]+)['\"](?:=(\d+)|:\((\d+)\)(\d+))?")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
# What the runtime of several slices does: it takes an array from each device, and names the slices and the kind.
_MEGASCALE = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}.*_xla_megascale_transfer_type="(\w+)"')


class Cost(NamedTuple):
    """Of one program, for each device."""

    name: str
    arguments: int  # bytes, like all but `flops` and `cycles`
    given: int  # the arguments without the padding of the device's layouts
    results: int  # beyond those that take the memory of donated arguments
    temporaries: int
    flops: float  # of matrix products
    traffic: int  # read from and written to its memory
    collectives: dict[str, int]  # sent to other devices, by kind
    cycles: int  # by the TPU compiler's estimate, without collectives and Pallas kernels; 0 where it gives none
    kernels: dict[str, tuple[float, float]]  # operations and bytes that Pallas kernels declare, by name

    @property
    def peak(self) -> int:
        """Bytes of arguments, results and temporaries together."""
        return self.arguments + self.results + self.temporaries

    @property
    def sent(self) -> int:
        """Bytes of all collectives."""
        return sum(self.collectives.values())


def cost_of(program: Program, slices: Sequence[int] = (), turn: bool = False) -> Cost:
    """The cost of a program that was compiled ahead of time. slices: of each device of its mesh, in order.

    turn: count what one turn of its loop does (`turn_of`), in the memory of all.
    """
    memory: Any = program.compiled.memory_analysis()
    text = program.compiled.as_text() or ""
    text = turn_of(text) if turn else text
    devices = {device for x in jax.tree.leaves(program.compiled.output_shardings) for device in x.device_set}
    platform = next((device.platform for device in devices), "cpu")
    return Cost(
        program.name,
        memory.argument_size_in_bytes,
        _given(program),
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        matrix_flops(program.jaxpr, platform) / max(len(devices), 1),
        traffic_in(text),
        dict(collectives_in(text, slices or [0] * len(devices))),
        cycles_in(text),
        {kernel.name: (kernel.flops, kernel.bytes) for kernel in kernels_in(text)},
    )


def _given(program: Program) -> int:
    """Bytes of the arguments on each device, those left out that the program does not read."""
    tree = program.compiled.in_tree
    shapes, shardings = (
        tree.flatten_up_to(program.lowered.args_info),
        tree.flatten_up_to(program.compiled.input_shardings),
    )
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x, sharding in zip(shapes, shardings, strict=True) if sharding is not None
    )  # fmt: skip


def at_depth(shallow: Cost, deep: Cost, depths: tuple[int, int], depth: int) -> Cost:
    """The cost at another number of layers than the two that were compiled, on the line through both.

    Exact for what each layer has alike, such as arguments; for temporaries it assumes that a layer adds as many.
    """
    part = (depth - depths[0]) / (depths[1] - depths[0])

    def between(a: float, b: float) -> int:
        # More layers never need less than the deeper of the two.
        return round(max(a + (b - a) * part, b if part >= 1 else 0))

    kinds = sorted({*shallow.collectives, *deep.collectives})
    numbers: dict[str, Any] = {
        name: between(getattr(shallow, name), getattr(deep, name))
        for name in Cost._fields if name not in ("name", "collectives", "kernels")
    }  # fmt: skip
    collectives = {kind: between(shallow.collectives.get(kind, 0), deep.collectives.get(kind, 0)) for kind in kinds}
    kernels = {
        name: _pair(between(*each) for each in zip(shallow.kernels.get(name, (0, 0)), found, strict=True))
        for name, found in deep.kernels.items()
    }
    return deep._replace(**numbers, collectives=collectives, kernels=kernels)


def followed(first: Cost, then: Cost, times: int) -> Cost:
    """The cost of a program and of so many calls of another one after it, of which all results are kept."""
    kinds = sorted({*first.collectives, *then.collectives})
    return Cost(
        first.name,
        max(first.arguments, then.arguments),
        max(first.given, then.given),
        first.results + times * then.results,
        max(first.temporaries, then.temporaries),
        first.flops + times * then.flops,
        first.traffic + times * then.traffic,
        {kind: first.collectives.get(kind, 0) + times * then.collectives.get(kind, 0) for kind in kinds},
        first.cycles + times * then.cycles,
        {
            name: _pair(
                a + times * b for a, b in zip(*(x.kernels.get(name, (0, 0)) for x in (first, then)), strict=True)
            )
            for name in {**first.kernels, **then.kernels}
        },
    )


def _pair(numbers: Iterable[float]) -> tuple[float, float]:
    a, b = numbers
    return a, b


def collectives_in(text: str, slices: Sequence[int] = (0,)) -> Counter[str]:
    """Bytes that each device sends in the collectives of a compiled program, by kind, if they go around rings.

    Of n devices each sends (n - 1) / n of what an all-gather gives, of what an all-to-all has and of what a
    reduce-scatter takes, twice that of an all-reduce, and all of a permutation. An asynchronous collective counts where
    it starts; an all-reduce of which a fusion keeps a device's slice is a reduce-scatter. slices: of each device of the
    program; what is sent to another slice has a kind of its own, also where the runtime of several slices sends it.
    """
    found: Counter[str] = Counter()
    for one in executed(text):
        if match := _KIND.fullmatch(one.instruction.kind):
            groups = groups_in(one.instruction.line, len(slices))
            kind, sent = _sent(one, match[1], bool(match[2]), groups.shape[1])
            crosses = len(set(slices)) > 1 and (np.ptp(np.asarray(slices)[groups], axis=1) > 0).any()
            found[kind + BETWEEN * bool(crosses)] += one.times * sent
        elif one.instruction.kind == "send" and (match := _MEGASCALE.search(one.instruction.line)):
            kind, given = match[2].lower().replace("_", "-"), max(sizes(one.instruction.shape))
            found[kind + BETWEEN] += one.times * _of_slices(kind, given, _slices(match[1]))
    return +found


def _of_slices(kind: str, given: int, n: int) -> int:
    """Bytes that each device sends of an array of so many bytes in a collective between n slices."""
    if kind == "all-gather":
        return given * (n - 1)
    if kind == "all-reduce":
        return 2 * given * (n - 1) // n
    return given * (n - 1) // n if kind in ("reduce-scatter", "all-to-all") else given


def _slices(listed: str) -> int:
    """How many slices "1,2" or "1:4" are."""
    ends = ([int(n) for n in part.split(":")] for part in listed.split(","))
    return sum(each[-1] - each[0] + 1 for each in ends)


def _sent(one: Executed, kind: str, starts: bool, n: int) -> tuple[str, int]:
    """The kind of a collective among groups of n devices, and the bytes that each sends once."""
    size = sum(sizes(one.instruction.shape))
    if kind == "collective-permute":
        return kind, max(sizes(one.instruction.shape), default=0) if starts else size
    if starts and kind == "all-gather":
        size = size * n // (n + 1)  # the result of a start is a tuple of what is sent and what arrives
    if kind == "reduce-scatter":
        return kind, size * (n - 1)
    if kind == "all-reduce":
        if one.fusion is not None and sum(sizes(one.fusion.shape)) * n <= size:
            return "reduce-scatter", size * (n - 1) // n
        return kind, 2 * size * (n - 1) // n
    return kind, size * (n - 1) // n


def groups_in(line: str, devices: int) -> np.ndarray:
    """int[groups, n]: the devices of each group of a collective; all in one where its line names none."""
    if match := _IOTA.search(line):
        count, size, dims, order = match.groups()
        found = np.arange(int(count) * int(size)).reshape([int(n) for n in dims.split(",")])
        return (found.transpose([int(n) for n in order.split(",")]) if order else found).reshape(int(count), int(size))
    if match := _NAMED.search(line):
        return _along(*([one.groups() for one in _AXIS.finditer(part)] for part in match.groups()))
    if match := _LISTED.search(line):
        listed = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
        if listed and len({len(group) for group in listed}) == 1:
            return np.asarray(listed)
    return np.arange(devices)[None]


def _along(mesh: list[tuple[str, ...]], axes: list[tuple[str, ...]]) -> np.ndarray:
    """The groups along some axes of a mesh of devices in their order, [(name, size, ...)], as Shardy prints them.

    An axis may be a part of one of the mesh: "x":(2)4 is the middle one of x as 2 x 4 x the rest.
    """
    shape, places = list[int](), dict[tuple[str, int], int]()
    cuts: dict[str, set[int]] = {name: {1, int(size)} for name, size, *_ in mesh}
    for name, _, before, size in axes:
        cuts[name] |= {int(before), int(before) * int(size)} if size else set()
    for name, marks in cuts.items():
        ordered = sorted(marks)
        for low, high in pairwise(ordered):
            places[name, low] = len(shape)
            shape.append(high // low)
    chosen = []
    for name, _, before, size in axes:
        low, high = (int(before), int(before) * int(size)) if size else (1, max(cuts[name]))
        chosen += [at for (other, start), at in places.items() if other == name and low <= start < high]
    rest = [at for at in range(len(shape)) if at not in chosen]
    groups = np.arange(int(np.prod(shape))).reshape(shape).transpose([*rest, *chosen])
    return groups.reshape(-1, int(np.prod([shape[at] for at in chosen])))
