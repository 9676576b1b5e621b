"""Frozen weights in four bits (QLoRA): rounding by loops, products and gradients, memory, sampler and trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxrl_llm import algorithms, load_policy, sample
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, update
from jaxrl_llm.models import lora
from jaxrl_llm.models.layers.products import matrix_product, ragged_product
from jaxrl_llm.models.layers.ragged import groups_of
from jaxrl_llm.models.outputs import NOTHING, policy_outputs
from jaxrl_llm.models.parameters import adapted_weights, combine
from jaxrl_llm.models.policy import Policy, init_params
from jaxrl_llm.models.quantised import dense, is_rounded
from jaxrl_llm.models.quantised.layers import NAMES, frozen_weight, rounded_specs
from jaxrl_llm.models.quantised.normal_float import LEVELS, NormalFloat, as_floats, normal_float
from jaxrl_llm.models.stacks import map_kinds
from jaxrl_llm.utils.errors import InputError

# As bitsandbytes has them (QLoRA, appendix E).
PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
KEY, RANK = jax.random.key(3), 3
KINDS = ("nf4", "int8", "float8")


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(params: Any, kind: str) -> Any:
    """The parameters with projections of layers as they are kept where they do not learn."""

    def kept(layer: Any) -> Any:
        return {name: frozen_weight(name, w, kind) for name, w in layer.items()}

    return {**params, "layers": map_kinds(kept, params["layers"])}


def as_dense(params: Any) -> Any:
    return jax.tree.map(lambda w: dense(w) if is_rounded(w) else w, params, is_leaf=is_rounded)


def test_the_levels_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(LEVELS, PUBLISHED, atol=2e-7)


@pytest.mark.parametrize(("K", "size"), [(128, 64), (64, 64), (48, 16), (12, 4)])
def test_rounding_by_loop(K: int, size: int) -> None:
    """Of each block of inputs of each output: its largest number in bfloat16, and the nearest level of each."""
    w = draw(0, 2, K, 3)
    w[0, 0], w[1] = 0.0, w[1] * 1e-3
    found = normal_float(jnp.asarray(w))
    assert (found.levels.dtype, found.scale.dtype) == (jnp.uint8, jnp.bfloat16)
    assert found.levels.nbytes == w.size // 2
    assert (found.shape, found.scale.shape) == (w.shape, (2, K // size, 3))
    values = np.asarray(as_floats(found))
    for e in range(2):
        for n in range(3):
            for start in range(0, K, size):
                block = w[e, start : start + size, n]
                scale = float(jnp.bfloat16(np.abs(block).max() or 1.0))
                assert float(found.scale[e, start // size, n]) == scale
                for k, x in enumerate(block):
                    distances = np.abs(np.array(PUBLISHED) - float(x) / scale)
                    expected = PUBLISHED[int(distances.argmin())] * scale
                    assert values[e, start + k, n] == pytest.approx(expected, rel=1e-6, abs=1e-12)
                    assert abs(values[e, start + k, n] - x) <= 0.156 * scale


def test_a_projection_of_heads_has_blocks_along_its_last_axis_of_inputs() -> None:
    w = draw(1, 2, 4, 128, 6)  # [layers, heads, head size, hidden]
    found = frozen_weight("out", jnp.asarray(w), "nf4")
    assert found.scale.shape == (2, 4, 2, 6)
    x = draw(2, 5, 4 * 128)
    one = jax.tree.map(lambda y: y[1], found)
    expected = x.astype(np.float64) @ np.asarray(as_floats(one), np.float64).reshape(512, 6)
    np.testing.assert_allclose(matrix_product(jnp.asarray(x), one), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="6 inputs have no blocks of at least 4, which nf4 needs: take int8"):
        normal_float(jnp.ones((6, 4)))
    assert frozen_weight("router", jnp.asarray(draw(3, 1, 4, 4)), "nf4").dtype == jnp.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [False, True])
def test_products_and_gradients_are_those_of_the_dequantised_matrix(kind: str, experts: bool) -> None:
    M, K, N, E = 12, 64, 10, 3
    name = "gate" if experts else "query"
    w = jnp.asarray(draw(0, E, K, N) if experts else draw(0, K, N))
    inputs = (-2,)
    from jaxrl_llm.models.quantised.layers import FROZEN

    q, x, dy = FROZEN[kind](w, inputs=inputs), jnp.asarray(draw(1, M, K)), jnp.asarray(draw(2, M, N))
    of_row = np.repeat(np.arange(E), [5, 0, 7])
    times = (lambda x, w: ragged_product(x, w, groups_of(jnp.asarray(of_row), E))) if experts else matrix_product
    found, back = jax.vjp(lambda x: times(x, q), x)
    wide = np.asarray(dense(q), np.float64)
    of_rows = wide[of_row] if experts else np.broadcast_to(wide, (M, K, N))
    expected = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), of_rows)
    into = np.einsum("mn,mkn->mk", np.asarray(dy, np.float64), of_rows)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)
    np.testing.assert_allclose(back(dy)[0], into, rtol=0, atol=1e-5 * np.abs(into).max())


def test_a_mesh_that_would_cut_blocks_is_refused(vectors: Any) -> None:
    config = vectors("mixtral").policy.config
    mesh = AbstractMesh((2, 2), ("expert", "tensor"))
    F, D = config.intermediate_size, config.hidden_size
    gate = normal_float(jnp.ones((config.num_experts, D, F)))
    spec = PartitionSpec("expert", None, "tensor")
    assert rounded_specs("gate", gate, config, mesh) == NormalFloat(spec, spec)
    down = normal_float(jnp.ones((config.num_experts, F, D)))
    assert down.scale.shape[1] % 2
    with pytest.raises(InputError, match="tensor=2 of the mesh would cut blocks of 64 inputs of down"):
        rounded_specs("down", down, config, mesh)


def batch_of(model: Any, policy: Policy, params: Any, **asked: Any) -> Any:
    usual = {"group_size": 4, "max_new_tokens": 8, "stop_token_ids": []}
    batch = sample(policy, params, [[5, 6, 7, 8], [11, 12]], jax.random.key(0), **usual | asked)
    reward = np.where(np.arange(8) % 3 == 0, 1.0, -0.5).astype(np.float32)
    batch = batch.replace(advantages=np.broadcast_to(reward[:, None], batch.tokens.shape))
    return jax.tree.map(np.asarray, batch.replace(old_logp=batch.behaviour_logp))


def adapted(model: Any, kind: str) -> tuple[Any, Any]:
    """Rounded frozen weights, and random adapters of all targets that the family has."""
    config = model.policy.config
    possible = {weight.name for weight in adapted_weights(config).values()} - {"embed", "unembed"}
    adapters = lora.init(KEY, config, RANK, sorted(possible))
    adapters = jax.tree.map(lambda x: 0.1 * jax.random.normal(jax.random.fold_in(KEY, x.size), x.shape), adapters)
    return lora.split(lora.scaled(combine(rounded(model.params, kind), adapters), RANK, 4.0))


@pytest.mark.heavy
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen2", "nf4"),
        *(
            pytest.param(family, kind, marks=pytest.mark.heavy)
            for family, kind in (
                ("mixtral", "nf4"), ("mixtral", "int8"), ("qwen2", "float8"), ("deepseek_v3", "nf4"),
                ("qwen3_5", "nf4"), ("gpt_oss", "nf4"), ("lfm2", "nf4"),
            )
        ),
    ],
)  # fmt: skip
def test_the_gradient_is_that_of_the_dequantised_base(family: str, kind: str, vectors: Any) -> None:
    """And the sampler's log-probabilities are the trainer's, before any step."""
    model = vectors(family)
    frozen, adapters = adapted(model, kind)
    layers = frozen["layers"]
    kept = [layers] if not model.policy.config.kinds else layers.values()
    assert all(is_rounded(w) == (name in NAMES) for layer in kept for name, w in layer.items())
    params = combine(frozen, adapters)
    batch = batch_of(model, model.policy, params)
    outputs = jax.jit(policy_outputs, static_argnums=(0, 4))
    logp = np.asarray(outputs(model.policy, params, batch, None, NOTHING).logp)
    mask = np.asarray(batch.action_mask)
    assert np.abs(logp - batch.behaviour_logp)[mask].max() < 2e-4
    objective = algorithms.get("dr_grpo").objective
    slices = jax.tree.map(lambda x: x[0], plan_steps(batch, runs=model.policy.config.recurrent).in_order)
    grad = jax.jit(gradient, static_argnums=(0, 1))
    found, other = (
        grad(model.policy, objective, adapters, batch, slices, base)[0] for base in (frozen, as_dense(frozen))
    )
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest), found, other)
    merged = lora.merge(params)
    assert jax.tree.structure(merged) == jax.tree.structure(model.params)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(merged))
    of_merged = np.asarray(outputs(model.policy, merged, batch, None, NOTHING).logp)
    np.testing.assert_allclose(of_merged, logp, atol=2e-3)


@pytest.mark.heavy
@pytest.mark.parametrize("remat", [True, False])
def test_the_update_holds_four_bits_of_a_weight(remat: bool, vectors: Any) -> None:
    """What XLA says of compiled updates of 4 and of 8 layers: what 4 more take as arguments and beside."""
    model, objective, optimizer = vectors("qwen2"), algorithms.get("dr_grpo").objective, optax.sgd(0.1)
    batch = batch_of(model, model.policy, model.params)
    batch = batch.replace(tokens=batch.tokens % 64)

    def compiled(layers: int, kind: str | None) -> tuple[Any, Any]:
        config = dataclasses.replace(
            model.policy.config, num_layers=layers, hidden_size=256, intermediate_size=1024, vocab_size=64,
            window_of_layer=(0,) * layers, rope_of_layer=(0,) * layers, num_tokens=0,
        )  # fmt: skip
        frozen = jax.eval_shape(lambda: init_params(KEY, config))
        frozen = frozen if kind is None else jax.eval_shape(lambda p: rounded(p, kind), frozen)
        adapters = jax.eval_shape(lambda: lora.init(KEY, config, 2))
        state = jax.eval_shape(lambda p: init_state(p, optimizer), adapters)

        def step(state: Any, frozen: Any) -> Any:
            return update(Policy(config, remat=remat), objective, optimizer, state, batch, frozen=frozen)

        return jax.jit(step).lower(state, frozen).compile().memory_analysis(), (frozen, adapters)

    def bytes_of(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    (few, held), (many, more) = compiled(4, "nf4"), compiled(8, "nf4")
    matrices = [w for w in held[0]["layers"].values() if isinstance(w, NormalFloat)]
    weights = sum(int(np.prod(w.shape)) for w in matrices)
    assert weights > 3e6
    assert 4.25 * weights <= 8 * bytes_of(matrices) < 4.3 * weights
    assert many.argument_size_in_bytes - few.argument_size_in_bytes == bytes_of(more) - bytes_of(held)
    beside = many.temp_size_in_bytes - few.temp_size_in_bytes
    if remat:
        assert beside < 0.5 * weights, "no copy of the weights of all layers"
    else:  # activations are kept, as beside plain weights, but no wide weights, which would take four times as many
        plain = [compiled(layers, None)[0].temp_size_in_bytes for layers in (4, 8)]
        assert beside < plain[1] - plain[0] + 0.5 * weights


@pytest.mark.usefixtures("quickly")
def test_weights_are_rounded_as_they_are_read(vectors: Any) -> None:
    from functools import partial

    model = vectors("qwen2")
    _, found, _ = load_policy(model.folder, keep=partial(frozen_weight, kind="nf4"))
    jax.tree.map(np.testing.assert_array_equal, found, rounded(model.params, "nf4"))
    assert isinstance(found["layers"]["query"], NormalFloat)
