"""Runs of a masked-diffusion model: supervised steps, methods of its own and others by name, kills, meshes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.models import init_params, load_policy, save_policy
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError


def tiny_llada(folder: Path) -> Path:
    """A tiny LLaDA with the tokenizer of the tiny Llama, and a token more, the mask."""
    policy, _, tokenizer = load_policy(runs.MODEL)
    size, ends = policy.config.vocab_size, policy.config.eos_token_ids
    config = from_hf({
        "model_type": "llada", "d_model": 32, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 48,
        "vocab_size": size + 1, "max_sequence_length": 64, "mask_token_id": size, "eos_token_id": list(ends),
        "weight_tying": True, "block_length": 4,
    })  # fmt: skip
    made = Policy(config, tokenizer=tokenizer)
    params = init_params(jax.random.key(1), config, scale=0.15)
    return save_policy(folder, made, params, tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a model, in a folder."""
    return tiny_llada(tmp_path_factory.mktemp("llada") / "model")


def config_of(folder: Path, model: Path, name: str, **changes: Any) -> TrainConfig:
    rows = [
        {"prompt": f"number {i:02d}:", "answer": str(i % 2), "completion": f"{i % 7} 1", "solution": "0 2 4 6 8 0 2"}
        for i in range(12)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "algorithm": name, "model": str(model), "prompts": str(path), "steps": 2, "minibatches": 1, "eval_size": 0,
        "top_p": 1.0, "max_new_tokens": 8, "checkpoint_every": 1, "log_completions_every": 1, "hyperparameters": {},
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


@pytest.mark.parametrize(
    ("name", "given", "metric"),
    [("bgpo", {"samples": 3}, "elbo"), ("grpo", {"kl_coefficient": 0.1}, "kl"),
     ("igpo_inpainting", {"free": 0, "success": 0.9}, "kl")],
)  # fmt: skip
def test_methods_learn_from_its_samples(tmp_path: Path, model: Path, name: str, given: Any, metric: str) -> None:
    runs.train(config_of(tmp_path, model, name, hyperparameters=given))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines), "there is a signal"
    assert all(np.isfinite(line[metric]) for line in lines)
    assert all(line["mismatch"] < 1e-5 for line in lines), "sampler and update agree"
    if name == "igpo_inpainting":
        assert any(line.get("rollout/guided", 0) > 0 for line in lines)


def test_supervised_steps_lower_the_bound(tmp_path: Path, model: Path) -> None:
    optimizer = runs.OptimizerConfig(learning_rate=1e-2)
    settings = {"samples": 8, "column": "completion"}
    runs.train(config_of(tmp_path, model, "masked_sft", hyperparameters=settings, steps=30, optimizer=optimizer,
                         checkpoint_every=30, reward="constant", group_size=1, rewards=("given",)))  # fmt: skip
    losses = [line["loss"] for line in runs.lines_of(tmp_path / "run" / "metrics.jsonl")]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


def test_a_run_that_was_killed_goes_on_as_if_it_was_not(tmp_path: Path, model: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = config_of(tmp_path / "whole", model, "bgpo", hyperparameters={"samples": 2}, steps=3)
    runs.train(whole)
    killed = dataclasses.replace(whole, output=str(tmp_path / "killed" / "run"))
    runs.train(dataclasses.replace(killed, steps=2))
    runs.train(killed, resume=True)
    both = [runs.reproducible(tmp_path / name / "run" / "metrics.jsonl")[-1] for name in ("whole", "killed")]
    assert both[0] == both[1]


def test_speculation_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InputError, match="speculative_tokens"):
        runs.train(config_of(tmp_path, model, "grpo", speculative_tokens=2))


@pytest.mark.parametrize("name", ["bgpo", "masked_sft"])
def test_a_causal_model_is_refused_by_methods_of_the_bound(tmp_path: Path, name: str) -> None:
    more = {"reward": "constant", "rewards": ("given",), "group_size": 1} if name == "masked_sft" else {}
    with pytest.raises(InputError, match="predicts the next token"):
        runs.train(config_of(tmp_path, runs.MODEL, name, **more))


def test_supervised_steps_of_causal_models_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InputError, match="take masked_sft"):
        runs.train(config_of(tmp_path, model, "sft", group_size=1, rewards=("given",), reward="constant"))


def test_a_plan_is_refused(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = runs.as_arguments(config_of(tmp_path, model, "grpo"))
    assert runs.main(["plan", *arguments, "--topology", "cpu:1"]) == 2
    assert "jaxrl plan knows models that predict the next token" in capsys.readouterr().err
