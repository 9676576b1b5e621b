"""The library's docstrings, which are plain text, as reStructuredText.

Paragraphs stay; text in backticks becomes code; arguments ("name: what it is"), numbered and dashed lists become lists;
indented blocks become equations or code; examples stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

from extensions.tex import GREEK, display

ARGUMENT = re.compile(
    r"(?P<names>[A-Za-z_]\w*(?:(?:, | and )[A-Za-z_]\w*)*)(?P<kind>, [^:`]*\[[^:`]*\])?: +(?P<text>.*)"
)
ITEM = re.compile(r"(?:[-*]|\d+\.) +")
CODE = re.compile(r"\b(?:def|import|from|await|async|lambda|return|class)\b|->|^\s*\(.*\)\s*$|\)\(")
EQUATION = re.compile(
    r"(?:^|\s)(?:loss|sum|mean)\b|<-|\b(?:" + "|".join(sorted(GREEK - {"delta"})) + r")\b|\w_\w?\b.* = "
)


def restructured(docstring: str) -> list[str]:
    """The lines of reStructuredText for a docstring whose common margin was removed."""
    out = list[str]()
    for paragraph in _paragraphs(docstring):
        out += [*_converted(paragraph), ""]
    return out


def escaped(text: str) -> str:
    """Text with its backtick spans as code and everything that reStructuredText would take for markup escaped."""
    parts = re.split(r"`+([^`]+)`+", text)
    plain = [re.sub(r"([\\*|_<>:])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]] + [""]
    pairs = list(zip(plain, code, strict=True))
    # Inline markup has to be apart from letters beside it.
    line = "".join(p + (f"\\ {c}\\ " if c else "") for p, c in pairs)
    return line.replace("``\\  ", "`` ").replace(" \\ ``", " ``")


def is_equation(block: str) -> bool:
    """Whether an indented block is mathematics rather than code or a list of choices."""
    first = block.lstrip()
    if first.startswith(('"', ">>>", "jaxrl ", "- ")) or CODE.search(block):
        return False
    return "=" in block or EQUATION.search(block) is not None


def _paragraphs(text: str) -> Iterator[str]:
    """Blocks between blank lines; where the indentation changes from or to the margin, a block of its own."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        yield block.rstrip()


def _converted(block: str) -> list[str]:
    lines = block.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        return dedent(block).splitlines()
    if all(line.startswith("    ") for line in lines):
        if is_equation(block):
            return [".. math::", "", *("   " + line for line in display(block).splitlines())]
        return [".. code-block:: text", "", *("   " + line for line in dedent(block).splitlines())]
    out = list[str]()
    for part in _parts(lines):
        text = " ".join(line.strip() for line in part)
        if item := ITEM.match(text):
            out += ["", f"* {escaped(text[item.end() :])}" if text[0] in "-*" else f"#. {escaped(text[item.end() :])}"]
        elif (argument := ARGUMENT.fullmatch(text)) and _is_argument(argument):
            names = ", ".join(f"``{name}``" for name in re.split(r", | and ", argument["names"]))
            out += ["", f"* {names}{escaped(argument['kind'] or '')}: {escaped(argument['text'])}"]
        else:
            out += ["", escaped(text)]
    return out[1:]


def _is_argument(found: re.Match[str]) -> bool:
    """Whether it is an argument's line: one name in lower case, or several."""
    return found["names"] == found["names"].lower() or "," in found["names"]


def _parts(lines: list[str]) -> Iterator[list[str]]:
    """Split a paragraph where a list item or an argument begins."""
    part = list[str]()
    for line in lines:
        ended = not part or part[-1].endswith((".", ":", ";"))
        begins = not line.startswith(" ") and (ITEM.match(line) or (ended and ARGUMENT.match(line)))
        after_item = part and not line.startswith(" ") and ITEM.match(part[0])
        if part and (begins or after_item):
            yield part
            part = []
        part.append(line)
    yield part


def _process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured("\n".join(lines)) if any(line.strip() for line in lines) else []


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
