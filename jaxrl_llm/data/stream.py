"""An endless, reshuffled stream of prompt batches that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError


class PromptStream(Iterator[tuple[list[dict[str, Any]], np.ndarray]]):
    """Batches of rows for ever: every epoch is another permutation of all rows, and batches run on across its end.

    rows: the prompts, as `load_prompts` gives them.
    batch_size: rows in a batch, >= 1. Every batch is full; a row can come twice in one that spans epochs.
    seed: 0 to 2^32 - 1. Same rows, batch_size and seed: same batches.
    shuffle: if false, every epoch has the rows in their own order.

    Each step gives (list of batch_size rows, int32[batch_size] prompt ids); a prompt id is the row's index in `rows`.

    >>> stream = PromptStream([{"prompt": "a"}, {"prompt": "b"}], batch_size=3, seed=0, shuffle=False)
    >>> next(stream)[1].tolist(), next(stream)[1].tolist()
    ([0, 1, 0], [1, 0, 1])

    Raises InputError if there are no rows or a number is out of its range.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], *, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        import grain

        if not rows:
            raise InputError("no rows to draw prompts from: give at least one")
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, found {batch_size}")
        if not 0 <= seed < 2**32:
            raise InputError(f"seed must be from 0 to 2^32 - 1, found {seed}")
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

        Raises InputError if the state is of a stream with another number of rows, batch size, seed or shuffle.
        """
        for name, value in self._made_of.items():
            if state.get(name) != value:
                raise InputError(f"cannot resume the prompt stream: {name} was {state.get(name)}, and is now {value}")
        self._batches.set_state(state["position"])
