"""An endless, reshuffled stream of prompt batches that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import preview
from jaxrl_llm.data.numbers import whole_number
from jaxrl_llm.errors import InputError, shown

_LARGEST = 2**24  # rows in a batch


class PromptStream(Iterator[tuple[list[dict[str, Any]], np.ndarray]]):
    """Batches of rows for ever: every epoch is another permutation of all rows, and batches run on across its end.

    rows: the prompts, as `load_prompts` gives them.
    batch_size: rows in a batch, 1 to 2^24. Every batch is full; a row can come twice in one that spans epochs.
    seed: 0 to 2^32 - 1. Same rows, batch_size and seed: same batches.
    shuffle: if false, every epoch has the rows in their own order.

    Each step gives (list of batch_size rows, int32[batch_size] prompt ids); a prompt id is the row's index in `rows`.

    >>> stream = PromptStream([{"prompt": "a"}, {"prompt": "b"}], batch_size=3, seed=0, shuffle=False)
    >>> next(stream)[1].tolist(), next(stream)[1].tolist()
    ([0, 1, 0], [1, 0, 1])

    Raises InputError if there are no rows, one is no dict, or a number is not whole or out of its range.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], *, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise InputError(f"rows is {preview(rows)}, but must be a list of dicts, as load_prompts gives them")
        if not rows:
            raise InputError("no rows to draw prompts from: give at least one")
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InputError(f"rows[{number}] is {preview(row)}, but must be a dict, as load_prompts gives them")
        batch_size, seed = whole_number("batch_size", batch_size, 1, _LARGEST), whole_number("seed", seed, 0, 2**32 - 1)
        if not isinstance(shuffle, bool):
            raise InputError(f"shuffle is {shown(shuffle)}, but must be True or False")
        import grain  # here, because it imports JAX

        self._rows = rows
        self._made_of = {"rows": len(rows), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        # Indices travel, not rows: grain would stack the leaves of rows into arrays.
        indices = grain.MapDataset.range(len(rows)).seed(seed)
        if shuffle:
            indices = indices.shuffle()
        # There is no last batch to drop, but grain cannot count single-row batches of an endless source without.
        batches = indices.repeat().batch(batch_size, drop_remainder=True)
        # Nothing to load ahead: without threads, the state is exactly the batches that were taken.
        self._batches = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def __next__(self) -> tuple[list[dict[str, Any]], np.ndarray]:
        prompt_ids = np.asarray(next(self._batches), dtype=np.int32)
        return [self._rows[index] for index in prompt_ids], prompt_ids

    def state(self) -> dict[str, Any]:
        """Where the stream is, as a dict that JSON can hold."""
        return {**self._made_of, "position": self._batches.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state()` was taken, on a stream of the same rows and settings.

        Raises InputError if the state is of a stream with another number of rows, batch size, seed or shuffle, or is
        no state at all; the stream then stays where it is.
        """
        if not isinstance(state, dict):
            raise InputError(f"cannot resume the prompt stream: its state is {preview(state)}, but must be a dict")
        for name, value in self._made_of.items():
            if name not in state or state[name] != value or isinstance(state[name], float):
                was = shown(state.get(name))
                raise InputError(f"cannot resume the prompt stream: {name} was {was}, and is now {value}")
        now, position = self._batches.get_state(), state.get("position")
        try:
            if not _is_alike(position, now):
                raise TypeError("another form")
            self._batches.set_state(position)
        except Exception as error:  # of whatever kind grain has for it
            self._batches.set_state(now)
            raise InputError(
                f"cannot resume the prompt stream: its position is {preview(position)}, but must be like {now}"
            ) from error


def _is_alike(state: Any, other: Any) -> bool:
    """Whether two states have the same form: keys, and types of the values; no number is negative."""
    if isinstance(other, dict):
        return (
            isinstance(state, dict)
            and state.keys() == other.keys()
            and all(_is_alike(state[k], other[k]) for k in other)
        )
    return type(state) is type(other) and not (isinstance(state, int) and state < 0)
