"""A digest of a value made of functions, such as an algorithm that a Python program gave to a run.

Equal code and equal numbers give equal digests in every process of one version of Python: functions of a library count
by their names, others by their bytecode, and all by what they enclose, their defaults, and the globals that they use. A
class counts by its name or its members likewise.
"""

import dataclasses
import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

PACKAGE = Path(__file__).parents[1]
LIBRARIES = tuple(
    {str(PACKAGE), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def value_digest(value: Any) -> str:
    """SHA-256 of the value's description, in hexadecimal."""
    return _digest(_Description().of(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class _Description:
    """Describes values as text, and those that hold others as the digest of their text."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # by id; the value is kept, or its id would be used again
        self._around: list[int] = []  # ids of what is being described, so that cycles end

    def of(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type) and _of_library(value):
            return f"type {value.__module__}.{value.__qualname__}"
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._around:
            return f"value {self._around.index(id(value))}"
        self._around.append(id(value))
        try:
            text = _digest(self._inside(value))
        except Exception:  # whatever objects raise that a function happens to refer to: they count by their class
            text = _digest(f"{type(value).__module__}.{type(value).__qualname__}")
        self._around.pop()
        self._known[id(value)] = value, text
        return text

    def _inside(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            own = {name: one for name, one in vars(value).items() if name not in _NO_CODE}
            return f"class {value.__qualname__} {self._all(value.__bases__, own)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{kind} {self.of(value.__func__)}"
        if isinstance(value, property):
            return f"property {self._all(value.fget, value.fset, value.fdel)}"
        if isinstance(value, MethodType):
            return f"method {self._all(value.__func__, value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial {self._all(value.func, value.args, value.keywords)}"
        if isinstance(value, set | frozenset):  # their order differs from process to process
            return f"set {sorted(map(self.of, value))}"
        if isinstance(value, Mapping):
            return f"mapping {self._all(*value.items())}"
        if isinstance(value, list | tuple):
            return f"{kind} {self._all(*value)}"
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            if "key<" in str(value.dtype):  # of JAX, which NumPy does not have
                import jax

                value = jax.random.key_data(value)
            array = np.asarray(value)
            if array.dtype.hasobject:
                return f"array {self._all(array.shape, array.tolist())}"
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            return f"array {array.dtype} {array.shape} {hashlib.sha256(data.data).hexdigest()}"
        if dataclasses.is_dataclass(value):
            return f"{kind} {self._all(*(getattr(value, field.name) for field in dataclasses.fields(value)))}"
        if hasattr(value, "__wrapped__"):  # such as a function that jax.jit gave
            return f"{kind} of {self.of(value.__wrapped__)}"
        if type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
            return re.sub(r" at 0x[0-9a-f]+", "", f"{kind} {value!r}")
        code = "" if _of_library(type(value)) else f"{self.of(type(value))} "
        return f"{kind} {code}{self._all(*vars(value).items())}"

    def _all(self, *values: Any) -> str:
        return f"({', '.join(map(self.of, values))})"

    def _function(self, function: FunctionType) -> str:
        code = function.__code__
        cells = [cell.cell_contents if _filled(cell) else None for cell in function.__closure__ or ()]
        held = self._all(cells, function.__defaults__, function.__kwdefaults__)
        if code.co_filename.startswith(LIBRARIES):
            return f"function {function.__module__}.{function.__qualname__} {held}"
        names = sorted(_names(code))
        used = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        return f"function {self._code(code)} {held} {self._all(*used)}"

    def _code(self, code: CodeType) -> str:
        constants = [self._code(one) if isinstance(one, CodeType) else self.of(one) for one in code.co_consts]
        variables = code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount
        return f"code {code.co_code.hex()} {variables} ({', '.join(constants)})"


# Of a class, what says nothing of its code, or differs from process to process.
_NO_CODE = {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"}


def _of_library(kind: type) -> bool:
    """Whether a class counts by its name, as those of libraries do; others by their code."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__module__ == "builtins"
    return module is not None and (file is None or file.startswith(LIBRARIES))


def _names(code: CodeType) -> set[str]:
    """The names that a function and those inside it look up."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that is not bound yet
        return False
