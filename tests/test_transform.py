"""The algebra: transforms chain, objectives add and scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.objective import Coefficient, Objective, in_turn
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import RunFacts, Transform, chain, counted, stateless
from jaxrl_llm.objectives import token_mean
from jaxrl_llm.utils.errors import InputError

OUTPUTS = PolicyOutputs(logp=jnp.array([[-1.0, -2.0]]), entropy=jnp.array([[0.5, 0.25]]))


def batch_of(reward: Any) -> Trajectories:
    reward = jnp.asarray(reward, jnp.float32)
    N = reward.shape[0]
    zeros, row = jnp.zeros((N, 2), jnp.int32), jnp.zeros(N, jnp.int32)
    mask = jnp.ones((N, 2), bool)
    return Trajectories(zeros, mask, mask, jnp.zeros((N, 2)), zeros, zeros, row, row, jnp.zeros(N, bool), reward=reward)


def scale(factor: float) -> Transform:
    return stateless(lambda b: b.replace(reward=b.reward * factor))


def running_sum() -> Transform:
    """Adds the sum of everything seen before; remembers it."""

    def apply(state: jax.Array, batch: Trajectories) -> tuple[jax.Array, Trajectories]:
        return state + jnp.sum(batch.reward), batch.replace(reward=batch.reward + state)

    return Transform(lambda: jnp.float32(0), apply)


def count() -> Transform:
    return Transform(lambda: {"calls": jnp.int32(0)}, lambda s, b: ({"calls": s["calls"] + 1}, b))


def test_chain_applies_from_left_to_right() -> None:
    # 1, 2 -> x10 -> 10, 20 (+0, remembers 30) -> x2 -> 20, 40; the second time the 30 is added before the doubling.
    both = chain(scale(10), running_sum(), scale(2))
    state, batch = both.apply(both.init(), batch_of([1, 2]))
    assert batch.reward.tolist() == [20, 40]
    state, batch = both.apply(state, batch_of([1, 2]))
    assert batch.reward.tolist() == [80, 100]
    assert float(state[1]) == 30 + 30


def test_chain_is_associative_and_has_a_unit() -> None:
    a, b, c = running_sum(), scale(3), running_sum()
    results = []
    for whole in (chain(a, b, c), chain(chain(a, b), c), chain(a, chain(b, c)), chain(chain(), a, b, c, chain())):
        state = whole.init()
        for reward in ([1, 2], [5, -1], [0, 4]):
            state, batch = whole.apply(state, batch_of(reward))
        results.append((batch.reward.tolist(), [float(x) for x in jax.tree.leaves(state)]))
    assert all(result == results[0] for result in results)
    state, batch = chain().apply(chain().init(), batch_of([1, 2]))
    assert state == ()
    assert batch.reward.tolist() == [1, 2]


def test_state_is_the_tuple_of_states_and_init_is_pure() -> None:
    whole = chain(running_sum(), scale(2), count())
    state = whole.init()
    assert isinstance(state, tuple)
    assert state[1] == ()
    assert state[2] == {"calls": 0}
    after, _ = whole.apply(state, batch_of([7, 8]))
    assert float(after[0]) == 15
    assert float(state[0]) == 0, "apply changes no state in place"
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(x == y), state, whole.init()))


def test_a_state_of_another_chain_is_refused() -> None:
    with pytest.raises(ValueError):
        chain(count(), count()).apply(chain(count()).init(), batch_of([1]))


def test_chain_under_jit_scan_and_vmap() -> None:
    whole = chain(running_sum(), scale(2), count())
    rewards = np.array([[1, 2], [5, -1], [0, 4]], np.float32)
    state, expected = whole.init(), []
    for reward in rewards:
        state, batch = whole.apply(state, batch_of(reward))
        expected.append(batch.reward.tolist())

    jitted, jitted_state = [], whole.init()
    for reward in rewards:
        jitted_state, batch = jax.jit(whole.apply)(jitted_state, batch_of(reward))
        jitted.append(batch.reward.tolist())
    assert jitted == expected

    batches = jax.tree.map(lambda *x: jnp.stack(x), *[batch_of(reward) for reward in rewards])
    scanned_state, scanned = jax.lax.scan(whole.apply, whole.init(), batches)
    assert scanned.reward.tolist() == expected
    assert int(scanned_state[2]["calls"]) == int(state[2]["calls"]) == 3
    assert float(scanned_state[0]) == float(state[0])

    # Each of the three has a memory of its own, in which this is the first batch.
    states = jax.vmap(lambda _: whole.init())(jnp.arange(3))
    _, mapped = jax.vmap(whole.apply)(states, batches)
    np.testing.assert_allclose(mapped.reward, 2 * rewards)


def first(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.sum(outputs.logp), {"first": jnp.float32(1)}


def second(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.sum(outputs.entropy), {"second": jnp.float32(2)}


A, B = Objective(first, frozenset({"old_logp"})), Objective(second, frozenset({"reference_logp"}))


@pytest.mark.parametrize(
    ("objective", "loss"),
    [
        (A, -3.0),
        (A + B, -2.25),
        (A - B, -3.75),
        (A + 0.5 * B, -2.625),
        (A * 2.0, -6.0),
        (2.0 * (A - 4 * B) + A, -15.0),
        (A + jnp.float32(0.5) * B, -2.625),
        (A - A, 0.0),
        (-A, 3.0),
        (B - -A, -2.25),
        (A / 2, -1.5),
        ((A + B) / jnp.float32(4), -0.5625),
        (sum([A, B, 2 * B]), -0.75),
        (sum([A]), -3.0),
    ],
)
def test_objectives_add_subtract_and_scale(objective: Objective, loss: float) -> None:
    assert float(objective(OUTPUTS, batch_of([0]))[0]) == pytest.approx(loss)
    assert float(jax.jit(objective)(OUTPUTS, batch_of([0]))[0]) == pytest.approx(loss)


def test_needs_and_metrics_are_united_and_not_scaled() -> None:
    both = A - 0.01 * B
    assert both.needs == {"old_logp", "reference_logp"}
    assert (3 * B).needs == {"reference_logp"}
    _, metrics = both(OUTPUTS, batch_of([0]))
    assert {name: float(value) for name, value in metrics.items()} == {"first": 1, "second": 2}


def test_gradients_are_linear_and_a_scale_may_be_traced() -> None:
    def loss(logp: jax.Array, factor: jax.Array) -> jax.Array:
        return (A + factor * A)(OUTPUTS.replace(logp=logp), batch_of([0]))[0]

    by_logp, by_factor = jax.jit(jax.grad(loss, argnums=(0, 1)))(OUTPUTS.logp, jnp.float32(0.25))
    assert by_logp.tolist() == [[1.25, 1.25]]
    assert float(by_factor) == -3


def test_objectives_and_transforms_are_static_arguments() -> None:
    assert hash(A + B)
    assert hash(chain(scale(2), count()))
    assert Objective(first, A.needs) == A, "equal parts make equal objectives, so nothing is compiled twice"


def test_what_is_scaled_by_a_known_zero_is_left_out_with_its_needs() -> None:
    """A number that is traced is not known, and keeps the term."""
    term = Objective(lambda outputs, batch: (jnp.float32(3), {"term": jnp.float32(3)}), frozenset({"reference_logp"}))
    base = Objective(lambda outputs, batch: (jnp.float32(2), {"base": jnp.float32(2)}))
    for off in (base + 0.0 * term, base - 0 * term, base - (-0.0) * term):
        loss, metrics = off(OUTPUTS, batch_of([1]))
        assert (float(loss), set(metrics), off.needs) == (2, {"base"}, set())
    assert (base + 0.5 * term).needs == {"reference_logp"}
    traced = jax.jit(lambda c: (base + c * term)(OUTPUTS, batch_of([1])))(0.0)
    assert (float(traced[0]), set(traced[1])) == (2, {"base", "term"})


def test_what_makes_a_part_is_told_to_be_called() -> None:
    with pytest.raises(InputError, match=r"part 2 of a chain must be of the type Transform.*running_sum.*call it"):
        chain(scale(2), running_sum)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="part 1 of a chain must be of the type Transform, but is of the type list"):
        chain([scale(2)])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="added to an objective must be of the type Objective, but is of"):
        Objective(lambda outputs, batch: (jnp.float32(0), {})) + 0.1  # type: ignore[operator]
    with pytest.raises(InputError, match="needs is 'old_logp', but must be a set of names"):
        stateless(lambda batch: batch, "old_logp")
    with pytest.raises(InputError, match="what makes a transform is 3, but must be a function"):
        stateless(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "factor", [float("nan"), float("inf"), None, [0.1], Objective(lambda outputs, batch: (jnp.float32(0), {}))]
)
def test_an_objective_is_scaled_by_a_finite_number(factor: Any) -> None:
    with pytest.raises(InputError, match="the scale of an objective is"):
        Objective(lambda outputs, batch: (jnp.float32(1), {})) * factor


@pytest.mark.parametrize(
    ("compose", "words"),
    [
        (lambda: A / 0, "an objective is divided by 0"),
        (lambda: A / B, "what an objective is divided by is .*, but must be a number"),
        (lambda: A / "beta", "what an objective is divided by is 'beta', but must be a number"),
        (lambda: 1 + A, "what an objective is added to must be of the type Objective, but is of the type int"),
        (lambda: token_mean() / 0.0, "an average is divided by 0"),
    ],
)
def test_what_operators_cannot_take_is_told(compose: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        compose()


def test_batches_are_checked_where_they_come_in() -> None:
    bad, whole = batch_of([1, 2]).replace(reward=jnp.ones(1)), chain(scale(2), scale(3))
    for transform in (whole, scale(2), counted(lambda step, batch: batch)):
        with pytest.raises(InputError, match=r"batch\.reward has the shape \[1\]"):
            transform.apply(transform.init(), bad)
    with pytest.raises(InputError, match=r"\(batch, state\), but takes \(state, batch\): swap them"):
        whole.apply(batch_of([1, 2]), whole.init())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the state of a chain of 2 is of 1: start from its own init"):
        whole.apply(((),), batch_of([1, 2]))


def test_what_a_transform_returns_is_checked() -> None:
    batch = batch_of([1, 2])
    for one, words in [
        (stateless(lambda batch: batch.reward), r"what a transform returns is float32\[2\], but must be its state and"),
        (
            Transform(lambda: (), lambda state, batch: batch),
            "what a transform returns is .*, but must be its state and",
        ),
        (chain(stateless(lambda batch: None)), "what a transform returns is None, but must be its state and the batch"),
    ]:
        with pytest.raises(InputError, match=words):
            one.apply(one.init(), batch)
    wrong = Algorithm(stateless(lambda batch: batch.replace(advantages=jnp.ones(3))), Objective(first))
    with pytest.raises(InputError, match=r"batch.advantages has the shape \[3\]"):
        wrong.transform.apply(wrong.transform.init(), batch)


def test_outputs_are_checked_where_they_come_in() -> None:
    objective, batch = Objective(lambda outputs, batch: (jnp.float32(1), {})), batch_of([1])
    assert float(objective(OUTPUTS, batch)[0]) == 1
    with pytest.raises(InputError, match=r"\(batch, outputs\), but takes \(outputs, batch\): swap them"):
        objective(batch, OUTPUTS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"outputs\.logp has the shape \[2\], but must be \[1, 2\]"):
        objective(OUTPUTS.replace(logp=jnp.zeros(2)), batch)
    with pytest.raises(InputError, match=r"outputs\.entropy is None"):
        objective(OUTPUTS.replace(entropy=None), batch)
    with pytest.raises(InputError, match="outputs of an objective must be of the type PolicyOutputs, but is None"):
        objective(None, batch)  # type: ignore[arg-type]


def test_an_init_is_told_what_the_run_knows_only_if_it_asks() -> None:
    asks = Transform(lambda facts: jnp.zeros(facts.prompts or 2), lambda s, b: (s, b))
    both = chain(count(), asks, chain(asks))
    assert [both.init()[1].shape, both.init()[2][0].shape] == [(2,), (2,)]
    state = both.init(RunFacts(prompts=5, steps=10))
    assert (state[0], state[1].shape, state[2][0].shape) == ({"calls": jnp.int32(0)}, (5,), (5,))
    assert dataclasses.replace(asks, needs=frozenset({"values"})).init(RunFacts(prompts=3)).shape == (3,)
    with pytest.raises(InputError, match="the facts of a run must be of the type RunFacts, but is of the type int"):
        asks.init(5)
    with pytest.raises(InputError, match="prompts of RunFacts is 0, but must be at least 1"):
        RunFacts(prompts=0)


def test_equal_parts_make_equal_transforms() -> None:
    part = count()
    assert Transform(part.init, part.apply) == dataclasses.replace(part)


def test_a_coefficient_reads_the_batch_and_brings_what_it_needs() -> None:
    def seen(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        return batch.with_controls(seen=jnp.sum(batch.reward))

    weight = Coefficient(lambda batch: batch.controls["seen"], frozenset({"feedback"}), seen)
    objective = A + weight * B
    assert objective.needs == {"old_logp", "reference_logp", "feedback"}
    loss, metrics = objective(OUTPUTS, batch_of([6]))
    assert float(loss) == pytest.approx(-3 + 6 * 0.75)
    assert set(metrics) == {"first", "second"}
    controlled = batch_of([0]).with_controls(c=jnp.float32(3))
    assert float((A + (lambda b: 2 * b.controls["c"]) * B)(OUTPUTS, controlled)[0]) == pytest.approx(-3 + 6 * 0.75)
    assert float((A + "c" * B)(OUTPUTS, controlled)[0]) == pytest.approx(-3 + 3 * 0.75)


def test_two_terms_with_one_metric_keep_both() -> None:
    """None of them hides another, whatever their order and number."""

    def term(value: float) -> Objective:
        return Objective(lambda outputs, batch: (jnp.float32(value), {"kl": jnp.float32(value)}))

    for objective in (term(1) + term(2) + term(3), term(1) + (term(2) + term(3))):
        loss, metrics = objective(OUTPUTS, batch_of([0]))
        assert (float(loss), sorted(float(x) for x in metrics.values())) == (6, [1, 2, 3])
        assert set(metrics) == {"kl", "kl/2", "kl/3"}
        assert float(metrics["kl"]) == 1


def test_refreshes_are_done_in_turn_and_each_once() -> None:
    def add(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        return batch.replace(reward=batch.reward + 1)

    def double(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        return batch.replace(reward=2 * batch.reward)

    refresh = in_turn(None, add, double, None, add)
    assert refresh is not None
    assert refresh(OUTPUTS, batch_of([3])).reward.tolist() == [8]
    assert in_turn(None, add) is add
    assert in_turn(None, None) is None
