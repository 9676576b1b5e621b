"""The collectives of a compiled program: what each device sends in them, and among whom."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jaxrl_llm.plan.program.text import Computation, Executed, Instruction, executed, sizes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
BETWEEN = " between slices"  # after the kind of a collective that does not stay within a slice
_KIND = re.compile(rf"({'|'.join(KINDS)})(-start)?")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_AXIS = re.compile(r"['\"]([^'\"]+)['\"](?:=(\d+)|:\((\d+)\)(\d+))?")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
# What the runtime of several slices does: it takes an array from each device, and names the slices and the kind.
_MEGASCALE = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}.*_xla_megascale_transfer_type="(\w+)"')
# An asynchronous collective that a fusion carries on stands in three fusions: one starts it, one or more carry it on
# beside their own work, one ends it.
_STARTS, _ENDS = 'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="AsyncCollectiveDone"'
_CARRIED = '"async_collective_fusion_config"'
START, CARRY, END = "start", "carry", "end"


def collectives_in(text: str, slices: Sequence[int] = (0,)) -> Counter[str]:
    """Bytes that each device sends in the collectives of a compiled program, by kind, if they go around rings.

    Of n devices each sends (n - 1) / n of what an all-gather gives, of what an all-to-all has and of what a
    reduce-scatter takes, twice that of an all-reduce, and all of a permutation. An asynchronous collective counts where
    it starts; an all-reduce of which a fusion keeps a device's slice is a reduce-scatter. slices: of each device of the
    program; what is sent to another slice has a kind of its own, also where the runtime of several slices sends it.
    """
    found: Counter[str] = Counter()
    for one in executed(text):
        if sent := sent_by(one, slices):
            found[sent[0]] += one.times * sent[1]
    return +found


def sent_by(one: Executed, slices: Sequence[int]) -> tuple[str, int] | None:
    """The kind of a collective, and the bytes that each device sends once; None for an instruction that sends nothing.

    Nor does one that carries on or ends what another has started.
    """
    line = one.instruction.line
    if match := _KIND.fullmatch(one.instruction.kind):
        if one.fusion is not None and part_of_collective(one.instruction, one.computation) in (CARRY, END):
            return None
        groups = groups_in(line, len(slices))
        kind, sent = _sent(one, match[1], bool(match[2]), groups.shape[1])
        crosses = len(set(slices)) > 1 and (np.ptp(np.asarray(slices)[groups], axis=1) > 0).any()
        return kind + BETWEEN * bool(crosses), sent
    if one.instruction.kind == "send" and (match := _MEGASCALE.search(line)):
        kind, given = match[2].lower().replace("_", "-"), max(sizes(one.instruction.shape))
        ends = ([int(n) for n in part.split(":")] for part in match[1].split(","))  # "1,2" or "1:4"
        return kind + BETWEEN, _of_slices(kind, given, sum(each[-1] - each[0] + 1 for each in ends))
    return None


def part_of_collective(one: Instruction, inside: Computation) -> str:
    """Which part of an asynchronous collective the fusion with this computation does; "" if it does all of it."""
    if _CARRIED not in one.line:
        return ""
    lines = [each.line for each in inside.values() if each.kind == "custom-call"]
    if any(_STARTS in line for line in lines):
        return START
    return END if any(_ENDS in line for line in lines) else CARRY


def _of_slices(kind: str, given: int, n: int) -> int:
    """Bytes that each device sends of an array of so many bytes in a collective between n slices."""
    if kind == "all-gather":
        return given * (n - 1)
    if kind == "all-reduce":
        return 2 * given * (n - 1) // n
    return given * (n - 1) // n if kind in ("reduce-scatter", "all-to-all") else given


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
