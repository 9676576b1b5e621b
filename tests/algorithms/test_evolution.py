"""EGGROLL: the worked example of its card, and an update that is the sum over members, without a pass of the model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import batch_of, prepared
from other_process import on_devices, result_of

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.evolution.eggroll import eggroll, fitness
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.learner.interactive import prepare
from jaxrl_llm.learner.interactive import update as step_update
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.nonfinite import not_finite
from jaxrl_llm.learner.step import Learner, as_sampled, learn_batch
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, update
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.by_row import perturbations
from jaxrl_llm.models.layers import projections
from jaxrl_llm.models.layers.projections import Members, inner_products, noise
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.models.parameters import adapted_by_default, adapted_weights
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.rollouts.programs import evolved, group, members, top_nsigma
from jaxrl_llm.utils.errors import InputError

CONFIG = ModelConfig(
    family="llama", vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.5,
)  # fmt: skip
METHOD = eggroll(sigma=0.1, rank=2)
POLICY = as_sampled(Policy(CONFIG), METHOD)


def rows_of(rewards: Any, groups: Any, seeds: Any = 5, L: int = 6) -> Trajectories:
    """Rows of as many members."""
    N = len(rewards)
    info = {"member": np.arange(N), "member_seed": np.broadcast_to(seeds, N)}
    mask = np.arange(L) >= np.where(np.arange(N) % 3 == 0, 2, 3)[:, None]
    batch = batch_of(mask, rewards, np.where(mask, -1.0, 0.0), groups)
    info = {name: jnp.asarray(x, jnp.float32) for name, x in info.items()}
    return batch.replace(old_logp=None, tokens=batch.tokens % 11, token_mask=jnp.ones((N, L), bool), info=info)


def test_the_worked_example_of_eggroll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members with one noise: z, U, and the gradient -sqrt(N) U. Our W is [inputs, outputs]."""
    given = jnp.array([[0.2, 0.4, -1.0]] * 2)[..., None], jnp.array([[1.0, -0.5]] * 2)[..., None]
    monkeypatch.setattr(projections, "noise", lambda members, name, inputs, outputs: given)
    own = Members(jnp.uint32(0), jnp.int32(0), jnp.arange(2), Population(sigma=0.1))
    batch = prepared(eggroll(), rows_of([3.0, 1.0], [0, 0]))
    np.testing.assert_allclose(batch.advantages[:, -1], [0.999995, -0.999995], atol=1e-7)

    def loss(w: jax.Array) -> jax.Array:
        outputs = PolicyOutputs(
            batch.behaviour_logp, jnp.zeros((2, 6)), {"perturbation": inner_products(w, own, "query")}
        )
        return eggroll().objective(outputs, batch)[0]

    U = np.array([[0.02, 0.04, -0.10], [-0.01, -0.02, 0.05]])
    found = -jax.grad(loss)(jnp.zeros((3, 2))).T
    np.testing.assert_allclose(found / math.sqrt(2), U, atol=1e-6)
    expected = [[0.028284, 0.056568, -0.141421], [-0.014142, -0.028284, 0.070710]]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_fitness_is_of_groups_and_of_all() -> None:
    F, groups = np.array([3.0, 1.0, 0.0, 0.5, np.nan, 2.0]), np.array([0, 0, 1, 1, 1, 2])
    known = ~np.isnan(F)
    var = F[known].var()
    batch = rows_of(F, groups)
    means = np.array([2.0, 2.0, 0.25, 0.25, 0.25, 2.0])
    for baseline, mean in (("group", means), ("population", F[known].mean())):
        z = np.where(known, (F - mean) / np.sqrt(var + 1e-5), 0.0)
        found = np.asarray(prepared(eggroll(baseline=baseline), batch).advantages)
        np.testing.assert_allclose(found, np.where(batch.action_mask, z[:, None], 0.0), atol=1e-6)
    same = prepared(eggroll(), rows_of([2.0] * 4, [0, 0, 1, 1])).advantages
    assert not np.asarray(same).any()
    with pytest.raises(InputError, match="baseline"):
        fitness("median")  # type: ignore[arg-type]


def by_members(params: Any, batch: Trajectories, z: np.ndarray) -> Any:
    """-sqrt(N) U by a loop over members and layers, layers as a tuple; 0 elsewhere."""
    names = {weight.name: weight for weight in adapted_weights(CONFIG).values() if adapted_by_default(weight)}
    found = jax.tree.map(np.zeros_like, unstack(params, CONFIG))
    N = len(z)
    for n in range(N):
        for place, layer in enumerate(found["layers"]):
            for name in set(layer) & set(names):
                inputs = math.prod(layer[name].shape[: names[name].inputs])
                own = Members(
                    jnp.uint32(batch.info["member_seed"][n]),
                    jnp.int32(place),  # type: ignore[index]
                    jnp.int32([batch.info["member"][n]]),
                    POLICY.population,
                )  # type: ignore[index]
                (B,), (A,) = (np.asarray(x, np.float64) for x in noise(own, name, inputs, layer[name].size // inputs))
                E = B @ A.T / np.sqrt(2)
                sign = 1 if n % 2 == 0 else -1
                layer[name] += (-z[n] * sign * 0.1 * E / math.sqrt(N)).reshape(layer[name].shape)
    return found


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_is_the_sum_over_members(unstacked: bool, micro_batches: int) -> None:
    """Of two steps at once, whose noise is another; also in slices. What is no projection has none."""
    params = init_params(jax.random.key(0), CONFIG, scale=0.5)
    rewards = np.random.default_rng(0).normal(size=8)
    batch = prepared(METHOD, rows_of(rewards, np.arange(8) // 4, np.repeat([5, 6], 4)))
    z = (rewards - np.repeat(rewards.reshape(2, 4).mean(1), 4)) / np.sqrt(rewards.var() + 1e-5)
    steps = plan_steps(batch, micro_batches=micro_batches)
    given = unstack(params, CONFIG) if unstacked else params
    found, metrics = jax.jit(gradient, static_argnums=(0, 1))(POLICY, METHOD.objective, given, batch, steps.slices)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), unstack(found, CONFIG), by_members(params, batch, z)
    )
    assert float(np.abs(found["embed"]).max()) == 0
    assert float(metrics["mismatch"]) == 0


def test_rows_without_actions_or_member_weigh_nothing() -> None:
    """As of a failed group: neither their noise nor their number is in the gradient."""
    params = init_params(jax.random.key(0), CONFIG, scale=0.5)
    whole = rows_of([1.0, 0.0, 3.0, 0.5], [0, 0, 1, 1])
    assert whole.info is not None
    gone = np.arange(4) >= 2
    info = {name: jnp.where(gone, jnp.nan, x) for name, x in whole.info.items()}
    part = whole.replace(
        info=info, action_mask=whole.action_mask & ~gone[:, None], reward=jnp.where(gone, jnp.nan, whole.reward)
    )
    alone = rows_of([1.0, 0.0], [0, 0])
    found, expected = (
        gradient(POLICY, METHOD.objective, params, prepared(METHOD, batch))[0] for batch in (part, alone)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


def test_no_token_goes_through_the_model() -> None:
    """The compiled update has no attention and no unembedding: its cost does not depend on the rows' length."""
    params, optimizer = init_params(jax.random.key(0), CONFIG), optax.sgd(1.0)

    def compiled(method: Algorithm, length: int) -> Any:
        batch = prepared(method, rows_of([1.0, 0.0] * 2, [0, 0, 1, 1], L=length))
        policy = as_sampled(Policy(CONFIG), method)
        run = jax.jit(lambda state: update(policy, method.objective, optimizer, state, batch))
        return run.lower(init_state(params, optimizer)).compile()

    short, long, grpo = compiled(METHOD, 8), compiled(METHOD, 128), compiled(algorithms.get("dr_grpo"), 128)
    flops = [one.cost_analysis()["flops"] for one in (short, long, grpo)]
    assert flops[1] < 1.1 * flops[0] + 4 * 128 * 100
    assert flops[2] > 5 * flops[1]
    for scope in ("attention", "mlp"):
        assert f"/{scope}" in grpo.as_text()
        assert f"/{scope}" not in long.as_text()


def test_an_update_step_by_step_and_what_is_not_finite() -> None:
    """Without a run: the same gradient, and a name for what is not finite, without a pass either."""
    params, optimizer = init_params(jax.random.key(0), CONFIG, scale=0.5), optax.sgd(1.0)
    batch = rows_of([1.0, 0.0, 3.0, 0.5], [0, 0, 1, 1])
    _, ready = prepare(METHOD, None, batch)
    expected = gradient(POLICY, METHOD.objective, params, ready)[0]
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    after, metrics = step_update(Policy(CONFIG), METHOD, optimizer, state, ready)
    assert float(metrics["finite"]) == 1
    jax.tree.map(lambda a, b, g: np.testing.assert_allclose(a, b - g, atol=1e-6), after.params, params, expected)
    large = ready.replace(advantages=ready.advantages * 1e38)
    found = not_finite(POLICY, METHOD.objective, params, large, plan_steps(large))
    assert found.startswith(("the loss", "the gradient of"))


def test_updates_align_with_the_gradient_of_a_linear_fitness() -> None:
    """F = <C, W>: U is an unbiased estimate of its gradient, up to a factor; 1,024 members of matrices of 64 to 96."""
    params = init_params(jax.random.key(0), CONFIG, scale=0.5)
    C = init_params(jax.random.key(1), CONFIG, scale=1.0)
    names = [weight.name for weight in adapted_weights(CONFIG).values() if adapted_by_default(weight)]
    N = 1024
    batch = rows_of(np.zeros(N), np.zeros(N))
    F = perturbations(POLICY, C, batch)  # <C, W + E_n> less the same number for all
    batch = prepared(eggroll(baseline="population"), batch.replace(reward=F))
    found, _ = jax.jit(gradient, static_argnums=(0, 1))(POLICY, METHOD.objective, params, batch)
    for name in names:
        a, b = (np.ravel(tree["layers"][name]) for tree in (found, C))
        assert -np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)) > 0.4, name
    a, b = (np.concatenate([np.ravel(tree["layers"][name]) for name in names]) for tree in (found, C))
    cosine = -np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))
    # D numbers, N / 2 independent products: of the squared length, D / (N / 2) is noise, to first order.
    assert cosine == pytest.approx(1 / math.sqrt(1 + 2 * a.size / N), abs=0.1)


def test_what_needs_a_pass_or_a_population_is_refused() -> None:
    params, batch = init_params(jax.random.key(0), CONFIG), rows_of([1.0, 0.0], [0, 0])
    with pytest.raises(InputError, match="runs no model, and has no values"):
        policy_outputs(POLICY, params, batch, wanted=Wanted(("perturbation", "values")))
    with pytest.raises(InputError, match="member of a population, which the policy does not have"):
        policy_outputs(Policy(CONFIG), params, batch, wanted=Wanted(("perturbation",)))
    with pytest.raises(InputError, match="this method needs member"):
        policy_outputs(POLICY, params, batch.replace(info=None), wanted=Wanted(("perturbation",)))
    with pytest.raises(InputError, match="population of evolved must be of the type Population"):
        evolved(group(), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="members of a population already"):
        evolved(members(Population()), Population())
    with pytest.raises(InputError, match=r"draws through the hook .* already, and cannot be one that is drawn"):
        evolved(top_nsigma(), Population())


def test_its_rollout_goes_around_that_of_the_run() -> None:
    own = eggroll(sigma=0.2).rollout
    assert own is not None
    assert own.wrap is not None
    found = own.wrap(dataclasses.replace(group(), name="agent"))
    assert isinstance(found, Rollout)
    assert found.population == own.population == Population(sigma=0.2)
    assert {"member", "member_seed"} <= found.provides


ON_FOUR_DEVICES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np, optax
from test_evolution import CONFIG, METHOD, Policy, init_params, learned, rows_of
from jaxrl_llm.distributed import make_mesh, mesh_of

params = init_params(jax.random.key(0), CONFIG, scale=0.5)
batch = rows_of(np.random.default_rng(0).normal(size=8), np.arange(8) // 4)
expected = learned(params, batch, mesh_of("data=1", jax.devices()[:1]))
out = []
for text in ("data=4", "fsdp=4", "fsdp=2,tensor=2"):
    found = learned(params, batch, mesh_of(text))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    out.append(max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
moved = max(float(np.abs(np.asarray(a) - b).max()) for a, b in
            zip(jax.tree.leaves(expected), jax.tree.leaves(params), strict=True))
print("RESULT" + json.dumps([out, moved]))
"""


def learned(params: Any, batch: Trajectories, mesh: Any) -> Any:
    """The parameters after an update on a mesh."""
    from jaxrl_llm.learner.setup import shard

    policy, optimizer = dataclasses.replace(Policy(CONFIG), mesh=mesh if mesh.size > 1 else None), optax.sgd(1.0)
    placed = shard(jax.tree.map(jnp.copy, params), policy, mesh)
    learner = Learner(policy, METHOD, optimizer, mesh)
    batch = jax.tree.map(np.asarray, batch)
    return learn_batch(learner, init_state(placed, optimizer), METHOD.transform.init(), batch).state.params


def test_an_update_on_four_devices_is_that_on_one() -> None:
    """Rows over four, parameters in shards over four, and heads split over two."""
    apart, moved = result_of(ON_FOUR_DEVICES, str(Path(__file__).parent), environment=on_devices(4, quick=True))
    assert max(apart) < 1e-6
    assert moved > 1e-2


def test_a_run_of_the_laboratory_repeats() -> None:
    """A run is one pure function of a key, on which its noise depends."""
    from jaxrl_llm.in_jax.settings import LabSettings
    from jaxrl_llm.in_jax.tasks import addition
    from jaxrl_llm.in_jax.train import make_train

    train = make_train(
        addition(1, 2), "eggroll", LabSettings(iterations=3, prompts=4, group_size=4, hidden=8, layers=1)
    )
    one, again, other = (jax.jit(lambda key: train(key, {"sigma": 0.05}))(jax.random.key(n)) for n in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one.params, again.params)
    assert not np.array_equal(one.params["layers"][0]["query"], other.params["layers"][0]["query"])
    assert np.isfinite(one.metrics["loss"]).all()
    with pytest.raises(InputError, match="a population's sigma is an array, but is part of the program"):
        jax.jit(train)(jax.random.key(0), {"sigma": 0.05})
