"""Compiling ahead of time: the same calls that run a program on arrays compile it for devices that need not be there.

    with ahead_of_time() as programs:
        state = replicate(shapes, mesh)                    # a mesh of `jax.experimental.topologies` will do
        state, metrics = update(policy, objective, optimizer, state, to_mesh(batch, mesh), steps)
    programs[0].compiled.memory_analysis()

Inside, functions decorated with `compiled` return shapes with the shardings that the compiler chose, so that what one
program gives can be given to the next. So the host code that runs a step is also what plans it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

Shapes = Any  # a pytree of jax.ShapeDtypeStruct


class Program(NamedTuple):
    """A program that was compiled and not run."""

    name: str  # of the function
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled


_programs: ContextVar[list[Program] | None] = ContextVar("programs", default=None)


@contextmanager
def ahead_of_time() -> Iterator[list[Program]]:
    """Within it `compiled` functions only compile, `place` only says where arrays would be; the list fills up."""
    programs: list[Program] = []
    token = _programs.set(programs)
    try:
        yield programs
    finally:
        _programs.reset(token)


def compiled(check: Callable[[Any], None] | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`jax.jit` with these options, as a decorator, of a function that can be compiled ahead of time.

    check: called before with the arguments by name (a namespace), traced ones too; it raises for what is wrong.
    `lower`, `trace` and `eval_shape` are jit's and check nothing.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        jitted, signature = jax.jit(function, **options), inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if check is not None:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                check(SimpleNamespace(**given.arguments))
            programs = _programs.get()
            return jitted(*args, **kwargs) if programs is None else _compile(programs, jitted, args, kwargs)

        for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
            setattr(call, name, getattr(jitted, name))
        return call

    return decorate


def _compile(programs: list[Program], jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Add the program to the list. Returns the shapes of its results, with their shardings."""
    traced = jitted.trace(*args, **kwargs)
    lowered = traced.lower()
    program = Program(jitted.__name__, lowered, lowered.compile())
    programs.append(program)
    shapes, shardings = jax.tree.leaves(lowered.out_info), jax.tree.leaves(program.compiled.output_shardings)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=aval.weak_type)
        for x, sharding, aval in zip(shapes, shardings, traced.jaxpr.out_avals, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(lowered.out_info), results)


def place(tree: Any, shardings: Any) -> Any:
    """`jax.device_put`, in one transfer. Ahead of time: shapes with these shardings.

    shardings: a Sharding, or a pytree of them, the same as `tree` or a prefix of it.
    """
    if _programs.get() is None:
        return jax.device_put(tree, shardings)
    shapes = jax.eval_shape(lambda x: x, tree)
    each = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, each)


def computed(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), which may be given shapes ahead of time, and then gives shapes."""
    return function(*args) if _programs.get() is None else jax.eval_shape(function, *args)
