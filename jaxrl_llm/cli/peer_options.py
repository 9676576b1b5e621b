"""Read options by the names that TRL, verl and Tunix give them, or say what they are here."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from jaxrl_llm.cli.peer_overrides import TUNIX_OTHER, TUNIX_SAME, VERL_OTHER, VERL_SAME
from jaxrl_llm.core.arguments.signatures import TEXT_METHODS, known_methods, options
from jaxrl_llm.utils.errors import InputError, InputErrors, unknown
from jaxrl_llm.utils.peer_names import COMMANDS, FILES, METHODS, TRL_FLAGS, TRL_OTHER, TRL_PLACE, TRL_SAME, Same

_OVERRIDE = re.compile(r"\+{0,2}([a-z][\w.]*)=(.*)", re.DOTALL)


def method_name(name: str) -> str:
    """The catalogue's name of a method, for one in capitals or with dashes; any other name is returned as it is.

    >>> method_name("GRPO"), method_name("Dr-GRPO"), method_name("gropo")
    ('grpo', 'dr_grpo', 'gropo')
    """
    plain = re.sub(r"[-. ]", "_", name.strip().lower())
    known = known_methods() | {*TEXT_METHODS}
    return next((one for one in (plain, METHODS.get(plain.replace("_", "")), METHODS.get(plain)) if one in known), name)


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the arguments with TRL's names of options replaced by those here, what to say about it).

    Raises InputErrors for options of TRL that something else takes the place of, and for overrides of verl and Tunix
    (NAME=VALUE), naming what each of them is here.
    """
    arguments, place = _without_place(arguments)
    at, found, notes, problems, overrides = 0, list[str](), list[str](), list[str](), list[str]()
    named = [
        after if one == "--algorithm" else one.partition("=")[2]
        for one, after in pairwise([*arguments, ""])
        if one.partition("=")[0] == "--algorithm"
    ]
    method = method_name(named[-1] if named else "grpo")
    known = {one.name for one in options(method)} if method in known_methods() else set()
    while at < len(arguments):
        argument, at = arguments[at], at + 1
        name, equals, value = argument.removeprefix("--").partition("=")
        plain = name.replace("-", "_")
        if not argument.startswith("--"):
            if not found and argument.endswith(FILES):
                problems.append(f"a file of settings is given as --config {argument}")
                continue
            is_override = not (found and found[-1].startswith("--")) and _OVERRIDE.fullmatch(argument)
            (overrides if is_override and _of_override(argument) else found).append(argument)
        elif plain in TRL_FLAGS:
            if not equals and at < len(arguments) and arguments[at].lower() in ("true", "false"):
                value, at = arguments[at], at + 1
            chosen = TRL_FLAGS[plain][value.lower() == "false"]
            found += chosen
            notes.append(f"--{name} is {' '.join(chosen)}")
        elif plain in TRL_SAME:
            same = TRL_SAME[plain]
            own = same.option.removeprefix("--algorithm.").replace("-", "_")
            if same.option.startswith("--algorithm.") and known and own not in known:
                why = f"which {method} does not have: leave it out, or choose another --algorithm"
                problems.append(f"TRL's --{name} is {same.option} here, {why}")
            notes.append(f"--{name} is {same.option}")
            found.append(f"{same.option}={same.values.get(value, value)}" if equals else same.option)
            while same.values and not equals and at < len(arguments) and not arguments[at].startswith("--"):
                found.append(same.values.get(arguments[at], arguments[at]))
                at += 1
        elif plain in TRL_OTHER:
            problems.append(f"TRL's --{name} {TRL_OTHER[plain]}")
            while not equals and at < len(arguments) and not arguments[at].startswith("--"):
                at += 1
        elif plain == "algorithm":
            found.append(f"--algorithm={method_name(value)}" if equals else argument)
            if not equals and at < len(arguments):
                found.append(method_name(arguments[at]))
                at += 1
        else:
            found.append(argument)
    if place:
        found, notes = _with_place(found, place), [*notes, f"a data set is --prompts OWNER/NAME{place}"]
    problems += [_as_options(overrides)] if overrides else []
    if problems:
        raise InputErrors(problems) if len(problems) > 1 else InputError(problems[0])
    return found, list(dict.fromkeys(notes))


def _without_place(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The arguments without TRL's configuration and split of a data set, and these as a part of its name here."""
    left, parts, at = list[str](), dict[str, str](), 0
    while at < len(arguments):
        argument, at = arguments[at], at + 1
        name, equals, value = argument.removeprefix("--").partition("=")
        part = TRL_PLACE.get(name.replace("-", "_")) if argument.startswith("--") else None
        if part is None:
            left.append(argument)
        elif equals or at < len(arguments):
            parts[part] = value if equals else arguments[at]
            at += not equals
    if not parts:
        return left, ""
    return left, ":" + "/".join(filter(None, [parts.get("config"), parts.get("split", "train")]))


def _with_place(arguments: Sequence[str], place: str) -> list[str]:
    """The arguments with the configuration and split added to the value of --prompts. InputError if there is none."""
    for at, argument in enumerate(arguments):
        given = at + (argument == "--prompts")
        if argument.partition("=")[0] == "--prompts" and given < len(arguments):
            return [*arguments[:given], arguments[given] + place, *arguments[given + 1 :]]
    raise InputError(
        f"TRL's configuration and split of a data set are part of its name here: --prompts OWNER/NAME{place}"
    )


def _of_override(text: str) -> tuple[str, Same | str] | None:
    """(whose override it is, what it is here), or None if it is nobody's."""
    name, _ = _split(text)
    for owner, same, other in (("verl", VERL_SAME, VERL_OTHER), ("Tunix", TUNIX_SAME, TUNIX_OTHER)):
        if name in same:
            return owner, same[name]
        if beginnings := [begin for begin in other if name.startswith(begin)]:
            return owner, other[max(beginnings, key=len)]
    return None


def _split(text: str) -> tuple[str, str]:
    name, value = _OVERRIDE.fullmatch(text).groups()  # type: ignore[union-attr]
    return name, value.strip("'\"")


def _as_options(overrides: Sequence[str]) -> str:
    """What overrides are here: those that are options as a command, and each of the others."""
    given, rest, owners = list[str](), list[str](), list[str]()
    for text in overrides:
        (name, value), (owner, here) = _split(text), _of_override(text)  # type: ignore[misc]
        owners.append(owner)
        if isinstance(here, Same):
            values = value.strip("[]").split(",") if value.startswith("[") else [value]
            texts = [here.values.get(one.strip(" '\""), one.strip(" '\"")) for one in values]
            texts = [method_name(one) for one in texts] if here.option == "--algorithm" else texts
            given.append(shlex.join([here.option, *texts]))
        else:
            rest.append(f"{owner}'s {name} {here}" if len(overrides) == 1 else f"{name} {here}")
    if len(overrides) == 1:
        return f"{owners[0]}'s {overrides[0]} is {given[0]} here" if given else rest[0]
    owner = " and ".join(dict.fromkeys(owners))
    write = [f"{owner}'s overrides are options here: {' '.join(given)}"] if given else []
    return "; ".join([*write, *rest])


def translated_settings(values: Mapping[str, Any], parameters: set[str]) -> dict[str, Any]:
    """Settings of a file with TRL's names replaced by those here: `learning_rate` becomes `optimizer.learning_rate`.

    parameters: of the chosen method. Raises InputErrors as `translated` does.
    """
    found, problems = dict[str, Any](), list[str]()
    said = dict[str, str]()  # by the name here
    for name, value in values.items():
        new = name
        if name in TRL_SAME:
            same = TRL_SAME[name]
            new = same.option.removeprefix("--").replace("-", "_")
            value = same.values.get(value, value) if isinstance(value, str) else value
            if new == "rewards" and isinstance(value, str):
                value = [value]
            if new.startswith("algorithm.") and new.partition(".")[2] not in parameters:
                problems.append(f"TRL's {name} is {new} here, which this method does not have: leave it out")
        elif name in TRL_FLAGS and isinstance(value, bool):
            chosen = TRL_FLAGS[name][not value]
            new = chosen[0].removeprefix("--no-").removeprefix("--")
            value = chosen[1] if len(chosen) > 1 else not chosen[0].startswith("--no-")
        elif name in TRL_OTHER:
            problems.append(f"TRL's {name} {TRL_OTHER[name]}")
        if new in found:
            peers = said[new] if name == new else name
            problems.append(f"{peers} is {new} here, which is set too: remove one")
        found[new], said[new] = value, name
    if problems:
        raise InputErrors(problems) if len(problems) > 1 else InputError(problems[0])
    return found


def unknown_command(name: str, known: Sequence[str]) -> InputError:
    """The error for an unknown command: what it is here, if another library has it or it is a method."""
    method = method_name(name)
    if name in COMMANDS:
        here = COMMANDS[name]
        return InputError(f"jaxrl {name} is {here}" if here.startswith("not") else f"jaxrl {name} is {here} here")
    if method in TEXT_METHODS:
        return InputError(f"{name} is a method: jaxrl texts {method} optimises a text with it")
    if method in known_methods():
        return InputError(f"{name} is a method: jaxrl train --algorithm {method} trains with it")
    return unknown("command", name, known)
