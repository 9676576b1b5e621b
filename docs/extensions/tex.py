"""Equations of docstrings, which are plain text, as TeX.

>>> print(tex("loss = -1/N sum_i min(rho A_i, clip_low)"))
\\text{loss} = -\\frac{1}{N} \\sum_{i} \\min(\\rho A_{i}, \\mathrm{clip\\_low})
"""

from __future__ import annotations

import re
from collections.abc import Callable

GREEK = frozenset(
    re.findall(
        r"\w+",
        """alpha beta gamma delta epsilon eta kappa lambda mu pi phi rho sigma tau theta Phi Delta
    Sigma lam""",
    )
)
COMMANDS = {"sum", "min", "max", "exp", "log", "argmax"}
OPERATORS = frozenset(
    re.findall(r"\w+", """mean std var Var median clip sigmoid softmax logsumexp relu floor ceil sign sg sqrt KL""")
)
SYMBOLS = {
    "<-": r"\leftarrow ", "->": r"\to ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "...": r"\dots ", "..": r"\dots ",
    "*": r"\cdot ", "%": r"\%", "#": r"\#", "&": r"\&", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\sim ",
    "<": r"\lt ", ">": r"\gt ",
}  # fmt: skip
TOKEN = re.compile(
    r"""(?P<quoted>"[^"]*"|`[^`]*`)
    |(?P<fraction>(?<![\w.])1/(?:\|[A-Za-z_]+\||[A-Za-z]+(?:_[A-Za-z]+)*(?![\w(])|\([^()]*\)))
    |(?P<space>\s{2,})
    |(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    |(?P<possessive>[A-Za-z]{2,}'s\b)
    |(?P<name>[A-Za-z][A-Za-z0-9]*(?:'+|~|\+(?=_))?(?:_[A-Za-z0-9]+)*)
    |(?P<below>_(?:\{|[A-Za-z0-9]+))
    |(?P<above>\^(?:\{|\(|[A-Za-z0-9]+))
    |(?P<symbol><-|->|<=|>=|!=|\.\.\.|\.\.|[*%#&$~{}<>])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
WORD = re.compile(r"[A-Za-z]{2,}")
CLOSING = {"{": "}", "(": ")"}


def display(block: str) -> str:
    """The lines of an equation block for a `math` directive, aligned on the left."""
    lines = [line for line in block.splitlines() if line.strip()]
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    rows = [("\\qquad " if len(line) - len(line.lstrip()) > margin else "") + tex(line.strip()) for line in lines]
    return rows[0] if len(rows) == 1 else " \\\\\n".join("& " + row for row in rows)


def tex(text: str) -> str:
    """One line of plain text as TeX."""
    out, place = list[str](), 0
    while place < len(text):
        found = TOKEN.match(text, place)
        assert found is not None  # "other" takes any character
        kind, token, place = str(found.lastgroup), found.group(), found.end()
        if kind in ("below", "above") and token[-1] in CLOSING:
            inner, place = _bracketed(text, place, token[-1])
            out.append(_script(token[0], inner))
        elif token == "sqrt" and text.startswith("(", place):
            inner, place = _bracketed(text, place + 1, "(")
            out.append(f"\\sqrt{{{tex(inner)}}}")
        elif kind == "space":
            out.append(r" \quad ")
        else:
            out.append(WRITERS[kind](token))
    return _joined(out)


def _bracketed(text: str, start: int, opening: str) -> tuple[str, int]:
    """(what is inside the bracket that was opened before `start`, the place after it)."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == CLOSING[opening])
        if depth == 0:
            return text[start:place], place + 1
    return text[start:], len(text)


def _script(mark: str, inner: str) -> str:
    first, dots, last = inner.partition("..")
    if mark == "_" and dots and not last.startswith("."):  # sum_{t=1..T}
        return f"_{{{tex(first)}}}^{{{tex(last)}}}"
    return f"{mark}{{{tex(inner)}}}"


def _name(token: str) -> str:
    base, *below = token.split("_")
    mark = re.search(r"['~+]+$", base)
    base = base[: mark.start()] if mark else base
    named = base in COMMANDS | OPERATORS and len(below) > 0 and len(below[0]) > 2  # clip_low, max_length
    if not below and not _is_symbol(base):
        return f"\\text{{{token}}}"
    if named or (below and not _is_symbol(base)):
        return f"\\mathrm{{{token.replace('_', chr(92) + '_')}}}"
    body = _symbol(base)
    if mark:
        body = {"~": f"\\tilde{{{body}}}", "+": f"{body}^{{+}}"}.get(mark.group(), body + mark.group())
    return body + (f"_{{{','.join(map(_index, below))}}}" if below else "")


def _is_symbol(base: str) -> bool:
    known = base in GREEK or base in COMMANDS or base in OPERATORS or base in ("logp", "Rhat", "Hbar")
    return known or re.fullmatch(r"[A-Za-z]\d*", base) is not None


def _symbol(base: str) -> str:
    special = {"logp": r"\log p", "Rhat": r"\hat{R}", "Hbar": r"\bar{H}", "lam": r"\lambda", "argmax": r"\arg\max"}
    if base in special:
        return special[base]
    if base in GREEK or base in COMMANDS:
        return "\\" + base
    if base in OPERATORS:
        return f"\\operatorname{{{base}}}"
    return base[0] + (f"_{base[1:]}" if len(base) > 1 else "")


def _index(part: str) -> str:
    if part in GREEK:
        return "\\" + part
    return f"\\text{{{part}}}" if len(part) > 3 or part in ("old", "ref", "off", "on", "thr") else part


def _number(token: str) -> str:
    digits, e, power = token.partition("e")
    return digits if not e else ("" if digits == "1" else digits + r" \cdot ") + f"10^{{{power}}}"


def _fraction(token: str) -> str:
    below = token[2:]
    return f"\\frac{{1}}{{{tex(below[1:-1] if below.startswith('(') else below)}}}"


def _quoted(token: str) -> str:
    inner = token[1:-1].replace("_", "\\_").replace(".", "{.}")
    return f"\\texttt{{{token[1:-1]}}}" if "_" not in token else f"\\mathtt{{{inner}}}"


WRITERS: dict[str, Callable[[str], str]] = {
    "quoted": _quoted,
    "fraction": _fraction,
    "number": _number,
    "possessive": lambda token: f"\\text{{{token}}}",
    "name": _name,
    "below": lambda token: f"_{{{_index(token[1:])}}}",
    "above": lambda token: f"^{{{_name(token[1:]) if token[1].isalpha() else token[1:]}}}",
    "symbol": SYMBOLS.__getitem__,
    "other": lambda token: token,
}


def _joined(parts: list[str]) -> str:
    """The parts in a row; words in text with single spaces between them become one text."""
    line = re.sub(r" {2,}", " ", "".join(parts))
    before = ""
    while line != before:
        before, line = line, re.sub(r"\\text\{([^{}]*)\} \\text\{", r"\\text{\1 ", line)
    line = re.sub(r"\\text\{([^{}]*)\} (?=\S)", r"\\text{\1} \\ ", line)
    line = re.sub(r"(?<=[\w}|)\]]) \\text\{", r" \\ \\text{", line)
    return re.sub(r"\\ \\(?=(?:quad|le|ge|lt|gt|ne|leftarrow|to|cdot)\b)", r"\\", line).replace(r"\ =", "=")
