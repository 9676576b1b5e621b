"""What a compiled program costs each device: memory, and bytes that collectives move.

Both are read off the compiled program. A loop's collectives count as often as the loop runs, where the compiler knows
how often that is; otherwise once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, NamedTuple

from jaxrl_llm.distributed.mesh import Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "bf16": 16,
    "f16": 16,
    "s16": 16,
    "u16": 16,
    "s64": 64,
    "f64": 64,
}
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r"known_trip_count[^\d]*(\d+)")


class Cost(NamedTuple):
    """Of one program, for each device, in bytes."""

    name: str
    arguments: int
    results: int  # beyond those that take the memory of donated arguments
    temporaries: int
    collectives: dict[str, int]  # kind -> bytes of what it gives, over the whole program

    @property
    def peak(self) -> int:
        """Arguments, results and temporaries together."""
        return self.arguments + self.results + self.temporaries


def cost_of(program: Program) -> Cost:
    """The cost of a program that was compiled ahead of time."""
    memory: Any = program.compiled.memory_analysis()
    return Cost(
        program.name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        dict(collectives_in(program.compiled.as_text() or "")),
    )


def collectives_in(text: str) -> Counter[str]:
    """Bytes that the collectives of a compiled program give on each device, by kind.

    An asynchronous collective counts where it starts, with what arrives.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", list[str]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = bodies.setdefault(head[1], [])
            entry = head[1] if line.startswith("ENTRY") else entry
        elif " = " in line:
            lines.append(line)
    known: dict[str, Counter[str]] = {}

    def count(name: str) -> Counter[str]:
        if name not in known:
            known[name] = Counter()
            for line in bodies.get(name, ()):
                known[name] += _of_instruction(line)
                times = int(trips[1]) if (trips := _TRIPS.search(line)) and " while(" in line else 1
                called = _CALLED.findall(line) + [
                    branch.strip().lstrip("%") for group in _BRANCHES.findall(line) for branch in group.split(",")
                ]
                for inner in called:
                    known[name] += Counter({kind: times * size for kind, size in count(inner).items()})
        return known[name]

    return count(entry)


def _of_instruction(line: str) -> Counter[str]:
    _, _, right = line.partition(" = ")
    for kind in KINDS:
        if match := re.search(rf"\s{kind}(-start)?\(", right):
            sizes = [_bytes(*array) for array in _ARRAY.findall(right[: match.start()])]
            # The result of a start is a tuple of what is sent, what arrives, and marks.
            return Counter({kind: max(sizes, default=0) if match[1] else sum(sizes)})
    return Counter()


def _bytes(dtype: str, dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n) * _BITS.get(dtype, 32) // 8
