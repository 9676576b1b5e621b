"""Which part of a completion is its program: fenced blocks, or code without a fence."""

import ast
import builtins
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from jaxrl_llm.rewards.verifiers import last_tagged

_OPENS = re.compile(r"^([ \t]*(?:[-*>][ \t]+|\d+[.)][ \t]+)?)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_PYTHON = re.compile(r"\{?\.?(?:i?python|py|cpython|pypy|sage)[\d.\s]*\b", re.IGNORECASE)
_BEGINS = re.compile(r"(?:from|import|def|class|async def|@|if|for|while|try|with|print\(|[A-Za-z_]\w*\s*=[^=])")
_TRIES = 200  # ends of code without a fence that are tried
_READS = {"input", "stdin", "open", "fileinput"}


class _Block(NamedTuple):
    """A part of a text that may be a program."""

    code: str
    python: bool | None  # whether its fence says that it is Python; None: it says nothing

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """The names that it defines, and those that it uses; none where it is no Python."""
        if (tree := syntax_tree(self.code)) is None:
            return set(), set()
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        return defined(tree), used | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def code_in(text: str, calls: Collection[str] = (), reads: bool = False) -> str:
    """The program in a text.

    calls: expressions that will be evaluated. The program is the last block that defines what they call, after the
    blocks before it that define what it uses itself. reads: the program will read its input; it is then the last block
    that does. Else it is the longest block of Python; without any fence the code in the text, or the text.

    >>> code_in("So:\\n```python\\ndef f(x):\\n    return 1\\n```\\nExample:\\n```python\\nprint(f(1))\\n```", ["f(2)"])
    'def f(x):\\n    return 1\\n'
    """
    found = list(_blocks(text))
    if not found:
        tagged = last_tagged(text)
        return _unfenced(text if tagged is None else tagged)
    for said in (True, None, False):
        if of_kind := [one for one in found if one.python is said]:
            break
    # Without a language, a block of Python is one that parses.
    candidates = of_kind if said else [one for one in of_kind if any(one.names)] or of_kind
    wanted = set().union(*map(_called, calls))
    for place in reversed(range(len(candidates))):
        defines, uses = candidates[place].names
        if (wanted and wanted <= defines) or (reads and not wanted and uses & _READS):
            return _with_helpers(candidates[: place + 1])
    if wanted:  # the names may be spread over blocks
        together = set().union(*(one.names[0] for one in candidates))
        if wanted <= together:
            return "\n".join(one.code for one in candidates if one.names[0])
    parsed = [one for one in candidates if any(one.names)] or candidates
    return max(reversed(parsed), key=lambda one: len(one.code)).code


def _blocks(text: str) -> Iterator[_Block]:
    """The fenced blocks of a text; one that is not closed ends with the text."""
    lines, place = text.split("\n"), 0
    while place < len(lines):
        opened = _OPENS.match(lines[place])
        place += 1
        if opened is None:
            inline = re.search(r"```(\w*)[ \t]*$", lines[place - 1])
            if inline is None or lines[place - 1].count("```") % 2 == 0:
                continue
            indent, fence, kind = "", "```", inline[1]
        else:
            indent, fence, kind = opened[1], opened[2], opened[3].strip()
        code, end = list[str](), [""]
        while place < len(lines):
            line = lines[place]
            place += 1
            bare = line.rstrip()
            if bare.strip(fence[0]).strip() == "" and bare.lstrip().startswith(fence):
                if len(bare) - len(bare.lstrip()) <= len(indent) + 3:
                    break
            elif re.match(rf"[ \t]*{fence}<", bare):  # a tag follows, and perhaps the next block
                place -= 1
                lines[place] = bare.lstrip().removeprefix(fence)
                break
            elif bare.endswith(fence) and not bare.lstrip().startswith(("#", '"""', "'''")):
                code.append(bare.removesuffix(fence))  # closed at the end of its last line
                break
            code.append(line)
        else:
            end = []  # it ends with the text
        said = None if not kind else _PYTHON.match(kind) is not None
        yield _Block(textwrap.dedent("\n".join([*code, *end])), said)


def defined(tree: ast.Module) -> set[str]:
    """The names that a module's own statements define."""
    out: set[str] = set()
    for node in _outer(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            out |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        else:
            out |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return out


def _outer(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those inside of its ifs, tries, loops and withs too."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _outer(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _outer(handler.body)


def _called(call: str) -> set[str]:
    """The names that an expression takes from the program."""
    if (tree := syntax_tree(call.strip(), "eval")) is None:
        return set()
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {node.id for node in names} - own - set(KNOWN) - set(dir(builtins))


# Names of a call that a program need not define: where they come from.
KNOWN = {
    **{name: (name, "") for name in ("math", "collections", "fractions", "decimal", "datetime", "itertools", "cmath")},
    **{name: ("collections", name) for name in ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple")},
    "Fraction": ("fractions", "Fraction"), "Decimal": ("decimal", "Decimal"), "isclose": ("math", "isclose"),
    "inf": ("math", "inf"), "nan": ("math", "nan"), "date": ("datetime", "date"),
}  # fmt: skip


def _with_helpers(candidates: list[_Block]) -> str:
    """The last block, after those before it that define names which it lacks."""
    defines, uses = candidates[-1].names
    parts, lacks = [candidates[-1].code], uses - defines
    for one in reversed(candidates[:-1]):
        more, uses = one.names
        if more & lacks and not more & defines:
            parts.insert(0, one.code)
            defines |= more
            lacks = (lacks | uses) - defines
    return "\n".join(parts)


def _unfenced(text: str) -> str:
    """The code in a text without fences: from a line that begins a statement to the last with which it parses."""
    if syntax_tree(text) is not None:
        return text
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if _BEGINS.match(line.lstrip())][:20]
    tries, best = 0, ""
    for start in starts:
        for end in range(len(lines), start, -1):
            tries += 1
            code = textwrap.dedent("\n".join(lines[start:end]))
            if tries > _TRIES or len(code) <= len(best):
                break
            if syntax_tree(code) is not None:
                best = code
                break
    return best + "\n" if best else text


def syntax_tree(code: str, mode: str = "exec") -> Any:
    """The syntax tree of code, with the mode "eval" of an expression; None where it is no Python."""
    try:
        return ast.parse(code, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
