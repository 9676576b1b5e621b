"""Runs whose rewards are those of reward models, beside others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_runs as runs

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.core.shapes import pad_rows
from jaxrl_llm.models.scores import init_reward_model
from jaxrl_llm.objectives.functional import bradley_terry_loss
from jaxrl_llm.reporting.reward_accuracy import Rated, accuracies
from jaxrl_llm.rewards import get_reward, score
from jaxrl_llm.rewards.models.whole import encoded
from jaxrl_llm.sampling.batch import prompts_of
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.run_model import load_model
from jaxrl_llm.training.setup import set_up
from jaxrl_llm.utils.errors import InputError

MODEL = str(Path(__file__).parents[1] / "reward_models" / "gemma2_1")


@pytest.mark.heavy
@pytest.mark.parametrize("stream", [False, True])
def test_a_run_with_a_reward_model(stream: bool, tmp_path: Path) -> None:
    functions = runs.write_rewards(tmp_path)
    config = runs.small_config(
        tmp_path, rewards=(f"model:{MODEL}*0.5", f"{functions}:even"), steps=2, minibatches=1, stream_rewards=stream
    )
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    scored = taken[0].scored
    batch, rewards = scored.batch, scored.batch.rewards or {}
    assert set(rewards) == {"gemma2_1", "even"}
    total = 0.5 * np.asarray(rewards["gemma2_1"]) + np.asarray(rewards["even"])
    np.testing.assert_allclose(batch.need("reward"), total, rtol=1e-5)
    _, _, tokenizer = load_policy(config.model)
    prompts = [tokenizer.decode(ids) for ids in prompts_of(batch)]
    alone = score([get_reward(f"model:{MODEL}")], scored.texts, {"prompts": prompts})
    np.testing.assert_allclose(alone.total, rewards["gemma2_1"], atol=1e-5)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["rewards/gemma2_1/scored"] for line in lines if "loss" in line] == [1.0, 1.0]


def test_conversations_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"number {i}"}], "answer": "1"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = runs.small_config(tmp_path, rewards=(f"model:{MODEL}",), prompts=str(tmp_path / "rows.jsonl"))
    with pytest.raises(InputError, match="the reward model gemma2_1 has no chat template, but scores conversations"):
        runs.train(config)


@pytest.mark.heavy
def test_a_run_with_rewards_of_steps(tmp_path: Path) -> None:
    """Each sentence's worth is on the token that ends it, by the weights of both models."""
    policy, params, tokenizer = load_policy(runs.MODEL)
    rewards = []
    for number, weight in enumerate((0.5, -2.0)):
        model, weights = init_reward_model(jax.random.key(number), policy, params, ("none", "right", "wrong"))
        save_policy(tmp_path / f"judge{number}", model, weights, tokenizer)
        rewards.append(f"sentences(0,1,-1):{tmp_path / f'judge{number}'}*{weight}")
    config = runs.small_config(tmp_path, algorithm="fgaif", rewards=tuple(rewards), steps=2, minibatches=1)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    scored = taken[0].scored
    earned, action = np.asarray(scored.batch.token_rewards), np.asarray(scored.batch.action_mask)
    assert not earned[~action].any()
    asked = [tokenizer.decode(ids) for ids in prompts_of(scored.batch)]
    found = score([get_reward(one) for one in rewards], scored.texts, {"prompts": asked}).entries["spans"]
    totals = [sum(value for *_, value in one or []) for one in found]
    np.testing.assert_allclose(earned.sum(axis=1), totals, atol=1e-5)
    assert np.count_nonzero(earned) >= 4
    assert not np.asarray(scored.batch.need("reward")).any()
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines)


@pytest.mark.heavy
def test_a_run_whose_critic_starts_as_a_reward_model(tmp_path: Path) -> None:
    policy, params, tokenizer = load_policy(runs.MODEL)
    model, weights = init_reward_model(jax.random.key(3), policy, params)
    save_policy(tmp_path / "reward", model, weights, tokenizer)
    reward = str(tmp_path / "reward")
    config = runs.small_config(
        tmp_path, algorithm="ppo_max", rewards=(f"model:{reward}",), critic_model=reward, steps=2, minibatches=1
    )
    made, started, _ = load_model(config, {"values"})
    assert made.critic is not None
    np.testing.assert_array_equal(started["critic"]["head"]["weight"], weights["score"])
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    assert len(taken) == 2
    assert load_run(str(tmp_path / "run"))[1].critic is not None
    for changes, message in [
        ({"critic": "shared"}, "critic is shared, but only a tower can start from a critic_model"),
        ({"critic_model": str(runs.MODEL)}, "has no score.weight"),
        ({"algorithm": "grpo"}, "grpo has no critic: leave out critic_model"),
    ]:
        with pytest.raises(InputError, match=message):
            set_up(dataclasses.replace(config, **changes))


def even_share(text: str) -> float:
    return sum(ord(one) % 2 == 0 for one in text) / max(len(text), 1)


def pairs_of(rng: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    """Texts of which the first of a pair has the larger share of characters with an even code."""
    odd, even = ([chr(code) for code in (*range(32, 127), 65533, 65534) if code % 2 == side] for side in (1, 0))

    def text(share: float) -> str:
        return "".join(rng.choice(even if rng.random() < share else odd) for _ in range(12))

    drawn = [sorted((text(0.2), text(0.8)), key=even_share) for _ in range(2 * count)]
    apart = [(better, worse) for worse, better in drawn if even_share(better) > even_share(worse)][:count]
    return [better for better, _ in apart], [worse for _, worse in apart]


@pytest.mark.heavy
def test_a_reward_model_learns_a_preference_and_teaches_it(tmp_path: Path) -> None:
    """It ranks held-out pairs as what they were made by does, and GRPO with it raises that."""
    policy, params, tokenizer = load_policy(runs.MODEL)
    model, weights = init_reward_model(jax.random.key(3), policy, params)
    optimizer, rng = optax.adam(3e-3), np.random.default_rng(0)
    state = optimizer.init(weights)

    def rows(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return pad_rows([encoded(tokenizer, "", text) for text in texts], 40)

    @jax.jit
    def learn(weights: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(weights: Any) -> jax.Array:
            scores = model.scores(weights, *batch)[:, 0].reshape(2, -1)
            return jnp.mean(bradley_terry_loss(*scores, centring=0.01))

        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    for _ in range(150):
        better, worse = pairs_of(rng, 16)
        weights, state = learn(weights, state, rows(better + worse))
    better, worse = pairs_of(rng, 100)
    scores = np.asarray(model.scores(weights, *rows(better + worse)))[:, 0].tolist()
    (found,) = accuracies([Rated([x], [y]) for x, y in zip(scores[:100], scores[100:], strict=True)])
    assert found.accuracy >= 0.95

    save_policy(tmp_path / "reward", model, weights, tokenizer)
    config = runs.small_config(
        tmp_path, rewards=(f"model:{tmp_path / 'reward'}",), steps=30, minibatches=1, max_new_tokens=12, eval_every=0
    )
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    share = [np.mean([even_share(text) for text in one.scored.texts]) for one in taken]
    assert np.mean(share[-5:]) > np.mean(share[:5]) + 0.15
