"""Rows from tasks of reasoning-gym, and of games with seeds.

With options far from a task's defaults, items are generated in a subprocess.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.utils.errors import InputError, missing_package, optional_package, shown, unknown

PREFIX = "reasoning-gym:"
COLUMNS = ("prompt", "answer", "reasoning_gym_task", "reasoning_gym_entry")

_MOST = 1_000_000  # items of a task
_TIMEOUT = 20.0  # seconds for each item of a subprocess
_START_TIMEOUT = 120.0  # seconds for its start, in which it imports sympy
_MEMORY = 8 * 2**30  # bytes of address space of a subprocess
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl_llm.data.generate import serve; serve()"
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    int | None: ((int, type(None)), "a whole number, or nothing"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "text"),
}


def games(number: int, seed: int) -> list[dict[str, Any]]:
    """Rows of games without prompts: each has an environment's seed, drawn with `seed`, in its column `seed`."""
    return [{"prompt": "", "seed": int(one)} for one in np.random.default_rng(seed).integers(2**31, size=number)]


def check_task(task: str) -> None:
    """InputError for an unknown task, or if the package is missing; a known one is found without importing it."""
    found = importlib.util.find_spec("reasoning_gym")
    if found is None or found.origin is None:
        raise missing_package("reasoning-gym", "verifiers", f"the source {PREFIX}{task}")
    sources = Path(found.origin).parent.rglob("*.py")
    if "reasoning_gym" in sys.modules or not any(f'DATASET_NAME = "{task}"' in x.read_text("utf-8") for x in sources):
        from reasoning_gym.factory import DATASETS  # takes a second or two

        if task not in DATASETS:
            raise unknown("reasoning-gym task", task, DATASETS)


def generate(task: str, limit: int | None, seed: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """`limit` items (None: the task's default) as rows: prompt, answer, reasoning_gym_task, reasoning_gym_entry.

    Raises InputError for an unknown task or option, an option of the wrong type, and options with which the task fails.
    With options far from its defaults, the task also fails if it needs more than 20 s for an item or more than 8 GiB.
    """
    with optional_package("reasoning-gym", "verifiers", f"the source {PREFIX}{task}"):
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    if task not in DATASETS:
        raise unknown("reasoning-gym task", task, DATASETS)
    if limit is not None and limit > _MOST:
        raise InputError(f"limit is {limit}, but at most {_MOST:,} items of a task can be generated")
    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1])}
    for name, value in options.items():
        _check_option(task, name, value, fields)
    size = {} if limit is None else {"size": limit}
    usual = all(_is_usual(value, fields[name].default) for name, value in options.items())
    # A task that the caller registered exists in this process only.
    if usual or not DATASETS[task][0].__module__.startswith("reasoning_gym."):
        try:
            items = list(_items(task, seed, size, options))
        except Exception as error:
            raise _cannot(task, options, _reason(error)) from error
    else:
        items = _generate_apart(task, seed, size, options)
    return [dict(zip(COLUMNS, (x["question"], x["answer"], task, x), strict=True)) for x in items]


def serve() -> None:
    """Main function of the subprocess: read a task from standard input, write its items to standard output."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not available on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    out = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # output printed by a task must not mix with the items
    try:
        request = pickle.load(sys.stdin.buffer)
        import reasoning_gym  # noqa: F401 (here, so that the first item's time does not include the import)

        out.send(("ready", None))
        for item in _items(*request):
            out.send(("item", item))
        out.send(("end", None))
    except Exception as error:
        out.send(("error", _reason(error)))


def _items(task: str, seed: int, size: dict[str, int], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    yield from reasoning_gym.create_dataset(task, seed=seed, **size, **options)


def _generate_apart(task: str, seed: int, size: dict[str, int], options: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    messages = Connection(os.dup(process.stdout.fileno()), writable=False)
    items: list[dict[str, Any]] = []
    timeout = _START_TIMEOUT
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            pickle.dump((task, seed, size, options), process.stdin)
        while True:
            if not messages.poll(timeout):
                raise _cannot(task, options, f"no item in {timeout:g} s; give smaller options")
            try:
                kind, value = messages.recv()
            except Exception:  # the end of the stream, or a truncated message
                raise _cannot(task, options, "its process ended; give smaller options") from None
            timeout = _TIMEOUT
            if kind == "item":
                items.append(value)
            elif kind == "end":
                return items
            elif kind != "ready":
                raise _cannot(task, options, value)
    finally:
        messages.close()
        process.stdout.close()
        process.kill()
        process.wait()


def _check_option(task: str, name: str, value: Any, fields: dict[str, dataclasses.Field[Any]]) -> None:
    if name in ("seed", "size"):
        raise InputError(f"task option {name!r}: pass it as {'limit' if name == 'size' else 'seed'}")
    if name not in fields:
        raise unknown(f"option of the task {task!r},", name, set(fields) - {"seed", "size"})
    types, wanted = _KINDS.get(fields[name].type, ((), ""))
    if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
        raise InputError(f"option {name} of the task {task!r} is {shown(value)}, but must be {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"option {name} of the task {task!r} is {value}, but must be finite")


def _is_usual(value: Any, default: Any) -> bool:
    """Whether an option is so close to the task's default, or so small, that generation is sure to terminate."""
    if value is None or isinstance(value, bool) or value == default:
        return True
    if isinstance(value, (int, float)):
        return abs(value) <= max(20, 2 * abs(default) if isinstance(default, (int, float)) else 0)
    if isinstance(value, (list, tuple)):
        return len(value) <= 20 and all(_is_usual(inner, None) for inner in value)
    return isinstance(value, str) and len(value) <= 100


def _cannot(task: str, options: dict[str, Any], reason: str) -> InputError:
    return InputError(f"reasoning-gym cannot generate {task!r} with {shown(options, 200)}: {reason}")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}".strip()
