"""Planned gradient steps: every row once an epoch, groups together, and the same update however it is sliced."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import optimised
from conftest import needs_wide_vectors
from heavy import few

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.microbatches import Steps, by_slices, filled_share, plan_steps, take_rows
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, update
from jaxrl_llm.models.packed_states import packed_states
from jaxrl_llm.models.packing import whole_rows
from jaxrl_llm.objectives import clip, entropy, policy_gradient, sequence_mean, sequence_ratio, token_mean, token_ratio
from jaxrl_llm.utils.errors import InputError


def uneven(groups: int = 4, group_size: int = 4, longest: int = 24, seed: int = 0) -> Trajectories:
    """Groups with prompts of 3 to 9 tokens and completions of 1 to `longest`; some tokens weigh more than others."""
    random, L = np.random.default_rng(seed), 9 + longest
    N = groups * group_size
    owner = np.arange(N) // group_size
    start = random.integers(3, 10, groups)[owner]
    end = start + random.integers(1, longest + 1, N)
    place = np.arange(L)
    prompts = random.integers(1, 250, (groups, L))
    real, action = place < end[:, None], (place >= start[:, None]) & (place < end[:, None])
    tokens = np.where(place < start[:, None], prompts[owner], random.integers(1, 250, (N, L))) * real
    float32 = partial(jnp.asarray, dtype=jnp.float32)
    return Trajectories(
        tokens=jnp.asarray(tokens, jnp.int32), token_mask=jnp.asarray(real), action_mask=jnp.asarray(action),
        behaviour_logp=float32(np.where(action, -5.5 + 0.3 * random.normal(size=(N, L)), 0)),
        policy_step=jnp.zeros((N, L), jnp.int32), turn=jnp.asarray(np.where(action, 0, -1)),
        group=jnp.asarray(owner), prompt_id=jnp.asarray(owner), truncated=jnp.zeros(N, bool),
        temperature=jnp.ones(N), advantages=float32(np.where(action, random.normal(size=(N, 1)), 0)),
        weights=float32(random.choice([0.5, 1.0, 2.0], (N, L))),
    )  # fmt: skip


def test_each_epoch_takes_every_row_once_in_whole_groups() -> None:
    batch = uneven(groups=8)
    steps = plan_steps(batch, epochs=3, minibatches=2, micro_batches=2, seed=5)
    rows = np.asarray(steps.rows)
    assert rows.shape == (3, 2, 2, 8)
    for epoch in rows:
        assert sorted(epoch.reshape(-1).tolist()) == list(range(32))
    for slice_ in rows.reshape(-1, 8):
        assert (np.unique(np.asarray(batch.group)[slice_], return_counts=True)[1] == 4).all()
    first = [set(epoch[0].reshape(-1).tolist()) for epoch in rows]
    assert first[0] != first[1], "minibatches are shuffled"
    again = plan_steps(batch, epochs=3, minibatches=2, micro_batches=2, seed=5)
    assert all(
        (np.asarray(x) == np.asarray(y)).all() for x, y in zip(*map(jax.tree.leaves, (steps, again)), strict=True)
    )
    assert (np.asarray(plan_steps(batch, epochs=3, minibatches=2, micro_batches=2, seed=6).rows) != rows).any()


def test_micro_batches_are_about_as_long() -> None:
    """Two groups are of 28 tokens a row and two of 4: each slice gets one of each kind."""
    batch = uneven()
    place = jnp.arange(batch.tokens.shape[1])
    end = jnp.asarray([28, 28, 4, 4])[batch.group][:, None]
    batch = batch.replace(token_mask=place < end, action_mask=(place >= 3) & (place < end))
    slices = np.asarray(plan_steps(batch, micro_batches=2).rows)[0, 0]
    for slice_ in slices:
        assert len({int(g) // 2 for g in np.asarray(batch.group)[slice_]}) == 2


def test_ragged_groups_split_by_rows() -> None:
    batch = uneven()
    ragged = batch.replace(group=jnp.asarray([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]))
    rows = np.asarray(plan_steps(ragged, minibatches=2, micro_batches=2).rows)
    assert sorted(rows.reshape(-1).tolist()) == list(range(16))


def test_rows_that_do_not_split_are_an_error() -> None:
    with pytest.raises(InputError, match="16 rows do not split evenly into 3 minibatches of 1 micro_batches"):
        plan_steps(uneven(), minibatches=3)


def test_slices_come_back_in_order() -> None:
    batch = uneven()
    steps = plan_steps(batch, minibatches=2, micro_batches=2, seed=1)
    assert not (np.asarray(steps.rows).reshape(-1) == np.arange(16)).all()
    found = by_slices(lambda part, packing: part.tokens + 1, batch, steps)
    np.testing.assert_array_equal(found, batch.tokens + 1)


# The surrogate by token and by sequence, and one with an entropy bonus.
OBJECTIVES = {
    "grpo": policy_gradient(token_ratio(), clip(0.2, 0.2), sequence_mean()),
    "gspo": policy_gradient(sequence_ratio(), clip(3e-4, 4e-4), sequence_mean()),
    "entropy": policy_gradient(token_ratio(), clip(0.2, 0.28), token_mean()) - 0.1 * entropy(),
}


@pytest.fixture(scope="module")
def tiny(vectors: Any) -> Any:
    model = vectors("llama_tied")
    return model._replace(policy=dataclasses.replace(model.policy, remat=False))


@pytest.mark.heavy
@pytest.mark.parametrize("name", few(OBJECTIVES, ["grpo"]))
def test_the_gradient_is_that_of_whole_rows_in_any_slices(name: str, tiny: Any) -> None:
    """Uneven lengths, 1, 2, 4 and 8 micro-batches; relative to the largest entry of each parameter's gradient."""
    batch = uneven(groups=8, group_size=2)
    grad_fn = jax.jit(gradient, static_argnums=(0, 1))
    expected, metrics = grad_fn(tiny.policy, OBJECTIVES[name], tiny.params, batch)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 1e-3
    for micro_batches in (1, 2, 4, 8):
        slices = plan_steps(batch, micro_batches=micro_batches).slices
        found, figures = grad_fn(tiny.policy, OBJECTIVES[name], tiny.params, batch, slices)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max()))
        for key, value in metrics.items():
            np.testing.assert_allclose(figures[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@optimised
@needs_wide_vectors
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_packed_states_have_the_bits_of_whole_rows(micro_batches: int, tiny: Any) -> None:
    """In float32, where heads have a multiple of 64 places."""
    random, config = np.random.default_rng(0), dataclasses.replace(tiny.policy.config, head_dim=64)
    D, H, K = config.hidden_size, config.num_heads, config.num_kv_heads
    layers: dict[str, Any] = dict(tiny.params["layers"])
    for name, shape in {"query": (D, H, 64), "key": (D, K, 64), "value": (D, K, 64), "out": (H, 64, D)}.items():
        layers[name] = jnp.asarray(random.normal(0, 0.3, (config.num_layers, *shape)), jnp.float32)
    policy, params = dataclasses.replace(tiny.policy, config=config), {**tiny.params, "layers": layers}
    states = jax.jit(lambda *of_rows: packed_states(policy, params, *of_rows)[0])
    batch = uneven(groups=8, group_size=2, longest=20)  # so that XLA would choose another order
    expected = np.asarray(states(batch.tokens, whole_rows(batch))).reshape(*batch.tokens.shape, D)
    slices = plan_steps(batch, micro_batches=micro_batches).slices
    rows, packings = slices.rows, slices.packing
    seen = 0
    for i, chosen in enumerate(np.asarray(rows)):
        packing = jax.tree.map(lambda x, i=i: x[i], packings)
        found, real = np.asarray(states(batch.tokens[chosen], packing)), np.asarray(packing.row) < len(chosen)
        row, column = chosen[np.asarray(packing.row)[real]], np.asarray(packing.column)[real]
        np.testing.assert_array_equal(found[real], expected[row, column])
        seen += len(row)
    assert seen == int(batch.action_mask.sum())


def test_log_probabilities_by_slices_are_those_at_once(tiny: Any) -> None:
    batch = uneven()
    steps = plan_steps(batch, minibatches=2, micro_batches=2, seed=2)
    found = outputs_of(tiny.policy, tiny.params, batch, steps)
    expected = outputs_of(tiny.policy, tiny.params, batch)
    np.testing.assert_allclose(found.logp, expected.logp, atol=2e-5)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=2e-5)


@pytest.mark.heavy
def test_planned_steps_are_the_update(tiny: Any) -> None:
    """Two epochs of two minibatches take four steps, each of plain descent along the gradient of its own rows."""
    batch, objective = uneven(), OBJECTIVES["grpo"]
    steps = plan_steps(batch, epochs=2, minibatches=2, micro_batches=2, seed=3)
    optimizer = optax.sgd(0.5)
    params = jax.tree.map(jnp.copy, tiny.params)
    grad_fn = jax.jit(gradient, static_argnums=(0, 1))
    for rows in np.asarray(steps.rows).reshape(4, -1):
        slope, _ = grad_fn(tiny.policy, objective, params, take_rows(batch, rows))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, slope)
    state = init_state(jax.tree.map(jnp.copy, tiny.params), optimizer)
    state, metrics = update(tiny.policy, objective, optimizer, state, batch, steps=steps)
    assert int(state.step) == 4
    assert metrics["finite"] == 1
    for x, y, z in zip(*map(jax.tree.leaves, (state.params, params, tiny.params)), strict=True):
        moved = float(jnp.abs(y - z).max())
        assert moved > 0
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * moved + 1e-7)


@pytest.mark.heavy
def test_growing_lengths_share_programs(tiny: Any) -> None:
    """Sixty batches whose completions grow from 2 to 61 tokens have 28 shapes, thirty of the same lengths four."""

    def shape(steps: Steps) -> Any:
        return tuple(x.shape for x in jax.tree.leaves(steps))

    def batch(longest: int, seed: int) -> Trajectories:
        return uneven(groups=16, group_size=8, longest=longest, seed=seed)

    grown = {shape(plan_steps(batch(n, n), micro_batches=2)) for n in range(2, 62)}
    assert len(grown) <= 28
    steady = {shape(plan_steps(batch(30, seed), micro_batches=2)) for seed in range(30)}
    assert len(steady) <= 4


def test_filled_is_the_share_of_places_with_a_token() -> None:
    """Rows of 3 and 16 tokens that share nothing: 2 + 15 tokens are seen, in the places of the packed rows."""
    batch = uneven(groups=2, group_size=1)
    place = jnp.arange(batch.tokens.shape[1])
    end = jnp.asarray([[3], [16]])
    steps = plan_steps(batch.replace(token_mask=place < end, action_mask=(place < end) & (place > 0)))
    assert steps.packing.suffixes is None
    assert filled_share(steps) == (2 + 15) / steps.packing.prefixes.source.size


def test_a_group_without_actions_takes_no_place() -> None:
    batch = uneven()
    batch = batch.replace(action_mask=batch.action_mask & (batch.group != 1)[:, None])
    steps = plan_steps(batch)
    assert set(np.asarray(steps.packing.row).reshape(-1).tolist()) == {*range(4), *range(8, 17)}
