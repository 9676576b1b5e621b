"""The update: independent of how the batch is split, equal to optax by hand, and safe with what is not finite."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import optimised
from heavy import few

from jaxrl_llm.algorithms import grpo
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, with_totals
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import Slices, Steps, plan_steps
from jaxrl_llm.learner.nonfinite import not_finite
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.learner.update import gradient, prepare, update
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.objectives import clip, entropy, kl, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.utils.errors import InputError

SMALL = ModelConfig(
    family="llama", vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0,), window_of_layer=(0,), query_scale=0.5,
)  # fmt: skip
POLICY = Policy(SMALL, remat=False)  # compiles faster
GRPO = grpo()
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, weight_decay=0.1), 4)
KEY = jax.random.key(7)
Metrics = dict[str, jax.Array]
# What runs once is not worth optimising: half the time to compile.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
compiled_gradient = quick_jit(gradient, static_argnums=(0, 1))


def fresh_params(dtype: Any = jnp.float32) -> Any:
    return init_params(jax.random.key(0), SMALL, dtype, scale=0.5)


def prepared(group_size: int = 2, lengths: Any = (9, 1, 4, 0, 7, 2, 3, 9), prompts: Any = (3, 1, 2, 3)) -> Trajectories:
    """Groups of rows with a common prompt; very uneven completions, one without a token. All fields are filled in."""
    N, L, random = len(lengths), 12, np.random.default_rng(1)
    owner = np.arange(N) // group_size
    start, place = np.array(prompts)[owner], np.arange(L)
    prefix = random.integers(0, 11, (len(prompts), L))
    end = start + np.array(lengths)
    mask = (place >= start[:, None]) & (place < end[:, None])
    tokens = np.where(place < start[:, None], prefix[owner], random.integers(0, 11, (N, L)))
    real = jnp.asarray(place < end[:, None])
    logp = jnp.asarray(np.where(mask, -2.4 + 0.4 * random.normal(size=(N, L)), 0), jnp.float32)
    return Trajectories(
        tokens=jnp.asarray(tokens * real, jnp.int32),
        token_mask=real,
        action_mask=jnp.asarray(mask),
        behaviour_logp=logp,
        policy_step=jnp.zeros((N, L), jnp.int32),
        turn=jnp.asarray(np.where(mask, 0, -1)),
        group=jnp.asarray(owner),
        prompt_id=jnp.asarray(owner),
        truncated=jnp.zeros(N, bool),
        temperature=jnp.ones(N),
        reward=jnp.asarray(random.integers(0, 3, N), jnp.float32),
        advantages=jnp.asarray(np.where(mask, random.normal(size=(N, 1)), 0), jnp.float32),
        weights=jnp.asarray(random.choice([0.5, 1.0, 2.0], (N, L)), jnp.float32),
        reference_logp=jnp.where(mask, logp - 0.2, 0.0),
    )


BATCH = prepared()
# Whole groups, each with its prompt once.
GROUPS: dict[str, Any] = {
    "group_size": 2, "packing": partial(shared_prompts, group_size=2, prompt_length=4, completion_length=10),
}  # fmt: skip


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Leaf by leaf, relative to the largest entry of the leaf."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(float(jnp.max(jnp.abs(b))), 1e-3))


def take(
    *,
    objective: Objective = GRPO.objective,
    batch: Trajectories = BATCH,
    params: Any = None,
    key: Any = KEY,
    **drawn: Any,
) -> Any:
    """`update` of a fresh state: one step on the batch as it is, or such steps as `draw_steps` gives."""
    state = init_state(fresh_params() if params is None else params, OPTIMIZER)
    return update(POLICY, objective, OPTIMIZER, state, batch, draw_steps(key, batch, **drawn) if drawn else None)


def micro_batches_of(batch: Trajectories, count: int, **options: Any) -> Slices:
    """The batch in so many micro-batches, of shuffled rows or groups."""
    return draw_steps(KEY, batch, minibatches=count, **options).slices


@partial(quick_jit, static_argnums=0)
def mixed_gradient(policy: Policy, params: Any, batch: Trajectories, shares: Any, slices: Slices | None) -> Any:
    """Gradient of a mixture of a token mean and a sequence mean, so that one program serves both."""
    surrogate = token_ratio(), clip(0.2, 0.28)
    by_token = policy_gradient(*surrogate, token_mean()) - 0.3 * entropy()
    by_sequence = policy_gradient(*surrogate, sequence_mean()) + 0.5 * kl(average=sequence_mean())
    return gradient(policy, shares[0] * by_token + shares[1] * by_sequence, params, batch, slices)


@pytest.mark.parametrize("shares", few([(1.0, 0.0), (0.0, 1.0)], [(0.0, 1.0)]))
@pytest.mark.parametrize("options", few([{}, GROUPS], [GROUPS]))
@pytest.mark.parametrize("count", few([1, 2, 4], [4]))
def test_micro_batches_change_nothing(
    vectors: Callable[[str], Any], count: int, options: Any, shares: tuple[float, float]
) -> None:
    tiny = vectors("llama_tied")
    policy, shares = dataclasses.replace(tiny.policy, remat=False), jnp.asarray(shares)
    expected = mixed_gradient(policy, tiny.params, BATCH, shares, None)
    assert max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected[0])) > 1e-3
    # Totals that an earlier batch has left do not count.
    stale = BATCH.replace(totals={name: jnp.float32(99) for name in ("tokens", "sequences", "rows")})
    batch = stale if count > 2 else BATCH
    found = mixed_gradient(policy, tiny.params, batch, shares, micro_batches_of(batch, count, **options))
    assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert float(found[1][name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


def test_one_step_is_optax_by_hand() -> None:
    params, kept = fresh_params(), fresh_params()
    state, metrics = take(params=params)
    grads, found = compiled_gradient(POLICY, GRPO.objective, kept, BATCH)
    moments = OPTIMIZER.init(kept)
    updates, moments = jax.jit(OPTIMIZER.update)(grads, moments, kept)
    assert_close(state, TrainState(optax.apply_updates(kept, updates), moments, jnp.int32(1)))
    assert int(state.step) == 1
    for name, value in found.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    squares = sum(float(np.sum(np.asarray(g, np.float64) ** 2)) for g in jax.tree.leaves(grads))
    assert float(metrics["grad_norm"]) == pytest.approx(squares**0.5, rel=1e-5)
    assert float(metrics["finite"]) == 1


def test_the_diagnostics_by_hand() -> None:
    _, metrics = take()
    outputs = policy_outputs(POLICY, fresh_params(), BATCH)
    weights = np.asarray(BATCH.loss_weights, np.float64)
    difference = np.asarray(outputs.logp - BATCH.behaviour_logp, np.float64)
    expected = {
        "mismatch": np.abs(difference),
        "kl/behaviour": np.exp(difference) - 1 - difference,
        "entropy": np.asarray(outputs.entropy),
    }
    for name, values in expected.items():
        assert float(metrics[name]) == pytest.approx((values * weights).sum() / weights.sum(), rel=1e-4), name


def test_the_state_is_donated() -> None:
    params = fresh_params()
    state = init_state(params, OPTIMIZER)
    old = jax.tree.leaves(state)
    new, _ = update(POLICY, GRPO.objective, OPTIMIZER, state, BATCH)
    assert all(x.is_deleted() for x in old)
    assert not any(x.is_deleted() for x in jax.tree.leaves((new, BATCH)))


def watching() -> Objective:
    """How often each row was in a step, whether the step parted a group, and its first row."""

    def watch(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        rows = batch.reward
        assert rows is not None
        metrics = {f"row/{i}": jnp.sum(rows == i).astype(jnp.float32) for i in range(8)}
        pairs = batch.group.reshape(-1, 2)
        metrics["parted"] = jnp.any(pairs[:, 0] != pairs[:, 1]).astype(jnp.float32)
        metrics["first"] = rows[0]
        return jnp.sum(outputs.logp), metrics

    return Objective(watch)


WATCH = watching()


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{}, GROUPS], ids=["rows", "groups"])
def test_each_epoch_sees_every_row_once_and_keeps_groups_together(options: Any) -> None:
    batch = BATCH.replace(reward=jnp.arange(8.0))
    firsts, parted = set(), 0.0
    for seed in range(4):
        state, metrics = take(
            objective=WATCH, batch=batch, key=jax.random.key(seed), epochs=2, minibatches=2, **options
        )
        assert int(state.step) == 4
        for i in range(8):
            # In one of the two steps of each of two epochs: half of the time.
            assert float(metrics[f"row/{i}"]) == 0.5
        firsts.add(float(metrics["first"]))
        parted += float(metrics["parted"])
    assert len(firsts) > 1, "the order comes from the key"
    assert (parted == 0) == bool(options)


def test_one_minibatch_is_not_shuffled_and_epochs_go_on_from_each_other() -> None:
    state, _ = take(epochs=3)
    assert int(state.step) == 3
    assert bits(take(epochs=3, key=jax.random.key(8))[0]) == bits(state), "the key plays no part"
    by_hand = init_state(fresh_params(), OPTIMIZER)
    for _ in range(3):
        by_hand, _ = update(POLICY, GRPO.objective, OPTIMIZER, by_hand, BATCH)
    assert_close(state, by_hand)


def test_rows_that_do_not_split_are_refused() -> None:
    for options, message in (
        ({"minibatches": 3}, "8 rows in groups of 1 do not split evenly into 3 minibatches"),
        ({"group_size": 3}, "8 rows in groups of 3 do not split evenly into 1 minibatches"),
        ({"minibatches": 8, **GROUPS}, "8 rows in groups of 2 do not split evenly into 8 minibatches"),
        ({"minibatches": 8, "packing": GROUPS["packing"]}, "1 rows are not whole groups of 2"),
    ):
        with pytest.raises(InputError, match=message):
            take(**options)


def test_rows_that_no_slice_holds_are_left_out() -> None:
    rows = jnp.asarray([[6, 1], [0, 7]])
    found = compiled_gradient(POLICY, GRPO.objective, fresh_params(), BATCH, Slices(rows))
    few = jax.tree.map(lambda x: x[rows.reshape(-1)], BATCH)
    assert_close(found, compiled_gradient(POLICY, GRPO.objective, fresh_params(), few))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def sour(batch: Trajectories, field: str, value: float) -> Trajectories:
    """The batch with a bad number at one action."""
    return batch.replace(**{field: getattr(batch, field).at[4, 5].set(value)})


def bad_params() -> Any:
    params = fresh_params()
    return {**params, "layers": {**params["layers"], "up": params["layers"]["up"].at[0, 1, 2].set(jnp.nan)}}


def nan_loss(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
    return jnp.sum(outputs.logp) * jnp.nan, {"good": jnp.float32(0), "bad": jnp.float32(jnp.nan)}


def nan_gradient(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
    """A root at 0 has the value 0 and no slope."""
    return jnp.sqrt(jnp.sum((outputs.logp - jax.lax.stop_gradient(outputs.logp)) ** 2)), {}


NAN_LOSS, NAN_GRADIENT = Objective(nan_loss), Objective(nan_gradient)


@pytest.mark.parametrize(
    ("objective", "batch", "make_params", "named"),
    [
        (GRPO.objective, sour(BATCH, "advantages", np.nan), fresh_params, "the batch's advantages"),
        (GRPO.objective, sour(BATCH, "advantages", np.inf), fresh_params, "the batch's advantages"),
        (GRPO.objective, sour(BATCH, "reference_logp", np.nan), fresh_params, "the batch's reference_logp"),
        (GRPO.objective, sour(BATCH, "behaviour_logp", np.nan), fresh_params, "the batch's behaviour_logp"),
        (GRPO.objective, sour(BATCH, "weights", np.inf), fresh_params, "the batch's weights"),
        (GRPO.objective, BATCH, bad_params, "the parameter layers/up"),
        (NAN_LOSS, BATCH, fresh_params, "the loss (bad)"),
        (NAN_GRADIENT, BATCH, fresh_params, "the gradient of embed"),
    ],
    ids=["nan-advantage", "inf-advantage", "reference", "behaviour", "weights", "parameter", "loss", "gradient"],
)
def test_what_is_not_finite_changes_nothing_and_is_named(
    objective: Objective, batch: Trajectories, make_params: Callable[[], Any], named: str
) -> None:
    before = bits(init_state(make_params(), OPTIMIZER))
    state, metrics = take(objective=objective, batch=batch, params=make_params())
    assert float(metrics["finite"]) == 0
    assert bits(state) == before
    assert not_finite(POLICY, objective, make_params(), batch, plan_steps(batch)) == named


def test_a_bad_number_where_nothing_counts_does_no_harm() -> None:
    masked = BATCH
    for field, value in itertools.product(("advantages", "reference_logp", "behaviour_logp"), (np.nan, np.inf)):
        masked = masked.replace(**{field: getattr(masked, field).at[0, 0].set(value).at[1, 11].set(value)})
    (clean, expected), (state, metrics) = take(), take(batch=masked)
    assert bits(state) == bits(clean)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in expected.items()}


def test_a_bad_minibatch_is_left_out_and_the_others_are_not() -> None:
    state, metrics = take(batch=sour(BATCH, "advantages", np.nan), minibatches=4)
    assert float(metrics["finite"]) == 0.75
    assert int(state.step) == 3
    assert bits(state.params) != bits(fresh_params())


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{}, GROUPS], ids=["plain", "shared"])
def test_a_batch_without_actions_is_finite(options: Any) -> None:
    empty = BATCH.replace(action_mask=jnp.zeros_like(BATCH.action_mask))
    params = fresh_params()
    grads, metrics = compiled_gradient(POLICY, GRPO.objective, params, empty, micro_batches_of(empty, 1, **options))
    assert float(metrics["loss"]) == 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


def test_learning_rate_zero_changes_no_parameter() -> None:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.0, weight_decay=0.1), 4)
    state, metrics = update(POLICY, GRPO.objective, optimizer, init_state(fresh_params(), optimizer), BATCH)
    assert bits(state.params) == bits(fresh_params())
    assert int(state.step) == 1
    assert float(metrics["grad_norm"]) > 0


@pytest.mark.heavy
def test_bfloat16_parameters_accumulate_in_float32() -> None:
    params = fresh_params(jnp.bfloat16)
    policy = dataclasses.replace(POLICY, dtype=jnp.bfloat16)
    rows = jnp.arange(8)[:, None]
    grads, metrics = compiled_gradient(policy, GRPO.objective, params, BATCH, Slices(rows))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert {m.dtype for m in jax.tree.leaves(metrics)} == {jnp.dtype(jnp.float32)}
    totals = with_totals(BATCH).totals

    @quick_jit
    @jax.grad
    def grad_fn(params: Any, row: Trajectories) -> jax.Array:
        return GRPO.objective(policy_outputs(policy, params, row), row.replace(totals=totals))[0]

    parts = [grad_fn(params, jax.tree.map(lambda x, i=i: x[i : i + 1], BATCH)) for i in range(8)]
    by_hand = jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x), *parts)
    assert {p.dtype for p in jax.tree.leaves(parts)} == {jnp.dtype(jnp.bfloat16)}
    assert_close(grads, by_hand, 5e-3)
    # Sums that were rounded to bfloat16 would all be numbers of it.
    assert any(bool(jnp.any(g.astype(jnp.bfloat16) != g)) for g in jax.tree.leaves(grads))
    state = init_state(params, OPTIMIZER)
    new, metrics = update(policy, GRPO.objective, OPTIMIZER, state, BATCH, Steps(rows[None, None]))
    assert {p.dtype for p in jax.tree.leaves(new.params)} == {jnp.dtype(jnp.bfloat16)}
    assert float(metrics["finite"]) == 1
    assert bits(new.params) != bits(fresh_params(jnp.bfloat16))


@optimised
def test_the_new_state_takes_the_memory_of_the_old() -> None:
    config = dataclasses.replace(
        SMALL, vocab_size=2000, hidden_size=128, intermediate_size=256, num_layers=4, head_dim=64,
        rope_of_layer=(0,) * 4, window_of_layer=(0,) * 4,
    )  # fmt: skip
    state = jax.eval_shape(lambda: init_state(init_params(KEY, config), OPTIMIZER))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert size > 5e6
    lowered = update.lower(Policy(config), GRPO.objective, OPTIMIZER, state, BATCH, draw_steps(KEY, BATCH, **GROUPS))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    # Nothing of the size of the state is given back beside it.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * size


def test_prepare_is_the_transform_compiled() -> None:
    memory, found = prepare(GRPO.transform, GRPO.transform.init(), BATCH)
    expected = GRPO.transform.apply((), BATCH)[1]
    assert memory == ()
    np.testing.assert_allclose(found.advantages, expected.advantages, rtol=1e-6)
    assert bits(found.replace(advantages=None)) == bits(expected.replace(advantages=None))


@pytest.mark.parametrize("steps", [None, plan_steps(BATCH)], ids=["plain", "packed"])
def test_provide_fills_in_what_is_needed_and_nothing_else(steps: Steps | None) -> None:
    reference, now = init_params(jax.random.key(9), SMALL, scale=0.5), fresh_params()
    bare = BATCH.replace(reference_logp=None)
    filled = provide(POLICY, frozenset({"reference_logp"}), now, reference, bare, steps)
    assert filled.old_logp is None
    np.testing.assert_allclose(
        filled.reference_logp, policy_outputs(POLICY, reference, BATCH).logp, rtol=1e-5, atol=1e-5
    )
    both = provide(POLICY, frozenset({"reference_logp", "old_logp"}), now, reference, bare, steps)
    np.testing.assert_allclose(both.old_logp, policy_outputs(POLICY, now, BATCH).logp, rtol=1e-5, atol=1e-5)
    assert bits(provide(POLICY, frozenset(), now, None, bare, steps)) == bits(bare)
