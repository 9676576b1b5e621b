"""The drawing of a comparison of credit: completions with each token shaded by what each method makes of it."""

import html
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.completions import MOST_TOKENS, token_texts
from jaxrl_llm.reporting.html.shading import LEVELS, level_value, shade_level, style_rules, visible
from jaxrl_llm.reporting.statistics import typical_size
from jaxrl_llm.utils.errors import InputError

_DIFFERS = 0.05  # of a method's full shade: smaller differences in a sequence are not drawn
_STYLE = """
.jaxrl-credit{font:13px/1.6 system-ui,sans-serif;overflow-x:auto}
.jaxrl-credit table{border-collapse:collapse}
.jaxrl-credit th{font-weight:600;text-align:left;vertical-align:top;white-space:nowrap;padding:.1em 1em .1em 0}
.jaxrl-credit td{text-align:left;padding:.1em 0}
.jaxrl-credit .credit td,.jaxrl-credit pre{font-family:monospace;white-space:pre-wrap;overflow-wrap:break-word}
@media(max-width:42rem){.jaxrl-credit .credit th{white-space:normal}}
.jaxrl-credit .sums{margin:.3em 0 .6em}
.jaxrl-credit .sums th,.jaxrl-credit .sums td{padding:.05em 1.4em .05em 0;text-align:right}
.jaxrl-credit .sums th[scope=row]{text-align:left}
.jaxrl-credit .row th{padding-top:.8em}
.jaxrl-credit .difference{opacity:.85}
.jaxrl-credit .difference th{font-weight:400;font-style:italic}
.jaxrl-credit pre{margin:.2em 0;padding:0;background:none;color:inherit;font-size:13px}
.jaxrl-credit summary{cursor:pointer;margin-top:.8em}
.jaxrl-credit i{font-style:normal}
.jaxrl-credit .given{opacity:.6}
.jaxrl-credit .note{opacity:.75;margin:.4em 0}
@media (max-width:42em){.jaxrl-credit .credit tr,.jaxrl-credit .credit th,.jaxrl-credit .credit td{display:block}}
"""

Comparison = Any  # `credit.Comparison`, whose module draws with this one
Text = list[tuple[int, str]]  # of a row: (position, text) of its tokens


def credit_page(found: Comparison, tokens: Any, shade: str, rows: int, prompts: Sequence[str] | None) -> str:
    """See `Comparison.to_html`."""
    texts = _texts_of(found, tokens, rows)
    if prompts is not None and (isinstance(prompts, str) or len(prompts) != len(found.group)):
        raise InputError(f"the prompts do not fit the batch: pass {len(found.group)} texts")
    values = found.pushes if shade == "push" else found.advantages
    limits = {name: typical_size(values[name][found.action_mask].tolist()) for name in found.names}
    lines = [_legend(shade), _sums(found, values, limits)]
    lines += [f'<p class="note">{html.escape(note)}</p>' for note in found.notes()]
    alike = {name: same for same in found.alike(values) for name in same}
    shown = [name for name in found.names if alike[name][0] == name]
    known: tuple[str, int] | None = None  # the prompt that was drawn last, and its group
    for n, text in enumerate(texts):
        given = _leading(found, n, text)
        prompt = "".join(part for _, part in text[:given]) if prompts is None else prompts[n]
        if prompt and (prompt, int(found.group[n])) != known:
            known = prompt, int(found.group[n])
            size = f" ({given} token{'s' if given != 1 else ''})" if given else ""
            about = f"Prompt of group {known[1]}{size}"
            body = f'<i class="given">{visible(prompt)}</i>'
            lines.append(f"<details><summary>{about}</summary><pre>{body}</pre></details>")
        title = f"sequence {n}, group {found.group[n]}, reward {found.reward[n]:.3g}"
        lines.append(f'<table class="credit"><tr class="row"><th colspan="2">{html.escape(title)}</th></tr>')
        idle = not any(values[name][n].any() for name in shown)
        for name in shown[:1] if idle else shown:
            drawn = "".join(_elements(found, name, n, text[given:], values[name][n], limits[name]))
            label = f"no {shade} by any" if idle else html.escape(", ".join(alike[name]))
            lines.append(f"<tr><th>{label}</th><td>{drawn}</td></tr>")
        lines += _difference_rows(found, shown, n, text[given:], values, limits)
        lines.append("</table>")
    if len(texts) < len(found.group):
        left = len(found.group) - len(texts)
        lines.append(f'<p class="note">{left} more sequences: to_html(rows=...) draws them</p>')
    style = f"<style>{_STYLE}{style_rules('advantage')}</style>"
    return f'<div class="jaxrl-credit show-advantage">{style}{"".join(lines)}</div>'


def _texts_of(found: Comparison, tokens: Sequence[Sequence[str | None]] | None, rows: int) -> list[Text]:
    """The texts of the first rows: those given, else by the comparison's tokenizer, else ids.

    Raises InputError if those given do not fit the batch.
    """
    N, L = found.tokens.shape
    if tokens is None:
        own = [(np.flatnonzero(real), ids[real]) for real, ids in zip(found.token_mask, found.tokens, strict=True)]
        return [
            list(zip(at.tolist(), token_texts(found.tokenizer, ids.tolist()), strict=True)) for at, ids in own[:rows]
        ]
    lists = isinstance(tokens, Sequence) and all(isinstance(row, list | tuple) for row in tokens)
    if not lists or len(tokens) != N or any(len(row) > L for row in tokens):
        raise InputError(f"the texts do not fit the batch: pass {N} lists of at most {L} tokens")
    return [[(t, text) for t, text in enumerate(row) if text is not None] for row in tokens[:rows]]


def residual(first: npt.NDArray[Any], other: npt.NDArray[Any]) -> tuple[float, npt.NDArray[Any]]:
    """(c, other - c first) with the c >= 0 that leaves the least: what a rescaling does not explain."""
    size = float(np.sum(first.astype(np.float64) ** 2))
    scale = max(float(np.sum(first.astype(np.float64) * other)) / size, 0.0) if size else 0.0
    return scale, other - scale * first


def _leading(found: Comparison, n: int, text: Text) -> int:
    """The number of texts before the first action."""
    return next((i for i, (t, _) in enumerate(text) if found.action_mask[n, t]), len(text))


def _difference_rows(
    found: Comparison, shown: Sequence[str], n: int, text: Text, values: Any, limits: Any
) -> Iterator[str]:
    """A line for each method that differs from the first in this sequence by more than a scale of the whole batch."""
    first = shown[0]
    for name in shown[1:]:
        rest = residual(values[first], values[name])[1][n]
        if np.abs(rest).max(initial=0.0) > _DIFFERS * limits[name]:
            drawn = "".join(_elements(found, name, n, text, rest, limits[name], f"beyond {first}"))
            label = f"{html.escape(name)} \u2212 {html.escape(first)}"
            yield f'<tr class="difference"><th>{label}</th><td>{drawn}</td></tr>'


def _elements(
    found: Comparison, name: str, n: int, text: Text, values: npt.NDArray[Any], limit: float, what: str = ""
) -> Iterator[str]:
    """An HTML element per token; only actions have numbers. Of a long sequence the middle is left out."""
    head = len(text) if len(text) <= MOST_TOKENS else MOST_TOKENS * 3 // 4
    tail = len(text) - (MOST_TOKENS - head)
    for place, (t, token) in enumerate(text):
        if head <= place < tail:
            if place == head:
                yield f"<em>[{tail - head:,} tokens left out]</em>"
        elif not found.action_mask[n, t]:
            yield f'<i class="given">{visible(token)}</i>'
        else:
            level = shade_level(float(values[t]), limit, "advantage")
            title = f"advantage {found.advantages[name][n, t]:.4g}, d loss / d logp {found.gradients[name][n, t]:.4g}"
            title += f", {html.escape(what)} {values[t]:+.3g}" if what else ""
            kind = f'class="a{level}" ' if level else ""
            yield f'<i {kind}title="{title}">{visible(token)}</i>'


def _legend(shade: str) -> str:
    swatches = "".join(
        f'<i class="a{level}" title="{level_value(level, 1.0, "advantage"):+.2f} of the full shade">&nbsp;&nbsp;</i>'
        for level in range(-LEVELS, LEVELS + 1)
    )
    ends = ("less likely", "more likely") if shade == "push" else ("below 0", "above 0")
    return (
        f'<p>{ends[0]} {swatches} {ends[1]} <span class="note">on a square-root scale, in full at each method\'s own '
        "98th percentile (below); point at a token for its numbers</span></p>"
    )


def _sums(found: Comparison, values: dict[str, npt.NDArray[Any]], limits: dict[str, float]) -> str:
    """A table of what each method does on the whole batch."""
    columns = found.summary()
    head = "".join(f'<th scope="col">{html.escape(label)}</th>' for label in [*columns, "full shade at"])
    rows = ""
    for i, name in enumerate(found.names):
        numbers = [*(column[i] for column in columns.values()), f"{limits[name]:.3g}" if values[name].any() else "-"]
        cells = "".join(f"<td>{html.escape(number)}</td>" for number in numbers)
        rows += f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>'
    return f'<table class="sums"><tr><td></td>{head}</tr>{rows}</table>'
