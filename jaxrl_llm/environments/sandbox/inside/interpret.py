"""The code's own process: a program once, or blocks that come one after another."""

from __future__ import annotations

import builtins
import marshal
import os
import sys

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any

ASK, TELL = 62, 63  # descriptors by which blocks come, and their ends are told


def read_message(descriptor: int) -> Any:
    """A value with its length before it; None at the end of the stream."""
    length = _read(descriptor, 8)
    return marshal.loads(_read(descriptor, int.from_bytes(length, "little"))) if len(length) == 8 else None


def _read(descriptor: int, count: int) -> bytes:
    out = bytearray()
    while len(out) < count:
        data = os.read(descriptor, min(count - len(out), 2**20))
        if not data:
            break
        out += data
    return bytes(out)


def message(value: Any) -> bytes:
    """What `read_message` reads."""
    data = marshal.dumps(value)
    return len(data).to_bytes(8, "little") + data


def write_files(files: dict[str, str]) -> None:
    """Texts in this folder, by name."""
    for name, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(".", name)), exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as opened:
            opened.write(text)


def own_main() -> dict[str, Any]:
    """The names of a new module __main__, and nothing of these programs among the modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "inside"]:
        del sys.modules[name]
    made = sys.modules["__main__"] = type(sys)("__main__")
    made.__dict__["__builtins__"] = builtins
    sys.path.insert(0, ".")
    del sys.argv[1:]
    sys.argv[0] = "main.py"
    return made.__dict__


def run_program(code: str) -> None:
    """Run a program as Python runs a file."""
    names = own_main()
    names["__file__"] = "main.py"
    exec(compile(code, "main.py", "exec", dont_inherit=True), names)


def serve() -> None:
    """Run blocks of code in one namespace. The end of each is told on a pipe that is not the code's.

    As in a notebook, the value of a last line that is an expression is shown.
    """
    import ast
    import traceback

    read, load, names = read_message, message, own_main()
    os.dup2(1, 2)  # one stream, in order
    write, number, flags, stdout = os.write, 0, ast.PyCF_ONLY_AST, sys.stdout
    while (code := read(ASK)) is not None:
        number += 1
        sys.stdout = sys.stderr = stdout
        try:
            tree: Any = compile(code, "<code>", "exec", flags, dont_inherit=True)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec", dont_inherit=True), names)
            if isinstance(last, ast.Expr):
                sys.displayhook(eval(compile(ast.Expression(last.value), "<code>", "eval", dont_inherit=True), names))
        except SystemExit:
            pass
        except BaseException:
            kind, error, trace = sys.exc_info()
            traceback.print_exception(kind, error, trace.tb_next if trace is not None else None, file=sys.stdout)
        try:  # noqa: SIM105  (contextlib takes a moment to import)
            stdout.flush()
        except (OSError, ValueError):
            pass
        write(TELL, load(number))
