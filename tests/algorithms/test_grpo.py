"""GRPO from rewards to loss: the worked example, and the invariances of the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import get, grpo
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.utils.errors import InputError

MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
OLD = np.array([[-1, -0.5, -2], [-0.7, -1.2, 0], [-0.3, 0, 0], [-1.5, -0.1, -0.9]])
LOGP = np.array([[-0.9, -0.8, -1.5], [-0.6, -1.6, 0], [-0.25, 0, 0], [-1.2, -0.15, -1.4]])
REFERENCE = np.array([[-1.1, -0.6, -1.9], [-0.6, -1, 0], [-0.4, 0, 0], [-1.4, -0.2, -1.1]])
N, L = 8, 6
FULL = get("grpo", kl_coefficient=0.04, entropy_coefficient=0.01)
many = settings(max_examples=30, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
Fields = dict[str, np.ndarray]


def batch_of(fields: Fields) -> tuple[PolicyOutputs, Trajectories]:
    """Outputs and batch of numpy arrays: mask, logp, entropy, old, reference [N, L]; reward, group [N]."""
    mask = jnp.asarray(fields["mask"], bool)
    zeros, rows = jnp.zeros(mask.shape, jnp.int32), mask.shape[0]
    f32 = {name: jnp.asarray(value, jnp.float32) for name, value in fields.items()}
    group = jnp.asarray(fields["group"], jnp.int32)
    batch = Trajectories(
        tokens=zeros,
        token_mask=mask,
        action_mask=mask,
        behaviour_logp=f32["old"],
        policy_step=zeros,
        turn=jnp.where(mask, 0, -1),
        group=group,
        prompt_id=group,
        truncated=jnp.zeros(rows, bool),
        reward=f32["reward"],
        reference_logp=f32["reference"],
    )
    return PolicyOutputs(f32["logp"], f32["entropy"]), batch


def loss_of(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, dict[str, jax.Array]]:
    _, batch = FULL.transform.apply(FULL.transform.init(), batch)
    return FULL.objective(outputs, batch)


eager = jax.value_and_grad(loss_of, has_aux=True)
compiled = jax.jit(eager)


def random_fields(seed: int) -> Fields:
    """Two to four ragged groups, uneven lengths (some rows without a token), some rewards missing."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, L + 1, N)
    return {
        "mask": np.arange(L) < lengths[:, None],
        "logp": -2 * random.random((N, L)),
        "old": -2 * random.random((N, L)),
        "reference": -2 * random.random((N, L)),
        "entropy": random.random((N, L)),
        "reward": np.where(random.random(N) < 0.1, np.nan, random.integers(0, 3, N) / 2),
        "group": random.integers(0, random.integers(2, 5), N),
    }


def result_of(fields: Fields, f: Any = compiled) -> tuple[float, dict[str, float], np.ndarray, np.ndarray]:
    (loss, metrics), gradient = f(*batch_of(fields))
    numbers = {name: float(value) for name, value in metrics.items()}
    return float(loss), numbers, np.asarray(gradient.logp), np.asarray(gradient.entropy)


def assert_same(found: Any, expected: Any, rows: Any = slice(None), columns: Any = slice(None)) -> None:
    """Loss, metrics and the gradients at `rows` and `columns`; elsewhere the gradients are 0."""
    assert np.isfinite(expected[0])
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-6)
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_allclose(mine[rows][:, columns], theirs, rtol=1e-5, atol=1e-6)
        assert np.count_nonzero(mine) == np.count_nonzero(mine[rows][:, columns])


@pytest.mark.parametrize(
    ("hyperparameters", "loss"),
    [({"kl_coefficient": 0.0}, 0.014998), ({}, 0.016817), ({"kl_coefficient": 0.04}, 0.016817)],
)
def test_worked_example(hyperparameters: dict[str, float], loss: float) -> None:
    algorithm = grpo(**hyperparameters)
    fields = {"mask": MASK, "logp": LOGP, "old": OLD, "reference": REFERENCE, "entropy": np.zeros((4, 3))}
    outputs, batch = batch_of({**fields, "reward": np.array([1.0, 0, 0, 1]), "group": np.zeros(4)})
    _, batch = algorithm.transform.apply(algorithm.transform.init(), batch)
    np.testing.assert_allclose(batch.advantages[:, 0], [0.866024, -0.866024, -0.866024, 0.866024], rtol=0, atol=1e-6)
    assert float(algorithm.objective(outputs, batch)[0]) == pytest.approx(loss, abs=1.5e-6)


@pytest.mark.heavy
def test_the_entropy_bonus_lowers_the_loss_by_its_mean() -> None:
    fields = {**random_fields(3), "entropy": np.full((N, L), 1.5)}
    outputs, batch = batch_of(fields)
    _, batch = grpo().transform.apply((), batch)
    without, _ = grpo().objective(outputs, batch)
    with_bonus, metrics = grpo(entropy_coefficient=0.1).objective(outputs, batch)
    assert float(with_bonus) == pytest.approx(float(without) - 0.15, abs=1e-6)
    assert float(metrics["entropy"]) == pytest.approx(1.5)


def test_without_a_penalty_no_reference_is_needed() -> None:
    assert grpo().needs == {"reference_logp"}
    assert grpo(kl_coefficient=0.0).needs == frozenset()
    outputs, batch = batch_of(random_fields(0))
    _, batch = grpo().transform.apply((), batch.replace(reference_logp=None))
    loss, metrics = grpo(kl_coefficient=0.0).objective(outputs, batch)
    assert np.isfinite(loss)
    assert "kl" not in metrics
    with pytest.raises(InputError, match="reference_logp"):
        grpo().objective(outputs, batch)


@many
@given(seed=SEEDS, shuffle=SEEDS)
def test_the_order_of_rows_does_not_matter(seed: int, shuffle: int) -> None:
    fields, order = random_fields(seed), np.random.default_rng(shuffle).permutation(N)
    expected = result_of(fields)
    moved = result_of({name: value[order] for name, value in fields.items()})
    assert_same(moved, expected, rows=np.argsort(order))


@many
@given(seed=SEEDS, names=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4, unique=True))
def test_the_names_of_groups_do_not_matter(seed: int, names: list[int]) -> None:
    fields = random_fields(seed)
    renamed = {**fields, "group": np.array(names)[fields["group"]]}
    assert_same(result_of(renamed), result_of(fields))


@many
@given(seed=SEEDS, left=st.integers(0, 4), garbage=st.sampled_from([0.0, -3.0, np.nan, np.inf, -np.inf]))
def test_padding_on_either_side_does_not_matter(seed: int, left: int, garbage: float) -> None:
    fields = random_fields(seed)
    padding = ((0, 0), (left, 4 - left))
    padded = {
        name: np.pad(value, padding, constant_values=garbage) for name, value in fields.items() if value.ndim == 2
    }
    padded["mask"] = np.pad(fields["mask"], padding)
    assert_same(result_of({**fields, **padded}), result_of(fields), columns=slice(left, left + L))


@many
@given(seed=SEEDS, place=st.integers(0, N), garbage=st.sampled_from([0.0, -3.0, np.nan, np.inf]))
def test_rows_without_actions_do_not_matter(seed: int, place: int, garbage: float) -> None:
    """Three more rows of other groups, with rewards but without a token of their own."""
    fields = random_fields(seed)

    def insert(name: str, value: np.ndarray) -> np.ndarray:
        extra: Any = {"mask": False, "group": 9, "reward": 1.0}.get(name, garbage)
        return np.insert(value, [place] * 3, extra, axis=0)

    more = {name: insert(name, value) for name, value in fields.items()}
    kept = np.delete(np.arange(N + 3), [place, place + 1, place + 2])
    assert_same(result_of(more), result_of(fields), rows=kept)


@pytest.mark.parametrize("seed", range(3))
def test_compiled_or_not_does_not_matter(seed: int) -> None:
    assert_same(result_of(random_fields(seed), eager), result_of(random_fields(seed)))


@many
@given(seed=SEEDS, constant=st.integers(-8, 8), factor=st.sampled_from([0.5, 2.0, 64.0]))
def test_the_scale_of_rewards_does_not_matter(seed: int, constant: int, factor: float) -> None:
    fields = random_fields(seed)
    moved = {**fields, "reward": factor * (fields["reward"] + constant)}
    loss, _, gradient, _ = result_of(moved)
    expected, _, expected_gradient, _ = result_of(fields)
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [grpo(), grpo(scale="none", ddof=0), grpo(kl_coefficient=0.0)])
def test_nothing_to_learn_from_is_finite_and_has_no_gradient(algorithm: Any) -> None:
    fields = {**random_fields(0), "mask": np.zeros((N, L))}
    outputs, batch = batch_of(fields)
    _, batch = algorithm.transform.apply((), batch)
    grad_fn = jax.value_and_grad(algorithm.objective, has_aux=True)
    (loss, metrics), gradient = grad_fn(outputs, batch)
    assert float(loss) == 0
    assert all(float(value) == 0 for value in metrics.values())
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradient))


def test_equal_rewards_leave_the_penalty_alone() -> None:
    fields = {**random_fields(1), "reward": np.full(N, 0.7)}
    outputs, batch = batch_of(fields)
    _, batch = grpo().transform.apply((), batch)
    loss, metrics = grpo(kl_coefficient=0.5).objective(outputs, batch)
    assert float(loss) == pytest.approx(0.5 * float(metrics["kl"]), rel=1e-6)
    assert float(metrics["kl"]) > 0


def test_bad_hyperparameters_are_refused() -> None:
    with pytest.raises(InputError, match="scale"):
        grpo(scale="variance")
    with pytest.raises(InputError, match="low of clip is"):
        grpo(clip_low=1.5)
