"""What a method needs of a run: settings that the run takes, its own rollout, and its form of environments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.method import run_settings_of
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import check_settings, fitted, setting_notes
from jaxrl_llm.training.method import check_method
from jaxrl_llm.utils.errors import InputError

PAIRS = {"max_new_tokens": 1024, "rewards": ("given",), "group_size": 2, "same_task": "row"}
LISTS = {name: x for name, x in PAIRS.items() if name != "group_size"}
TAKEN: dict[str, dict[str, Any]] = {
    "spo_single_stream": {"group_size": 1},
    "pa_rl": {"group_size": 16},
    "mdpo_mirror_descent": {"epochs": 4},
    "gbpo": {"epochs": 5},
    "dapo_direct_advantage": {"epochs": 4},
    "llds": {"epochs": 2},
    "igpo_inpainting": {"epochs": 4},
    "dispo": {"epochs": 2},
    "decoupled_ppo": {"max_staleness": 4},
    "jet_rl": {"weight_dtype": "float8_blocks", "same_rounding": True},
    "loop": {"epochs": 2},
    "remix": {"epochs": 2, "epochs_until": 50},
    "ui_s1": {"rewards": ("environment",)},
    "vision_zero": {"rewards": ("environment",)},
    "lspo": {"rewards": ("environment",)},
    "trpa": {"rewards": ("tagged_levels",)},
    "ui_r1": {"rewards": ("answer_tags", "gui_kind", "gui_click")},
    **dict.fromkeys(("dpo", "ipo", "orpo", "cpo", "simpo", "mpo", "reward_model", "fspo_few_shot"), PAIRS),
    **{name: {**PAIRS, "group_size": 1} for name in ("kto", "sft", "masked_sft", "process_reward_model")},
    **dict.fromkeys(("lipo", "oppo"), LISTS),
    "seppo": {**PAIRS, "eval_size": 0},
    "spo_self_supervised": {**LISTS, "critic": "shared"},
    "likelihood_overopt_indicators": {
        **PAIRS,
        "eval_every": 10,
        "eval_metric": "indicators/top_entropy",
        "eval_patience": 3,
    },
    "eggroll": {},  # with an even group
    "brpo": {},
    "baichuan_m2": {},
    "cgpo_judges": {},
    "deeptravel": {},
    "popri": {},
    "nash_md": {},
    "xpo": {},  # without a judge
    **{name: {"rewards": ("judge",), "eval_size": 0} for name in ("pairwise_rl", "spo_structured")},
}
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("spo_single_stream", {"group_size": 4}, "group_size is 4: give 1"),
    ("eggroll", {"group_size": 5}, "group_size is 5: give 8"),
    ("pa_rl", {"group_size": 10}, "group_size is 10: give 16"),
    ("pa_rl", {"group_size": 4, "hyperparameters": {"keep": 4}}, "group_size is 4: give 8"),
    ("dpo", {"rewards": ("number_match",)}, "rewards is number_match: give given"),
    ("popri", {"group_size": 4}, "group_size is 4: give 10"),
    ("jet_rl", {"weight_dtype": "float8"}, "weight_dtype is 'float8': give 'float8_blocks'"),
    ("jet_rl", {"cache_dtype": "int8"}, "cache_dtype is 'int8': give 'dtype'"),
    ("kto", {"group_size": 4}, "group_size is 4: give 1"),
    ("ui_s1", {"rewards": ("number_match",)}, "rewards is number_match: give environment"),
    ("trpa", {"rewards": ("number_match", "answer_tags")}, "is number_match answer_tags: give tagged_levels"),
    ("ui_r1", {"rewards": ("number_match",)}, "rewards is number_match: give answer_tags gui_kind gui_click"),
    ("xpo", {"rewards": ("number_match",), "hyperparameters": {"judge": "policy"}}, "is number_match: give judge"),
    ("cgpo_judges", {"rewards": ("mine.py:good",), "hyperparameters": {"judges": "answer_tags"}}, "give answer_tags*0"),
]
FITTING: list[tuple[str, dict[str, Any]]] = [
    ("pa_rl", {"group_size": 12}), ("pa_rl", {"group_size": 8, "hyperparameters": {"keep": 4}}),
    ("decoupled_ppo", {"max_staleness": 1}),
    ("gbpo", {"minibatches": 2}), ("llds", {"epochs": 3}), ("trpa", {"rewards": ("mine.py:levels",)}),
    ("ui_r1", {"rewards": ("number_match",), "hyperparameters": {"right": 1.0}}),
    ("ui_s1", {"rewards": ("environment*2",)}),
]  # fmt: skip


def test_the_table_is_of_all_methods_with_settings() -> None:
    assert set(TAKEN) == {name for name in algorithms.names() if run_settings_of(algorithms.CATALOGUE[name])}


@pytest.mark.parametrize("name", TAKEN)
def test_a_run_by_name_takes_what_the_method_needs_and_says_so(name: str) -> None:
    config = TrainConfig(algorithm=name)
    found = fitted(config)
    assert found == dataclasses.replace(config, **TAKEN[name])
    check_settings(found)
    for note, setting in zip(setting_notes(found), TAKEN[name], strict=True):
        assert note.startswith(f"{name} runs with {setting} ")
        assert "because it needs" in note
    assert fitted(found) == found


@pytest.mark.parametrize(("name", "changes", "said"), CONTRADICTIONS)
def test_what_contradicts_the_method_is_refused_in_one_line(name: str, changes: dict[str, Any], said: str) -> None:
    config = fitted(TrainConfig(algorithm=name, **changes))
    with pytest.raises(InputError) as error:
        check_settings(config)
    assert str(error.value).startswith(f"{name} needs ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "changes"), FITTING)
def test_what_fits_stays(name: str, changes: dict[str, Any]) -> None:
    config = TrainConfig(algorithm=name, **changes)
    assert fitted(config) == config
    check_settings(config)
    assert setting_notes(config) == []


OWN = ("ghpo", "scaf_grpo", "nurl", "masa", "xrpo", "sage_self_hint", "dars", "prefixrl", "latr", "icpo_in_context")


@pytest.mark.parametrize("name", OWN)
def test_another_rollout_than_the_method_s_own_is_refused(name: str) -> None:
    config = TrainConfig(algorithm=name, rollout="forked(8)")
    with pytest.raises(InputError, match=f"{name} has a rollout of its own, .*: leave out rollout, or choose another"):
        check_method(config, data_mesh())


def test_hints_do_not_replace_a_method_s_own_guidance() -> None:
    """Though both make guided rows: ICPO also draws the wrong ones again, from the plain prompt."""
    with pytest.raises(InputError, match=r"icpo_in_context has a rollout of its own, in_context"):
        check_method(TrainConfig(algorithm="icpo_in_context", rollout="hinted(hint)"), data_mesh())


def test_another_call_of_the_same_rollout_is_the_method_s() -> None:
    check_method(TrainConfig(algorithm="masa", rollout="with_predictions(4)"), data_mesh())


@pytest.mark.parametrize("name", ["eapo_iterresearch", "flow_grpo", "dart_gui"])
def test_whole_conversations_are_refused_where_turns_have_prompts_of_their_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.rollouts.agents.program import agent\n\n\n"
        "def rounds():\n    return agent(lambda row: None, fresh=True)\n"
    )
    config = TrainConfig(algorithm=name, environment=f"{tmp_path}/own.py:rounds")
    with pytest.raises(
        InputError, match=rf"{name} .*needs fresh_prompts .*: use a --rollout that returns .*fresh=True"
    ):
        check_method(config, data_mesh())
    check_method(TrainConfig(algorithm=name, rollout=f"{tmp_path}/own.py:rounds"), data_mesh())
