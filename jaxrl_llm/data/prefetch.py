"""Values that worker threads compute ahead of their use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The values of numbers. Which are computed ahead, and by how many threads, changes none of them.

    load: numbers -> their values, called from several threads. workers: number of threads.
    place: numbers are loaded in the order of their places, so that neighbours are loaded together.

    The values used last are kept: four times as many as are asked for at once.
    """

    def __init__(self, load: Callable[[list[int]], list[T]], workers: int, place: Callable[[int], int]) -> None:
        self._load, self._workers, self._place = load, workers, place
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="prompts")
        self._found: OrderedDict[int, tuple[Future[list[T]], int]] = OrderedDict()
        self._room = 0

    def start(self, numbers: Iterable[int]) -> None:
        """Begin to compute the values of these numbers, unless they are known."""
        wanted = dict.fromkeys(int(number) for number in numbers)
        new = sorted((number for number in wanted if number not in self._found), key=self._place)
        size = -(-len(new) // self._workers)
        for chunk in [new[i : i + size] for i in range(0, len(new), max(size, 1))]:
            future = self._pool.submit(self._load, chunk)
            self._found.update((number, (future, place)) for place, number in enumerate(chunk))
        for number in wanted:
            self._found.move_to_end(number)
        self._room = max(self._room, 4 * len(wanted))
        while len(self._found) > self._room:
            self._found.popitem(last=False)

    def __getitem__(self, number: int) -> T:
        if number not in self._found:
            self.start([number])
        future, place = self._found[number]
        self._found.move_to_end(number)
        try:
            return future.result()[place]
        except Exception:  # of any number that was loaded together with this one
            return self._load([number])[0]
