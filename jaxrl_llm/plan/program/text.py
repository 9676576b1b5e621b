"""The text of a compiled program, instruction by instruction, each with the number of times that it runs."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "s64": 64, "u64": 64,
    "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_BODY, _CONDITION = re.compile(r"body=%?([\w.\-]+)"), re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r"known_trip_count[^\d]*(\d+)")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
APART = ("fusion", "call-start")  # whose computations take no time of their own: one estimate covers all, or none


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # the type of its result
    kind: str
    operands: tuple[str, ...]
    line: str


Computation = dict[str, Instruction]  # by name, in order


class Executed(NamedTuple):
    """An instruction of a program that runs."""

    instruction: Instruction
    times: int
    computation: Computation  # that it is in
    fusion: Instruction | None  # that the computation is of; or the call that other cores than the chip's main run


def sizes(shape: str, only_main: bool = False) -> list[int]:
    """Bytes of the arrays in a type; with `only_main`, of those that are in the device's main memory."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        if not (only_main and "S(" in layout):
            found.append(math.prod(int(n) for n in dims.split(",") if n) * BITS.get(dtype, 32) // 8)
    return found


def computations(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program by name, and the name of the one that it begins with."""
    found: dict[str, Computation] = {}
    inside: Computation = {}
    entry = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            inside = found.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif parts := _INSTRUCTION.match(line):
            name, shape, kind, rest = parts.groups()
            operands = tuple(_OPERAND.findall(rest.split("), ")[0]))
            inside[name] = Instruction(name, shape, kind, operands, line)
    return found, entry


def turn_of(text: str) -> str:
    """The text of a program that is one turn of the longest loop which the given program begins; itself without one.

    What runs before and after the loop is left out, as the copies of weights that XLA makes once for all turns.
    """
    found, entry = computations(text)
    bodies = [_name(_BODY, one.line) for one in found.get(entry, {}).values() if one.kind == "while"]
    if not bodies:
        return text
    longest = max(bodies, key=lambda name: len(found.get(name, {})))
    heads = [(f"ENTRY %{entry} (", f"%{entry} ("), (f"%{longest} (", f"ENTRY %{longest} (")]
    return "\n".join(
        next((new + line.removeprefix(old) for old, new in heads if line.startswith(old)), line)
        for line in text.splitlines()
    )


def executed(text: str) -> Iterator[Executed]:
    """Every instruction, those inside fusions too, with the number of times that it runs.

    A loop runs as often as the compiler knows; one whose end depends on data counts once. Each branch of a conditional
    counts once.
    """
    found, entry = computations(text)
    return _visit(found, entry, 1, None)


def _visit(found: dict[str, Computation], name: str, times: int, fusion: Instruction | None) -> Iterator[Executed]:
    inside = found.get(name, {})
    for one in inside.values():
        yield Executed(one, times, inside, fusion)
        for inner, each in called_by(one, found):
            yield from _visit(found, inner, times * each, one if one.kind in APART else fusion)


def nested_instructions(one: Instruction, found: dict[str, Computation]) -> Iterator[Executed]:
    """Every instruction that one instruction runs in computations of its own."""
    for name, times in called_by(one, found):
        yield from _visit(found, name, times, one if one.kind in APART else None)


def called_by(one: Instruction, found: dict[str, Computation]) -> list[tuple[str, int]]:
    """The computations that an instruction runs, and how often: see `executed`."""
    if one.kind == "while":
        return [(_name(_BODY, one.line), _trips(one.line, found))]
    if one.kind not in ("call", "conditional", "async-start", *APART):
        return []
    branches = (branch for group in _BRANCHES.findall(one.line) for branch in group.split(","))
    return [(name, 1) for name in [*_CALLED.findall(one.line), *(branch.strip().lstrip("%") for branch in branches)]]


def fused(one: Instruction, found: dict[str, Computation]) -> Computation:
    """The computation of a fusion."""
    return found.get(_name(_CALLED, one.line), {})


def _name(pattern: re.Pattern[str], line: str) -> str:
    match = pattern.search(line)
    return match[1] if match else ""


def _trips(line: str, found: dict[str, Computation]) -> int:
    """How often a loop runs: as its line says, or by the bound that its condition compares a counter with; else 1."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = found.get(_name(_CONDITION, line), {}).values()
    bounds = [int(match[1]) for one in condition if (match := _BOUND.search(one.line))]
    compared = any(one.kind == "compare" and "direction=LT" in one.line for one in condition)
    return bounds[0] if compared and len(bounds) == 1 else 1
