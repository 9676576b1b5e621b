"""The options of a command that runs on several hosts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from jaxrl_llm.cli.options import take
from jaxrl_llm.utils.errors import InputError


def host_options(arguments: list[str]) -> tuple[Callable[[], AbstractContextManager[bool]] | None, list[str]]:
    """What joins the run's other hosts, None for a process alone; and the arguments without those that say so.

    It gives a context manager, which yields whether this is the first host. InputError for options that do not fit.
    """
    coordinator, arguments = take(arguments, "--coordinator")
    count, arguments = take(arguments, "--processes")
    index, arguments = take(arguments, "--process")
    detect, arguments = take(arguments, "--distributed")
    if detect not in (None, "auto"):
        raise InputError(f"--distributed is {detect}, but must be auto, or left out")
    for name, text in (("--processes", count), ("--process", index)):
        if text is not None and not text.isdecimal():
            raise InputError(f"{name} is {text}, but must be a number")
    if coordinator is None and (count or index):
        raise InputError("--processes and --process need --coordinator HOST:PORT, the address of process 0")
    if coordinator is None and detect is None:
        return None, arguments
    from jaxrl_llm.distributed.connect import joined  # here: importing JAX takes seconds

    return partial(joined, coordinator, *(None if text is None else int(text) for text in (count, index))), arguments
