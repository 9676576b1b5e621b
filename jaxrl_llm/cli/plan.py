"""`jaxrl plan`: whether a run fits a topology, what it costs, and what to change."""

import dataclasses
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path

from jaxrl_llm.cli.options import flag, parse_config, short_help, take
from jaxrl_llm.utils.errors import InputError, require

PICTURES = (".svg", ".png", ".pdf", ".jpg")
_OWN = (
    ("--topology TOPOLOGY", "The devices: v5e:4x4, h100:8, cpu:1 and so on"),
    ("--slices N", "Of a TPU topology: that many slices"),
    ("--json", "Print a JSON object"),
    ("--shardings", "Print every array with its sharding and bytes"),
    ("--picture FILE", "Draw the memory over the phases"),
)


def plan_command(arguments: list[str]) -> int:
    """Whether a run fits on some devices, its least time and price, and what to change: --topology v5e:4x4 and so on.

    A topology is a TPU slice (v5e:4x4; --slices N: several of them), GPUs (h100:8) or CPUs (cpu:1). None of them need
    be there, nor the model's weights. The run's programs are compiled for TPUs (needs libtpu) and CPUs, and lowered
    for GPUs, whose memory is estimated. Where the run does not fit, mesh, micro-batches, precision, caches and adapters
    are searched, and the command of the best configuration is printed. --json prints a JSON object, --shardings every
    array with its sharding and bytes, --picture FILE draws the memory over the phases. With --max-staleness the command
    estimates how many devices should sample, and how many learn. Other options are those of jaxrl train.
    """
    usage = "jaxrl plan --topology TOPOLOGY [OPTIONS of jaxrl train]"
    arguments = short_help(arguments, usage, str(plan_command.__doc__), _OWN)
    given = list(arguments)
    topology, arguments = take(arguments, "--topology")
    slices, arguments = take(arguments, "--slices")
    picture, arguments = take(arguments, "--picture")
    as_object, arguments = flag(arguments, "--json")
    table, arguments = flag(arguments, "--shardings")
    config = parse_config(arguments, plan_command.__doc__)
    if topology is None:
        raise InputError("name the devices: --topology v5e:4x4, h100:8 or cpu:1")
    if slices is not None and not slices.isdecimal():
        raise InputError(f"--slices is {slices}, but must be a number")
    require("--slices", int(slices or 1), least=1, most=2**16)
    if picture is not None and not Path(picture).absolute().parent.is_dir():
        raise InputError(f"--picture {picture!r} cannot be written: give the name of a file in a folder that exists")
    if picture is not None and Path(picture).suffix not in PICTURES:
        raise InputError(f"--picture {picture!r} cannot be drawn: its name must end in {', '.join(PICTURES)}")
    _prepare(topology)
    from jaxrl_llm.distributed.chips import topology_of  # here: importing JAX takes seconds, and reads what was set
    from jaxrl_llm.plan import choose_mesh
    from jaxrl_llm.plan import split as plan_split
    from jaxrl_llm.plan import table as plan_table
    from jaxrl_llm.plan.search import search
    from jaxrl_llm.plan.shapes import shapes_of
    from jaxrl_llm.plan.table import sharding_table
    from jaxrl_llm.training.config.auto_dtype import AUTO, dtype_for
    from jaxrl_llm.training.config.method_settings import fitted

    devices = topology_of(topology, int(slices or 1))
    config = fitted(config)
    if config.dtype == AUTO:
        config = dataclasses.replace(config, dtype=dtype_for(devices.platform))
    if config.samplers:
        raise InputError(
            "plans are of one program's devices: leave out samplers, and plan max_staleness with all devices"
        )
    if config.max_staleness:
        if table or picture is not None:
            raise InputError("of a run with max_staleness, jaxrl plan tells the split of the devices: leave "
                             "--shardings and --picture out")  # fmt: skip
        splits = plan_split.splits(config, devices)
        command = shlex.join(["jaxrl", "train", *_without(given, "--sampler-devices")])
        print(json.dumps(plan_split.as_json(splits)) if as_object else plan_split.as_text(splits, command))
        return 0 if plan_split.best(splits).fits else 1
    asked, config = config, choose_mesh.with_chosen_meshes(config, devices)
    chosen = ["--mesh", config.mesh] if config.mesh != asked.mesh else []
    chosen += ["--sampling-mesh", config.sampling_mesh] if config.sampling_mesh != asked.sampling_mesh else []
    if table:
        print(plan_table.shardings_text(sharding_table(shapes_of(config, devices))))
        return 0
    found = search(config, devices, lambda text: print(text, file=sys.stderr, flush=True), asked)
    shown = found.best or found.first
    if picture is not None and shown is not None:
        plan_table.write_picture(plan_table.plan_json(shown), picture)
    given = _without(given) + chosen if found.best is None else _without(given, "--mesh")
    command = shlex.join(["jaxrl", "train", *given])
    print(json.dumps(plan_table.as_json(found)) if as_object else plan_table.as_text(found, command))
    return 0 if shown is not None and shown.fits else 1


def _prepare(topology: str) -> None:
    """Set JAX up, before it starts, to compile without the devices. CPU devices stand in for GPUs."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    count = topology.partition(":")[2]
    if count.isdecimal() and 1 < int(count) <= 4096:
        own = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {own}".strip()
    beside = Path(sys.prefix) / "aot"  # where `make` puts libtpu: beside JAX it would make every start print warnings
    if not count.isdecimal() and importlib.util.find_spec("libtpu") is None and (beside / "libtpu").is_dir():
        sys.path.append(str(beside))


def _without(arguments: list[str], *names: str) -> list[str]:
    """The arguments without those options and their values, and without those of `jaxrl plan`."""
    for name in ("--topology", "--slices", "--picture", *names):
        _, arguments = take(arguments, name)
    return [argument for argument in arguments if argument not in ("--json", "--shardings")]
