"""What a compiled program costs each device: memory, operations, bytes of its memory, and bytes that collectives send.

All of it is read off the compiled program, but for the operations, which are counted on its jaxpr: XLA counts the body
of a loop once, and of a Pallas kernel nothing. Loops count as often as they run, see `text.executed`; recomputation
too.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm.distributed.aot import Program
from jaxrl_llm.distributed.chips import chip_of_kind
from jaxrl_llm.plan.program.collectives import collectives_in
from jaxrl_llm.plan.program.cycles import cycles_in, kernels_in
from jaxrl_llm.plan.program.schedule import scheduled
from jaxrl_llm.plan.program.text import Computation, Instruction, computations, executed, fused, sizes, turn_of


class Cost(NamedTuple):
    """Of one program, for each device."""

    name: str
    arguments: int  # bytes, like all but `flops` and `cycles`
    given: int  # the arguments without the padding of the device's layouts
    results: int  # beyond those that take the memory of donated arguments
    temporaries: int  # see `temporaries_of`
    flops: float  # of matrix products
    traffic: int  # read from and written to its memory
    collectives: dict[str, int]  # sent to other devices, by kind
    cycles: int  # by the TPU compiler's estimate, without collectives and Pallas kernels; 0 where it gives none
    kernels: dict[str, tuple[int, int]]  # operations and bytes that Pallas kernels declare, by name
    exposed: float = 0.0  # seconds of collectives beside which, by the TPU compiler's schedule, nothing runs

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
    chip = chip_of_kind(next(iter(devices)).device_kind) if devices else None
    slices = slices or [0] * len(devices)
    return Cost(
        program.name,
        memory.argument_size_in_bytes,
        _given(program),
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries_of(memory, platform),
        matrix_flops(program.jaxpr, platform) / max(len(devices), 1),
        traffic_in(text),
        dict(collectives_in(text, slices)),
        cycles_in(text),
        {kernel.name: (kernel.flops, kernel.bytes) for kernel in kernels_in(text)},
        scheduled(text, chip, slices).exposed if chip is not None and chip.clock else 0.0,
    )


def temporaries_of(memory: Any, platform: str) -> int:
    """Bytes of a program's temporaries, of its `memory_analysis()` for a platform.

    What the TPU compiler states as such counts more than there is where arguments are donated: 14.4 GiB for an update
    of Qwen3.5-9B to whose temporaries it assigns 8.8. There they are what is live at the peak beside arguments and
    results. What lies unused between them is not included (2.5 % of that program); the compiler refuses a program that
    does not fit with it.
    """
    if platform != "tpu":
        return memory.temp_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return max(memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results, 0)


def _given(program: Program) -> int:
    """Bytes of the arguments on each device, those left out that the program does not read."""
    trees = program.lowered.args_info, program.compiled.input_shardings
    given = zip(*map(program.compiled.in_tree.flatten_up_to, trees), strict=True)
    return sum(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x, place in given if place is not None)


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
        for name in Cost._fields if name not in ("name", "collectives", "kernels", "exposed")
    }  # fmt: skip
    collectives = {kind: between(shallow.collectives.get(kind, 0), deep.collectives.get(kind, 0)) for kind in kinds}
    kernels: dict[str, Any] = {
        name: tuple(map(between, shallow.kernels.get(name, (0, 0)), found)) for name, found in deep.kernels.items()
    }
    exposed = max(shallow.exposed + (deep.exposed - shallow.exposed) * part, 0.0)
    return deep._replace(**numbers, collectives=collectives, kernels=kernels, exposed=exposed)


def followed(first: Cost, then: Cost, times: int) -> Cost:
    """The cost of a program and of so many calls of another one after it, of which all results are kept."""

    def add(a: Any, b: Any) -> Any:
        return a + times * b

    kinds = sorted({*first.collectives, *then.collectives})
    found: dict[str, Any] = {
        name: (max if name in ("arguments", "given", "temporaries") else add)(getattr(first, name), getattr(then, name))
        for name in Cost._fields
        if name not in ("name", "collectives", "kernels")
    }
    found["collectives"] = {kind: add(first.collectives.get(kind, 0), then.collectives.get(kind, 0)) for kind in kinds}
    found["kernels"] = {
        name: tuple(map(add, *(x.kernels.get(name, (0, 0)) for x in (first, then))))
        for name in {**first.kernels, **then.kernels}
    }
    return first._replace(**found)


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
            read = min(read, sum(sum(sizes(user.shape)) for user in of if user.kind in _SLICES))
        total += read
    updates = [each for each in inner.values() if each.kind == "dynamic-update-slice"]
    written = _main(one.shape)
    for update in updates:
        whole, piece = sum(sizes(update.shape)), inner.get(update.operands[1])
        if piece is not None and whole <= written:
            written -= whole - sum(sizes(piece.shape))
    return total + written


def matrix_flops(jaxpr: Any, platform: str = "tpu") -> float:
    """Operations (2 for each multiplication and addition) of all devices together.

    jaxpr: a Jaxpr or ClosedJaxpr. platform: "tpu", "cuda" or "cpu", for functions that depend on it. A scan counts each
    of its turns, and a Pallas kernel each point of its grid, or what it declares where the grid or the turns of a loop
    are known on the device alone; a while loop counts once, and of a conditional the branch with most. What one device
    does in a `shard_map` is multiplied by the number of its devices.
    """
    return sum(_of_equation(equation, platform) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: Any, platform: str) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return _product(equation, contracted)
    if name == "ragged_dot_general":  # in groups: each row meets one group's matrix, or adds to one
        dims = params["ragged_dot_dimension_numbers"]
        (contracted, of_right), _ = dims.dot_dimension_numbers
        if not set(dims.lhs_ragged_dimensions) & set(contracted):
            return _product(equation, contracted)
        left, right = (x.aval.shape for x in equation.invars[:2])
        return 2.0 * math.prod(left) * math.prod(right) / math.prod(right[axis] for axis in of_right)
    if name == "cond":
        branches, platforms = params["branches"], params.get("branches_platforms")
        if platforms is not None:  # the one branch that this platform takes
            own = [i for i, names in enumerate(platforms) if names is not None and platform in names]
            branches = (branches[(own or [platforms.index(None)])[0]],)
        return max(matrix_flops(branch, platform) for branch in branches)
    times = 1.0
    if name == "scan":
        times = params["length"]
    elif name == "pallas_call":
        grid, declared = params["grid_mapping"].grid, params.get("cost_estimate")
        if declared is not None and not (all(isinstance(size, int) for size in grid) and _counted(params["jaxpr"])):
            return float(declared.flops)  # how many points the grid has, or turns a loop, is known on the device only
        times = math.prod(size for size in grid if isinstance(size, int))
    elif name == "shard_map":
        axes = params.get("newly_manual_axes") or params.get("manual_axes") or params["mesh"].axis_names
        times = math.prod(params["mesh"].shape[axis] for axis in axes)
    elif name == "while":
        return matrix_flops(params["body_jaxpr"], platform)
    return times * sum(matrix_flops(inner, platform) for inner in _inside(params))


def _counted(jaxpr: Any) -> bool:
    """Whether it is known how often its loops turn."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return all(one.primitive.name != "while" and all(map(_counted, _inside(one.params))) for one in inner.eqns)


def _product(equation: Any, contracted: tuple[int, ...]) -> float:
    left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one
