"""The final answer of a completion, and numbers in texts. Imports neither NumPy nor JAX."""

import math
import re
import unicodedata
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from jaxrl_llm.utils.errors import InputError, shown

_TAG = re.compile(r"<(answer|final_answer)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACES = re.compile(r"(?<!\\)[{}]")
_TOKEN = re.compile(r"[-+]?(?:[0-9][0-9.,]*[0-9]|[0-9])|[A-Za-z]|\\[A-Za-z]+")
_JOINED = re.compile(
    r"[\s$,;.]*(?:(?:and|or|\\text\{\s*(?:and|or)\s*\}|\\quad)[\s$,;]*)?"
)  # between boxes of one answer


def final_answer(text: str) -> str | None:
    """What the last box or answer tag of a text holds; None where there is none.

    Boxes are \\boxed{...}, \\fbox{...}, \\boxed 5; tags <answer>...</answer>, of which the last may be open. Boxes that
    only a comma, "and" or "or" joins are one answer. Where thoughts end, </think>, what follows them counts.

    >>> [final_answer(text) for text in ("\\\\boxed{1}. No: \\\\boxed{\\\\pi}", "<answer> 42 </answer>", "42")]
    ['\\\\pi', '42', None]
    """
    _, thoughts, after = text.rpartition("</think>")
    if thoughts and (found := final_answer(after)) is not None:
        return found
    tags, boxes = list(_TAG.finditer(text)), _boxes(text)
    if not tags:
        return _boxed(boxes, text)
    begin, closed = tags[-1].end(), re.search(f"</{tags[-1][1]}>", text[tags[-1].end() :], re.IGNORECASE)
    end = len(text) if closed is None else begin + closed.start()
    if boxes and boxes[-1][1] > end:
        return _boxed(boxes, text)
    inside = text[begin:end].strip()
    return _boxed(_boxes(inside), inside) or inside


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """The outermost boxes of a text that are closed: where they begin and end, and what they hold."""
    begins = {found.end(): found.start() for found in _BOX.finditer(text)}  # by the place of what they hold
    found: list[tuple[int, int, str]] = []
    open_braces: list[int] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif open_braces and (at := open_braces.pop()) in begins:
            start, end = begins.pop(at), brace.end()
            while found and found[-1][0] > start:
                found.pop()  # inside of this one
            found.append((start, end, text[at + 1 : end - 1].strip()))
    for at, start in begins.items():
        if text[at : at + 1] != "{" and (token := _TOKEN.match(text, at)) is not None:
            found.append((start, token.end(), token[0]))
    found.sort()
    out: list[tuple[int, int, str]] = []
    for one in found:
        if not out or one[0] >= out[-1][1]:
            out.append(one)
    return out


def _boxed(boxes: list[tuple[int, int, str]], text: str) -> str | None:
    """The last box, with those before it that it is joined to."""
    if not boxes:
        return None
    parts = [boxes[-1]]
    for one in reversed(boxes[:-1]):
        between = text[one[1] : parts[0][0]]
        if not _JOINED.fullmatch(between) or not between.strip(" \n$."):
            break
        parts.insert(0, one)
    return ", ".join(content for *_, content in parts)


_SPACES = "\u00a0\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_SIGNS = {
    **dict.fromkeys(_SPACES, "\u2009"), **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d\u207b", "-"),
    "\uff0b": "+", "\uff0e": ".", "\uff0c": ",", "\uff0f": "/", "\u2044": "/", "\u066b": ".", "\u066c": ",",
    "\uff05": "%",
    "\u066a": "%", "\u2019": "'", "\uff07": "'", "\u02d9": "'", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*",
    "\u2217": "*",
}  # fmt: skip
_LATEX = [
    (re.compile(r"\\(?:left|right|displaystyle|textstyle)\b"), ""),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\[,;:! ]|~)(?=[0-9])"), "\u2009"),
    (re.compile(r"(?:(?<=[0-9])\s*)\\[dtc]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*\{\s*([-+]?[0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}"), r"\1/\2"),
    (re.compile(r"(?:(?<=[0-9])\s*)\\[dtc]?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
    (re.compile(r"\\(?:times|cdot)\b"), "*"),
    (re.compile(r"\\([$%])"), r"\1"),
]
_SUPERSCRIPTS = re.compile(r"(?<=[0-9])[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")


def normalised(text: str) -> str:
    """A text with the digits, signs, spaces, fractions and simple LaTeX of its numbers in plain ASCII.

    Spaces that only stand within numbers become U+2009, a thin space.
    """
    if not text.isascii():
        text = _SUPERSCRIPTS.sub(lambda raised: "^" + _wide(raised[0]).replace("\u2212", "-"), text)
        text = "".join(map(_plain, text))
    if "\\" in text or "{,}" in text or "~" in text:
        for pattern, instead in _LATEX:
            text = pattern.sub(instead, text)
    return text


def _wide(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _plain(one: str) -> str:
    if one.isascii():
        return one
    if one in _SIGNS:
        return _SIGNS[one]
    if one.isdecimal():
        return str(unicodedata.decimal(one))
    if unicodedata.category(one) == "No" and "\u2044" in (wide := _wide(one)):
        return f" {wide.replace(chr(0x2044), '/')}"  # a fraction such as 1/2 in one character
    return one


_GROUPED = [
    r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?",
    r"[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])(?:\.[0-9]+)?",  # 12,34,567 of India
    r"[0-9]{1,3}(?:'[0-9]{3})+(?![0-9])(?:[.,][0-9]+)?",
    r"[0-9]{1,3}(?:_[0-9]{3})+(?![0-9])(?:\.[0-9]+)?",
    "[0-9]{1,3}(?:\u2009[0-9]{3})+(?![0-9])(?:[.,][0-9]+)?",
    r"[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9]|\.[0-9])(?:,[0-9]+)?",
    # With plain spaces only where it is no list of numbers: 1 000, 12 500, 250 000, but not 100 200 300.
    r"(?<![0-9] )(?:[0-9]{1,2}(?: [0-9]{3})+|[0-9]{3}(?: [0-9]{3})* 000)(?![0-9]| [0-9])(?:[.,][0-9]+)?",
]
_PLAIN = r"[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
# Exponents have at most three digits, so that "1e999999999" cannot exhaust memory.
_POWER = r"10[ ]?(?:\^|\*\*)[ ]?(?:\{[ ]?[-+]?[0-9]{1,3}[ ]?\}|\([-+]?[0-9]{1,3}\)|[-+]?[0-9]{1,3}(?![0-9]))"
_TIMES = rf"(?:[eE][-+]?[0-9]{{1,3}}(?!\w)|[ ]?(?:\*|x)[ ]?{_POWER})"
_UNSIGNED = rf"(?:(?:{_POWER})|(?:{'|'.join(_GROUPED)}|{_PLAIN}){_TIMES}?)"
# A number starts neither inside a word ("x2") nor after the point of another ("1.2.3"). A sign right after a closing
# bracket is an operator, "(1)-2".
_NUMBER = re.compile(
    rf"(?<![0-9A-Za-z])(?<![0-9]\.)(?:(?<![)\]}}])(?P<sign>[-+])[$\u20ac\u00a3]?)?"
    rf"(?:(?P<whole>[0-9]+)\s+(?P<above>[0-9]+)[ ]?/[ ]?(?P<below>[0-9]+)(?![0-9])"
    rf"|(?P<value>{_UNSIGNED})(?:\s*/\s*(?P<denominator>{_UNSIGNED}))?)"
)
_LONGEST = 1000  # characters of a number


def last_number(text: str) -> Fraction | None:
    """The last number in the text; None if there is none, or if it divides by zero or has over 1000 characters.

    >>> [str(last_number(text)) for text in ("1 1/2 cups", "1.000.000,5", "3 x 10^5", "-\\\\frac{3}{4}")]
    ['3/2', '2000001/2', '300000', '-3/4']
    """
    found = list(_NUMBER.finditer(normalised(text)))
    return _value(found[-1]) if found else None


def numeric_value(text: str) -> Fraction | None:
    """The number that a whole text is, but for quotes, emphasis, a currency, a percent sign and a full stop.

    >>> numeric_value("**$1,234.00**"), numeric_value("x = 5")
    (Fraction(1234, 1), None)
    """
    bare = normalised(text).strip(" \n\t\u2009`*_\"'$\u20ac\u00a3").rstrip(" .%")
    if bare.startswith("(") and bare.endswith(")") and "," not in bare:
        bare = bare[1:-1].strip()
    found = _NUMBER.fullmatch(bare)
    return None if found is None else _value(found)


_USUAL = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:\s*/\s*[0-9]+)?")
_CURRENCY = re.compile(r"(?<![0-9])[\u20ac\u00a3\u00a5\u20b9](?=[-+]?[0-9])")


def with_usual_numbers(text: str) -> str:
    """The text with numbers that are written in other ways than 1,234.5 or 3/4 written so.

    >>> with_usual_numbers("It is 1 1/2, or 1.234.567, or -3 x 10^5.")
    'It is 3/2, or 1234567, or -300000.'
    """

    def usual(found: re.Match[str]) -> str:
        if _USUAL.fullmatch(found[0]) or (value := _value(found)) is None:
            return found[0]
        return str(value)

    return _NUMBER.sub(usual, _CURRENCY.sub("", normalised(text)))


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > _LONGEST:
        return None
    if found["whole"] is not None:
        if int(found["below"]) == 0:
            return None
        value = int(found["whole"]) + Fraction(int(found["above"]), int(found["below"]))
    else:
        value = _read(found["value"])
        if found["denominator"]:
            below = _read(found["denominator"])
            if below == 0:
                return None
            value /= below
    return -value if found["sign"] == "-" else value


def _read(text: str) -> Fraction:
    power = Fraction(1)
    if (raised := re.search(_POWER + r"\Z", text)) is not None:
        digits = re.sub(r"[^-0-9]", "", re.split(r"\^|\*\*", raised[0])[1])
        power, text = Fraction(10) ** int(digits), text[: raised.start()].rstrip(" *x") or "1"
    text = re.sub("(?<=[0-9])[ '_\u2009](?=[0-9])", "", text)
    thousands = re.fullmatch(r"[0-9]{1,3},[0-9]{3}", text)
    if text.count(".") > 1 or (re.fullmatch(r"[0-9]+,[0-9]+", text) and not thousands):
        text = text.replace(".", "").replace(",", ".")  # a decimal comma
    return Fraction(text.replace(",", "")) * power


def answer_text(answer: Any) -> str:
    """The text of an expected answer: of a number its value, 42.0 as "42", of a list of one that of its entry.

    Raises InputError for anything else than texts, numbers and lists of one.
    """
    if isinstance(answer, str):
        return answer
    if getattr(answer, "shape", None) == () and hasattr(answer, "item"):
        answer = answer.item()
    if isinstance(answer, list | tuple) and len(answer) == 1:
        return answer_text(answer[0])
    if isinstance(answer, bool | Integral) or type(answer).__name__ in ("Decimal", "Fraction"):
        return str(answer)
    if isinstance(answer, Real) and math.isfinite(value := float(answer)):
        return str(int(value)) if value == int(value) and abs(value) < 1e16 else repr(value)
    raise InputError(
        f"the answer is {shown(answer)}, but must be a text or a number: mend the data, or leave out the row"
    )


_TOWER = re.compile(r"[0-9]+(?:[\s{(]*(?:\^|\*\*)[\s{(]*[0-9]+)+")
_FACTORIAL = re.compile(r"([0-9]+)((?:[\s)}]*!)+)")
_DIGITS = 1e4  # decimal digits of a number that is still computed


def is_huge(text: str) -> bool:
    """Whether a text has a tower of powers, or a factorial of one, that nobody computes.

    >>> is_huge("9^{9^{9^9}}"), is_huge("2^{3^2}"), is_huge("((5!)!)!")
    (True, False, True)
    """
    for tower in _TOWER.finditer(text):
        *bases, top = map(_at_most, re.findall(r"[0-9]+", tower[0]))
        for base in reversed(bases):
            if top * math.log10(max(base, 1)) > _DIGITS:
                return True
            top = base**top
    for found in _FACTORIAL.finditer(text):
        value = _at_most(found[1])
        for _ in range(found[2].count("!")):
            if value > 3000:
                return True
            value = math.factorial(value)
    return False


def _at_most(digits: str) -> int:
    return int(digits) if len(digits) <= 12 else 10**12
