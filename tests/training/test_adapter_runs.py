"""Runs and adapters of PEFT's: written by jaxrl export --adapters, read by --adapter in train, sample, eval, export."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs
from safetensors.numpy import load_file, save_file

from jaxrl_llm.cli.program import main
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models import load_policy, lora
from jaxrl_llm.models.quantised import is_rounded
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.setup import set_up
from jaxrl_llm.utils.errors import InputError

WEIGHTS = "adapter_model.safetensors"
LEARNING = {"optimizer": OptimizerConfig(learning_rate=0.02), "minibatches": 1, "top_p": 1.0}
PENALTY: Any = {"hyperparameters": {"kl_coefficient": 0.05}}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with new adapters, and `adapter`, what jaxrl export --adapters wrote of it."""
    folder = tmp_path_factory.mktemp("first")
    config = runs.small_config(
        folder, lora_rank=2, lora_alpha=4.0, lora_targets=("query", "down"), steps=2, **LEARNING | PENALTY
    )
    runs.train(config)
    assert main(["export", config.output, str(folder / "adapter"), "--adapters"]) == 0
    shutil.move(config.output, folder / "run")
    return folder


def config_of(folder: Path, adapter: Path, **changes: Any) -> TrainConfig:
    return runs.small_config(folder, adapter=str(adapter), **{"steps": 2} | LEARNING | changes)


@pytest.fixture(scope="module")
def second(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that began with those adapters."""
    config = config_of(tmp_path_factory.mktemp("second"), first / "adapter", **PENALTY)
    runs.train(config)
    return Path(config.output)


def test_the_adapters_of_a_run_are_those_of_its_files(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.loads((first / "adapter" / "adapter_config.json").read_text())
    assert (raw["r"], raw["lora_alpha"], raw["target_modules"]) == (2, 4, ["down_proj", "q_proj"])
    assert raw["base_model_name_or_path"] == str(runs.MODEL)
    _, policy, params, _ = load_run(str(first / "run"))
    again, found, _ = load_policy(runs.MODEL, adapter=first / "adapter")
    assert again.config == policy.config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert np.any(np.asarray(params["layers"]["query_lora_out"]))
    capsys.readouterr()


@pytest.mark.heavy
def test_a_run_with_adapters_of_experts_and_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampler and trainer agree; what is exported is read again; a second run goes on from it."""
    monkeypatch.setattr(runs, "MODEL", runs.MODEL.parent / "mixtral")
    targets = ("query", "gate", "up", "down", "embed", "unembed")
    config = runs.small_config(tmp_path, lora_rank=2, lora_alpha=4.0, lora_targets=targets, steps=2, **LEARNING)
    runs.train(config)
    assert all(line["mismatch"] < 1e-5 for line in runs.lines_of(tmp_path / "run" / "metrics.jsonl"))
    assert main(["export", config.output, str(tmp_path / "adapter"), "--adapters"]) == 0
    _, policy, params, _ = load_run(config.output)
    again, found, _ = load_policy(runs.MODEL, adapter=tmp_path / "adapter")
    assert again.config == policy.config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert all(np.any(np.asarray(params["layers"][f"{name}_lora_out"])) for name in ("gate", "up", "down"))
    assert np.any(np.asarray(params["unembed_lora_out"]))
    assert np.any(np.asarray(params["embed_lora_in"]))
    (tmp_path / "second").mkdir()
    runs.train(config_of(tmp_path / "second", tmp_path / "adapter"))
    assert all(line["mismatch"] < 1e-5 for line in runs.lines_of(tmp_path / "second" / "run" / "metrics.jsonl"))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_over_a_rounded_base(kind: str, tmp_path: Path) -> None:
    """QLoRA: sampler and trainer agree, what is exported is the policy that was trained, and adapters by themselves."""
    config = runs.small_config(tmp_path, lora_rank=2, lora_alpha=4.0, steps=2, frozen_dtype=kind, **LEARNING)
    runs.train(config)
    assert all(line["mismatch"] < 1e-5 for line in runs.lines_of(tmp_path / "run" / "metrics.jsonl"))
    _, policy, params, _ = load_run(config.output)
    assert is_rounded(params["layers"]["query"])
    assert np.any(np.asarray(params["layers"]["query_lora_out"]))
    for name, more in (("model", []), ("adapter", ["--adapters"])):
        assert main(["export", config.output, str(tmp_path / name), *more]) == 0
    _, exported, _ = load_policy(tmp_path / "model")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 200, (1, 7)))
    logits = np.asarray(policy.logits(params, tokens))
    np.testing.assert_allclose(policy.logits(exported, tokens), logits, atol=1e-4 * np.abs(logits).max())
    _, again, _ = load_policy(runs.MODEL, adapter=tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, lora.split(again)[1], lora.split(params)[1])


def test_what_a_rounded_base_does_not_go_with(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="frozen_dtype is nf4, but all weights are trained: set lora_rank or adapter"):
        runs.small_config(tmp_path, frozen_dtype="nf4")
    with pytest.raises(InputError, match=r"weight_dtype is int8, but weights are kept, .* in nf4"):
        runs.small_config(tmp_path, frozen_dtype="nf4", lora_rank=2, weight_dtype="int8")


def test_a_run_goes_on_from_an_adapter(first: Path, second: Path) -> None:
    """The reference is the model with the adapter as it was; sampler and trainer agree."""
    lines = runs.lines_of(second / "metrics.jsonl")
    assert all(line["mismatch"] < 1e-5 for line in lines)
    distances = [next(v for k, v in line.items() if k.startswith("kl") and "behaviour" not in k) for line in lines]
    assert abs(distances[0]) < 1e-6
    assert distances[-1] > 1e-5
    _, _, params, _ = load_run(str(second))
    _, before, _ = load_policy(runs.MODEL, adapter=first / "adapter")
    frozen, adapters = lora.split(params)
    kept, began = lora.split(before)
    jax.tree.map(np.testing.assert_array_equal, frozen, kept)
    assert jax.tree.structure(adapters) == jax.tree.structure(began)
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(adapters), jax.tree.leaves(began), strict=True)]
    assert min(moved) > 0


def test_only_adapters_learn_and_the_reference_shares_the_weights(first: Path, tmp_path: Path) -> None:
    found, state, _ = set_up(config_of(tmp_path, first / "adapter", **PENALTY))
    assert state.params["layers"].keys() == {f"{n}_lora_{end}" for n in ("query", "down") for end in ("in", "out")}
    assert found.frozen is not None
    assert found.reference["layers"]["query"] is found.frozen["layers"]["query"]
    for name, x in state.params["layers"].items():
        np.testing.assert_array_equal(found.reference["layers"][name], x)
        assert found.reference["layers"][name].unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


@pytest.mark.heavy
def test_a_resumed_run_is_the_same(second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    again = tmp_path / "again"
    shutil.copytree(second, again)
    shutil.rmtree(again / "checkpoints" / "2")
    loop.resume(str(again))
    jax.tree.map(np.testing.assert_array_equal, load_run(str(again))[2], load_run(str(second))[2])


@pytest.mark.heavy
def test_an_adapter_that_has_changed_is_told(first: Path, tmp_path: Path) -> None:
    """It is a part of the run, as the model is."""
    shutil.copytree(first / "adapter", tmp_path / "adapter")
    config = config_of(tmp_path, tmp_path / "adapter", steps=1)
    runs.train(config)
    load_run(config.output)
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file({name: 2 * x for name, x in tensors.items()}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(InputError, match="the model's weights changed"):
        load_run(config.output)


@pytest.mark.heavy
def test_the_commands(first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, adapter = str(runs.MODEL), str(first / "adapter")
    options = ["--samples", "2", "--max-new-tokens", "6", "--jsonl"]
    texts = []
    for arguments in ([model, "1 + 1?", "--adapter", adapter], [str(first / "run"), "1 + 1?"], [model, "1 + 1?"]):
        assert main(["sample", *arguments, *options, "--system-prompt", "", "--prompt-template", "{prompt}"]) == 0
        texts.append([json.loads(line)["mean_logp"] for line in capsys.readouterr().out.splitlines()])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert main(["export", model, str(tmp_path / "merged"), "--adapter", adapter]) == 0
    _, merged, _ = load_policy(tmp_path / "merged")
    _, params, _ = load_policy(model, adapter=adapter)
    jax.tree.map(np.testing.assert_array_equal, merged, lora.merge(params))
    assert main(["export", model, str(tmp_path / "half"), "--adapter", adapter, "--dtype", "bfloat16"]) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        np.testing.assert_array_equal(half[name], value.astype(jnp.bfloat16), err_msg=name)
    assert main(["export", str(second), str(tmp_path / "again"), "--adapters"]) == 0
    found = load_policy(model, adapter=tmp_path / "again")[1]
    jax.tree.map(np.testing.assert_array_equal, found, load_run(str(second))[2])
    assert main(["export", str(second), str(tmp_path / "again"), "--adapters", "--overwrite"]) == 0
    capsys.readouterr()
    for arguments, message in (
        (["sample", str(first / "run"), "x", "--adapter", adapter], "is a run, and --adapter is for a model"),
        (["export", model, str(tmp_path / "x"), "--adapters"], "has no adapters: they are trained by jaxrl train with"),
        (["export", str(second), str(tmp_path / "x"), "--adapters", "--keep-unread"], "leave out --keep-unread"),
        (["export", str(second), str(tmp_path / "x"), "--adapters", "--dtype", "bfloat16"], "--adapter and --dtype"),
        (["export", str(second), str(first / "adapter"), "--overwrite"], "from which the model is read"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.heavy
def test_greedy_accuracy_of_a_model_with_an_adapter(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((first / "run" / "config.json").read_text())
    same = ["--size", "6", "--max-new-tokens", "5", "--rewards", "number_match"]
    figures = []
    for number, arguments in enumerate(([str(first / "run")], [str(runs.MODEL), "--adapter", str(first / "adapter")])):
        output = tmp_path / f"{number}.json"
        assert main(["eval", *arguments, "--prompts", config["prompts"], *same, "--output", str(output)]) == 0
        figures.append(json.loads(output.read_text()))
    assert figures[0]["reward"] == figures[1]["reward"]
    capsys.readouterr()


@pytest.mark.heavy
def test_what_has_no_adapter_here_is_frozen_and_kept_out_of_adapters(first: Path, tmp_path: Path) -> None:
    """An adapter with a whole embedding: it is merged, and then adapters alone would not be the run's model."""
    embed = load_file(runs.MODEL / "model.safetensors")["model.embed_tokens.weight"]
    shutil.copytree(first / "adapter", tmp_path / "a")
    raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    more = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(raw | more))
    tensors, whole = load_file(tmp_path / "a" / WEIGHTS), {"base_model.model.model.embed_tokens.weight": 2 * embed}
    save_file(tensors | whole, tmp_path / "a" / WEIGHTS)
    config = config_of(tmp_path, tmp_path / "a", steps=1)
    runs.train(config)
    np.testing.assert_array_equal(load_run(config.output)[2]["embed"], 2 * embed)
    with pytest.raises(InputError, match=r"changes model\.embed_tokens\.weight, which has no adapter here"):
        _raise(["export", config.output, str(tmp_path / "x"), "--adapters"])
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(raw | more | {"target_modules": []}))
    save_file(whole, tmp_path / "a" / WEIGHTS)
    with pytest.raises(InputError, match="no adapters of projections that could be trained: merge it into the model"):
        set_up(config_of(tmp_path, tmp_path / "a"))


def _raise(arguments: list[str]) -> None:
    from jaxrl_llm.cli.commands import COMMANDS

    COMMANDS[arguments[0]](arguments[1:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 4}, "adapter is given, whose rank, scale and targets are its own: leave out lora_rank"),
        ({"lora_targets": ("query",)}, "adapter is given, whose rank"),
        ({"reference_memory": "host"}, "with adapter the reference policy is the frozen model"),
        ({"adapter": " "}, "adapter is ' ': give a name, or leave it out"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TrainConfig(**{"adapter": "x"} | changes)


def test_a_wrong_adapter_is_told_before_the_model_is_loaded(first: Path, tmp_path: Path) -> None:
    from jaxrl_llm.training.inputs import read_inputs

    config = config_of(tmp_path, tmp_path / "none")
    with pytest.raises(InputError, match=r"there is no file .*none/adapter_config.json"), read_inputs(config):
        pass
    assert dataclasses.replace(config, adapter=str(first / "adapter")).adapts == "adapter"


@pytest.mark.heavy
def test_plans_know_the_shapes_of_a_run_with_an_adapter(first: Path, tmp_path: Path) -> None:
    from jaxrl_llm.plan.shapes import state_shapes
    from jaxrl_llm.training.method import make_algorithm

    config = config_of(tmp_path, first / "adapter", **PENALTY)
    found, state, _ = set_up(config)
    planned = state_shapes(config, load_policy(runs.MODEL)[0].config, make_algorithm(config))
    for ours, theirs in (
        (planned.frozen, found.frozen), (planned.state.params, state.params), (planned.reference, found.reference),
    ):  # fmt: skip
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (ours, theirs))
        assert shapes[0] == shapes[1]


@pytest.mark.heavy
def test_a_critic_tower_begins_as_the_merged_model(first: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, first / "adapter", algorithm="ppo", critic="tower")
    found, state, _ = set_up(config)
    tower = state.params["critic"]["tower"]
    assert found.frozen is not None
    merged = lora.merge(load_policy(runs.MODEL, adapter=first / "adapter")[1])
    jax.tree.map(np.testing.assert_array_equal, tower["layers"], merged["layers"])
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
