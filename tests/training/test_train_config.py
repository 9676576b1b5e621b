"""The configuration of a run: round trips, and values out of range are refused."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_vectors
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models.lora import TARGETS
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.training.config import LoraTarget, TrainConfig
from jaxrl_llm.training.config.json_text import from_dict, located, to_dict
from jaxrl_llm.training.run_model import with_precision
from jaxrl_llm.utils.errors import InputError, InputErrors

FULL = TrainConfig(
    model="somewhere",
    seed=2**32 - 1,
    stop=("a", "b"),
    rewards=("number_match*0.5", "format_match(x)"),
    prompts="reasoning-gym:chain_sum",
    task_options={"max_digits": "3"},
    hyperparameters={"clip_high": 0.28},
    optimizer=OptimizerConfig(learning_rate=3e-7, schedule="cosine", warmup_steps=3),
    system_prompt="{be} brief",
    param_dtype="bfloat16",
    prompts_per_step=12,
    minibatches=2,
    micro_batches=3,
)


@pytest.mark.parametrize("config", [TrainConfig(), FULL])
def test_there_and_back_through_json(config: TrainConfig) -> None:
    assert from_dict(to_dict(config)) == config
    through = from_dict(json.loads(json.dumps(to_dict(config))))
    assert through == config
    assert isinstance(through.stop, tuple)
    assert isinstance(through.optimizer, OptimizerConfig)


@given(
    st.builds(
        TrainConfig,
        steps=st.integers(1, 10**6),
        temperature=st.floats(1e-6, 10),
        top_p=st.floats(1e-6, 1),
        stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
        system_prompt=st.none() | st.text(),
        wandb=st.none() | st.text().filter(lambda text: text.strip() and "\0" not in text),
        trackio=st.none() | st.just("mine"),
        mlflow=st.none() | st.just("mine"),
        optimizer=st.builds(OptimizerConfig, learning_rate=st.floats(0, 1), beta1=st.floats(0, 0.999)),
    )
)
def test_there_and_back_whatever_is_in_it(config: TrainConfig) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_every_setting_is_in_the_dictionary_and_described() -> None:
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(to_dict(TrainConfig())) == names
    assert set(to_dict(TrainConfig())["optimizer"]) == {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown setting 'group_sise': did you mean 'group_size'"):
        from_dict({"group_sise": 4})
    with pytest.raises(InputError, match="unknown setting 'learning_rat': did you mean 'learning_rate'"):
        from_dict({"optimizer": {"learning_rat": 4}})


OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    *((name, 0, "must be at least 1") for name in (
        "steps", "num_prompts", "max_prompt_tokens", "prompts_per_step", "group_size", "max_new_tokens", "epochs",
        "minibatches", "micro_batches",
    )),
    *((name, -1, "must be at least 0") for name in (
        "seed", "slots", "eval_size", "eval_every", "checkpoint_every", "log_completions_every",
        "overlong_tokens", "top_k",
    )),
    ("keep_checkpoints", 1, "must be at least 2"),
    ("hang_seconds", -1.0, "must be at least 0"),
    ("hang_factor", 0.5, "must be at least 1"),
    ("spike_factor", -1.0, "must be at least 0"),
    ("spike_window", 3, "must be at least 4"),
    ("spike_rollbacks", 0, "must be at least 1"),
    ("seed", 2**32, "seed is 4294967296, but must be at least 0 and at most 4294967295"),
    ("temperature", 0.0, "must be at least 1e-09"),
    ("temperature", float("nan"), "must be a finite number"),
    ("temperature", float("inf"), "must be a finite number"),
    ("top_p", 0.0, "must be at least 1e-30 and at most 1"),
    ("top_p", 1e-45, "must be at least 1e-30 and at most 1"),
    ("top_p", 1.01, "must be at least 1e-30 and at most 1"),
    ("top_p", float("nan"), "must be a finite number"),
    ("min_p", -0.1, "must be at least 0 and at most 1"),
    ("min_p", 1.1, "must be at least 0 and at most 1"),
    ("reward_time_limit", 0.0, "must be at least 0.001"),
    ("reward_time_limit", float("inf"), "must be a finite number"),
    ("reward_default", float("inf"), "must be a finite number"),
    ("reward_default", float("nan"), "must be a finite number"),
    ("overlong_tokens", 129, "must be at most max_new_tokens"),
    ("rewards", (), "rewards is empty"),
    ("stop", ("ok", ""), "empty string"),
    ("minibatches", 3, "prompts_per_step is 16, but must be a multiple of minibatches 3 x micro_batches 1 = 3"),
    ("micro_batches", 24, "prompts_per_step is 16, but must be a multiple of minibatches 1 x micro_batches 24 = 24"),
    ("dtype", "float16", "unknown dtype 'float16'.*float32"),
    ("param_dtype", "int8", "unknown param_dtype 'int8'"),
    ("long_prompts", "drop", "unknown long_prompts 'drop'.*skip"),
    ("top_k", 2**31, "must be at least 0 and at most 2147483647"),
    ("seed", 2**70, "must be at least 0"),
    ("oversample", 1e9, "must be at least 1 and at most 1024"),
    ("lora_alpha", float("inf"), "must be a finite number"),
    ("steps", 1.5, "steps is 1.5, but must be a whole number"),
    ("steps", True, "steps is True, but must be a whole number"),
    ("steps", 10**200, "a number of over 80 digits"),
    ("steps", "3", "steps is str '3', but must be a whole number"),
    ("temperature", None, "temperature is None, but must be a finite number"),
    ("temperature", 10**400, "must be a finite number"),
    ("tensorboard", "no", "tensorboard is str 'no', but must be true or false"),
    ("rewards", "number_match", "rewards is str 'number_match', but must be a list"),
    ("rewards", (1,), "rewards holds 1, but each must be a function, or the name of one"),
    ("stop", ("\ud800",), "an entry of stop is str '.ud800', but must be text that UTF-8 can hold"),
    ("task_options", ["max_digits"], "task_options is list"),
    ("hyperparameters", {1: 2}, "hyperparameters is dict"),
    ("optimizer", 3, "optimizer is 3"),
    ("output", "", "output is ''"),
    ("output", "a\0b", "output is "),
    ("wandb", "", "wandb is ''"),
    ("eval_prompts", " ", "eval_prompts is ' '"),
    ("lora_targets", ("qeury",), "did you mean 'query'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
def test_settings_out_of_range(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=name) as caught:
        TrainConfig(**{name: value})
    assert caught.match(message.replace("^", r"\^"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-6),
        ("learning_rate", float("nan")),
        ("warmup_steps", -1),
        ("schedule", "cosin"),
        ("final_fraction", 1.5),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("weight_decay", -0.1),
        ("max_grad_norm", -1.0),
        ("epsilon", 0.0),
        ("epsilon", 1e-45),
        ("critic_learning_rate", float("inf")),
        ("warmup_steps", 1.5),
        ("moments", None),
    ],
)
def test_settings_of_the_optimizer_out_of_range(name: str, value: Any) -> None:
    """Found when the configuration is made, before anything is loaded or a folder is begun."""
    with pytest.raises(InputError, match="schedule 'cosin': did you mean 'cosine'" if name == "schedule" else name):
        TrainConfig(optimizer=OptimizerConfig(**{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**32 - 1, "steps": 1, "group_size": 1, "prompts_per_step": 1},
        {"top_p": 1.0, "min_p": 1.0, "temperature": 1e-9, "max_new_tokens": 1, "overlong_tokens": 1},
        {"prompts_per_step": 6, "minibatches": 3, "micro_batches": 2},
        {"eval_size": 0, "checkpoint_every": 0, "log_completions_every": 0, "reward_default": -1.0},
    ],
)
def test_the_ends_of_the_ranges_are_inside(changes: dict[str, Any]) -> None:
    assert vars(TrainConfig(**changes)).items() >= changes.items()


def test_several_settings_out_of_range_are_said_together() -> None:
    with pytest.raises(InputErrors) as caught:
        TrainConfig(steps=0, top_p=2.0, output="", optimizer=OptimizerConfig(epsilon=0.0))
    assert [text.split()[0] for text in caught.value.problems] == ["steps", "top_p", "optimizer.epsilon", "output"]


def test_settings_that_belong_to_others() -> None:
    with pytest.raises(InputError, match="task_options apply to reasoning-gym:TASK"):
        TrainConfig(prompts="a.jsonl", task_options={"max_digits": "3"})
    with pytest.raises(InputError, match="eval_size is 0"):
        TrainConfig(eval_size=0, eval_prompts="b.jsonl")


def test_paths_and_scalars_of_numpy_are_taken() -> None:
    config = TrainConfig(output=Path("a/b"), steps=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (config.output, config.steps, config.temperature) == ("a/b", 3, 0.5)
    assert json.loads(json.dumps(to_dict(config)))["steps"] == 3


@pytest.mark.parametrize(
    "raw", [{"optimizer": []}, {"optimizer": None}, {"steps": None}, {"stop": [1]}, {"rewards": {}}]
)
def test_a_configuration_of_wrong_types(raw: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(raw))):
        from_dict(raw)


def test_relative_paths_are_seen_from_where_the_run_was_started(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = TrainConfig(model="model", prompts="a.jsonl", rewards=("r.py:f", "exact_match", "a.b:c", "/x/r.py:f*0.5"))
    seen = located(config, tmp_path)
    assert (seen.model, seen.prompts, seen.eval_prompts) == (str(tmp_path / "model"), str(tmp_path / "a.jsonl"), None)
    assert seen.rewards == (f"{tmp_path}/r.py:f", "exact_match", "a.b:c", "/x/r.py:f*0.5")
    names = located(TrainConfig(model="owner/model", prompts="reasoning-gym:chain_sum"), tmp_path)
    assert (names.model, names.prompts) == ("owner/model", "reasoning-gym:chain_sum")


def test_targets_of_lora_are_those_of_the_module() -> None:
    assert typing.get_args(LoraTarget) == TARGETS


def test_settings_of_sampling_are_one_value() -> None:
    """Each setting of `SamplingConfig` is one of the run, with the same default; dtypes by their names."""
    plain = SamplingConfig()
    for field in dataclasses.fields(SamplingConfig):
        if field.name not in ("cache_dtype", "weight_dtype"):
            assert getattr(TrainConfig(), field.name) == getattr(plain, field.name)
    changes = {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "stop": ("a",),
        "slots": 2,
    }
    found = TrainConfig(**changes, dtype="bfloat16").sampling
    assert found == SamplingConfig(**changes, cache_dtype="bfloat16")
    assert TrainConfig(cache_dtype="int8").sampling.cache_dtype == "int8"
    assert TrainConfig(cache_dtype="float8").sampling.cache_dtype == "float8_e4m3fn"
    assert TrainConfig(dtype="bfloat16", activations="float32").sampling.cache_dtype == "float32"
    assert [TrainConfig(weight_dtype=x).sampling.weight_dtype for x in ("dtype", "int8")] == [None, "int8"]


def test_one_precision_needs_rounded_weights() -> None:
    with pytest.raises(InputError, match="same_rounding is given, but weight_dtype is dtype: set it"):
        TrainConfig(same_rounding=True)
    policy = Policy(load_vectors("llama").policy.config, jnp.dtype(jnp.bfloat16))
    for changes, activations, rounding in (
        ({}, None, None),
        ({"activations": "float32"}, jnp.float32, None),
        ({"weight_dtype": "int8"}, None, None),
        ({"weight_dtype": "float8", "same_rounding": True}, None, "float8"),
    ):
        found = with_precision(TrainConfig(dtype="bfloat16", **changes), policy)
        assert (found.activations, found.rounding) == (activations, rounding)
    assert with_precision(TrainConfig(activations="float32"), policy).activations is None  # it is the dtype
