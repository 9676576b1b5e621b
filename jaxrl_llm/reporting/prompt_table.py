"""Which prompts a run tried, how their solve rates moved, and what was left out and why: the most telling of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.shown_completions import shared_beginning
from jaxrl_llm.reporting.html.visits import LeftOut, read_left_out, read_visits
from jaxrl_llm.reporting.statistics import as_number
from jaxrl_llm.utils.errors import InputError, several

KINDS = ("fell", "rose", "never solved", "always solved", "steady", "tried once")
BARS = "▁▂▃▄▅▆▇█"
_POINTS = 8  # of a sparkline
_TEXT = 120  # characters of a prompt


class PromptRow(NamedTuple):
    """A prompt of the table."""

    prompt_id: int
    text: str
    """The beginning of the prompt, "" if none of its completions is logged."""
    kind: str
    groups: int
    first_step: int
    last_step: int
    before: float
    """Mean of the values of the first third of its groups, at least of one."""
    after: float
    """The same of the last third."""
    line: str
    """A sparkline of its groups, in order."""
    equal: int
    """Groups with equal rewards."""
    dropped: int
    """Groups that were sampled, but not trained on."""
    why: str
    """Why the curriculum leaves it out now; "" if it does not."""


class PromptTable(NamedTuple):
    """The prompts of a run. Values are solve rates, or mean rewards where no sample of the run was correct."""

    rows: list[PromptRow]
    kinds: dict[str, int]
    """How many prompts there are of each kind; the rows are some of them."""
    value: str
    """ "solve rate" or "mean reward"."""
    tried: int
    total: int | None
    """Prompts of the run, if it is known."""
    groups: int
    equal: int
    """Groups with equal rewards."""
    dropped: dict[str, int]
    """Groups that were sampled, but not trained on, by reason."""
    left_out: dict[str, int]
    """Prompts that the curriculum leaves out, by reason."""
    as_of: int | None
    """The step of `left_out`; None if the curriculum leaves nothing out."""
    sampled: bool
    """Whether only logged completions were read: groups of some steps."""

    def __str__(self) -> str:
        return _as_text(self)


def prompt_table(run: RunData, each: int = 8) -> PromptTable | None:
    """The table of a run, with at most `each` prompts of each kind and of each reason; None if no group is known.

    The prompts that moved most come first; of the others, those that were tried most often. Raises InputError for a
    damaged file.
    """
    visits, left_out = read_visits(run), read_left_out(run.folder)
    if not len(visits.prompt):
        return None
    order = np.lexsort((visits.step, visits.prompt))
    ids, first, count = np.unique(visits.prompt[order], return_index=True, return_counts=True)
    solved = bool(visits.right.any())
    value = (visits.right / np.maximum(visits.samples, 1) if solved else visits.reward)[order]
    before, after = _ends(value, first, count)
    kind = _kinds(value, first, count, before, after, solved)
    why = np.zeros(len(ids), np.int64)
    if left_out is not None:
        inside = ids < len(left_out.why)
        why[inside] = left_out.why[ids[inside]]
    rank = np.lexsort((ids, -count, -np.abs(after - before)))  # of all prompts, the most telling first
    chosen = [place for number in range(len(KINDS)) for place in rank[kind[rank] == number][:each]]
    shown = set(chosen)
    for reason in np.unique(why[why > 0]):
        already = sum(why[place] == reason for place in shown)
        more = [place for place in rank[why[rank] == reason] if place not in shown] if already < each else []
        chosen += more[: each - already]
    chosen.sort(key=lambda place: kind[place])
    texts, bounds = _texts(run, ids[chosen]), (0.0, 1.0) if solved else (float(value.min()), float(value.max()))
    equal, lost = visits.equal[order], (visits.why > 0)[order]
    rows = []
    for place in chosen:
        own = slice(first[place], first[place] + count[place])
        steps, prompt = visits.step[order[own]], int(ids[place])
        rows.append(
            PromptRow(
                prompt, texts.get(prompt, ""), KINDS[kind[place]], int(count[place]), int(steps[0]), int(steps[-1]),
                float(before[place]), float(after[place]), sparkline(value[own], bounds), int(equal[own].sum()),
                int(lost[own].sum()), left_out.words[why[place]] if left_out is not None and why[place] else "",
            )
        )  # fmt: skip
    return PromptTable(
        rows, {name: n for number, name in enumerate(KINDS) if (n := int(np.sum(kind == number)))},
        "solve rate" if solved else "mean reward", len(ids), _total(run, left_out), len(value), int(equal.sum()),
        {name: int(np.sum(visits.why == number)) for number, name in enumerate(visits.reasons, start=1)},
        _counts(left_out), None if left_out is None else left_out.step, visits.sampled,
    )  # fmt: skip


def sparkline(values: npt.NDArray[np.float64], bounds: tuple[float, float] = (0.0, 1.0)) -> str:
    """At most 8 bars, the means of equal parts of the values in order; "" for a single value.

    >>> sparkline(np.array([0.0, 0.25, 1.0])), sparkline(np.arange(16) / 15)
    ('▁▃█', '▁▂▃▄▅▆▇█')
    """
    if len(values) < 2:
        return ""
    low, high = bounds
    parts = np.array_split(values, min(len(values), _POINTS))
    levels = [(float(np.mean(part)) - low) / (high - low) if high > low else 0.5 for part in parts]
    return "".join(BARS[int(min(max(x, 0.0), 1.0) * (len(BARS) - 1) + 0.5)] for x in levels)


def _as_text(table: PromptTable) -> str:
    """The table for a terminal.

    >>> one = PromptRow(7, "What is 2 + 3?", "rose", 4, 1, 9, 0.25, 1.0, "▁▅█", 1, 0, "solved")
    >>> print(_as_text(PromptTable([one], {"rose": 3}, "solve rate", 3, 10, 9, 4, {}, {"solved": 2}, 9, False)))
    3 of 10 prompts tried: 3 rose. 9 groups, 4 with equal rewards.
    Left out after step 9: 2 solved.
    prompt  groups  steps  solve rate           left out
         7       4  1-9    0.25 to 1 ▁▅█        solved    What is 2 + 3?
    """
    lines = [f"{tried_text(table)}. {groups_text(table)}."]
    if table.left_out:
        lines.append(f"Left out after step {table.as_of}: {counts_in_words(table.left_out)}.")
    cells = [["prompt", "groups", "steps", table.value, "left out", ""]]
    for row in table.rows:
        moved = f"{row.before:.3g}" if row.groups == 1 else f"{row.before:.3g} to {row.after:.3g} {row.line}"
        steps = f"{row.first_step}-{row.last_step}" if row.groups > 1 else f"{row.first_step}"
        cells.append([f"{row.prompt_id}", f"{row.groups}", steps, moved, row.why, " ".join(row.text.split())])
    widths = [max(len(one[place]) for one in cells) for place in range(5)]
    widths[3] = max(widths[3], 19)
    for one in cells:
        padded = [x.rjust(n) for x, n in zip(one[:2], widths[:2], strict=True)]
        padded += [x.ljust(n) for x, n in zip(one[2:5], widths[2:], strict=True)]
        lines.append("  ".join([*padded, one[5]]).rstrip())
    return "\n".join(lines)


def tried_text(table: PromptTable) -> str:
    """How many prompts were tried, and how they did."""
    of = f"{table.tried:,} prompts" if table.total is None else f"{table.tried:,} of {table.total:,} prompts"
    return f"{of} tried{' in logged steps' if table.sampled else ''}: {counts_in_words(table.kinds)}"


def groups_text(table: PromptTable) -> str:
    """How many groups there were, and how many taught nothing."""
    text = f"{several(table.groups, 'group')}, {table.equal:,} with equal rewards"
    return text + (f"; sampled and not trained on: {counts_in_words(table.dropped)}" if table.dropped else "")


def counts_in_words(counts: dict[str, int]) -> str:
    """Counts with their names, the largest first.

    >>> counts_in_words({"rose": 3, "fell": 1200})
    '1,200 fell, 3 rose'
    """
    return ", ".join(f"{n:,} {name}" for name, n in sorted(counts.items(), key=lambda one: -one[1]))


def read_table(folder: Any) -> PromptTable:
    """The table of the run in a folder; InputError where it has no groups yet."""
    table = prompt_table(RunData(folder))
    if table is None:
        raise InputError(f"{folder} has no groups yet: no step is complete")
    return table


def _ends(value: Any, first: Any, count: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The means of the first and of the last third of each prompt's values."""
    total, third = np.concatenate([[0.0], np.cumsum(value)]), np.maximum(count // 3, 1)
    last = first + count
    return (total[first + third] - total[first]) / third, (total[last] - total[last - third]) / third


def _kinds(value: Any, first: Any, count: Any, before: Any, after: Any, solved: bool) -> npt.NDArray[np.int64]:
    """The kind of each prompt, as a place in KINDS."""
    low, high = (how.reduceat(value, first) for how in (np.minimum, np.maximum))
    gap = after - before
    kind = np.select([gap < -1e-9, gap > 1e-9, count == 1], [0, 1, 5], 4)
    return np.select([high <= 0, low >= 1], [2, 3], kind) if solved else kind


def _texts(run: RunData, ids: Sequence[Any] | npt.NDArray[Any]) -> dict[int, str]:
    """The beginnings of the prompts with these ids, as far as completions of them are logged."""
    wanted = {int(one) for one in ids}
    rows = {row.prompt_id: row for row in run.rows if row.phase == "train" and row.prompt_id in wanted}
    texts = {line["prompt_id"]: line.get("prompt") or "" for line in run.read(rows.values()).values()}
    start = shared_beginning(texts.values())
    return {prompt: f"{'…' if start else ''}{text[start : start + _TEXT]}" for prompt, text in texts.items()}


def _total(run: RunData, left_out: LeftOut | None) -> int | None:
    """The number of training prompts: of the curriculum's state, else as the summary says."""
    if left_out is not None:
        return len(left_out.why)
    prompts = run.summary.get("prompts")
    number = as_number(prompts.get("training")) if isinstance(prompts, dict) else np.nan
    return int(number) if number >= 1 else None


def _counts(left_out: LeftOut | None) -> dict[str, int]:
    if left_out is None:
        return {}
    counts = np.bincount(left_out.why, minlength=len(left_out.words)).tolist()
    return {name: n for name, n in zip(left_out.words[1:], counts[1:], strict=True) if n}
