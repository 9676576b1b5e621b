"""Sums over the vocabulary by blocks, and what `policy_outputs` finds with them, against whole logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.outputs import affinity
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.models.packing import Packing, shared_prompts
from jaxrl_llm.models.stacks import inner_policy
from jaxrl_llm.models.vocabulary import Distribution, divergence, logp_of_tokens, most_probable, vocabulary_sum
from jaxrl_llm.objectives.distillation.divergences import generalised_jsd
from jaxrl_llm.utils.errors import InputError

CONFIG = ModelConfig(
    family="llama", vocab_size=37, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0,) * 3, window_of_layer=(0,) * 3,
    query_scale=8**-0.5, logit_softcap=5.0,
)  # fmt: skip
POLICY = Policy(CONFIG, remat=False)
PARAMS, OTHER = (init_params(jax.random.key(seed), CONFIG, scale=0.5) for seed in (0, 1))


def batch() -> Trajectories:
    """Two groups of two with prompts of 3 and 4 tokens."""
    random = np.random.default_rng(0)
    start, end = np.array([3, 3, 4, 4])[:, None], np.array([8, 6, 9, 5])[:, None]
    place = np.arange(9)
    tokens = random.integers(0, 37, (4, 9))
    tokens[1, :3], tokens[3, :4] = tokens[0, :3], tokens[2, :4]
    action = jnp.asarray((place >= start) & (place < end))
    zeros = jnp.zeros((4, 9), jnp.int32)
    return Trajectories(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(place < end), action, zeros * 0.0, zeros, zeros,
        jnp.asarray([0, 0, 1, 1]), jnp.asarray([0, 0, 1, 1]), jnp.zeros(4, bool),
        temperature=jnp.asarray([0.7, 0.7, 1.3, 1.3]),
    )  # fmt: skip


BATCH = batch()
SHARED = shared_prompts(BATCH, group_size=2, prompt_length=4, completion_length=6)
ACTIONS = np.asarray(BATCH.action_mask)


def log_softmax(policy: Policy, params: dict, times: float = 1.0) -> np.ndarray:
    """f64[N, L, V] of the distribution that each token was drawn from, at a multiple of the temperature."""
    logits = np.asarray(policy.logits(params, BATCH.tokens, BATCH.token_mask), np.float64)
    logits = np.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0))) / (times * np.asarray(BATCH.temperature))[:, None, None]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def of_tokens(logp: np.ndarray) -> np.ndarray:
    return np.take_along_axis(logp, np.asarray(BATCH.tokens)[..., None], axis=-1)[..., 0] * ACTIONS


@pytest.mark.parametrize("block", [4, 37, 100])
def test_sums_do_not_depend_on_the_blocks(block: int) -> None:
    random = np.random.default_rng(1)
    hidden, rows = random.normal(size=(5, 8)), random.normal(size=(37, 8))
    z = 3 * np.tanh(hidden @ rows.T / 3) / np.arange(1, 6)[:, None]
    logp = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    source = Distribution(*(jnp.asarray(x, jnp.float32) for x in (hidden, rows, np.arange(1, 6))), softcap=3.0)
    found = vocabulary_sum(lambda p, q: jnp.exp(p) * q, source, source, block=block)
    np.testing.assert_allclose(found, (np.exp(logp) * logp).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("packing", [pytest.param(None, marks=pytest.mark.heavy), SHARED], ids=["plain", "shared"])
def test_measures_are_those_of_whole_logits(packing: Packing | None) -> None:
    names = ("squared_probability", "cubed_probability", "mean_logp", "hidden")
    found = policy_outputs(POLICY, PARAMS, BATCH, packing, Wanted(names, temperatures=(0.8, 2.0))).extras
    logp = log_softmax(POLICY, PARAMS)
    assert found is not None
    for name, expected in {
        "squared_probability": np.exp(2 * logp).sum(axis=-1) * ACTIONS,
        "cubed_probability": np.exp(3 * logp).sum(axis=-1) * ACTIONS,
        "mean_logp": logp.mean(axis=-1) * ACTIONS,
        "tempered_logp:0.8": of_tokens(log_softmax(POLICY, PARAMS, 0.8)),
        "tempered_logp:2": of_tokens(log_softmax(POLICY, PARAMS, 2.0)),
    }.items():
        np.testing.assert_allclose(found[name], expected, rtol=2e-5, atol=2e-5, err_msg=name)
    z = np.asarray(found["hidden"]) @ np.asarray(PARAMS["unembed"]).T
    z = 5 * np.tanh(z / 5) / np.asarray(BATCH.temperature)[:, None, None]
    again = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(of_tokens(again), of_tokens(logp), atol=2e-5)


@pytest.mark.parametrize("packing", [None, SHARED], ids=["plain", "shared"])
def test_affinity_of_two_policies(packing: Packing | None) -> None:
    expected = np.exp((log_softmax(POLICY, PARAMS) + log_softmax(POLICY, OTHER)) / 2).sum(axis=-1) * ACTIONS
    np.testing.assert_allclose(affinity(POLICY, PARAMS, OTHER, BATCH, packing), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(affinity(POLICY, PARAMS, PARAMS, BATCH, packing), ACTIONS, atol=1e-5)


@pytest.mark.heavy
def test_the_inner_policy_is_the_first_layers_without_the_last_norm() -> None:
    """Against a model whose later layers do nothing and whose last norm is undone."""
    wanted = Wanted(("internal_logp",), layer=2)
    found = policy_outputs(POLICY, PARAMS, BATCH, SHARED, wanted).extras
    inner, weights = inner_policy(POLICY, PARAMS, 2)
    assert jax.tree.leaves(weights["layers"])[0].shape[0] == 2
    assert found is not None
    np.testing.assert_allclose(found["internal_logp"], of_tokens(log_softmax(inner, weights)), atol=2e-5)
    idle = jax.tree.map(jnp.array, PARAMS)
    for name in ("out", "down"):
        idle["layers"][name] = idle["layers"][name].at[2].set(0)
    real = BATCH.token_mask.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    whole, _ = POLICY.forward(idle, BATCH.tokens, positions, real)
    short, _ = inner.forward(weights, BATCH.tokens, positions, real)
    rms = np.sqrt(np.mean(np.asarray(short) ** 2, axis=-1, keepdims=True) + CONFIG.norm_epsilon)
    np.testing.assert_allclose(np.asarray(short) / rms, whole, rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda p: policy_outputs(POLICY, p, BATCH, SHARED, wanted).extras["internal_logp"].sum())(
        PARAMS
    )
    per_layer = np.abs(np.asarray(gradient["layers"]["query"])).reshape(3, -1).max(axis=1)
    assert (per_layer[:2] > 0).all()
    assert per_layer[2] == 0, "layers above get no gradient"
    with pytest.raises(InputError, match="layer is 4, but the model has layers 1 to 3"):
        inner_policy(POLICY, PARAMS, 4)


@pytest.mark.parametrize("kind", ["tower", "shared"])
@pytest.mark.parametrize("heads", [1, 2])
def test_values_are_of_the_state_before_the_action(kind: str, heads: int) -> None:
    policy = Policy(CONFIG, remat=False, critic=Critic(kind, heads))
    params = init_critic(jax.random.key(2), policy, PARAMS, policy.critic)
    params["critic"]["head"]["weight"] = jax.random.normal(jax.random.key(3), (16, heads))
    found = [policy_outputs(policy, params, BATCH, packing, Wanted(("values",))) for packing in (None, SHARED)]
    hidden = np.asarray(policy_outputs(policy, params, BATCH, None, Wanted(("hidden",))).extras["hidden"])
    expected = hidden @ np.asarray(params["critic"]["head"]["weight"])
    for one in found:
        values = np.asarray(one.extras["values"])
        assert values.shape == ((4, 9) if heads == 1 else (4, 9, 2))
        np.testing.assert_allclose(values.reshape(4, 9, heads), expected, rtol=1e-4, atol=1e-5)


def test_values_without_a_critic_are_refused() -> None:
    with pytest.raises(InputError, match="give the policy a critic"):
        policy_outputs(POLICY, PARAMS, BATCH, None, Wanted(("values",)))


@pytest.mark.heavy
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("block", [4, 7, 100])
def test_log_probabilities_of_chosen_tokens_and_their_gradient(block: int, softcap: float) -> None:
    random = np.random.default_rng(0)
    hidden, weights = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((5, 3), (11, 3)))
    temperature = jnp.asarray([0.5, 1.0, 2.0, 1.0, 0.7])
    tokens = jnp.asarray([[0, 10, 3], [3, 4, 4], [7, 8, 6], [10, 9, 0], [1, 2, 5]])

    def dense(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        z = hidden @ weights.T
        z = softcap * jnp.tanh(z / softcap) if softcap else z
        return jax.nn.log_softmax(z / temperature[:, None], axis=1)

    def chosen(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.take_along_axis(dense(hidden, weights), tokens, axis=1)

    def blocked(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        return logp_of_tokens(Distribution(hidden, weights, temperature, softcap), tokens, block)

    np.testing.assert_allclose(blocked(hidden, weights), chosen(hidden, weights), atol=1e-5)
    factor = jnp.asarray(random.normal(size=tokens.shape), jnp.float32)
    found, expected = (
        jax.grad(lambda *x, f=f: jnp.sum(factor * f(*x)), argnums=(0, 1))(hidden, weights) for f in (blocked, chosen)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    logp = np.asarray(dense(hidden, weights))
    for count in (1, 5, 50):
        best, values = most_probable(Distribution(hidden, weights, temperature, softcap), count, block)
        order = np.argsort(-logp, axis=1)[:, :count]
        np.testing.assert_array_equal(best, order)
        np.testing.assert_allclose(values, np.take_along_axis(logp, order, axis=1), atol=1e-5)


def test_of_equally_probable_tokens_the_first_are_taken() -> None:
    one = Distribution(jnp.zeros((1, 2)), jnp.ones((11, 2)), jnp.ones(1))
    assert most_probable(one, 6, 4)[0].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_in_64_bit_mode_tokens_stay_int32() -> None:
    with jax.enable_x64(True):
        one = Distribution(jnp.zeros((1, 2)), jnp.ones((11, 2)), jnp.ones(1))
        tokens, logp = most_probable(one, 6, 4)
    assert (tokens.dtype, tokens.tolist()) == (jnp.int32, [[0, 1, 2, 3, 4, 5]])
    np.testing.assert_allclose(logp, -np.log(11), rtol=1e-12)


RANDOM = np.random.default_rng(0)


def made(M: int, D: int, V: int, **more: Any) -> Distribution:
    return Distribution(
        *(jnp.asarray(RANDOM.normal(size=shape)) for shape in ((M, D), (V, D))),
        jnp.asarray(RANDOM.uniform(0.5, 1.5, M)), **more,
    )  # fmt: skip


def whole(source: Distribution, tokens: int) -> Any:
    z = source.hidden @ source.unembedding[:tokens].T
    z = source.softcap * jnp.tanh(z / source.softcap) if source.softcap else z
    return jax.nn.log_softmax(z / source.temperature[:, None], axis=1)


@pytest.mark.heavy
@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize(("tokens", "block"), [(None, 8), (17, 64), (19, 5)])
def test_values_and_gradients_are_those_of_all_logits(beta: float, tokens: int | None, block: int) -> None:
    with jax.enable_x64(True):
        student, teacher = made(6, 4, 23, softcap=3.0, tokens=tokens), made(6, 3, 21, softcap=2.0)
        teacher = teacher._replace(temperature=student.temperature)
        count, weights = tokens or 21, jnp.asarray(RANDOM.normal(size=6))

        def by_blocks(hidden: Any, unembedding: Any) -> Any:
            return weights @ divergence(student._replace(hidden=hidden, unembedding=unembedding), teacher, beta, block)

        def dense(hidden: Any, unembedding: Any) -> Any:
            own = whole(student._replace(hidden=hidden, unembedding=unembedding), count)
            return weights @ generalised_jsd(own, whole(teacher, count), beta)

        at = student.hidden, student.unembedding
        (found, by), (value, gradients) = (jax.value_and_grad(f, (0, 1))(*at) for f in (by_blocks, dense))
        np.testing.assert_allclose(found, value, rtol=1e-11)
        for x, y in zip(by, gradients, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-13)


def test_in_bfloat16_it_is_near() -> None:
    student, teacher = (jax.tree.map(jnp.bfloat16, made(5, 8, 40)) for _ in range(2))
    wide = [jax.tree.map(jnp.float32, x) for x in (student, teacher)]
    np.testing.assert_allclose(
        divergence(student._replace(temperature=wide[0].temperature), teacher, 1.0, 16),
        divergence(wide[0], wide[1], 1.0, 16), rtol=0.02,
    )  # fmt: skip


def test_no_array_has_all_logits() -> None:
    M, D, V = 256, 8, 8192
    student, teacher = (jax.tree.map(jnp.float32, made(M, D, V)) for _ in range(2))

    def loss(hidden: Any, unembedding: Any) -> Any:
        return divergence(student._replace(hidden=hidden, unembedding=unembedding), teacher, 0.5, 256).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(student.hidden, student.unembedding).compile()
    assert program.memory_analysis().temp_size_in_bytes < M * V * 4 / 2


def test_a_beta_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="beta of a divergence from the teacher"):
        divergence(made(1, 1, 3), made(1, 1, 3), 1.5)
