"""Where the time of a program goes that was compiled for a TPU without one, by the TPU compiler's own clock.

The compiler writes estimated cycles beside most instructions. A Pallas kernel has none: it counts with the least
seconds that its declared operations take at the chip's peak, or its bytes at the memory's bandwidth. Neither have
collectives, which may run beside all else: what they take over the links is stated apart. What runs beside other
instructions, as copies between memories do that start and end separately, counts nothing.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm.distributed.chips import Chip
from jaxrl_llm.plan.program.text import Computation, Instruction, computations, executed, fused

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"?(\d+)')
_SOURCE = re.compile(r'op_name="([^"]*)"')
KERNEL = 'custom_call_target="tpu_custom_call"'

PRODUCTS, KERNELS, MOVES, OTHERS = "matrix products", "kernels", "copies, broadcasts and converts", "others"
_MOVED = {"copy", "transpose", "broadcast", "convert"}
_RUN_OTHERS = ("while", "conditional", "call")
_FREE = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "iota"}
_WRAPPERS = re.compile(r"^(jit|jvp|transpose|vmap|checkpoint|remat|closed_call|while|body|cond|shard_map|branch_\d+_fun"
                       r"|rematted_computation|gradient|pjit|custom_\w+)(\(|$)")  # fmt: skip


class Line(NamedTuple):
    """An instruction that takes time, each of its runs counted."""

    name: str
    kind: str  # PRODUCTS, KERNELS, MOVES or OTHERS
    source: str  # the named scopes and the operation that it comes from
    seconds: float
    times: int


class Kernel(NamedTuple):
    """What a Pallas kernel declares, over all its runs."""

    name: str
    flops: int
    bytes: int

    def seconds(self, chip: Chip) -> float:
        """On the more loaded of the chip's arithmetic and memory; 0 where its rates are not known."""
        return max(_over(self.flops, chip.peak * 1e12), _over(self.bytes, chip.bandwidth * 1e9))


def _over(number: float, rate: float) -> float:
    return number / rate if rate else 0.0


def cycles_in(text: str) -> int:
    """The compiler's cycles of all instructions outside of fusions, loops as often as they run; without kernels."""
    return sum(cycles * times for _, times, cycles, _ in _estimated(text))


def kernels_in(text: str) -> list[Kernel]:
    """The Pallas kernels of a program by name, in their order."""
    flops, moved = Counter[str](), Counter[str]()
    for one in executed(text):
        if KERNEL in one.instruction.line:
            kernel = _declared(one.instruction)
            flops[kernel.name] += one.times * kernel.flops
            moved[kernel.name] += one.times * kernel.bytes
    return [Kernel(name, flops[name], moved[name]) for name in flops]


def lines_in(text: str, chip: Chip) -> list[Line]:
    """Every instruction that takes time, the dearest first."""
    found = []
    for one, times, cycles, bodies in _estimated(text):
        found.append(Line(one.name, _kind(one, bodies), scopes_of(one), times * _over(cycles, chip.clock * 1e9), times))
    for each in executed(text):
        if KERNEL in each.instruction.line:
            kernel, source = _declared(each.instruction), scopes_of(each.instruction)
            found.append(Line(kernel.name, KERNELS, source, each.times * kernel.seconds(chip), each.times))
    return sorted(found, key=lambda line: -line.seconds)


def seconds_of_one(one: Instruction, chip: Chip) -> float:
    """Seconds of one run of an instruction outside of fusions; 0 where it has no estimate, or only runs others."""
    if KERNEL in one.line:
        return _declared(one).seconds(chip)
    match = None if one.kind in _RUN_OTHERS else _CYCLES.search(one.line)
    return _over(int(match[1]), chip.clock * 1e9) if match else 0.0


def by_source(lines: list[Line]) -> list[Line]:
    """The lines of one source together, the dearest first."""
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        key = line.kind, line.source
        before = found.get(key, line._replace(seconds=0.0, times=0))
        found[key] = line._replace(seconds=line.seconds + before.seconds, times=line.times + before.times)
    return sorted(found.values(), key=lambda line: -line.seconds)


def by_kind(lines: list[Line]) -> dict[str, float]:
    """Seconds of each kind."""
    found = dict.fromkeys((PRODUCTS, KERNELS, MOVES, OTHERS), 0.0)
    for line in lines:
        found[line.kind] += line.seconds
    return found


def _estimated(text: str) -> Iterator[tuple[Instruction, int, int, dict[str, Computation]]]:
    """Instructions that have an estimate, how often they run, their cycles, and all computations of the program."""
    bodies, _ = computations(text)
    for one in executed(text):
        apart = one.fusion is not None or one.instruction.kind in _RUN_OTHERS
        match = None if apart or KERNEL in one.instruction.line else _CYCLES.search(one.instruction.line)
        if match:
            yield one.instruction, one.times, int(match[1]), bodies


def _kind(one: Instruction, bodies: dict[str, Computation]) -> str:
    kinds = {each.kind for each in fused(one, bodies).values()} if one.kind == "fusion" else {one.kind}
    if kinds & {"convolution", "dot"}:
        return PRODUCTS
    return MOVES if kinds & _MOVED and kinds <= _MOVED | _FREE else OTHERS


def _declared(one: Instruction) -> Kernel:
    """Of one run of a kernel."""
    match = _ESTIMATE.search(one.line)
    said = dict(_NUMBER.findall(match[1])) if match else {}
    parts = (_SOURCE.search(one.line) or [""])[0].rstrip('"').split("/")
    named = len(parts) > 1 and parts[-1] == "pallas_call"
    name = parts[-2] if named else one.name.partition(".")[0]
    return Kernel(name, int(said.get("flops", 0)), int(said.get("bytes_accessed", 0)))


def scopes_of(one: Instruction) -> str:
    """The scopes of an instruction without what only wraps functions; "backward" and "recomputed" in front."""
    match = _SOURCE.search(one.line)
    if match is None:
        return one.name.rstrip("0123456789.")
    parts = match[1].split("/")
    kept = [part for part in parts if not _WRAPPERS.match(part) and "->" not in part]
    again = ["recomputed"] if "rematted_computation" in parts else []
    back = ["backward"] if not again and any(part.startswith("transpose(") for part in parts) else []
    return " / ".join(back + again + (kept or parts[-1:]))
