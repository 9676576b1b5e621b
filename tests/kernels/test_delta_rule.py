"""`delta_rule`: its kernel against the loop in JAX, and what it compiles to for TPUs."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxrl_kernels.delta_rule import DeltaInputs, Shares, delta_rule
from jaxrl_kernels.delta_rule.chunk import heads_first, step
from jaxrl_kernels.delta_rule.pallas_kernel import Sizes, slots_of, step_flops
from other_process import result_of
from tpu_environment import tpu_environment

Array = jax.Array


def drawn(
    seed: int, R: int, n: int, K: int, H: int, C: int, k: int, v: int, s: int
) -> tuple[DeltaInputs, Array, Array, Shares]:
    """Inputs, entries, starts, and shares of chunks that hold up to three paths."""
    random = np.random.default_rng(seed)
    keys = random.normal(size=(R, n, C, K, k))
    x = DeltaInputs(
        random.normal(size=(R, n, C, K, k)), keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        random.normal(size=(R, n, C, H, v)), -random.gamma(1, 0.3, (R, n, C, H)), random.random((R, n, C, H)),
    )  # fmt: skip
    choices = [[-1, chunk - 1, *range(chunk), *(n + np.arange(s))] for chunk in range(n)]
    entry = np.array([[random.choice(choice) for choice in choices] for _ in range(R)], np.int32)
    path = np.sort(random.integers(0, 3, (R, n, 1, 1, C)), axis=-1)
    first, last = path[..., :1], path[..., -1:]
    shares = Shares(*(np.asarray(mark, x.q.dtype) for mark in (path, path == first, path == last, first == last)))
    return *jax.tree.map(jnp.asarray, (x, entry, random.normal(size=(R, s, H, k, v)))), jax.tree.map(
        jnp.asarray, shares
    )


def results(
    implementation: str, x: DeltaInputs, entry: Array, starts: Array, shares: Shares | None, branches: int | None = None
) -> Any:
    """Outputs, last states, and the gradients of a sum of functions of them; and both as without gradients."""
    rule = partial(delta_rule, shares=shares, branches=branches, implementation=implementation)

    def total(x: DeltaInputs, starts: Array) -> tuple[Array, Any]:
        out, last = rule(x, entry, starts)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(last)), (out, last)

    return jax.jit(lambda x, starts: (jax.grad(total, (0, 1), has_aux=True)(x, starts), rule(x, entry, starts)))(
        x, starts
    )


@pytest.mark.heavy
@settings(max_examples=2, deadline=None)
@given(
    st.integers(0, 99), st.integers(1, 2), st.integers(1, 5), st.sampled_from([(1, 1), (2, 4)]),
    st.sampled_from([1, 4, 8]), st.integers(0, 2), st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_kernel_is_the_loop_wherever_paths_branch(
    seed: int, R: int, n: int, heads: tuple[int, int], C: int, s: int, shared: bool, counted: bool
) -> None:
    """In float64, forward and backward: chunks that begin with earlier ones, with given states or with nothing."""
    with jax.enable_x64(True):
        x, entry, starts, shares = drawn(seed, R, n, *heads, C, 4, 5, s)
        parents = [{e for c, e in enumerate(row) if 0 <= e < n and e != c - 1} for row in entry.tolist()]
        branches = max(map(len, parents)) if counted else None
        found, expected = (
            results(implementation, x, entry, starts, shares if shared else None, branches)
            for implementation in ("pallas", "xla")
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), found, expected)


def test_slots_by_hand() -> None:
    """Chunk 1 goes on, 2 begins with the state after 0, 3 with a start, 4 with zeros, the last start, 5 with 2's."""
    found = slots_of(jnp.asarray([[7, 0, 0, 6, 7, 2]]), starts=2)
    assert found.take.tolist() == [[1, -1, 2, 0, 1, 3]]
    assert found.keep.tolist() == [[2, -1, 3, -1, -1, -1]]


@pytest.mark.parametrize("C, k, v", [(16, 16, 16), (64, 128, 128), (32, 72, 40)])
def test_the_kernel_declares_no_less_than_its_formula_costs(C: int, k: int, v: int) -> None:
    of = Sizes(R=1, n=1, H=2, K=1, C=C, k=k, v=v, s=1, slots=1, together=2)
    x, *_ = jax.eval_shape(lambda: drawn(0, 1, 1, 1, 2, C, k, v, 0))
    one = jax.eval_shape(heads_first, jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape[2:], jnp.float32), x))
    state = jax.ShapeDtypeStruct((2, k, v), jnp.float32)
    forward = jax.jit(step).lower(one, state)
    cost: Any = forward.cost_analysis()
    assert 2 * step_flops(of) >= cost["flops"]
    assert 2 * step_flops(of) <= 1.5 * cost["flops"]

    def backward(x: Any, state: Array, cotangents: Any) -> Any:
        return jax.vjp(step, x, state)[1](cotangents)

    both: Any = jax.jit(backward).lower(one, state, (one.v, state)).cost_analysis()
    assert 3 * 2 * step_flops(of) >= both["flops"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": jnp.zeros((1, 2, 4, 1, 5))}, r"k must be float32\[1, 2, 4, 1, 4\], found float32\[1, 2, 4, 1, 5\]"),
        ({"g": jnp.zeros((1, 2, 4))}, r"g must be float32\[1, 2, 4, 2\]"),
        ({"entry": jnp.zeros((1, 3), jnp.int32)}, r"entry must be int32\[1, 2\]"),
        ({"starts": jnp.zeros((1, 0, 2, 4, 9))}, r"starts must be floating \[1, s, 2, 4, 4\]"),
        ({"q": jnp.zeros((1, 2, 4, 3, 4))}, "v must have a multiple of 3 heads"),
        ({"implementation": "cuda"}, "unknown implementation 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    keys, values, numbers = jnp.zeros((1, 2, 4, 1, 4)), jnp.zeros((1, 2, 4, 2, 4)), jnp.zeros((1, 2, 4, 2))
    x = DeltaInputs(keys, keys, values, numbers, numbers)
    given: dict[str, Any] = {"entry": jnp.zeros((1, 2), jnp.int32), "starts": jnp.zeros((1, 0, 2, 4, 4))}
    x = x._replace(**{name: value for name, value in change.items() if name in x._fields})
    given |= {name: value for name, value in change.items() if name not in x._fields}
    with pytest.raises(ValueError, match=message):
        delta_rule(x, **given)


TPU_PROGRAM = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels.delta_rule import DeltaInputs, delta_rule

def report(chip, n, C, branches):
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    R, K, H, k, v = 1, 4, 8, 128, 128
    of = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype, sharding=one)
    x = DeltaInputs(*[of(R, n, C, K, k)] * 2, of(R, n, C, H, v), *[of(R, n, C, H)] * 2)

    def backward(x, entry, starts):
        rule = lambda x, starts: delta_rule(x, entry, starts, branches=branches)
        return jax.grad(lambda *given: sum(jnp.sum(y) for y in rule(*given)), argnums=(0, 1))(x, starts)

    program = jax.jit(backward).lower(x, of(R, n, dtype="int32"), of(R, 1, H, k, v)).compile()
    return {
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": program.as_text().count('custom_call_target="tpu_custom_call"'),
    }

print("RESULT" + json.dumps([report(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.mark.heavy
def test_compiles_for_tpus_and_keeps_states_of_chunks_alone() -> None:
    """Forward and backward kernel; where many chunks may branch the loop in JAX, as states would not fit on a chip."""
    cases = [
        ("v5e:2x2", 64, 64, None),
        ("v6e:2x2", 32, 32, None),
        ("v5p:2x2x1", 16, 64, None),
        ("v5e:2x2", 1024, 32, 40),
        ("v5e:2x2", 1024, 32, None),
    ]
    found = result_of(TPU_PROGRAM, json.dumps(cases), environment=tpu_environment())
    assert [report["kernels"] for report in found] == [2, 2, 2, 2, 0]
    n, states = cases[0][1], 8 * 128 * 128 * 4
    assert found[0]["temporaries"] <= 1.6 * n * states
