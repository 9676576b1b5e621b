"""An infinite, reshuffled stream of prompt batches whose position can be saved and restored."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from jaxrl_llm.data.chat.encode import preview
from jaxrl_llm.utils.errors import InputError, shown

_LARGEST = 2**24  # rows in a batch


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int. InputError unless it is a whole number (True and 2.0 are not) from `least` to `most`.

    >>> whole_number("limit", 3, 1)
    3
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}, but must be a whole number")
    number = int(value)
    if number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        raise InputError(f"{name} must be at least {least}{upper}, found {shown(number)}")
    return number


class PromptStream(Iterator[tuple[list[dict[str, Any]], np.ndarray]]):
    """Infinite batches of rows. Every epoch is a new permutation of all rows, and batches can span two epochs.

    rows: the prompts, as returned by `load_prompts` or `open_prompts`.
    batch_size: rows in a batch, 1 to 2^24. Every batch is full; a batch that spans two epochs can repeat a row.
    seed: 0 to 2^32 - 1. The same rows, batch_size and seed give the same batches.
    shuffle: if false, every epoch keeps the order of the rows.

    Each item is (list of batch_size rows, int32[batch_size] prompt ids); a prompt id is the row's index in `rows`.

    >>> stream = PromptStream([{"prompt": "a"}, {"prompt": "b"}], batch_size=3, seed=0, shuffle=False)
    >>> next(stream)[1].tolist(), next(stream)[1].tolist()
    ([0, 1, 0], [1, 0, 1])

    Raises InputError if there are no rows, a row is not a dict, or a number is not whole or out of range.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], *, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise InputError(f"rows is {preview(rows)}, but must be a list of dicts, as returned by load_prompts")
        if not len(rows):
            raise InputError("no rows to draw prompts from: give at least one")
        for number, row in enumerate(rows if isinstance(rows, list | tuple) else ()):  # others are read as drawn
            if not isinstance(row, dict):
                raise InputError(f"rows[{number}] is {preview(row)}, but must be a dict, as returned by load_prompts")
        batch_size, seed = whole_number("batch_size", batch_size, 1, _LARGEST), whole_number("seed", seed, 0, 2**32 - 1)
        if not isinstance(shuffle, bool):
            raise InputError(f"shuffle is {shown(shuffle)}, but must be True or False")
        import grain  # here, because it imports JAX

        self._rows = rows
        self._inputs = {"rows": len(rows), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        # The data set is one of indices, because grain would stack the leaves of rows into arrays.
        indices = grain.MapDataset.range(len(rows)).seed(seed)
        if shuffle:
            indices = indices.shuffle()
        # There is no last batch to drop, but without it grain cannot count single-row batches of an infinite source.
        batches = indices.repeat().batch(batch_size, drop_remainder=True)
        # Without prefetching threads, the state is exactly the number of batches taken.
        self._batches = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def __next__(self) -> tuple[list[dict[str, Any]], np.ndarray]:
        prompt_ids = self.next_ids()
        return [self._rows[index] for index in prompt_ids], prompt_ids

    def next_ids(self) -> np.ndarray:
        """The prompt ids of the next batch, int32[batch_size], without its rows."""
        return np.asarray(next(self._batches), dtype=np.int32)

    def state(self) -> dict[str, Any]:
        """The position of the stream, as a JSON value."""
        return {**self._inputs, "position": self._batches.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Move the stream to a position returned by `state()`.

        Raises InputError if the state is of a stream with another number of rows, batch size, seed or shuffle, or is
        malformed; the stream then keeps its position.
        """
        if not isinstance(state, dict):
            raise InputError(f"cannot resume the prompt stream: its state is {preview(state)}, but must be a dict")
        for name, value in self._inputs.items():
            if name not in state or state[name] != value or isinstance(state[name], float):
                was = shown(state.get(name))
                raise InputError(f"cannot resume the prompt stream: {name} was {was}, and is now {value}")
        now, position = self._batches.get_state(), state.get("position")
        try:
            if not _is_alike(position, now):
                raise TypeError("malformed")
            self._batches.set_state(position)
        except Exception as error:  # grain raises several types
            self._batches.set_state(now)
            raise InputError(
                f"cannot resume the prompt stream: its position is {preview(position)}, but must be like {now}"
            ) from error


def _is_alike(state: Any, other: Any) -> bool:
    """Whether two states have the same keys and types of values, and no number is negative."""
    if isinstance(other, dict):
        alike = isinstance(state, dict) and state.keys() == other.keys()
        return alike and all(_is_alike(state[name], value) for name, value in other.items())
    return type(state) is type(other) and not (isinstance(state, int) and state < 0)
