"""Running out of device memory, explained in one line."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.arguments.signatures import PYTHON
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.hyperparameters import options_of
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.health.goodput import Clock
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.state import RunState
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.settings import as_arguments

SHOWN = 4  # arrays in the message
REASON = 140  # letters of XLA's message
# Settings without effect on what a plan says.
APART = {"output", "tensorboard", "wandb", "trackio", "mlflow", "date"}


class OutOfMemoryError(InputError):
    """A device's memory was too small. The message names the phase, the largest arrays, and a command to plan with."""


class Held(NamedTuple):
    """Arrays of one name, shape and dtype."""

    name: str  # path in the run's state; "other" for arrays that are no part of it, such as caches
    array: str  # dtype and shape
    number: int
    bytes: int  # on a device, of all together

    def __str__(self) -> str:
        times = f"{self.number} x " if self.number > 1 else ""
        return f"{self.name} {times}{self.array} {self.bytes / 2**20:,.1f} MiB"


@contextmanager
def explained(config: TrainConfig, clock: Clock, named: Callable[[], Any]) -> Iterator[None]:
    """Context manager that turns XLA's RESOURCE_EXHAUSTED into an OutOfMemoryError.

    named: gives a pytree of the run's arrays, for their names.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(message(config, clock, str(error), largest(named()))) from error


def arrays_of(parts: RunParts, state: RunState) -> dict[str, Any]:
    """The run's arrays by name."""
    return {
        "params": state.train.params, "optimizer": state.train.optimizer, "memory": state.memory,
        "frozen": parts.frozen, "reference": parts.reference, **state.policies,
        "teacher": parts.teacher,
    }  # fmt: skip


def largest(named: Any, most: int = SHOWN) -> list[Held]:
    """What takes the most memory of a device: arrays of the tree (deleted ones too), and all others that are alive."""
    names: dict[int, tuple[str, Any]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(named):
        if isinstance(x, jax.Array):
            names.setdefault(id(x), (jax.tree_util.keystr(path, simple=True, separator="/"), x))
    for x in jax.live_arrays():
        names.setdefault(id(x), ("other", x))
    sizes, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for name, x in names.values():
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # random keys
            continue
        array = name, f"{x.dtype}[{','.join(map(str, x.shape))}]"
        sizes[array] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        counts[array] += 1
    return [Held(*array, counts[array], size) for array, size in sizes.most_common(most)]


def message(config: TrainConfig, clock: Clock, said: str, held: list[Held]) -> str:
    """One line: when, what XLA said, the largest arrays on a device, and what to do."""
    reason = said.partition("RESOURCE_EXHAUSTED:")[2].strip().partition("\n")[0].rstrip(".")
    reason = reason if len(reason) <= REASON else f"{reason[: REASON - 3]}..."
    when = "" if clock.step is None else f" of step {clock.step + 1}"
    arrays = f" Largest on a device: {'; '.join(map(str, held))}." if held else ""
    command = f"jaxrl plan --topology v5e:4x4 {shlex.join(changed_options(config))}".rstrip()
    return (
        f"out of device memory in {clock.failed or 'load'}{when}: {reason or 'no more was said'}.{arrays} See what a "
        f"step needs, with fewer slots, more micro_batches or another mesh: {command}"
    )


def changed_options(config: TrainConfig) -> list[str]:
    """The options of the command line that give this configuration, as far as it is not the default and matters here.

    >>> changed_options(TrainConfig(group_size=4, stop=("a b",), remat=False, output="x"))
    ['--group-size=4', '--stop', 'a b', '--no-remat']
    """

    def changed(now: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in now.items():
            if isinstance(value, dict) and value != default.get(name):
                out[name] = changed(value, default.get(name, {}))
            elif name not in default or value != default[name]:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out

    methods = {one.name: one.default for one in options_of(config.algorithm, config.hyperparameters.get("preset"))}
    found = changed(to_dict(config), to_dict(TrainConfig()) | {"hyperparameters": {**methods, "preset": None}})
    apart = {*APART, "algorithm", "hyperparameters"} if config.algorithm.startswith(PYTHON) else APART
    return as_arguments({name: value for name, value in found.items() if name not in apart})
