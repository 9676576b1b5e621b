"""Completions as text for notebooks and terminals, each token shaded by a number such as its log-probability."""

import html
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.chat.encode import prompt_text
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.reporting.html.conversations import common_prefix, observation
from jaxrl_llm.reporting.html.shading import LEVELS, level_value, shade_level, style_rules, visible
from jaxrl_llm.reporting.statistics import typical_size
from jaxrl_llm.sampling.checks import check_not_negative, check_tokenizer
from jaxrl_llm.utils.errors import InputError, several, shown, unknown

MOST_TOKENS = 1000  # tokens of a row with an HTML element each; notebooks store their output

_STYLE = """
.jaxrl-completions{font:13px/1.6 system-ui,sans-serif}
.jaxrl-completions p{margin:.8em 0 0}
.jaxrl-completions pre{font:13px/1.6 monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0;padding:0;
background:none;color:inherit}
.jaxrl-completions i{font-style:normal}
.jaxrl-completions .given{opacity:.6}
.jaxrl-completions details.given{border-left:3px solid;padding-left:.6em}
.jaxrl-completions .given summary{cursor:pointer;white-space:normal}
"""


class ShownRow(NamedTuple):
    """One sequence to show; n is the number of its tokens without padding."""

    about: str
    ids: np.ndarray  # int32[n]
    action: np.ndarray  # bool[n]
    numbers: dict[str, np.ndarray]  # [n] values of the tokens, by name
    known: int  # tokens that the previous row begins with, too, which are not repeated: a prompt, or a path to a fork


@dataclass(frozen=True, repr=False)
class Completions:
    """The result of `show`: a notebook displays it as HTML, `print` as plain text."""

    rows: tuple[ShownRow, ...]
    tokenizer: Any
    by: str
    left_out: int  # rows of the batch that are not shown

    def values(self) -> np.ndarray:
        """f64[n]: the finite values of all actions shown."""
        found = [row.numbers[self.by][row.action] for row in self.rows]
        values = np.concatenate(found).astype(np.float64) if found else np.zeros(0)
        return values[np.isfinite(values)]

    def __str__(self) -> str:
        lines = [f"{several(len(self.rows), 'completion')}, {self._range()}"]
        for row in self.rows:
            values = row.numbers[self.by][row.action]
            values = values[np.isfinite(values)]
            lines.append(row.about + (f", mean {self.by} {values.mean(dtype=np.float64):.3g}" if values.size else ""))
            if row.known > _leading(row):
                lines.append("  [as the row before up to here]")
            for is_action, places in _runs(row):
                text = html.unescape(visible(self._text(row.ids[places])))
                lines.append(textwrap.indent(text.rstrip("\n"), "> " if is_action else "  ", lambda line: True))
        return "\n".join(lines + self._more())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        kind, limit = shade_kind(self.by), typical_size(self.values().tolist())
        parts = [f"<p>{_legend(self.by, kind, limit)}{html.escape(self._range())}</p>"]
        for row in self.rows:
            body = "".join(self._elements(row, kind, limit))
            parts.append(f"<p>{html.escape(row.about)}</p><pre>{body}</pre>")
        parts += [f"<p>{html.escape(line)}</p>" for line in self._more()]
        style = f"<style>{_STYLE}{style_rules(kind)}</style>"
        return f'<div class="jaxrl-completions show-{kind}">{style}{"".join(parts)}</div>'

    def _elements(self, row: ShownRow, kind: str, limit: float) -> Iterator[str]:
        """One HTML element per action and per run of other tokens, in order."""
        actions = int(row.action[row.known :].sum())
        head = actions if actions <= MOST_TOKENS else MOST_TOKENS * 3 // 4
        tail, seen = actions - (MOST_TOKENS - head), 0
        texts = token_texts(self.tokenizer, row.ids.tolist())
        if row.known > _leading(row):
            yield "<em>[as the row before up to here]</em>"
        for is_action, places in _runs(row):
            if not is_action:
                text = self._text(row.ids[places])
                yield observation(text) if places[0] > _leading(row) else f'<i class="given">{visible(text)}</i>'
                continue
            for i in places:
                if seen < head or seen >= tail:
                    yield _token(row, i, texts[i], self.by, kind, limit)
                elif seen == head:
                    yield f"<em>[{tail - head:,} tokens left out]</em>"
                seen += 1

    def _text(self, ids: np.ndarray) -> str:
        return " ".join(map(str, ids)) + " " if self.tokenizer is None else prompt_text(self.tokenizer, ids.tolist())

    def _range(self) -> str:
        values = self.values()
        if not values.size:
            return f"{self.by}: no values"
        return f"{self.by} {values.min():.3g} to {values.max():.3g}, mean {values.mean():.3g}"

    def _more(self) -> list[str]:
        return [f"{several(self.left_out, 'more row')}: pass rows= to show them"] if self.left_out else []


def show(batch: Trajectories, tokenizer: Any, by: str = "logp", rows: int = 16) -> Completions:
    """Show the completions of a batch: in a notebook with each token shaded, with `print` as plain text.

    by: what shades the tokens: "logp" (of the behaviour policy), "entropy", "advantages", or any other floating [N, L]
    field or entry of `info`. The full shade is at the 98th percentile of its absolute value. Hovering over a token
    shows its numbers. Tokens that the policy did not choose are pale; a prompt that neighbouring rows share is shown
    once. tokenizer: or the policy, which has one; None shows token ids. rows: number of rows to show, from the first.
    Raises InputError for a field that the batch does not have, and for rows below 1.
    """
    check_batch(batch)
    check_number("rows", rows, least=1, whole=True)
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, Policy) else tokenizer
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    if not isinstance(by, str):
        raise InputError(f"by is {shown(by)}, but must be the name of a field")
    columns = _columns(batch)
    if by not in columns:
        if by in batch.__dataclass_fields__:
            raise InputError(f"the batch has no {by} of each token: show it by one of {', '.join(sorted(columns))}")
        raise unknown("field", by, columns)
    count = min(rows, batch.tokens.shape[0])
    fields = (batch.tokens, batch.token_mask, batch.action_mask, batch.policy_step)
    tokens, real, action, step = (np.asarray(x[:count]) for x in fields)
    named = [name for name in dict.fromkeys(("logp", "entropy", by)) if name in columns]
    numbers = {name: np.asarray(columns[name][:count]) for name in named}
    numbers["policy_step"] = step
    check_not_negative(tokens, real)
    nodes = None if "node" not in (batch.info or {}) else np.asarray((batch.info or {})["node"][:count])
    out: list[ShownRow] = []
    for n in range(count):
        own = {name: x[n][real[n]] for name, x in numbers.items()}
        row = ShownRow(_about(batch, n), tokens[n][real[n]], action[n][real[n]], own, 0)
        given = _leading(row)
        same = bool(out) and _leading(out[-1]) == given and np.array_equal(out[-1].ids[:given], row.ids[:given])
        if same and nodes is not None:  # tokens with the same node were sampled once
            paths = [nodes[row_number][real[row_number]] for row_number in (n - 1, n)]
            given += common_prefix(*(path[given:] for path in paths))
        out.append(row._replace(known=given) if same else row)
    return Completions(tuple(out), tokenizer, by, batch.tokens.shape[0] - count)


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds to the ones before it; a character of several tokens is added by the last one."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    out = []
    start, whole = 0, 0  # text up to `whole` is emitted; decoding from `start` keeps the spaces between tokens
    for i in range(len(ids)):
        before = prompt_text(tokenizer, ids[start:whole]) if whole > start else ""
        text = prompt_text(tokenizer, ids[start : i + 1])
        if text.endswith("\ufffd") and i + 1 < len(ids):
            out.append("")
        else:
            out.append(text[len(before) :])
            start, whole = whole, i + 1
    return out


def shade_kind(by: str) -> str:
    """The kind of shade (a key of `shading.KINDS`) for a field."""
    if by.endswith(("logp", "support_floor")):
        return "logp"
    return "entropy" if "entropy" in by else "advantage"


def _columns(batch: Trajectories) -> Mapping[str, Any]:
    """All floating [N, L] arrays of the batch by name; "logp" is that of the behaviour policy."""
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    named = {"logp": batch.behaviour_logp, **fields, **(batch.info or {})}
    return {
        name: x
        for name, x in named.items()
        if getattr(x, "shape", None) == batch.tokens.shape and jnp.issubdtype(x.dtype, jnp.floating)
    }


def _about(batch: Trajectories, n: int) -> str:
    said = [f"row {n}", f"group {int(batch.group[n])}"]
    if batch.reward is not None:
        said.append(f"reward {float(batch.reward[n]):.3g}")
    said.append(f"{int(np.sum(np.asarray(batch.action_mask[n])))} tokens")
    if batch.turn_rewards is not None:
        turns = int(np.max(np.asarray(batch.turn[n]), initial=-1)) + 1
        said += [f"rewards of turns {' '.join(f'{float(x):.3g}' for x in np.asarray(batch.turn_rewards[n])[:turns])}"]
    return ", ".join(said) + (", truncated" if bool(batch.truncated[n]) else "")


def _runs(row: ShownRow) -> Iterator[tuple[bool, list[int]]]:
    """The places of consecutive actions, or of other tokens, behind those that are known."""
    for is_action, run in groupby(range(row.known, len(row.ids)), key=lambda i: bool(row.action[i])):
        yield is_action, list(run)


def _leading(row: ShownRow) -> int:
    """The number of tokens before the first action."""
    return int(np.argmax(row.action)) if row.action.any() else len(row.ids)


def _token(row: ShownRow, i: int, text: str, by: str, kind: str, limit: float) -> str:
    """The HTML element of an action; its title shows the token, its id and its numbers."""
    level = shade_level(float(row.numbers[by][i]), limit, kind)
    numbers = [f"{name} {x[i]:.3g}" for name, x in row.numbers.items() if np.isfinite(x[i])]
    title = ", ".join([f"{visible(text).rstrip()} (id {row.ids[i]})", *map(html.escape, numbers)])
    shade = f'class="{kind[0]}{level}" ' if level else ""
    return f'<i {shade}title="{title}">{visible(text)}</i>'


def _legend(by: str, kind: str, limit: float) -> str:
    """The scale of shades, between the values of its ends."""
    levels = range({"entropy": 0}.get(kind, -LEVELS), {"logp": 0}.get(kind, LEVELS) + 1)
    swatches = "".join(f'<i class="{kind[0]}{level}">&nbsp;&nbsp;</i>' for level in levels)
    least, most = (f"{level_value(level, limit, kind):.3g}" for level in (levels[0], levels[-1]))
    half = f" (half the shade at {level_value(LEVELS // 2, limit, kind):.3g})" if kind == "advantage" else ""
    return f"{html.escape(by)} {least} {swatches} {most}{half}; found: "
