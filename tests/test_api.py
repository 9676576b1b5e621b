"""The names of the package itself, and a loop of one's own from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import VECTORS

import jaxrl_llm
from jaxrl_llm import InputError, Trajectories, algorithms, evaluate, init_state, prepare, sample, score, update
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.update import prepare as prepare_alone
from jaxrl_llm.learner.update import update as update_alone
from jaxrl_llm.rewards import Reward
from jaxrl_llm.training.evaluation.evaluate import Evaluation

ROWS = [{"prompt": f"number {i:02d}:", "answer": str(i % 2)} for i in range(2)]
KEY = jax.random.key(0)
STAYS = {
    "Algorithm", "InputError", "Objective", "OptimizerConfig", "PolicyOutputs", "Run", "TrainConfig", "Trajectories",
    "Transform", "algorithms", "chain", "compare", "evaluate", "init_state", "load_policy",
    "load_reward_model", "make_train", "prepare", "sample", "save_policy", "score", "show", "train", "update",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any, Any]:
    return jaxrl_llm.load_policy(VECTORS / "llama_tied")


@pytest.fixture(scope="module")
def batch(model: tuple[Any, Any, Any]) -> Trajectories:
    policy, params, _ = model
    return sample(policy, params, [row["prompt"] for row in ROWS], KEY, group_size=4, max_new_tokens=6)


def even(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [float(value) for value in answer]


def test_names_that_stay() -> None:
    assert set(jaxrl_llm.__all__) == STAYS
    assert set(dir(jaxrl_llm)) >= STAYS
    for name in STAYS:
        assert getattr(jaxrl_llm, name).__doc__, name


def test_importing_the_package_imports_nothing() -> None:
    """Also the configuration alone needs no JAX."""
    program = (
        "import sys, jaxrl_llm; from jaxrl_llm import TrainConfig, OptimizerConfig, InputError; "
        "assert not {'jax', 'flax', 'optax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_score(model: tuple[Any, Any, Any], batch: Trajectories, tmp_path: Path) -> None:
    tokenizer = model[2]
    (tmp_path / "own.py").write_text("def half(completions):\n    return [0.5] * len(completions)\n")
    found = score(batch, [even, Reward(right, weight=2.0), f"{tmp_path}/own.py:half*4"], ROWS, tokenizer)
    assert found.rewards is not None
    assert set(found.rewards) == {"even", "right", "half"}
    assert found.rewards["right"].tolist() == [0] * 4 + [1] * 4
    np.testing.assert_allclose(found.reward, found.rewards["even"] + 2 * found.rewards["right"] + 2, rtol=1e-6)
    alone = score(batch, even, [row["prompt"] for row in ROWS], tokenizer)
    np.testing.assert_array_equal(alone.reward, found.rewards["even"])
    for given, message in [
        ((batch, right, ["a", "b"], tokenizer), r"column that the reward 'right' needs, 'answer'"),
        ((batch, even, ROWS[::-1], tokenizer), r"row 1 is not of the batch.s prompt 1, which is that of row 2: give"),
        ((batch, even, ROWS[:1], tokenizer), r"there are 1 rows, but the batch has 2 prompts: give the row of each"),
        ((batch, even, "ab", tokenizer), r"rows are 'ab', but must be a list"),
        ((batch, even, [{"answer": "1"}] * 2, tokenizer), r"row 1 is .* but must have a prompt"),
        ((batch, [], ROWS, tokenizer), r"rewards are \[\], but must be functions or names of rewards"),
        ((batch, [even, even], ROWS, tokenizer), r"two rewards are named 'even'"),
        ((batch, "evn", ROWS, tokenizer), r"unknown reward 'evn'"),
        ((batch, even, ROWS, None), r"tokenizer is None"),
    ]:
        with pytest.raises(InputError, match=message):
            score(*given)


def test_evaluate(model: tuple[Any, Any, Any], tmp_path: Path) -> None:
    policy, params, _ = model
    found = evaluate(policy, params, ROWS, right, max_new_tokens=6)
    assert isinstance(found, Evaluation)
    assert found.accuracy == 0.5
    assert repr(found) == "accuracy 50.0 % (9.5 to 90.5) on 2 prompts"
    assert found.figures["temperature"] == 0.0
    several = evaluate(policy, params, ROWS, [even, right], judge="right", samples=2, max_new_tokens=6, size=1)
    assert repr(several).endswith("on 1 prompt, 2 samples each")
    assert several.figures["pass_at"]["2"]["value"] == 0.0
    assert several.figures["temperature"] == 1.0
    with pytest.raises(InputError, match="unknown reward to judge by 'left'"):
        evaluate(policy, params, ROWS, right, judge="left", max_new_tokens=6)
    with pytest.raises(InputError, match=r"a prompt has 10 tokens, and max_new_tokens is 128, but .* is 128 tokens"):
        evaluate(policy, params, ROWS, right)
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        evaluate(policy, params, str(tmp_path / "nowhere.jsonl"), right)


def test_a_step_is_what_the_parts_do(model: tuple[Any, Any, Any], batch: Trajectories) -> None:
    """`prepare` and `update` on a method with a reference: bit by bit what the functions of `learner` give."""
    policy, params, tokenizer = model
    grpo, optimizer = algorithms.get("grpo"), optax.sgd(0.1)
    scored = score(batch, even, ROWS, tokenizer)
    memory, ready = prepare(grpo, None, scored, policy, params, reference=params)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    state, metrics = update(policy, grpo, optimizer, state, ready, minibatches=2, seed=3)
    assert int(state.step) == 2
    assert float(metrics["grad_norm"]) > 0

    other = provide(policy, grpo.needs, params, params, scored)
    same, expected = prepare_alone(grpo.transform, grpo.transform.init(), other)
    assert same == memory
    for one, two in zip(jax.tree.leaves(ready), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, two)
    steps = plan_steps(expected, minibatches=2, seed=3)
    start = init_state(jax.tree.map(jnp.copy, params), optimizer)
    after, _ = update_alone(policy, grpo.objective, optimizer, start, expected, steps)
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(one, two)
    _, by_transform = prepare(grpo.transform, None, scored)
    np.testing.assert_array_equal(by_transform.advantages, ready.advantages)


def test_memory_and_feedback_go_on(model: tuple[Any, Any, Any], batch: Trajectories) -> None:
    """A controller of the KL coefficient moves once there are metrics of an update."""
    policy, params, tokenizer = model
    scored = score(batch, even, ROWS, tokenizer)
    method = next(
        algorithms.get(name)
        for name in algorithms.names()
        if "feedback" in algorithms.get(name).needs and "reference_logp" in algorithms.get(name).needs
    )
    memory, first = prepare(method, None, scored, policy, params, reference=params)
    memory, second = prepare(
        method, memory, scored, policy, params, params, {"kl": 9.0, "entropy": 0.1, "kl/behaviour": 9.0}
    )
    assert first.controls is not None
    assert second.controls is not None
    assert any(float(first.controls[name]) != float(second.controls[name]) for name in first.controls)


def test_what_a_step_lacks(model: tuple[Any, Any, Any], batch: Trajectories) -> None:
    policy, params, tokenizer = model
    grpo, scored = algorithms.get("grpo"), score(batch, even, ROWS, tokenizer)
    for given, message in [
        ((grpo, None, scored), r"the algorithm needs reference_logp: give the policy and params to compute them with"),
        ((grpo, None, scored, policy, params), r"needs a reference policy: give its parameters, reference=\.\.\."),
        ((grpo, None, batch, policy, params, params), r"reward"),
        ((grpo.objective, None, scored), r"what prepares a batch must be of the type Algorithm"),
        ((algorithms.get("icpo_in_context"), None, scored, policy, params, params), r"needs guided .*the batch has no"),
    ]:
        with pytest.raises(InputError, match=message):
            prepare(*given)
    optimizer = optax.sgd(0.1)
    with pytest.raises(InputError, match=r"what is minimised must be of the type Algorithm, but is of the type"):
        update(policy, grpo.transform, optimizer, init_state(params, optimizer), scored)
    with pytest.raises(InputError, match=r"the state is .*init_state\(params, optimizer\)"):
        update(policy, grpo, optimizer, params, prepare(grpo, None, scored, policy, params, params)[1])
