"""Scored batches of some groups, and of several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards.entry_arrays import alike
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rewards.workers.calling import Logged, all_logged
from jaxrl_llm.sampling.requests import RECORDS
from jaxrl_llm.sampling.routed_experts import of_rows


def some_rows(scored: Scored, number: int, place: slice) -> Scored:
    """The rows of group `number`. Failures and metrics are not known per row: all are attributed to the first group."""
    failures = {name: 0 if number else count for name, count in scored.failures.items()}
    batch = jax.tree.map(lambda x: np.asarray(x)[place], scored.batch)
    logged = Logged(
        () if number else scored.logged.metrics, {name: x[place] for name, x in scored.logged.extras.items()}
    )
    return Scored(batch, scored.texts[place], failures, scored.entries, logged)


def rows_of_group(scored: Scored, number: int, size: int) -> Scored:
    """The rows of one group, where all have `size`. Failures are attributed to the first group."""
    return some_rows(scored, number, slice(number * size, (number + 1) * size))


def concatenate_groups(groups: list[Scored]) -> Scored:
    """Concatenate groups of possibly different widths, renumbering them in their order; one may have several parts."""
    width = max(group.batch.tokens.shape[1] for group in groups)

    def widened(batch: Trajectories, first: int) -> Any:
        padded = {
            name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=PADDING.get(name, 0))
            for name, x in vars(batch).items()
            if isinstance(x, np.ndarray) and x.ndim == 2
        }
        at_tokens: dict[str, Any] = {
            name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=np.nan)
            for name, x in (batch.info or {}).items()
            if x.ndim == 2 and x.shape[1] == batch.tokens.shape[1] and x.dtype.kind == "f"
        }
        batch = batch.with_info(**at_tokens) if at_tokens else batch
        number = first + np.unique(batch.group, return_inverse=True)[1]
        return batch.replace(**padded, group=number.astype(np.int32))

    counts = [len(np.unique(group.batch.group)) for group in groups]
    starts = np.cumsum([0, *counts]).tolist()
    batches = [widened(group.batch, first) for first, group in zip(starts, groups, strict=False)]
    infos: Any = alike([(batch.info or {}, len(batch.group)) for batch in batches])
    batches = [batch.replace(info=info or None) for batch, info in zip(batches, infos, strict=True)]
    for name in RECORDS:
        found = [getattr(batch, name) for batch in batches]
        if any(x is not None for x in found):
            rows = [[None] * len(b.group) if x is None else list(x) for b, x in zip(batches, found, strict=True)]
            batches = [b.replace(**{name: x}) for b, x in zip(batches, _split(rows, width), strict=True)]
    if any(batch.token_rewards is not None for batch in batches):
        zeros: list[Any] = [np.zeros(b.tokens.shape, np.float32) for b in batches]
        both = zip(batches, zeros, strict=True)
        batches = [b.replace(token_rewards=none if b.token_rewards is None else b.token_rewards) for b, none in both]
    return Scored(
        jax.tree.map(lambda *x: np.concatenate(x), *batches),
        [text for group in groups for text in group.texts],
        {name: sum(group.failures[name] for group in groups) for name in groups[0].failures},
        tuple(dict.fromkeys(name for group in groups for name in group.entries)),
        all_logged((group.logged, len(group.texts)) for group in groups),
    )


def _split(records: Sequence[Sequence[Any]], width: int) -> list[np.ndarray]:
    """The records of the rows of several batches, such as their experts, padded to one width."""
    whole = of_rows([row for rows in records for row in rows], width)
    assert whole is not None
    return np.split(whole, np.cumsum([len(rows) for rows in records])[:-1])


PADDING = {"turn": -1, "support_floor": -np.inf, **dict.fromkeys(RECORDS, -1)}  # of fields of tokens; 0 of the others
