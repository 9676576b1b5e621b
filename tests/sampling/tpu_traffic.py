"""What a program compiled for a TPU moves to and from the chip's main memory (HBM), read off its text."""

from __future__ import annotations

import math
import re

BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional"}


def sizes(shape: str, only_hbm: bool = True) -> list[int]:
    """Bytes of the arrays in a shape; with `only_hbm` of those that are not in a memory space of the core, S(1) ..."""
    found = []
    for dtype, dims, layout in ARRAY.findall(shape):
        if dtype in BYTES and not (only_hbm and "S(" in layout):
            found.append(BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n))
    return found


def loop_traffic(text: str) -> int:
    """Bytes that one turn of the program's longest loop body reads from and writes to HBM.

    An instruction reads its operands and writes its results that are in HBM. Asynchronous copies and slices move what
    arrives; a gather reads the rows that it gives; an update in place writes its piece, which is too small to count.
    XLA's own "bytes accessed" counts the core's memories too, and a prefetched slice as the whole array.
    """
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if start := re.match(r"%([\w.\-]+) \(", line):
            lines = bodies.setdefault(start.group(1), [])
        lines.append(line)
    body = max((lines for name, lines in bodies.items() if "fused" not in name), key=len)
    instructions = [m.groups() for m in map(INSTRUCTION.match, body) if m]
    shapes = {name: shape for name, shape, _, _ in instructions}
    total = 0
    for name, shape, kind, rest in instructions:
        operands = [shapes.get(operand, "") for operand in re.findall(r"%([\w.\-]+)", rest.split("), ")[0])]
        if (
            kind in NOTHING
            or kind.endswith("-done")
            or "dynamic_update_slice" in name
            or kind == "dynamic-update-slice"
        ):
            continue
        if kind in ("copy-start", "slice-start"):
            total += min((size for size in sizes(shape, only_hbm=False) if size > 64), default=0)
        elif "gather" in name or kind == "gather":
            total += 2 * sum(sizes(shape, only_hbm=False))
        else:
            total += sum(sizes(shape)) + sum(sum(sizes(operand)) for operand in operands)
    return total
