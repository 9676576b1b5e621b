"""Load what a name such as FILE.py:NAME refers to: reward functions (in their own processes), rollouts, algorithms."""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_llm.rewards import boxes, code, graded, screens, tool_calls, verifiers
from jaxrl_llm.rewards.entries import SPANS, provided
from jaxrl_llm.rewards.judges import questions
from jaxrl_llm.rewards.parsing import answers
from jaxrl_llm.rewards.specs import DENSE, OWN, model_name
from jaxrl_llm.utils.errors import InputError, error_line, missing_package, unknown
from jaxrl_llm.utils.starting import phase

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    graded.answer_bleu, verifiers.answer_format_reward, verifiers.answer_tags, verifiers.one_answer,
    boxes.box_confidence, boxes.box_format, boxes.box_overlap, boxes.class_match, questions.first_error,
    screens.gui_action, screens.gui_click, screens.gui_format, screens.gui_kind, screens.gui_parameter,
    verifiers.reasoning_gym, verifiers.think_format_reward, tool_calls.valid_calls, *OWN.values(),
    answers.keyed(verifiers.exact_match, answers.trimmed), answers.keyed(verifiers.number_match, answers.final_number),
    answers.keyed(verifiers.number_match_strict, answers.final_number),
    answers.keyed(verifiers.math_verify, answers.expression),
    answers.keyed(verifiers.math_verify_strict, answers.expression),
    answers.keyed(graded.tagged_levels, answers.tagged), answers.keyed(verifiers.tagged_match, answers.tagged),
)  # fmt: skip
FUNCTIONS = {function.__name__: function for function in _FUNCTIONS}


def _distances(text: str) -> Callable[..., Any]:
    """`distances(NAME)` or `distances(NAME, SUCCESS)`."""
    name, _, success = text.partition(",")
    try:
        above = float(success) if success.strip() else 0.5
    except ValueError:
        raise InputError(
            f"distances({text}): {success.strip()!r} is no number above which a reward is a success"
        ) from None
    return graded.distances(_built_in(name.strip(), "distances"), above)


def _useful_calls(text: str) -> Callable[..., Any]:
    """`useful_calls(NAME)`, or with the numbers C_S, C_Q and B_v after it."""
    name, *numbers = (part.strip() for part in text.split(","))
    try:
        searches, pages, checks = [*numbers, *("8", "16", "1")[len(numbers) :]]
        given = float(searches), float(pages), int(checks)
    except ValueError:
        raise InputError(
            f"useful_calls({text}): after the name of a reward there are C_S, C_Q and the whole number B_v at most"
        ) from None
    return tool_calls.useful_calls(_built_in(name, "useful_calls"), *given)


FACTORIES: dict[str, Callable[[str], Callable[..., Any]]] = {
    "by_mode": lambda name: graded.by_mode(_built_in(name, "by_mode")),
    "code_tests": answers.providing(code.code_tests, "tests"),
    "coverage": answers.providing(graded.coverage, "share", "spans"),
    "distances": answers.providing(_distances, "distance"),
    "format_match": verifiers.format_match,
    "useful_calls": _useful_calls,
}
ARGUMENTS = {
    "by_mode": "NAME", "code_tests": "COLUMN", "coverage": "COLUMN", "distances": "NAME, SUCCESS",
    "format_match": "REGEX", "useful_calls": "NAME, C_S, C_Q, B_v",
}  # fmt: skip
READ_ANSWERS = {  # whose answers are texts or numbers, see `final_answers.answer_text`
    "answer_bleu", "exact_match", "number_match", "number_match_strict", "math_verify", "math_verify_strict",
    "tagged_levels",
}  # fmt: skip
_PACKAGES = {  # name of the reward -> package and module
    "math_verify": ("math-verify", "math_verify"), "math_verify_strict": ("math-verify", "math_verify"),
    "reasoning_gym": ("reasoning-gym", "reasoning_gym"),
}  # fmt: skip


_FOLDERS: set[str] = set()  # of files that were executed


class Loaded(NamedTuple):
    """A reward function, and the digest of its code."""

    function: Callable[..., Any]
    digest: str  # SHA-256 of its file in hexadecimal; "" if it has no file
    warm_up: Callable[[], Any] | None = None  # imports what the function's first call would import


def load(name: str | bytes) -> Loaded:
    """Load NAME, NAME(ARGUMENT), FILE.py:FUNCTION, MODULE:FUNCTION or a pickle. Paths are relative to the folder here.

    Raises InputError for a module or function that is missing or fails, even with sys.exit(); for a built-in whose
    package is not installed; and for an invalid argument.
    """
    if isinstance(name, bytes):
        return Loaded(pickle.loads(name), "")
    head, bracket, rest = name.partition("(")
    if bracket and head in FACTORIES:
        return Loaded(FACTORIES[head](rest[:-1]), _digest(verifiers.__file__))
    if ":" in name:
        return load_function(name, "rewards")
    digest = _digest(verifiers.__file__)
    if name not in _PACKAGES:
        return Loaded(FUNCTIONS[name], digest)
    package, module = _PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        raise missing_package(package, "verifiers", f"the reward {name!r}")
    return Loaded(FUNCTIONS[name], digest, lambda: importlib.import_module(module))


def _built_in(name: str, outer: str) -> Callable[..., Any]:
    if name not in FUNCTIONS:
        raise unknown(f"reward in {outer}(...)", name, FUNCTIONS)
    return FUNCTIONS[name]


def declared(name: str) -> frozenset[str]:
    """The entries that the function of a reward's name declares to return; nothing is loaded, and no error is raised.

    Of FILE.py:FUNCTION and MODULE:FUNCTION they are what a line FUNCTION.provides = {...} of the source says.
    """
    head = name.partition("(")[0]
    if head in FUNCTIONS or head in FACTORIES:
        return frozenset(provided({**FUNCTIONS, **FACTORIES}[head]))
    with contextlib.suppress(InputError):
        if (of_model := model_name(name)) is not None:
            return frozenset({SPANS} if of_model.kind in DENSE else ())
    source, _, function = name.rpartition(":")
    with contextlib.suppress(Exception):  # whatever is wrong with the source is an error when it is loaded
        if source.endswith(".py"):
            text = Path(source).expanduser().read_text()
        else:
            found = importlib.util.find_spec(source)
            text = Path(found.origin).read_text() if found is not None and found.origin else ""
        return _said(text, function)
    return frozenset()


def _said(source: str, function: str) -> frozenset[str]:
    """What the last line FUNCTION.provides = ... of a source assigns."""
    out: frozenset[str] = frozenset()
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == f"{function}.provides":
            value = line.value
            if isinstance(value, ast.Call) and value.args:  # frozenset({...})
                value = value.args[0]
            names = ast.literal_eval(value)
            out = frozenset([names] if isinstance(names, str) else names)
    return out


def load_function(spec: str, what: str) -> Loaded:
    """Load FILE.py:FUNCTION or MODULE:FUNCTION. what: names it in errors. Raises InputError as `load` does."""
    source, _, function = spec.rpartition(":")
    module, digest = _from_source(source, what)
    if callable(found := getattr(module, function, None)):
        return Loaded(found, digest)
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise unknown(f"function of {source!r},", function, own)


def load_value(spec: str, what: str) -> tuple[Any, str]:
    """What FILE.py:NAME or MODULE:NAME is, function or not, and the digest of its file, as `load_function`."""
    source, _, name = spec.rpartition(":")
    module, digest = _from_source(source, what)
    if not hasattr(module, name):
        raise unknown(f"name in {source!r}", name, [key for key in vars(module) if not key.startswith("_")])
    return getattr(module, name), digest


def check_file(spec: str, what: str) -> None:
    """InputError if FILE.py:NAME names no file, or a file is given without a name. what: names it in errors."""
    source = spec.rpartition(":")[0]
    if spec.endswith(".py"):
        raise InputError(f"{what} {spec!r} names nothing in the file: write {spec}:NAME")
    if not source:
        raise InputError(f"{what} {spec!r} names no file: write path/to/file.py:NAME or package.module:NAME")
    if source.endswith(".py") and not (path := Path(source).expanduser()).is_file():
        where = "" if path.is_absolute() else f" in {path.absolute().parent}"
        raise InputError(f"no file {source!r}{where} for {what}: give the path of a Python file")


def _from_source(source: str, what: str) -> tuple[ModuleType, str]:
    """A user's module and its digest."""
    try:
        with phase(f"load {what} from {source!r}", foreign=True):
            if source.endswith(".py"):
                return _from_file(Path(source).expanduser())
            module = importlib.import_module(source)
            return module, _digest(getattr(module, "__file__", None))
    except BaseException as error:  # SystemExit too
        raise InputError(f"cannot load {what} from {source!r}: {error_line(error)}") from error


def _from_file(path: Path) -> tuple[ModuleType, str]:
    """Execute a file and return its digest, that of its neighbours which it imports included.

    Cached bytecode could be outdated, so it is neither read nor written for the file itself.
    """
    data = path.read_bytes()
    # A unique module name, because the file may have the name of a module that is imported later.
    module = ModuleType(f"user_file_{path.stem}")
    module.__file__ = str(path.absolute())
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    with _neighbours(path.absolute().parent) as imported:
        exec(compile(data, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module, hashlib.sha256(b"".join([data, *(one.read_bytes() for one in imported)])).hexdigest()


@contextlib.contextmanager
def _neighbours(folder: Path) -> Iterator[list[Path]]:
    """Context manager: modules of a folder can be imported. On exit the list has their files.

    The folder comes first while a file is executed, as for a script, and last afterwards, for imports within its
    functions. Modules of another such folder, whose names this one has too, are imported anew.
    """
    files: list[Path] = []
    for name, module in list(sys.modules.items()):
        own = Path(getattr(module, "__file__", None) or "")
        if str(own.parent) in _FOLDERS - {str(folder)} and (folder / own.name).exists() and "." not in name:
            del sys.modules[name]
    was_there = str(folder) in sys.path
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield files
    finally:
        sys.path.remove(str(folder))
        if not was_there:
            sys.path.append(str(folder))
        _FOLDERS.add(str(folder))
        found = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name not in before}
        files += sorted(Path(file) for file in found if file and Path(file).is_relative_to(folder))


def _digest(path: str | None) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
