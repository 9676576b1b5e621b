"""The state of the engine's rows: the few numbers of each that the host and the decode loop both read and write."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.soft_thinking import SoftThinking, no_thoughts
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.scheduler import Assignment


class RowState(NamedTuple):
    """Decoding state of each row. A row's own tokens are those after its prompt."""

    prompt: Array  # int32[B], tokens of its prompt
    newest: Array  # int32[B], its last token, which the model has not seen yet
    own: Array  # int32[B], own tokens before the newest
    fresh: Array  # bool[B], has no own token yet
    done: Array  # bool[B], ended, or empty
    last: Array  # int32[B], column of the newest token
    limit: Array  # int32[B], number of own tokens at which it ends
    prompt_id: Array  # int32[B], keys the noise together with `sample`
    sample: Array  # int32[B]
    adapter: Array  # int32[B], which of the weights' adapters it has, see `models.by_row`
    # Of a policy that thinks softly, else None: whether its next token is soft, bool[B]; and the record of its newest
    # token, f32[B, 3, K], as which the model sees it.
    thinking: Array | None = None
    thought: Array | None = None


def no_rows(rows: int, thinking: SoftThinking | None = None) -> RowState:
    """The state of empty rows. thinking: the policy's."""
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, bool)  # the host writes to them before a program reads them
    found: Any = RowState(*(zeros, zeros, zeros, ~ones, ones, zeros, zeros, zeros, zeros, zeros))  # type: ignore[arg-type]
    return found if thinking is None else found._replace(thinking=~ones, thought=no_thoughts(thinking, rows))


def marked_done(state: RowState, rows: Any) -> RowState:
    """The state where some rows are done. rows: an index of them."""
    done = np.array(state.done)
    done[rows] = True
    return state._replace(done=done)  # type: ignore[arg-type]


def begun_rows(
    state: RowState, assigned: Sequence[Assignment], requests: Mapping[int, Request], thinking: SoftThinking | None
) -> RowState:
    """The state where requests are in the rows that they were assigned. thinking: the policy's."""
    rows: Any = jax.tree.map(np.array, state)
    for number, row, _ in assigned:
        request = requests[number]
        begun = request.begun.token
        rows.prompt[row] = len(request.prompt)
        rows.newest[row] = begun[-1] if begun.size else 0
        rows.own[row] = max(begun.size - 1, 0)
        rows.fresh[row], rows.done[row] = begun.size == 0, False
        rows.limit[row] = request.until
        rows.prompt_id[row], rows.sample[row] = request.prompt_id, request.sample
        rows.adapter[row] = request.adapter
        if thinking is not None:
            thoughts = request.begun.thoughts
            rows.thinking[row] = thinking.end not in begun
            rows.thought[row] = thoughts[-1] if thoughts is not None and begun.size else -1
    return rows
