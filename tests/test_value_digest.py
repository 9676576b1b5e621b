"""Digests of algorithms: equal for equal code and numbers in every process, and different for others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import FunctionType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.utils.value_digest import value_digest

PROGRAM = """
import jax
from jaxrl_llm import Algorithm, algorithms
from jaxrl_llm.advantages import group_relative
from jaxrl_llm.objectives import clip, entropy, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.utils.value_digest import value_digest

WEIGHT = {weight}

def weight(batch):
    return WEIGHT * batch.reward.mean()

@jax.jit
def other(batch):
    return {other}

def mine(clip_high={clip}):
    surrogate = policy_gradient(token_ratio(), clip(0.2, clip_high), sequence_mean())
    return Algorithm(group_relative(), surrogate + weight * entropy() + other * entropy())
"""
PRINT = "print(value_digest(mine), value_digest(mine()), value_digest(algorithms.get('xrpo')))"


def digest(value: str = "mine()", clip: str = "0.3", weight: str = "0.01", other: str = "batch.reward.max()") -> str:
    space: dict[str, Any] = {}
    source = PROGRAM.format(clip=clip, weight=weight, other=other)
    exec(compile(f"{source}\nresult = value_digest({value})", "<cell>", "exec"), space)
    return space["result"]


def test_it_is_the_same_in_every_process() -> None:
    program = PROGRAM.format(clip="0.3", weight="0.01", other="batch.reward.max()") + PRINT
    environment = {**os.environ, "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    assert done.stdout.split() == [digest("mine"), digest(), value_digest(algorithms.get("xrpo"))]


def test_it_sees_numbers_globals_and_code() -> None:
    """Also those of a function that `jax.jit` has wrapped, and of one that another calls."""
    known = digest()
    assert digest() == known
    assert digest(clip="0.31") != known
    assert digest("mine(0.31)") == digest(clip="0.31")
    assert digest(weight="0.02") != known
    assert digest(other="batch.reward.min()") != known
    assert digest("mine", clip="0.31") != digest("mine") != known


def test_methods_of_the_catalogue_differ() -> None:
    found = {name: value_digest(algorithms.get(name)) for name in algorithms.names()}
    assert len(set(found.values())) == len(found)
    assert found == {name: value_digest(algorithms.get(name)) for name in found}


def test_cycles_end_and_shared_parts_do_not_count() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    assert isinstance(even, FunctionType)
    assert value_digest(even) != value_digest(odd)
    part = functools.partial(even, 3)
    assert value_digest([part, part]) == value_digest([functools.partial(even, 3), functools.partial(even, 3)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (True, 1), ("1", 1), ([1], (1,)), (np.arange(3), np.arange(1, 4)), (jnp.float32(1), jnp.float32(2)),
        ({"a": 1}, {"a": 2}), (frozenset({"a"}), frozenset({"b"})), (jnp.tanh, jnp.exp), (np.tanh, np.exp),
    ],
)  # fmt: skip
def test_values_of_other_kinds_or_numbers_differ(one: Any, other: Any) -> None:
    assert value_digest(one) != value_digest(other)
    assert value_digest(one) == value_digest(one)


def test_classes_count_by_their_members_and_keys_by_their_numbers() -> None:
    def digest_of(source: str) -> str:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(f"import jax, numpy\n{source}", "<cell>", "exec"), space)
        return value_digest(space["value"])

    known = "class A:\n    n = {n}\n    def f(self): return {f}\nvalue = A{end}"
    a = [digest_of(known.format(n=n, f=f, end=end)) for n in (1, 2) for f in (1, 2) for end in ("", "()")]
    assert len({*a}) == 8
    assert a[0] == digest_of(known.format(n=1, f=1, end=""))
    kept = "key = jax.random.key({n})\ndef value(): return key"
    assert digest_of(kept.format(n=1)) == digest_of(kept.format(n=1)) != digest_of(kept.format(n=2))
    objects = "table = numpy.array([{n}, 'a'], object)\ndef value(): return table"
    assert digest_of(objects.format(n=1)) == digest_of(objects.format(n=1)) != digest_of(objects.format(n=2))
    odd = "class Odd:\n    def __getattr__(self, name): raise RuntimeError\nodd = Odd()\ndef value(): return odd"
    assert digest_of(odd) == digest_of(odd)
