"""The configuration of a run: there and back, and nothing out of range gets in."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.errors import InputError
from jaxrl_llm.training.config import TrainConfig, from_dict, to_dict
from jaxrl_llm.training.optimizer import OptimizerConfig

FULL = TrainConfig(
    model="somewhere",
    seed=2**32 - 1,
    stop=("a", "b"),
    rewards=("number_match*0.5", "format_match(x)"),
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
        wandb=st.none() | st.text(),
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
    ("seed", 2**32, "must be below 2^32"),
    ("temperature", 0.0, "must be above 0"),
    ("temperature", float("nan"), "must be above 0"),
    ("temperature", float("inf"), "must be above 0"),
    ("top_p", 0.0, "must be above 0 and at most 1"),
    ("top_p", 1.01, "must be above 0 and at most 1"),
    ("top_p", float("nan"), "must be above 0 and at most 1"),
    ("min_p", -0.1, "must be between 0 and 1"),
    ("min_p", 1.1, "must be between 0 and 1"),
    ("reward_time_limit", 0.0, "must be above 0 seconds"),
    ("reward_default", float("inf"), "must be finite"),
    ("reward_default", float("nan"), "must be finite"),
    ("overlong_tokens", 129, "must be at most max_new_tokens"),
    ("rewards", (), "rewards is empty"),
    ("stop", ("ok", ""), "empty string"),
    ("minibatches", 3, "prompts_per_step is 16, but must be a multiple of minibatches 3 x micro_batches 1 = 3"),
    ("micro_batches", 32, "prompts_per_step is 16, but must be a multiple of minibatches 1 x micro_batches 32 = 32"),
    ("dtype", "float16", "unknown dtype 'float16'.*float32"),
    ("param_dtype", "int8", "unknown param_dtype 'int8'"),
    ("long_prompts", "drop", "unknown long_prompts 'drop'.*skip"),
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
