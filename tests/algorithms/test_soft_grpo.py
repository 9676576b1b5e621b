"""SofT-GRPO: the worked example of its card, densities of the update that are the sampler's, and their gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import prepared
from conftest import quick_compiles

from jaxrl_llm import algorithms, sample
from jaxrl_llm.algorithms.exploration.soft_grpo import soft_grpo
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.core.soft_thinking import SoftThinking, heaviest, log_density, log_probabilities, mixture
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.interactive import update as step_update
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.step import as_sampled
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.rollouts.programs import group, soft_thoughts, softly, top_nsigma
from jaxrl_llm.utils.errors import InputError

V, END = 16, 10
CONFIG = ModelConfig(
    family="llama", vocab_size=V, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.35,
    eos_token_ids=(15,),
)  # fmt: skip
PARAMS = init_params(jax.random.key(0), CONFIG, scale=0.2)
OTHERS = init_params(jax.random.key(1), CONFIG, scale=0.2)
PROMPTS = [[1, 2, 4], [6, 7, 8, 9, 10, 11, 12]]


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles() -> Iterator[None]:
    with quick_compiles():
        yield


def thinking_of(density: Any = "mean") -> SoftThinking:
    return SoftThinking(top_k=4, top_p=0.9, gumbel_temperature=0.5, end=END, density=density)


def policy_of(density: Any = "mean") -> Policy:
    return Policy(CONFIG, thinking=thinking_of(density))


def sampled(density: Any = "mean", **given: Any) -> Trajectories:
    """Two groups of four, with rewards."""
    found = sample(
        policy_of(density), PARAMS, PROMPTS, jax.random.key(3), **{"group_size": 4, "max_new_tokens": 14, **given}
    )
    reward = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
    return found.replace(reward=reward, rewards={"r": reward})


def packing_of(batch: Trajectories) -> Any:
    """Of one slice of all rows."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[0], plan_steps(batch).packing)


def record_of(p: Any, eps: Any, density: Any) -> tuple[SoftThinking, jax.Array]:
    """The record of three tokens that are all kept."""
    thinking = SoftThinking(top_k=3, top_p=1.0, gumbel_temperature=0.1, end=0, density=density)
    logp = log_probabilities(thinking, jnp.log(jnp.asarray(p)), jnp.ones(3, bool))
    return thinking, jnp.stack([jnp.arange(3.0), logp + jnp.asarray(eps), logp])


def test_the_worked_example_of_soft_grpo() -> None:
    """g, y, the log-densities of both forms, and their ratios."""
    p_old, p_new, eps = [0.6, 0.3, 0.1], [0.65, 0.25, 0.10], [0.3, -0.2, 0.1]
    expected = {"sum": (-3.067058, -3.027505, 1.040346), "mean": (-1.022353, -1.009168, 1.013272)}
    for density, (of_old, of_new, ratio) in expected.items():
        thinking, record = record_of(p_old, eps, density)
        np.testing.assert_allclose(record[1], [-0.210826, -1.403973, -2.202585], atol=1.1e-5)
        np.testing.assert_allclose(mixture(thinking, record).weights, [0.999993, 0.000007, 0.0], atol=1e-6)
        assert int(heaviest(record)) == 0
        new = log_probabilities(thinking, jnp.log(jnp.asarray(p_new)), jnp.ones(3, bool))
        old_f, new_f = (float(log_density(thinking, logp, record)) for logp in (record[2], new))
        np.testing.assert_allclose([old_f, new_f, np.exp(new_f - old_f)], [of_old, of_new, ratio], atol=3e-6)
    exact = record_of(p_old, eps, "sum")[1]
    np.testing.assert_allclose(exact[1], [-0.210826, -1.403973, -2.202585], atol=1e-6)


def test_the_mean_is_over_what_was_probable_in_the_rollout_with_clipped_noise() -> None:
    thinking, record = record_of([0.9, 0.06, 0.04], [0.1, 0.2, 0.3], "mean")  # log 0.04 is below -3
    u = np.asarray([9.0, -7.0])  # of the new policy, clipped
    found = log_density(thinking, record[1] - jnp.asarray([*u, 0.0]), record)
    clipped = np.clip(u, -1.5, 3)
    assert float(found) == pytest.approx(np.mean(-clipped - np.exp(-clipped)), abs=1e-5)
    slope = jax.grad(lambda logp: log_density(thinking, logp, record))(record[1] - jnp.asarray([*u, 0.0]))
    np.testing.assert_array_equal(slope, 0.0)


@pytest.mark.parametrize("density", ["mean", "sum"])
def test_the_update_s_densities_are_the_sampler_s(density: Any) -> None:
    """The ratio of the first step is 1, of whole rows, and packed with prompts that rows share."""
    batch = sampled(density, temperature=0.7, top_p=0.8)
    soft, action = np.asarray(batch.thoughts)[:, :, 0, 0] >= 0, np.asarray(batch.action_mask)
    assert 8 < soft.sum() < action.sum()  # some rows answer
    assert not (soft & ~action).any()
    policy = policy_of(density)
    for lies in (None, packing_of(batch)):
        found = policy_outputs(policy, PARAMS, batch, lies)
        for got, drawn in ((found.logp, batch.behaviour_logp), (found.entropy, batch.entropy)):
            np.testing.assert_allclose(np.asarray(got)[action], np.asarray(drawn)[action], atol=2e-5)
    moved = policy_outputs(policy, OTHERS, batch)
    assert np.abs(np.asarray(moved.logp) - np.asarray(batch.behaviour_logp))[soft].max() > 0.05


@pytest.mark.parametrize("density", ["mean", "sum"])
def test_densities_under_other_weights_are_those_of_a_slow_loop(density: Any) -> None:
    """Of each row alone, with each mixture as a row of the table of embeddings."""
    batch, thinking = sampled(density), thinking_of(density)
    found = np.asarray(policy_outputs(policy_of(density), OTHERS, batch).logp)
    table, plain = np.asarray(OTHERS["embed"], np.float64), Policy(CONFIG)
    for row in range(8):
        n = int(np.asarray(batch.token_mask)[row].sum())
        ids, own = np.asarray(batch.tokens)[row, :n].copy(), [*table]
        records = np.asarray(batch.thoughts, np.float64)[row, :n]
        for t in np.flatnonzero(records[:, 0, 0] >= 0):
            kept = records[t][:, records[t][0] >= 0]
            y = np.exp(kept[1] / thinking.gumbel_temperature)
            ids[t] = len(own)
            own.append((y / y.sum()) @ table[kept[0].astype(int)])
        places, real = jnp.arange(n)[None], jnp.ones((1, n), jnp.int32)
        hidden, _ = plain.forward({**OTHERS, "embed": jnp.asarray(own, jnp.float32)}, ids[None], places, real)
        logits = np.asarray(plain.logits_of(OTHERS, hidden), np.float64)[0]
        for t in np.flatnonzero(np.asarray(batch.action_mask)[row, :n]):
            z, token = logits[t - 1], int(np.asarray(batch.tokens)[row, t])
            expected = z[token] - np.log(np.exp(z).sum())
            if ids[t] >= V:
                kept = records[t][:, records[t][0] >= 0]
                p = np.exp(z[kept[0].astype(int)])
                p = p / p.sum()
                if density == "mean":
                    u = np.clip(kept[1] - np.log(p + 1e-6), -1.5, 3)[kept[2] > -3]
                    expected = np.mean(-u - np.exp(-u))
                else:
                    u = kept[1] - np.log(p)
                    expected = np.sum(-u - np.exp(-u))
            assert found[row, t] == pytest.approx(expected, abs=3e-5)


def test_rows_share_only_what_is_equal() -> None:
    """Rows of the same ids with other scores are packed apart, and those with the same scores together."""
    one = jax.tree.map(lambda x: x[:2], sampled())
    twins = one.replace(**{
        name: jnp.broadcast_to(getattr(one, name)[:1], getattr(one, name).shape)
        for name in ("tokens", "token_mask", "action_mask", "behaviour_logp")
    })  # fmt: skip
    records = jnp.broadcast_to(one.thoughts[:1], one.thoughts.shape)  # type: ignore[index]
    soft = np.flatnonzero(np.asarray(records)[0, :, 0, 0] >= 0)
    other = records.at[1, soft[0], 1, 0].add(0.5)
    packed = []
    for thoughts in (records, other):
        batch = twins.replace(thoughts=thoughts)
        packing = packing_of(batch)
        packed.append(int((np.asarray(packing.prefixes.enter) > 0).sum()))
        outputs, whole = (policy_outputs(policy_of(), OTHERS, batch, lies) for lies in (packing, None))
        np.testing.assert_allclose(outputs.logp, whole.logp, atol=2e-5)
    assert packed[1] == 3  # the prompt alone
    assert packed[0] > packed[1]


@pytest.mark.parametrize("density", ["mean", "sum"])
def test_the_gradient_is_that_of_finite_differences(density: Any) -> None:
    """Of all weights, embeddings included, in a random direction; scores and ids are data."""
    batch, policy = sampled(density), policy_of(density)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=batch.tokens.shape), jnp.float32)
    with jax.enable_x64(True):
        double = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, (OTHERS, batch, weights)
        )
        params, rows, each = double
        exact = dataclasses.replace(policy, dtype=jnp.float64)
        value = jax.jit(lambda params: jnp.sum(each * policy_outputs(exact, params, rows).logp))
        slope = jax.grad(value)(params)
        for name in ("embed", "unembed", "all"):
            random = init_params(jax.random.key(5), CONFIG, jnp.float64, scale=1.0)
            way = jax.tree.map(jnp.zeros_like, random) | ({name: random[name]} if name != "all" else random)
            moved = [value(jax.tree.map(lambda x, d, s=s: x + s * d, params, way)) for s in (1e-6, -1e-6)]
            expected = float(moved[0] - moved[1]) / 2e-6
            found = sum(
                float(jnp.vdot(a, b)) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True)
            )
            assert abs(expected) > 0.1
            assert float(found) == pytest.approx(expected, rel=1e-5)
    data = jax.grad(lambda x: jnp.sum(policy_outputs(policy, OTHERS, batch.replace(thoughts=x)).logp))(batch.thoughts)
    np.testing.assert_array_equal(data, 0.0)


@pytest.mark.parametrize("density", ["mean", "sum"])
def test_the_loss_is_that_of_a_loop(density: Any) -> None:
    """GRPO's, with the densities' ratios, and k3 of them."""
    method = soft_grpo(density=density, kl_coefficient=0.1)
    batch = prepared(method, sampled(density))
    outputs = policy_outputs(policy_of(density), OTHERS, batch)
    reference = policy_outputs(policy_of(density), init_params(jax.random.key(2), CONFIG, scale=0.2), batch).logp
    found, _ = method.objective(outputs, batch.replace(reference_logp=reference))
    reward, action = np.asarray(batch.reward, np.float64), np.asarray(batch.action_mask)
    new, old, fixed = (np.asarray(x, np.float64) for x in (outputs.logp, batch.behaviour_logp, reference))
    total = 0.0
    for row in range(8):
        own = reward[row // 4 * 4 : row // 4 * 4 + 4]
        A = (reward[row] - own.mean()) / (own.std(ddof=1) + 1e-6)
        terms = []
        for t in np.flatnonzero(action[row]):
            rho, d = np.exp(new[row, t] - old[row, t]), fixed[row, t] - new[row, t]
            terms.append(min(rho * A, np.clip(rho, 0.8, 1.2) * A) - 0.1 * (np.exp(d) - 1 - d))
        total -= np.mean(terms) / 8
    assert float(found) == pytest.approx(total, abs=2e-5)


def test_a_step_without_a_run_moves_towards_what_was_good() -> None:
    """Rewarded thoughts become more likely."""
    method = dataclasses.replace(soft_grpo(kl_coefficient=0.0), rollout=soft_thoughts(thinking_of()))
    batch = prepared(method, sampled())
    optimizer = optax.sgd(0.5)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer)
    after, metrics = step_update(Policy(CONFIG), method, optimizer, state, batch)
    assert float(metrics["finite"]) == 1
    moved = np.asarray(policy_outputs(policy_of(), after.params, batch).logp) - np.asarray(batch.behaviour_logp)
    soft = np.asarray(batch.thoughts)[:, :, 0, 0] >= 0
    assert float((moved * np.asarray(batch.advantages))[soft].sum()) > 0.01


def test_its_hyperparameters_are_those_of_its_thoughts_and_any_method_thinks_so() -> None:
    found = algorithms.get("soft_grpo", top_k=3, density="sum", end="<end>")
    assert found.rollout is not None
    assert found.rollout.thinking == SoftThinking(3, 0.95, 0.1, "<end>", "sum")
    assert as_sampled(Policy(CONFIG), found).thinking == found.rollout.thinking
    other = dataclasses.replace(algorithms.get("dapo"), rollout=soft_thoughts(thinking_of()))
    assert as_sampled(Policy(CONFIG), other).thinking == thinking_of()


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    batch = sampled()
    for policy, wanted, said in (
        (Policy(CONFIG), (), "the batch has soft tokens, but the policy does not think so"),
        (Policy(CONFIG, thinking=SoftThinking(top_k=3)), (), "of the shape [3, 4], but the policy's are of [3, 3]"),
        (policy_of(), ("greedy",), "soft tokens have no greedy"),
    ):
        with pytest.raises(InputError) as error:
            policy_outputs(policy, PARAMS, batch, wanted=Wanted(wanted))
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    for rollout, said in (
        (soft_thoughts(thinking_of()), "thinks softly already"),
        (
            top_nsigma(),
            "draws through the hook .* already, and cannot be one that thinks softly",
        ),
        (dataclasses.replace(group(), provides=frozenset({"turns"})), "goes on after observations"),
        (dataclasses.replace(group(), demands=Demands(reference=True)), "also draws from other policies"),
    ):
        with pytest.raises(InputError, match=said):
            softly(rollout, thinking_of())
    with pytest.raises(InputError, match="thinking of softly must be of the type SoftThinking"):
        softly(group(), 3)  # type: ignore[arg-type]
    assert isinstance(softly(group(), thinking_of()), Rollout)
