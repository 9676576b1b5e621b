"""Bytes that a compiled program moves from and to each device's main memory, read off its text."""

from __future__ import annotations

import re

from jaxrl_llm.plan.program.text import Computation, Instruction, computations, executed, fused, sizes

_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}, \w+=")
_NOT_MOVED = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "iota"}
_SLICES = ("dynamic-slice", "slice", "gather")


def traffic_in(text: str) -> int:
    """Bytes that a program reads from and writes to each device's main memory.

    An instruction reads its operands and writes its results that are there. A slice, alone or in a fusion, reads what
    it gives, and an update in place writes its piece.
    """
    found, _ = computations(text)
    return sum(
        one.times * _traffic(one.instruction, one.computation, found)
        for one in executed(text)
        if one.fusion is None and one.instruction.kind not in _NOT_MOVED
        if not one.instruction.kind.endswith("-done")
    )


def _main(shape: str) -> int:
    return sum(sizes(shape, only_main=True))


def _traffic(one: Instruction, inside: Computation, found: dict[str, Computation]) -> int:
    operands = [inside[name].shape if name in inside else "" for name in one.operands]
    if one.kind in _SLICES:
        return 2 * _main(one.shape)
    if one.kind == "dynamic-update-slice":
        return 2 * _main(operands[1]) if len(operands) > 1 else 0
    if one.kind in ("copy-start", "slice-start"):  # a tuple of what arrives, where it is from, and a mark
        return min((size for size in sizes(one.shape) if size > 64), default=0)
    if one.kind == "fusion":
        return _fusion_traffic(one, operands, fused(one, found))
    written = _main(one.shape)
    if one.kind == "custom-call" and (match := _ALIASED.search(one.line)):
        # In the memory of operands, of which a kernel writes a piece.
        arrays = sizes(one.shape)
        written -= sum(arrays[int(i)] for i in re.findall(r"\{(\d+)\}: \(", match[1]) if int(i) < len(arrays))
    return max(written, 0) + sum(map(_main, operands))


def _fusion_traffic(one: Instruction, operands: list[str], inner: Computation) -> int:
    users: dict[str, list[Instruction]] = {}
    for each in inner.values():
        for name in each.operands:
            users.setdefault(name, []).append(each)
    total = 0
    for each in inner.values():
        if each.kind != "parameter":
            continue
        number = int(each.line.partition("parameter(")[2].partition(")")[0])
        read = _main(operands[number]) if number < len(operands) else 0
        of = users.get(each.name, [])
        if read and of and all(user.kind in (*_SLICES, "dynamic-update-slice") for user in of):
            parts = (sum(sizes(user.shape)) for user in of if user.kind in _SLICES)
            read = min(read, sum(parts))
        total += read
    updates = [each for each in inner.values() if each.kind == "dynamic-update-slice"]
    written = _main(one.shape)
    for update in updates:
        whole, piece = sum(sizes(update.shape)), inner.get(update.operands[1])
        if piece is not None and whole <= written:
            written -= whole - sum(sizes(piece.shape))
    return total + written
