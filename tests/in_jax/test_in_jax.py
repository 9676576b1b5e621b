"""Runs as pure functions: the same alone and under vmap, rollouts that the trainer agrees with, needs filled in."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms import grpo, hbpo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import Objective, chain, control, controller
from jaxrl_llm.in_jax.rollout import evaluate_task, greedy_reward, sample_batch
from jaxrl_llm.in_jax.settings import lab_optimizer
from jaxrl_llm.in_jax.tasks import addition, sequence_lock
from jaxrl_llm.in_jax.train import QUICK_COMPILE, LabSettings, Run, fresh_params, make_policy, make_train, warm_start
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.utils.errors import InputError

TINY = LabSettings(iterations=4, prompts=4, group_size=4, hidden=16, layers=1, learning_rate=1e-2)
TASK = sequence_lock(2, 3)


@cache
def start() -> Any:
    return warm_start(jax.random.key(0), TASK, TINY, 12, learning_rate=1e-2)


@cache
def batch_and_prompts() -> Any:
    policy = make_policy(TASK, TINY)
    sample = jax.jit(lambda p, k: sample_batch(policy, p, TASK, k, 3, 4, 4), compiler_options=QUICK_COMPILE)
    return sample(start(), jax.random.key(1))


@pytest.mark.heavy
def test_a_batch_is_what_it_says() -> None:
    batch, prompts = batch_and_prompts()
    N, P, L = 16, TASK.prompt_length, TASK.prompt_length + TASK.completion_length
    assert batch.tokens.shape == (N, L)
    np.testing.assert_array_equal(batch.tokens[:, :P], np.repeat(prompts, 4, axis=0))
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(4), 4))
    tokens, mask = np.asarray(batch.tokens)[:, P:], np.asarray(batch.action_mask)[:, P:]
    for row, (line, marks) in enumerate(zip(tokens.tolist(), mask.tolist(), strict=True)):
        length = line.index(TASK.end) + 1 if TASK.end in line else len(line)
        assert marks == [i < length for i in range(len(line))]
        assert bool(batch.truncated[row]) == (TASK.end not in line)
        _, reward = TASK.score(batch.tokens[row, :P], batch.tokens[row, P:])
        assert float(batch.reward[row]) == float(reward)
    assert not np.asarray(batch.action_mask)[:, :P].any()
    assert np.asarray(batch.token_mask)[:, :P].all()


@pytest.mark.heavy
def test_the_trainer_agrees_with_the_sampler() -> None:
    batch, _ = batch_and_prompts()
    outputs = jax.jit(policy_outputs, static_argnums=0)(make_policy(TASK, TINY), start(), batch)
    np.testing.assert_allclose(outputs.logp, batch.behaviour_logp, atol=1e-5)
    np.testing.assert_allclose(outputs.entropy, batch.entropy, atol=1e-5)


@pytest.mark.heavy
def test_runs_are_the_same_alone_and_under_vmap() -> None:
    """Rewards exactly, parameters to 1e-5, for several seeds and learning rates at once."""
    train, params = make_train(TASK, "grpo", TINY), start()

    def one(key: jax.Array, rate: jax.Array, clip: jax.Array) -> Run:
        return train(key, {"learning_rate": rate, "clip_high": clip, "kl_coefficient": 0.0}, params)

    keys = jax.random.split(jax.random.key(2), 3)
    rates, clips = jnp.array([1e-2, 1e-2, 3e-3]), jnp.array([0.2, 0.3, 0.2])
    together = jax.jit(jax.vmap(one), compiler_options=QUICK_COMPILE)(keys, rates, clips)
    alone = jax.jit(one, compiler_options=QUICK_COMPILE)
    for i in range(3):
        single = alone(keys[i], rates[i], clips[i])
        np.testing.assert_array_equal(together.metrics["reward"][i], single.metrics["reward"])
        for a, b in zip(jax.tree.leaves(together.params), jax.tree.leaves(single.params), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=0, atol=1e-5)
    assert len(np.unique(np.asarray(together.metrics["reward"]), axis=0)) == 3


@pytest.mark.heavy
def test_the_reward_rises() -> None:
    settings = LabSettings(iterations=60, prompts=16, group_size=8, hidden=16, layers=1, learning_rate=3e-3)
    train = make_train(TASK, "grpo", settings)
    run = jax.jit(lambda k, p: train(k, {"kl_coefficient": 0.0}, p), compiler_options=QUICK_COMPILE)
    rewards = np.asarray(run(jax.random.key(3), start()).metrics["reward"])
    assert rewards[0] < 0.6
    assert rewards[-10:].mean() > rewards[0] + 0.3


@pytest.mark.heavy
def test_it_can_start_inside_another_program() -> None:
    """The warm start and its evaluation are the same in a jit of the caller's."""

    def rewards(key: jax.Array) -> jax.Array:
        params = warm_start(key, TASK, TINY, 2)
        return evaluate_task(params, TASK, TINY, key, prompts=8)["reward"]

    inside = jax.jit(rewards, compiler_options=QUICK_COMPILE)(jax.random.key(6))
    np.testing.assert_array_equal(inside, rewards(jax.random.key(6)))


def test_the_warm_start_earns_a_part_of_the_reward() -> None:
    found = evaluate_task(start(), TASK, TINY, jax.random.key(4), prompts=256)
    assert set(found) == {"reward", "open"}
    assert found["reward"].shape == (256,)
    assert 0.05 < float(found["reward"].mean()) < 0.9


def test_greedy_rewards_are_of_the_most_probable_completion() -> None:
    _, prompts = batch_and_prompts()
    policy = make_policy(TASK, TINY)
    value = greedy_reward(policy, start(), TASK, prompts)
    tokens = np.asarray(prompts)
    for _ in range(TASK.completion_length):
        following = np.asarray(policy.logits(start(), jnp.asarray(tokens)))[:, -1].argmax(axis=-1)
        ended = (tokens[:, TASK.prompt_length :] == TASK.end).any(axis=1)
        tokens = np.concatenate([tokens, np.where(ended, TASK.end, following)[:, None]], axis=1)
    expected = [
        TASK.score(jnp.asarray(t[: TASK.prompt_length]), jnp.asarray(t[TASK.prompt_length :]))[1] for t in tokens
    ]
    np.testing.assert_array_equal(value, np.array(expected))


@pytest.mark.heavy
def test_what_a_method_needs_is_filled_in() -> None:
    """Feedback counts the updates; the old policy is the sampler's, and at first also the reference."""

    def probe(outputs: Any, batch: Any) -> Any:
        facts = {
            "updates": control(batch, "updates"),
            "last_loss": control(batch, "last_loss"),
            "old": jnp.max(jnp.abs(batch.old_logp - batch.behaviour_logp)),
            "reference": jnp.max(jnp.abs(batch.reference_logp - batch.behaviour_logp)),
            "greedy": jnp.mean(batch.need("greedy_reward")),
            "values": jnp.max(jnp.abs(batch.need("values") - outputs.extras["values"])),
        }
        return jnp.sum(outputs.logp), facts

    def method() -> Algorithm:
        transform = chain(
            controller("updates", 0.0, lambda _, found: found["updates"]),
            controller("last_loss", 0.0, lambda _, found: found["loss"]),
        )
        return Algorithm(
            transform, Objective(probe, frozenset({"old_logp", "reference_logp", "values", "greedy_reward"}))
        )

    train = make_train(TASK, method, TINY)
    metrics = jax.jit(train, compiler_options=QUICK_COMPILE)(jax.random.key(5), None, start()).metrics
    np.testing.assert_array_equal(metrics["updates"], [0, 1, 2, 3])
    np.testing.assert_allclose(metrics["last_loss"][1:], metrics["loss"][:-1], rtol=1e-6)
    np.testing.assert_allclose(metrics["old"], 0.0, atol=1e-5)
    assert float(metrics["reference"][0]) < 1e-5 < float(metrics["reference"][1])
    np.testing.assert_allclose(metrics["values"], 0.0, atol=1e-5)
    assert ((metrics["greedy"] >= 0) & (metrics["greedy"] <= 1)).all()


@pytest.mark.heavy
def test_a_value_and_a_file_train_as_the_name_does(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms import get\n\n"
        "def mine(clip_low: float):\n    return get('dr_grpo', clip_low=clip_low, max_length=4)\n"
    )
    settings = replace(TINY, iterations=2)
    value = algorithms.get("dr_grpo", clip_low=0.1, max_length=4)
    found = [
        jax.jit(make_train(TASK, given, settings), compiler_options=QUICK_COMPILE)(jax.random.key(1), numbers, start())
        for given, numbers in (
            ("dr_grpo", {"clip_low": 0.1, "max_length": 4}),
            (value, {}),
            (f"{tmp_path}/own.py:mine", {"clip_low": 0.1}),
        )
    ]
    for other in found[1:]:
        for one, two in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(one, two)


def test_the_critic_has_a_learning_rate_of_its_own() -> None:
    """Adam's first step is as large as the learning rate, whatever the gradient."""
    params = {"embed": jnp.zeros(2), "critic": {"head": {"bias": jnp.zeros(1)}}}
    gradient = jax.tree.map(lambda x: x + 0.5, params)
    for settings, multiple in ((LabSettings(), 1), (LabSettings(critic_rate=10.0), 10)):
        optimizer = lab_optimizer(settings, 1e-3)
        change, _ = optimizer.update(gradient, optimizer.init(params))
        np.testing.assert_allclose(change["embed"], -1e-3, rtol=1e-4)
        np.testing.assert_allclose(change["critic"]["head"]["bias"], -1e-3 * multiple, rtol=1e-4)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="grpo"):
        make_train(TASK, "gropo")
    with pytest.raises(InputError, match="clip_low"):
        make_train(TASK, grpo, TINY)(jax.random.key(0), {"clip_lo": 0.1}, None)
    with pytest.raises(InputError, match="group_size"):
        make_train(TASK, grpo, LabSettings(group_size=0))
    with pytest.raises(InputError, match="critic_rate"):
        make_train(TASK, grpo, LabSettings(critic_rate=-1.0))
    with pytest.raises(InputError, match="unknown hyper-parameter 'clip_low'"):
        make_train(TASK, grpo(), TINY)(jax.random.key(0), {"clip_low": 0.1}, None)
    with pytest.raises(InputError, match="Algorithm"):
        make_train(TASK, grpo().objective, TINY)


def test_a_method_that_lacks_a_part_is_refused() -> None:
    key = jax.random.key(0)
    with pytest.raises(InputError, match=r"hbpo needs budget .*without='budget'"):
        make_train(TASK, "hbpo", TINY)(key, {"max_length": 8})
    with pytest.raises(InputError, match=r"otr needs demonstrated.*without='demonstrated'"):
        make_train(TASK, "otr", TINY)(key)
    with pytest.raises(InputError, match="budget"):
        make_train(TASK, partial(hbpo, max_length=8), TINY)(key)
    with pytest.raises(InputError, match=r"has a rollout of its own.*without='rollout'"):
        make_train(TASK, "ghpo", TINY)(key)
    with pytest.raises(InputError, match="tree"):
        make_train(TASK, "hbpo", TINY, without="tree")(key, {"max_length": 8})


def test_parameters_of_a_task_fit_its_vocabulary() -> None:
    params = fresh_params(jax.random.key(0), addition(), TINY)
    assert params["embed"].shape == (13, 16)
    assert len(params["layers"]) == 1
