"""Compiling ahead of time: the same calls that run a program on arrays compile it for devices that need not be there.

    with ahead_of_time() as programs:
        state = replicate(shapes, mesh)                    # a mesh of `jax.experimental.topologies` will do
        state, metrics = update(policy, objective, optimizer, state, to_mesh(batch, mesh), steps)
    programs[0].compiled.memory_analysis()

Inside, functions decorated with `compiled` return shapes with the shardings that the compiler chose, so that what one
program gives can be given to the next. So the host code that runs a step is also what plans it.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from jaxrl_llm.distributed.chips import compiler_options

T = TypeVar("T")
Shapes = Any  # a pytree of jax.ShapeDtypeStruct


class Program(NamedTuple):
    """A program that was compiled and not run."""

    name: str  # of the function
    lowered: jax.stages.Lowered
    compiled: Any  # jax.stages.Compiled; None where it was only lowered
    jaxpr: Any


class _Recording(NamedTuple):
    programs: list[Program]
    platform: str | None
    beside: Executor | None


_programs: ContextVar[_Recording | None] = ContextVar("programs", default=None)


@contextmanager
def ahead_of_time(platform: str | None = None, beside: Executor | None = None) -> Iterator[list[Program]]:
    """Within it `compiled` functions only compile, `place` only says where arrays would be; the list fills up.

    platform: only lower, for a platform without a compiler here, such as "cuda"; results then have no shardings.
    beside: compiles, at the same time, the programs that say how their results are sharded. They are in the list, as
    all others, once the context ends.
    """
    programs: list[Program] = []
    token = _programs.set(_Recording(programs, platform, beside))
    try:
        yield programs
    finally:
        _programs.reset(token)
    for number, program in enumerate(programs):
        if isinstance(program.compiled, Future):
            programs[number] = program._replace(compiled=program.compiled.result())


def compiled(
    check: Callable[[Any], None] | None = None, results: Callable[[Any], Any] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """`jax.jit` with these options, as a decorator, of a function that can be compiled ahead of time.

    check: called before with the arguments by name (a namespace), traced ones too; it raises for what is wrong.
    results: of the arguments by name, the sharding that the function gives all its results; None where it gives none.
    `lower`, `trace` and `eval_shape` are jit's and check nothing.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        jitted = jax.jit(function, **options)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            recording = _programs.get()
            given = None
            if check is not None or (recording is not None and results is not None):
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                given = SimpleNamespace(**bound.arguments)
            if check is not None:
                check(given)
            if recording is None:  # compiled with XLA's options for the devices, where they have some
                chosen = compiler_options(args, kwargs) if jax.default_backend() == "tpu" else {}
                return (with_options(tuple(chosen.items())) if chosen else jitted)(*args, **kwargs)
            return _compile(recording, jitted, args, kwargs, None if results is None else results(given))

        @functools.cache
        def with_options(chosen: tuple[tuple[str, str], ...]) -> Any:
            return jax.jit(function, compiler_options=dict(chosen), **options)

        for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
            setattr(call, name, getattr(jitted, name))
        return call

    return decorate


def program_of(name: str, traced: Any, platform: str | None = None, options: dict[str, str] | None = None) -> Program:
    """A traced function, compiled with XLA's options; with a platform only lowered for that."""
    if platform is not None:
        return Program(name, traced.lower(lowering_platforms=(platform,)), None, traced.jaxpr)
    lowered = traced.lower()
    return Program(name, lowered, lowered.compile(compiler_options=options), traced.jaxpr)


def _compile(
    recording: _Recording, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: Sharding | None
) -> Shapes:
    """Add the program to the list. Returns the shapes of its results, with their shardings.

    sharding: of all results, where the function says it itself.
    """
    traced, options = jitted.trace(*args, **kwargs), compiler_options(args, kwargs) or None
    if sharding is None or recording.beside is None or recording.platform is not None:
        program = program_of(jitted.__name__, traced, recording.platform, options)
    else:
        lowered = traced.lower()
        program = Program(jitted.__name__, lowered, recording.beside.submit(lowered.compile, options), traced.jaxpr)
    recording.programs.append(program)
    shapes = jax.tree.leaves(program.lowered.out_info)
    shardings = [sharding] * len(shapes)
    if isinstance(program.compiled, jax.stages.Compiled):
        shardings = jax.tree.leaves(program.compiled.output_shardings)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=aval.weak_type)
        for x, sharding, aval in zip(shapes, shardings, traced.jaxpr.out_avals, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(program.lowered.out_info), results)


def place(tree: Any, shardings: Any) -> Any:
    """`jax.device_put`, in one transfer. Ahead of time: shapes with these shardings.

    shardings: a Sharding, or a pytree of them, the same as `tree` or a prefix of it.
    """
    if _programs.get() is None:
        if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
            return jax.device_put(tree, shardings)
        return jax.tree.map(_put, tree, jax.tree.broadcast(shardings, tree))
    shapes = jax.eval_shape(lambda x: x, tree)
    each = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, each)


def _put(x: Any, sharding: Any) -> jax.Array:
    """An array on devices of several hosts, each of which has all of x, or x is on all of them already."""
    if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def computed(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), which may be given shapes ahead of time, and then gives shapes."""
    return function(*args) if _programs.get() is None else jax.eval_shape(function, *args)
