"""The final expression of a text, as math-verify parses it; formulas in plain notation as LaTeX, letters of options."""

import functools
import logging
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.rewards.parsing.final_answers import final_answer, normalised, with_usual_numbers

_SIGNS = {
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u2205": r"\emptyset ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm ",
    "\u00b0": r"^\circ ", "\u2212": "-", "\u00d7": r"\times ", "\u00f7": "/", r"\varnothing": r"\emptyset",
}  # fmt: skip
_NAMES = re.compile(
    r"(?<![A-Za-z\\{])(pi|theta|alpha|beta|gamma|lambda|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|infinity|oo)"
    r"(?![A-Za-z}])"
)
_GROUP = r"(\{[^{}]*\}|\\[A-Za-z]+|[0-9A-Za-z])"
_REWRITES = [
    (re.compile(r"\\(?:mathrm|mathit|text|rm)\s*\{([A-Za-z])\}"), r"\1 "),  # one letter is a name, and no unit
    (re.compile(rf"\\[dtc]?frac\s*{_GROUP}\s*{_GROUP}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{\{([^{}]*)\}\}"), r"{\1}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\+\s*-"), "-"),
    (re.compile(r"(?<![0-9.,])([0-9]+)\.0+(?![0-9])"), r"\1"),
    (re.compile(r"(?<![0-9.,A-Za-z}])1(?=[ij](?![A-Za-z]))"), ""),
    (re.compile(r"\u221a\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])"), r"\\sqrt{\1}"),
]
_CALLS = {"sqrt": r"\sqrt{", "\u221a": r"\sqrt{", "exp": "e^{", "^": "^{"}
_CALL = re.compile(r"(?:(?<![A-Za-z])\\?(sqrt|exp)|(\u221a|\^))\s*\(")
_RAISED = re.compile(r"(?<=[0-9A-Za-z)}])[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")


def as_latex(text: str) -> str:
    """A formula in the notation of Python or of plain text as LaTeX; LaTeX stays as it is.

    >>> as_latex("2*sqrt(x**2 + 1) - sin(pi/2)"), as_latex("e\u00b2 + \u221a3")
    ('2*\\\\sqrt{x^2 + 1} - \\\\sin (\\\\pi /2)', 'e^{2} + \\\\sqrt{3}')
    """
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}".replace("\u2212", "-"), text)
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    for pattern, latex in _REWRITES:
        text = pattern.sub(latex, text)
    place = 0
    while (call := _CALL.search(text, place)) is not None:
        end = _closing(text, call.end())
        if end is None:
            place = call.end()
            continue
        begin = _CALLS[call[1] or call[2]]
        text = f"{text[: call.start()]}{begin}{text[call.end() : end]}}}{text[end + 1 :]}"
        place = call.start() + len(begin)
    return _NAMES.sub(lambda found: "\\" + {"infinity": "infty", "oo": "infty"}.get(found[1], found[1]) + " ", text)


def _closing(text: str, start: int) -> int | None:
    """Where the bracket closes that was opened before `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


_STYLE = re.compile(r"\\(?:text[a-z]*|math[a-z]+|mbox)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\(?([A-J])(?:\)?|\)?[:.)](?:[\s\\].*)?|\)\s*\S.*)", re.DOTALL)
_SAID = re.compile(
    r"\b(?:answer|option|choice)\s*(?:is|:)?[\s:*]*\(?([A-J])\b(?!\s*(?:[-+/^=]|\*(?!\*)))", re.IGNORECASE
)


def choice_of(text: str) -> str | None:
    """The letter of an option: B, (B), **B**, \\text{B}, B: a cat, "the answer is B"; None where there is none.

    >>> [choice_of(text) for text in ("(B)", "B. a cat", "The answer is **C**.", "Because")]
    ['B', 'B', 'C', None]
    """
    bare = _STYLE.sub(r"\1", text).strip(" \n\t$*`")
    if (found := _LETTER.fullmatch(bare)) is not None:
        return found[1]
    said = [one[1] for one in _SAID.finditer(bare) if one[1].isupper()]
    return said[-1] if said else None


def same_text(one: str, other: str) -> bool:
    """Whether two formulas are written alike, but for spaces, delimiters and the size of brackets."""
    return _written(one) == _written(other)


def _written(text: str) -> str:
    return (
        re.sub(r"\\(?:left|right|displaystyle|text|mathrm|quad|[,;:! ])|[\s${}]|\\[()\[\]]", "", text)
        .replace(r"\ldots", "...")
        .replace(r"\dots", "...")
        .replace(r"\cdots", "...")
    )


_QUOTE = r"[`*_\"'()\[\]]"
_QUOTES = re.compile(rf"(?<!{_QUOTE}){_QUOTE}++(?=[-+]?\.?[0-9])|(?<=[0-9]){_QUOTE}++")  # around numbers
_INLINE = re.compile(r"\$([^$\n]+)\$")
_FORMULA = re.compile(
    r"(?=.*(?:\\[a-z]|[\^*/=+]))(?:\\[a-zA-Z]+|[^\\$A-Za-z\n]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+"
)  # without words
THOUGHTS = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)
_LONGEST = 2000  # characters of a final answer, and of the end of a text in which it is looked for
LATEX_DELIMITERS = (
    "$", r"\(", r"\[", r"\boxed", *(rf"\begin{{{kind}" for kind in ("equation", "align", "gather", "math")),
)  # fmt: skip


def readings(text: str, numbers: bool = True) -> Iterator[list[Any]]:
    """The final expression of a text, as math-verify parses it, in each way to read it.

    A box or a tag may hold a formula, or words with one among them. Else it is the expression that math-verify finds,
    and if it finds none, the one that quotes or brackets hide. numbers: read them as `number_match` does.
    """
    if (found := final_answer(text)) is not None:
        if len(found) > _LONGEST:
            return
        usual = with_usual_numbers(found) if numbers else found
        ways = [f"\\boxed{{{usual}}}", f"${normalised(usual)}$", usual, found, f"${as_latex(found)}$"]
        yield from filter(None, map(math_verify_reading, dict.fromkeys(ways)))
        return
    said = _INLINE.sub(lambda one: f"${as_latex(one[1])}$", _end_of(after_thoughts(text)))
    usual = with_usual_numbers(said) if numbers else said
    alone = math_verify_reading(f"${as_latex(said)}$") if _FORMULA.fullmatch(said) else []
    if one := alone or math_verify_reading(usual) or math_verify_reading(_QUOTES.sub(" ", normalised(said))):
        yield one


@functools.lru_cache(maxsize=64)
def math_verify_reading(text: str) -> list[Any]:
    """What math-verify finds in a text; empty if nothing. Its time limits, alarms of the main thread, are off."""
    from math_verify import parse

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_is_not_about_timeouts)
    found = list(parse(text, parsing_timeout=None))
    is_cut = bool(found) and isinstance(found[-1], str) and found[-1].count("{") != found[-1].count("}")
    return [] if is_cut else found


def _end_of(text: str) -> str:
    """The last characters of a long text, from the beginning of a line or sentence on, so that no formula is cut."""
    if len(text) <= _LONGEST:
        return text
    end = text[-_LONGEST:]
    places = [place + 1 for sign in ("\n", ". ") if 0 <= (place := end.find(sign)) < _LONGEST // 2]
    return end[min(places) :] if places else end


def _is_not_about_timeouts(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")


def after_thoughts(text: str) -> str:
    """What a text says after its last thoughts; the whole of one that says nothing else."""
    return text.rpartition("</think>")[2].strip() or text
