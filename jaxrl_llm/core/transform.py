"""How functions of a batch compose: stateful preparation (`Transform`) and stateless losses (`Objective`).

What objectives are is in `jaxrl_llm.core.objective`; its names are here too.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.core.arguments.checks import check_fields, expect, names_of, require_function
from jaxrl_llm.core.arguments.ranges import Count, NonNegativeInt
from jaxrl_llm.core.loss_metrics import Metrics
from jaxrl_llm.core.objective import Objective, control
from jaxrl_llm.core.repr import PartCall, layout, part, record
from jaxrl_llm.core.shapes import check_batch, in_words
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.utils.errors import InputError

__all__ = [
    "Guarded", "Metrics", "Objective", "RunFacts", "State", "StateInit", "Transform", "chain", "control", "controller",
    "counted", "stateless",
]  # fmt: skip

State = Any


@dataclass(frozen=True)
class RunFacts:
    """Sizes that a run knows before its first step; None where unknown.

    prompts: number of prompts in the data set; every `prompt_id` is below it. steps: iterations of the run.
    """

    prompts: Count | None = None
    steps: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, repr=False)
class Transform:
    """A pair of pure functions, as in optax. `apply` fills in fields of the batch; all memory is in the state.

    init:  (facts=RunFacts()) -> state, a pytree. May be built from a function without arguments, or from one with a
           parameter named `facts`, which gets the run's sizes, e.g. for a table with an entry per prompt.
    apply: (state, batch) -> (state, batch)
    needs: names of what the loop must provide in the batch, e.g. "old_logp"; see `jaxrl_llm.core.needs`

    Its repr is the code that composes it, if it comes from a factory of the library or one with `repr.part`.
    """

    init: Callable[..., State]
    apply: Callable[[State, Trajectories], tuple[State, Trajectories]]
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        init, apply = self.init, self.apply
        if not isinstance(init, StateInit):
            init = StateInit(init)
            object.__setattr__(self, "init", init)
        if not isinstance(apply, Guarded):
            apply = Guarded(apply)
            object.__setattr__(self, "apply", apply)
        object.__setattr__(self, "needs", names_of(self.needs))
        needs = {"needs": self.needs} if self.needs else {}
        record(self, PartCall(Transform, (), {"init": init.function, "apply": apply.function, **needs}))

    __repr__ = layout


@dataclass(frozen=True)
class StateInit:
    """An init function that accepts an optional `RunFacts`, whether or not the wrapped function takes one."""

    function: Callable[..., State]

    def __call__(self, facts: RunFacts | None = None) -> State:
        if facts is not None:
            expect("the facts of a run", facts, RunFacts)
        return self.function(facts or RunFacts()) if self.asks else self.function()

    @property
    def asks(self) -> bool:
        """Whether the function has a parameter named `facts`."""
        try:
            return "facts" in inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # no signature is available, e.g. for some builtins
            return False


@dataclass(frozen=True)
class Guarded:
    """`apply` of a transform, after a static check of the batch's shapes and dtypes (`check_batch`).

    rows: what an algorithm does to a batch first (`trajectory.counted_alone`). A `chain` leaves it to its own.
    """

    function: Callable[[State, Trajectories], tuple[State, Trajectories]]
    rows: Callable[[Trajectories], Trajectories] | None = None

    def __call__(self, state: State, batch: Trajectories) -> tuple[State, Trajectories]:
        if isinstance(state, Trajectories):
            raise InputError("a transform was applied to (batch, state), but takes (state, batch): swap them")
        check_batch(batch)
        try:
            after = self.function(state, batch if self.rows is None else self.rows(batch))
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            if said := _explained(error, partial(self.function, state), batch):
                raise InputError(said) from error
            raise
        if not (isinstance(after, tuple) and isinstance(after[-1], Trajectories)):
            found = after[-1] if isinstance(after, tuple) and after else after
            raise InputError(f"what a transform returns is {in_words(found)}, but must be its state and the batch")
        if self.rows is not None:  # of an algorithm; within it each transform checks what the one before returned
            check_batch(after[1])
        return after


@part
def stateless(f: Callable[[Trajectories], Trajectories], needs: Iterable[str] = ()) -> Transform:
    """The transform that applies `f` and has no state."""
    require_function("what makes a transform", f, alone=True)
    return Transform(lambda: (), lambda state, batch: (state, f(batch)), names_of(needs))


@part
def chain(*transforms: Transform) -> Transform:
    """Apply transforms from left to right; the result is a Transform whose state is the tuple of theirs.

    Raises InputError for a part that is not a Transform and, when applied, for a state of the wrong length.
    """
    for number, one in enumerate(transforms, start=1):
        expect(f"part {number} of a chain", one, Transform)
    applied = [replace(t.apply, rows=None) if isinstance(t.apply, Guarded) else t.apply for t in transforms]

    def init(facts: RunFacts) -> State:
        return tuple(t.init(facts) for t in transforms)

    def apply(state: State, batch: Trajectories) -> tuple[State, Trajectories]:
        if not isinstance(state, tuple | list) or len(state) != len(transforms):
            found = f"of {len(state)}" if isinstance(state, tuple | list) else in_words(state)
            raise InputError(f"the state of a chain of {len(transforms)} is {found}: start from its own init()")
        after = []
        for part_apply, before in zip(applied, state, strict=True):
            new, batch = part_apply(before, batch)
            after.append(new)
        return tuple(after), batch

    return Transform(init, apply, frozenset().union(*(t.needs for t in transforms)))


@part
def counted(apply: Callable[[Array, Trajectories], Trajectories], needs: Iterable[str] = ()) -> Transform:
    """The transform whose state counts its applications: `apply(step int32[], batch) -> batch`."""
    return Transform(lambda: jnp.int32(0), lambda step, batch: (step + 1, apply(step, batch)), names_of(needs))


@part
def controller(name: str, start: float, update: Callable[[Array, Metrics], Array]) -> Transform:
    """Adapt a number to the last update's metrics: `update(number f32[], feedback) -> number`.

    It is written to `batch.controls[name]`, and stays at `start` until the first update.
    """

    def apply(value: Array, batch: Trajectories) -> tuple[State, Trajectories]:
        if batch.feedback is not None:
            value = jnp.where(batch.feedback["updates"] > 0, update(value, batch.feedback), value)
        return value, batch.with_controls(**{name: value})

    return Transform(lambda: jnp.float32(start), apply, frozenset({"feedback"}))


class _Entries(dict[str, Any]):
    """Entries of a batch's field, which note the name of one that is not there."""

    def __init__(self, entries: dict[str, Any] | None, field: str, absent: list[tuple[str, str]]) -> None:
        super().__init__(entries or {})
        self._field, self._absent = field, absent

    def __missing__(self, name: str) -> Any:
        self._absent.append((self._field, name))
        raise KeyError(name)


class _Read:
    """A batch that notes which of its fields and entries were read and are not there."""

    def __init__(self, batch: Trajectories) -> None:
        self._batch = batch
        self.absent: list[tuple[str, str]] = []  # field, and entry of it or ""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._batch, name)
        if name in ("info", "rewards", "controls", "feedback"):
            return _Entries(value, name, self.absent)
        if value is None and name in Trajectories.__dataclass_fields__:
            self.absent.append((name, ""))
        return value


def _explained(error: Exception, function: Callable[[Any], Any], batch: Trajectories) -> str:
    """What the batch lacks that a function failed on with this error, in words; "" if that is not why."""
    return absent(function, batch) if isinstance(error, KeyError) or "None" in str(error) else ""


def absent(function: Callable[[Any], Any], batch: Trajectories) -> str:
    """What a function read last of a batch that is not there, and what provides it, in words; "" for nothing.

    The function is called once more, on a batch that notes what is read.
    """
    read = _Read(batch)
    with contextlib.suppress(Exception):  # as before, or since this is no Trajectories
        function(read)
    return _in_words(*read.absent[-1]) if read.absent else ""


def _in_words(field: str, entry: str) -> str:
    from jaxrl_llm.core.needs import NEEDS, where_from  # here: needs are made of transforms' modules

    if entry:
        what, need = f"{field}[{entry!r}]", entry.partition(":")[0] in NEEDS and field == "info"
    else:
        what, need = field, field in NEEDS
    found = f"the batch has no {what} where a transform reads it"
    if need:
        return f"{found}: name {entry or field!r} among its needs"
    if field in ("advantages", "returns", "weights", "controls"):
        return f"{found}: put it after the transform that writes batch.{field}"
    return f"{found}: {where_from(field)}"
