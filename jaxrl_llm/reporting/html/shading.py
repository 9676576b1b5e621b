"""HTML of tokens shaded by a number each, used by reports and notebooks for credit, log-probability and entropy."""

import html
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from types import NoneType
from typing import Any

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.reporting.statistics import as_number, typical_size
from jaxrl_llm.utils.errors import InputError, require_choice, shown

KINDS = {  # kinds of values, with the colours (red, green, blue) below and above zero
    "advantage": ("214,64,52", "38,110,214"),
    "logp": ("224,122,0", "224,122,0"),
    "entropy": ("138,74,204", "138,74,204"),
}
LEVELS = 6  # of shade on each side of zero


def shade_level(value: float, limit: float, kind: str) -> int:
    """The level of shade of a value, from -LEVELS to LEVELS, which is at `limit` and beyond; 0 for NaN.

    Advantages have a square-root scale on which all but 0 have a shade, since those of the many completions of a group
    that are alike are small beside the one that differs. Other kinds have a linear one.

    >>> [shade_level(x, 2.0, "advantage") for x in (2.0, 0.5, -0.01, 0.0)], shade_level(-0.5, 2.0, "logp")
    ([6, 3, -1, 0], -2)
    """
    if not math.isfinite(value) or value == 0:
        return 0
    share = min(1.0, abs(value) / limit)
    level = max(1, round(LEVELS * math.sqrt(share))) if kind == "advantage" else round(LEVELS * share)
    return level if value > 0 else -level


def level_value(level: int, limit: float, kind: str) -> float:
    """The value whose shade has this level: the inverse of `shade_level`."""
    share = level / LEVELS
    return limit * (share * abs(share) if kind == "advantage" else share)


def shade(tokens: Sequence[str], values: Sequence[float | None], kind: str, limit: float | None = None) -> str:
    """HTML of a completion with each token shaded by its value, for notebooks (`IPython.display.HTML(shade(...))`).

    `values`: one per token; None or NaN leaves it unshaded. `kind`: "advantage" (red below zero, blue above, on a
    square-root scale), "logp" (deeper is less likely) or "entropy" (nats). `limit` > 0: the absolute value at full
    shade, by default the 98th percentile. Newlines and other invisible characters are made visible.
    Raises InputError for another kind, a wrong number of values, or a limit that is not positive.
    """
    require_choice("kind of shade", kind, KINDS)
    check_number("limit, the value with the full shade,", limit, above=0, or_none=True)
    _check_list("tokens", tokens, str, "text")
    _check_list("values", values, Real | NoneType, "numbers")
    body = shaded_tokens(tokens, {kind: values}, {kind: limit or typical_size(values)})
    block = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6"
    style = f"<style>{style_rules(kind)}.jaxrl-tokens i{{font-style:normal}}</style>"
    return f'<div class="jaxrl-tokens show-{kind}" style="{block}">{style}{body}</div>'


def _check_list(name: str, values: Any, kind: Any, words: str) -> None:
    """InputError unless `values` is a list (or array) of entries of this kind."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{name} is {shown(values)}, but must be a list of {words}")
    for entry in values:
        if not isinstance(entry, kind) and getattr(entry, "shape", None) != ():  # JAX scalars count as numbers
            raise InputError(f"{name} holds {shown(entry)}, but must be a list of {words}")


def style_rules(kind: str) -> str:
    """CSS rules of one kind, e.g. classes a-6 to a6 for the advantage, active inside an element `show-advantage`."""
    return "".join(
        f".show-{kind} .{kind[0]}{n}{{background:rgba({KINDS[kind][n > 0]},{0.6 * abs(n) / LEVELS:.1f})}}"
        for n in range(-LEVELS, LEVELS + 1)
    )


def shaded_tokens(
    tokens: Sequence[str],
    values: Mapping[str, Sequence[Any]],
    limits: Mapping[str, float],
    most: int | None = None,
    between: Mapping[int, Sequence[str]] | None = None,
) -> str:
    """An HTML element per token, shaded by classes, with its numbers as title. Beyond `most`, the middle is omitted.

    between: HTML that comes before the tokens with these numbers, 0 to len(tokens), and is never omitted.
    """
    for kind, column in values.items():
        if len(column) != len(tokens):
            raise InputError(f"{len(column)} values of {kind} for {len(tokens)} tokens: pass one value for each token")
    left_out = max(0, len(tokens) - (len(tokens) if most is None else most))
    head = (len(tokens) - left_out) * 3 // 4
    parts: list[str] = []
    before, done = dict(between or {}), 0
    for i in chain(range(head), range(head + left_out, len(tokens))):
        if i == head + left_out and left_out:
            parts.append(f"<em>[{left_out:,} tokens left out]</em>")
        parts += [text for place in range(done, i + 1) for text in before.get(place, ())]
        done = i + 1
        here = {kind: value for kind in values if math.isfinite(value := as_number(values[kind][i]))}
        levels = {kind: shade_level(value, limits[kind], kind) for kind, value in here.items()}
        classes = " ".join(f"{kind[0]}{level}" for kind, level in levels.items() if level)
        title = ", ".join(f"{kind} {value:.3f}" for kind, value in here.items())
        parts.append(f'<i class="{classes}" title="{title}">{visible(tokens[i])}</i>')
    parts += [text for place in range(done, len(tokens) + 1) for text in before.get(place, ())]
    return "".join(parts)


def visible(token: str) -> str:
    """A token as escaped HTML with visible control and format characters; a newline is a sign and a line break."""

    def show(char: str) -> str:
        if ord(char) < 32:
            return {"\n": "↵\n", "\t": "⇥\t"}.get(char, chr(0x2400 + ord(char)))
        # Format characters can hide or reorder the text around them, but the zero-width joiner belongs to emoji.
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char != "\u200d":
            return f"⟨U+{ord(char):04X}⟩"
        return "⍽" if char == "\u00a0" else char

    return html.escape("".join(map(show, token))) or "∅"
