"""Invariances of the loss and gradient of every method, and robustness to extreme inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_method import every_method as every
from experience import Case, Found, L, N, Steps, case, learn, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import NEEDS, value_of
from jaxrl_llm.core.trajectory import map_rows

ODD, EVEN = np.arange(1, N, 2), np.arange(0, N, 2)
few = settings(max_examples=2, deadline=None, derandomize=True, database=None)
seeds = st.sampled_from([11, 23])  # of batches; few, so that what they are held against is computed once


@lru_cache(maxsize=2)  # tests of a method follow each other
def compiled(name: str) -> Steps:
    """The steps of a method, each a program for all batches of one shape."""
    return Steps(*map(jax.jit, steps_of(algorithms.get(name))))


@lru_cache(maxsize=2)
def in_halves(name: str) -> Steps:
    """The same with two micro-batches."""
    return Steps(compiled(name).prepare, jax.jit(steps_of(algorithms.get(name), parts=[ODD, EVEN]).gradient))


def two_cases(seed: int, algorithm: Algorithm, **changes: Any) -> list[Case]:
    """Two batches in turn; with weights, which are 1, so that all are of one structure."""
    changes = {"weights": np.ones((N, L)), **changes}
    return [case(seed + one, algorithm, **changes) for one in (0, 1)]


@lru_cache(maxsize=8)
def plain(name: str, seed: int) -> Found:
    """The reference that the other results are compared with."""
    algorithm = algorithms.get(name)
    return jax.device_get(learn(algorithm, two_cases(seed, algorithm), compiled(name)))


@lru_cache(maxsize=2)
def uncompiled(name: str) -> Found:
    """Operation by operation, without weights."""
    algorithm = algorithms.get(name)
    return learn(algorithm, two_cases(11, algorithm, weights=None))


def assert_same(a: Found, b: Found, rows: Any = slice(None), columns: Any = slice(None)) -> None:
    """Equal to 1e-6 of the gradient's size; rows and columns say where the first's places are in the second."""
    scale = max(1.0, abs(float(a.loss)))
    assert abs(float(a.loss) - float(b.loss)) <= 3e-6 * scale
    for one, two in zip(jax.tree.leaves(a.gradient), jax.tree.leaves(b.gradient), strict=True):
        two = np.asarray(two)[rows]
        places = two.ndim > 1 and two.shape[1] != np.shape(one)[1]  # none: a perturbation, samples of the bound
        two = two[:, columns] if places else two
        assert np.isfinite(two).all()
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=3e-6 * max(1e-3, np.abs(one).max()))


def check(name: str, seed: int, change: Callable[[Case], Case], **places: Any) -> None:
    algorithm = algorithms.get(name)
    cases = [change(one) for one in two_cases(seed, algorithm)]
    assert_same(plain(name, seed), learn(algorithm, cases, compiled(name)), **places)


def rows_of(one: Case, rows: np.ndarray) -> Case:
    def pick(x: Any) -> Any:
        return x[rows]

    return Case(map_rows(pick, one.batch), jax.tree.map(pick, one.outputs))


@every
@few
@given(seed=seeds)
def test_the_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(N)
    check(name, seed, lambda one: rows_of(one, order), rows=np.argsort(order))


@every
@few
@given(seed=seeds)
def test_the_names_of_groups_do_not_matter(name: str, seed: int) -> None:
    names = jnp.asarray(np.random.default_rng(seed).permutation([7, 0, 100]).astype(np.int32))
    check(name, seed, lambda one: one._replace(batch=one.batch.replace(group=names[one.batch.group])))


@every
@few
@given(seed=seeds)
def test_padding_and_rows_without_actions_do_not_matter(name: str, seed: int) -> None:
    """Two places of padding, before or after, and two rows: one of a known group, one of a new one."""
    left = seed % 3

    def pad(x: Any) -> Any:
        if x.ndim < 2 or x.shape[1] != L:
            return x
        fill = False if x.dtype == bool else 3
        return jnp.pad(x, ((0, 0), (left, 2 - left), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)

    def larger(one: Case) -> Case:
        more = rows_of(one, np.concatenate([np.arange(N), [0, N - 1]]))
        empty = np.arange(N + 2) >= N
        batch = more.batch.replace(
            action_mask=more.batch.action_mask & ~empty[:, None],
            turn=jnp.where(empty[:, None], -1, more.batch.turn),
            reward=jnp.where(empty, 5.0, more.batch.reward),
            group=jnp.where(np.arange(N + 2) == N + 1, 99, more.batch.group).astype(jnp.int32),
        )
        return Case(map_rows(pad, batch), jax.tree.map(pad, more.outputs))

    check(name, seed, larger, rows=slice(0, N), columns=slice(left, left + L))


@every
@few
@given(seed=seeds)
def test_micro_batches_do_not_matter(name: str, seed: int) -> None:
    if name == "bnpo":
        pytest.skip("bnpo is defined by the mean over the slice at hand")
    algorithm = algorithms.get(name)
    assert_same(plain(name, seed), learn(algorithm, two_cases(seed, algorithm), in_halves(name)))


@every
def test_compiled_or_not_does_not_matter(name: str) -> None:
    """Nor whether weights of 1 are given."""
    assert_same(plain(name, 11), uncompiled(name))


@every
def test_it_asks_for_what_there_is_and_uses_nothing_else(name: str) -> None:
    algorithm = algorithms.get(name)
    asked = {value_of(need)[0] for need in algorithm.needs}
    assert asked <= set(NEEDS)
    bare = {field: None for field in ("old_logp", "reference_logp", "values") if field not in asked}
    cases = two_cases(11, algorithm, weights=None)
    for number, one in enumerate(cases):
        # A teacher with prompts of its own says by them which rows it read.
        used = asked | {"teacher_tokens"} if any(name.startswith("teacher_") for name in asked) else asked
        info = {k: v for k, v in (one.batch.info or {}).items() if k.partition(":")[0] in used}
        cases[number] = one._replace(batch=one.batch.replace(**bare, info=info))
    found, full = jax.tree.leaves(learn(algorithm, cases)), jax.tree.leaves(uncompiled(name))
    assert [np.asarray(x).tobytes() for x in found] == [np.asarray(x).tobytes() for x in full]


@every
def test_it_learns_from_a_small_batch(name: str) -> None:
    """A method may drop a batch, but not every batch."""
    found = (plain(name, seed) for seed in (11, 23, 35))
    assert any(np.abs(np.asarray(x)).max() > 0 for one in found for x in jax.tree.leaves(one.gradient))


EVEN_HARDER = {
    "no actions": {"mask": np.zeros((N, L), bool)},
    "one row with actions": {"mask": np.arange(N)[:, None] * np.ones((1, L)) == 4},
    "one action in each row": {"mask": np.ones((N, 1)) * np.arange(L) == 2},
    "groups of one": {"group": np.arange(N)},
    "equal rewards": {"reward": np.ones(N)},
    "no reward": {"reward": np.zeros(N)},
    "huge rewards": {"reward": np.where(np.arange(N) % 2, 1e6, -1e6)},
    "not scored": {"reward": np.where(np.arange(N) % 3, np.nan, 1.0)},
    "nothing scored": {"reward": np.full(N, np.nan)},
    "impossible tokens": {"behaviour": np.full((N, L), -1e4)},
    "huge ratios": {"old_logp": np.full((N, L), -1e4), "reference_logp": np.full((N, L), 0.0)},
    "all dropped": {"weights": np.zeros((N, L))},
    "all truncated": {"truncated": np.ones(N, bool)},
}


@every
def test_nothing_upsets_it(name: str) -> None:
    algorithm = algorithms.get(name)
    for what, changes in EVEN_HARDER.items():
        changes = dict(changes)
        group = changes.pop("group", None)
        cases = two_cases(5, algorithm, **changes)
        if group is not None:
            cases = [c._replace(batch=c.batch.replace(group=jnp.asarray(group, jnp.int32))) for c in cases]
        if what == "impossible tokens":  # likely now, or never likely
            spread = jnp.where(jnp.arange(N) % 2, 0.0, -1e4)[:, None] * jnp.ones((N, L))
            cases = [c._replace(outputs=c.outputs.replace(logp=spread)) for c in cases]
        found = learn(algorithm, cases, compiled(name))
        assert np.isfinite(found.loss), what
        for part in jax.tree.leaves(found.gradient):
            assert np.isfinite(part).all(), what
            where = np.asarray(cases[-1].batch.action_mask)
            if np.shape(part)[:2] != where.shape:  # of whole rows
                where = where.any(axis=1)
            assert (np.asarray(part)[~where] == 0).all(), f"{what}: a gradient where there is no action"
