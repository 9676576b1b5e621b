"""Parse command-line arguments and configuration files into settings, with the same checks. Needs the package tyro."""

import contextlib
import dataclasses
import inspect
import io
import json
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxrl_llm.cli.config_file import check_kinds, check_names, in_sections, read_config
from jaxrl_llm.cli.option_groups import GROUPS, parameter_doc, setting_docs
from jaxrl_llm.cli.peer_options import method_name, translated, translated_settings
from jaxrl_llm.core.arguments.hyperparameters import Hyperparameter
from jaxrl_llm.core.arguments.signatures import is_in_file
from jaxrl_llm.learner.optimizer_config import OptimizerConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.hyperparameters import options_of
from jaxrl_llm.utils.errors import InputError, gather, nearest, optional_package, require
from jaxrl_llm.utils.peer_names import TRL_SAME
from jaxrl_llm.utils.settings import as_arguments, range_checks

Checks = Iterable[Callable[[], Any]]
Check = Callable[[Any], Checks]  # of an instance of a class of options
Option = tuple[str, Any, str, Any]  # its name, type and description, and its default: a value or a dataclass's field


def parse_config(arguments: list[str], description: str | None = None) -> TrainConfig:
    """The configuration from the command line and the --config file; the command line takes precedence.

    The algorithm's hyper-parameters are options of their own: --algorithm grpo --algorithm.clip-high 0.28. Names of TRL
    are read as those here where they mean the same.
    Raises InputError, in one line, for anything invalid.
    """
    arguments, _ = translated(arguments)
    file, arguments = take(arguments, "--config")
    if file is not None and take(arguments, "--config")[0] is not None:
        raise InputError("--config is given twice: one file has all settings")
    values = read_config(Path(file)) if file is not None else {}
    for name in ("template_options", "chat_template_kwargs"):  # the second is TRL's
        if isinstance(values.get(name), dict):
            values[name] = json.dumps(values[name])
    if isinstance(values.get("algorithm"), str):
        values["algorithm"] = method_name(values["algorithm"])
    if isinstance(values.get("algorithm"), dict):
        raise InputError(
            f"{file}: algorithm holds settings, but must be a name; its settings are algorithm.NAME: VALUE"
        )
    chosen = _last(arguments, "--algorithm") or str(values.get("algorithm", TrainConfig.algorithm))
    in_file = values.get("hyperparameters")
    preset = _last(arguments, "--algorithm.preset") or (in_file.get("preset") if isinstance(in_file, dict) else None)
    parameters = options_of(chosen, preset)
    kinds = {**typing.get_type_hints(TrainConfig), "hyperparameters": {one.name: one.kind for one in parameters}}
    kinds["optimizer"] = typing.get_type_hints(OptimizerConfig)
    try:
        values = in_sections(translated_settings(values, {one.name for one in parameters}))
        check_names(values, chosen, [one.name for one in parameters])
        check_kinds(values, kinds)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    parsed = parse(_command(chosen, parameters), as_arguments(values) + arguments, "jaxrl train", description)
    settings = {name: getattr(getattr(parsed, group), name) for group, (_, names) in GROUPS.items() for name in names}
    given = {one.name: getattr(parsed.hyperparameters, one.name) for one in parameters}
    if not given.get("without", True):
        del given["without"]
    # Checked again by the method, with its types. Those in files have ranges of their own.
    limits = {} if is_in_file(chosen) else {one.name: one.range.limits for one in parameters if one.range.limits}
    of_optimizer = {field.name: getattr(parsed.optimizer, field.name) for field in dataclasses.fields(OptimizerConfig)}
    settings |= {"hyperparameters": given, "optimizer": OptimizerConfig(**of_optimizer)}
    checks = [partial(require, f"{chosen}: {name}", given[name], **limits[name]) for name in limits]
    config, *_ = gather(lambda: TrainConfig(**settings), *checks)
    assert isinstance(config, TrainConfig)
    return config


def _command(method: str, parameters: Sequence[Hyperparameter]) -> type:
    """A dataclass whose options are all settings, in their groups, and the method's hyper-parameters."""
    conf = _tyro().conf
    groups: list[tuple[str, Any, Any]] = []

    def add(name: str, about: Any, rows: Sequence[Option], *marks: Any) -> None:
        made = options_class(name, rows)
        groups.append((name, Annotated[(made, about, *marks)], dataclasses.field(default_factory=made)))

    for name, (about, names) in GROUPS.items():
        add(name, conf.arg(help=about), settings_rows(TrainConfig, names), conf.OmitArgPrefixes)
    own = settings_rows(OptimizerConfig, OptimizerConfig.__dataclass_fields__)
    add("optimizer", conf.arg(help="AdamW and its schedule."), own)
    about = f"Hyper-parameters of {method}"
    about += "." if is_in_file(method) else f"; jaxrl algorithms {method} has the equations."
    rows = [(one.name, one.kind, parameter_doc(one), one.default) for one in parameters]
    add("hyperparameters", conf.arg(name="algorithm", help=about), rows)
    return dataclasses.make_dataclass("train", groups, frozen=True)


def parse(kind: Any, arguments: list[str], program: str, description: str | None, check: Check = lambda _: ()) -> Any:
    """Parse arguments into an instance of a dataclass, whose fields are within the ranges of their annotations.

    check: gives further checks of the instance. Raises InputError with each problem in one line, and SystemExit after
    printing --help.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = _tyro().cli(kind, args=arguments, prog=program, description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise InputError(_in_one_line(said.getvalue(), program, _options_of(kind))) from None
    gather(*range_checks(found, "--", dashes=True), *check(found))
    return found


def options_class(name: str, rows: Iterable[Option]) -> Any:
    """A dataclass with these options."""
    arg = _tyro().conf.arg
    fields: list[tuple[str, Any, Any]] = []
    for option, kind, text, default in rows:
        given = default if isinstance(default, dataclasses.Field) else dataclasses.field(default=default)
        fields.append((option, Annotated[kind, arg(help=text)], given))
    return dataclasses.make_dataclass(name, fields, frozen=True)


def settings_rows(kind: Any, names: Iterable[str]) -> list[Option]:
    """The options that some settings of a configuration's class are, with its defaults."""
    hints = typing.get_type_hints(kind)
    docs = setting_docs(kind)

    def field_of(name: str) -> Any:
        field = kind.__dataclass_fields__[name]
        return dataclasses.field(default=field.default, default_factory=field.default_factory)

    return [(name, hints[name], docs[name], field_of(name)) for name in names]


def positional(name: str, many: bool = False) -> Any:
    """The type of a positional argument that the help calls by this name: a text, or many of them."""
    conf = _tyro().conf
    shown = f"[{name} ...]" if many else name
    return Annotated[tuple[str, ...] if many else str, conf.Positional, conf.arg(metavar=shown)]


SHORT = (
    "model", "prompts", "rewards", "algorithm", "output", "steps", "prompts_per_step", "group_size", "max_new_tokens",
    "temperature", "environment", "tools", "lora_rank", "dtype", "mesh", "epochs", "eval_size", "eval_every", "seed",
)  # fmt: skip


def short_help(arguments: list[str], usage: str, description: str, own: Sequence[tuple[str, str]] = ()) -> list[str]:
    """The arguments, where they ask for no help or for all (--help all); for --help it prints the short one and exits.

    The short one has the command's own options, the settings that most runs change, and the hyper-parameters of the
    method that is named. own: options with what they are.
    """
    at = next((i for i, one in enumerate(arguments) if one in ("-h", "--help")), None)
    if at is None:
        return arguments
    if arguments[at + 1 : at + 2] == ["all"]:
        return [*arguments[: at + 1], *arguments[at + 2 :]]
    docs, method = setting_docs(TrainConfig), _last(arguments, "--algorithm")
    rows = [*own, *((f"--{name.replace('_', '-')}", docs[name]) for name in SHORT)]
    rows.insert(len(own) + 12, ("--optimizer.learning-rate", setting_docs(OptimizerConfig)["learning_rate"]))
    for one in [] if method is None else options_of(method_name(method), None):
        rows.append((f"--algorithm.{one.name.replace('_', '-')}", parameter_doc(one)))
    width = max(len(option) for option, _ in rows) + 2
    lines = [f"usage: {usage}", "", *inspect.cleandoc(description).splitlines(), ""]
    for option, text in rows:
        first = re.split(r"(?<=[^.])\. (?=[A-Z])", text, maxsplit=1)[0].rstrip(".")
        lines += textwrap.wrap(
            first, 110, initial_indent=f"  {option:{width}}", subsequent_indent=" " * (width + 2),
            break_on_hyphens=False, max_lines=3,
        )  # fmt: skip
    count = len(dataclasses.fields(TrainConfig)) + len(dataclasses.fields(OptimizerConfig))
    command = " ".join(usage.split()[:2])
    lines += ["", f"{command} --help all describes all {count} settings and the method's hyper-parameters."]
    print("\n".join(lines))
    raise SystemExit(0)


def take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option (--x V or --x=V), or None if it is absent, and the remaining arguments."""
    for i, argument in enumerate(arguments):
        if argument == option:
            if i + 1 == len(arguments):
                raise InputError(f"{option} needs a value")
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
        if argument.startswith(option + "="):
            return argument.split("=", 1)[1], arguments[:i] + arguments[i + 1 :]
    return None, arguments


def flag(arguments: list[str], name: str) -> tuple[bool, list[str]]:
    """Whether a flag is among the arguments, and the remaining arguments."""
    return name in arguments, [argument for argument in arguments if argument != name]


def _last(arguments: list[str], option: str) -> str | None:
    last = None
    value, rest = take(arguments, option)
    while value is not None:
        last = value
        value, rest = take(rest, option)
    return last


def _tyro() -> Any:
    with optional_package("tyro", "run", "the command line"):
        import tyro
    return tyro


def _options_of(kind: Any, prefix: str = "--") -> list[str]:
    """The options of a dataclass, including those of nested dataclasses."""
    hints, found = typing.get_type_hints(kind, include_extras=True), list[str]()
    for name, hint in hints.items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        shown_as = "algorithm" if name == "hyperparameters" else name.replace("_", "-")
        if dataclasses.is_dataclass(inner):
            found += _options_of(inner, prefix if name in GROUPS else f"{prefix}{shown_as}.")
        else:
            found.append(prefix + shown_as)
    return found


def _in_one_line(box: str, program: str, options: list[str]) -> str:
    """tyro's boxed error message on one line, with the option nearest to an unknown one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    rows = [line.strip("│ ") for line in plain.splitlines()[1:] if not line.startswith("╰")]
    parts: list[list[str]] = [[]]
    for row in rows:
        if row and set(row) <= {"─", "-"}:
            parts.append([])
        elif row:
            parts[-1].append(row)
    said = " ".join(next((part for part in parts if part), ["these arguments cannot be read"]))
    said = re.sub(r"^Error parsing (\w+: )?", "", said).replace(". Expected 1 values", "")
    if said.startswith("Unrecognized options: "):
        said = _unknown_options(said.removeprefix("Unrecognized options: ").split(", "), options)
    if said.startswith("Missing from ") and (lacking := re.findall(r"(?::|\)) [A-Z]+ (.*?)\.? \(required\)", said)):
        said = f"{program} needs {' and '.join(text[0].lower() + text[1:] for text in lacking)}"
    if wrong := re.search(r"invalid choice '([^']*)' for argument '(--[^']*)'\. Expected one of \(([^)]*)\)", said):
        choice, option, choices = wrong.groups()
        if near := nearest(choice, re.findall(r"'([^']*)'", choices)):
            said = f"{option}: invalid choice {choice!r}: did you mean {near!r}? It must be one of {choices}"
    said = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is not a whole number", said)
    said = re.sub(r"could not convert string to float: ('.*')", r"\1 is not a number", said)
    return f"{said.rstrip('.')} ({program} --help lists the options)"


def _unknown_options(words: list[str], options: list[str]) -> str:
    """What to say of the words that tyro does not know: options with the nearest one, and their values.

    Nearest is one whose last part is this name, or the shortest that begins with it, or else the most similar one.
    """
    found, peers = list[str](), [name for name, same in TRL_SAME.items() if same.option in options]
    of_algorithm = [option for option in options if option.startswith("--algorithm")]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        ends_so = [option for option in options if option.rpartition(".")[2] == name.lstrip("-")]
        begin_so = sorted((option for option in options if option.startswith(name)), key=len)
        if not word.startswith("--"):
            found += [] if found else [f"unexpected argument {word!r}"]  # or else the value of an option
        elif name == "--algorithm.without":
            found.append(f"{name} is for methods that lack a part in some runs, which this one does not: leave it out")
        elif name.startswith("--algorithm.") and of_algorithm == ["--algorithm"]:
            found.append(f"{name}: the algorithm has no hyper-parameters: give a function of them that returns it")
        elif near := next(iter([*ends_so, *begin_so]), None) or _nearest_option(name, options):
            found.append(f"unknown option {name}: did you mean {near}?")
        elif near := nearest(name.removeprefix("--").replace("-", "_"), peers):
            found.append(f"unknown option {name}: did you mean {TRL_SAME[near].option}, which is TRL's {near}?")
        else:
            found.append(f"unknown option {name}")
    return "; ".join(found)


def _nearest_option(name: str, options: list[str]) -> str | None:
    """The option most similar to this one, compared without the section where both are of the same one."""
    section, dot, last = name.rpartition(".")
    inside = {one.removeprefix(section + dot): one for one in options if dot and one.startswith(section + dot)}
    near = nearest(last, inside) if inside else nearest(name, options)
    return inside.get(near, near) if near else None
