"""The final expression of a text, as math-verify parses it, in each way to read it."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.rewards.parsing.final_answers import final_answer, normalised, with_usual_numbers
from jaxrl_llm.rewards.parsing.notation import as_latex

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
        yield from filter(None, map(parsed, dict.fromkeys(ways)))
        return
    said = _INLINE.sub(lambda one: f"${as_latex(one[1])}$", _end_of(after_thoughts(text)))
    usual = with_usual_numbers(said) if numbers else said
    alone = parsed(f"${as_latex(said)}$") if _FORMULA.fullmatch(said) else []
    if one := alone or parsed(usual) or parsed(_QUOTES.sub(" ", normalised(said))):
        yield one


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> list[Any]:
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
