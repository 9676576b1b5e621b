"""Commands about this installation: jaxrl demo, jaxrl env, jaxrl help and jaxrl --version."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from jaxrl_llm.cli.options import parse
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.training.config import Dtype
from jaxrl_llm.utils.errors import InputError, gather, missing_package
from jaxrl_llm.version import __version__

FIRST_STEPS = """First steps:
  jaxrl demo                                          trains a 135M-parameter model on sums, in some minutes on a CPU
  jaxrl train --prompts data.jsonl --rewards number_match --output runs/a     your own data, a row a line
  jaxrl algorithms                                    methods, and where to start; jaxrl help COMMAND says more"""


def version_line() -> str:
    """The version, as jaxrl --version prints it."""
    return f"jaxrl_llm {__version__} (Python {sys.version.split()[0]})"


def env_command(arguments: list[str]) -> int:
    """Print the versions of the packages, the commit and the devices; --json as JSON. For reports of problems."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        json: bool = False
        """Print a JSON object."""

    args = parse(Arguments, arguments, "jaxrl env", env_command.__doc__)
    from jaxrl_llm.training.folder.provenance import as_text, environment

    found = environment()
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def demo_command(arguments: list[str]) -> int:
    """Train SmolLM2-135M-Instruct on sums with DAPO, and show what changed: some minutes on two CPU cores."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        output: str = "runs/demo"
        """Folder of the run."""
        model: str = "smollm2-135m"
        """The model: as for jaxrl train."""
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 0
        """Seed of prompts and samples."""
        steps: Annotated[int, Range(least=1, most=2**31 - 1)] = 9
        """Iterations."""
        dtype: Dtype = "float32"
        """Dtype of the computation, as for jaxrl train."""

    args = _demo_arguments(Arguments, arguments, demo_command, "reasoning_gym", "gguf", "tensorboardX")
    from jaxrl_llm.cli.demo import run  # here: importing JAX takes seconds

    run(args.model, args.seed, args.output, args.steps, args.dtype)
    return 0


def agent_demo_command(arguments: list[str]) -> int:
    """Train SmolLM2-135M-Instruct to solve word problems with a calculator, and show what changed."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        output: str = "runs/agent-demo"
        """Folder of the run; its questions are a file beside it."""
        model: str = "smollm2-135m"
        """The model: as for jaxrl train, with a chat template."""
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 0
        """Seed of questions and samples."""
        steps: Annotated[int, Range(least=1, most=2**31 - 1)] = 8
        """Iterations."""

    args = _demo_arguments(Arguments, arguments, agent_demo_command, "gguf", "tensorboardX")
    from jaxrl_llm.cli.agent_demo import run  # here: importing JAX takes seconds

    run(args.model, args.seed, args.output, args.steps)
    return 0


def _demo_arguments(kind: Any, arguments: list[str], command: Callable[..., int], *modules: str) -> Any:
    """The arguments of a demo, checked, as are its packages, the model and the folder."""

    def check_packages() -> None:
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise missing_package(module.replace("_", "-"), "demo", "the demo")

    program = f"jaxrl {command.__name__.removesuffix('_command').replace('_', '-')}"
    args = parse(kind, arguments, program, command.__doc__, lambda args: [check_packages])
    from jaxrl_llm.models.io.folders import check_source
    from jaxrl_llm.training.folder.files import RunFolder

    gather(partial(check_source, args.model), RunFolder(args.output).check_free)
    return args


def help_command(arguments: list[str], commands: Mapping[str, Callable[[list[str]], int]]) -> int:
    """Print the commands, or what one of them does."""
    if not arguments:
        print("usage: jaxrl COMMAND ...   (jaxrl COMMAND --help, or jaxrl help COMMAND, says more)\n")
        for name, command in commands.items():
            print(f"  {name:11} {(command.__doc__ or '').splitlines()[0]}")
        print(f"  help        This list, or what a command does: jaxrl help [COMMAND].\n\n{FIRST_STEPS}")
        return 0
    if len(arguments) > 1 and arguments[1:] != ["all"]:
        raise InputError(f"jaxrl help takes one command at most: remove {' '.join(arguments[1:])}")
    if arguments[0] not in commands:
        from jaxrl_llm.cli.peer_options import unknown_command

        raise unknown_command(arguments[0], [*commands])
    return commands[arguments[0]](["--help", *arguments[1:]])
