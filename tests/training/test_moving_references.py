"""References that move, and references of several models, in whole runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    MODEL,
    Taken,
    assert_equal_trees,
    final_params,
    lines_of,
    reproducible,
    small_config,
    train,
    watched,
)

from jaxrl_llm.algorithms import get
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.reference import REFERENCE, ReferenceRule, exponential_average, periodic_reset
from jaxrl_llm.distributed import mesh_of
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.learner.optimizer_config import OptimizerConfig
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.step import LearnedBatch, learn_batch
from jaxrl_llm.models import load_policy, save_policy
from jaxrl_llm.plan.shapes import held_by, shapes_of
from jaxrl_llm.training import step as learning
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import fitted
from jaxrl_llm.training.method import check_method, make_algorithm
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.utils.errors import InputError


def with_reference(rule: ReferenceRule | None) -> Algorithm:
    return dataclasses.replace(get("grpo", kl_coefficient=0.5), reference=rule)


def other_model(folder: Path, scale: float) -> str:
    """A model of the same shapes with other weights."""
    policy, params, tokenizer = load_policy(MODEL)
    save_policy(folder, policy, jax.tree.map(lambda x: scale * x, params), tokenizer)
    return str(folder)


@pytest.mark.heavy
def test_a_run_that_is_resumed_goes_on_with_its_reference(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    algorithm = with_reference(exponential_average(0.5))
    train(small_config(tmp_path / "a"), algorithm=algorithm)
    train(small_config(tmp_path / "b", steps=2), algorithm=algorithm)
    train(small_config(tmp_path / "b"), algorithm=algorithm, resume=True, accept_changed_inputs=True)
    assert_equal_trees(final_params(tmp_path / "a" / "run"), final_params(tmp_path / "b" / "run"))
    lines = [reproducible(tmp_path / name / "run" / "metrics.jsonl") for name in ("a", "b")]
    assert lines[0] == lines[1]


@pytest.mark.heavy
def test_with_adapters_the_last_iterate_makes_the_divergence_zero(tmp_path: Path) -> None:
    """One gradient step: the policy is its reference. The frozen model is not, after the first step."""
    found = {}
    for name, rule in (("moving", periodic_reset(1)), ("frozen", None)):
        (tmp_path / name).mkdir()
        train(small_config(tmp_path / name, steps=3, minibatches=1, lora_rank=2), algorithm=with_reference(rule))
        found[name] = [line["kl"] for line in lines_of(tmp_path / name / "run" / "metrics.jsonl")]
    np.testing.assert_allclose(found["moving"], 0, atol=1e-7)
    assert max(found["frozen"][1:]) > 1e-6


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}], ids=["whole", "adapters"])
def test_remix_is_anchored_to_the_policy_of_the_switch_and_to_the_one_before(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """With one gradient step for each batch, the divergences are those of the weights that sampled it."""
    steps: list[Taken] = []
    config = small_config(tmp_path, steps=4, minibatches=1, eval_size=0, **changes)
    with watched(steps):
        train(config, algorithm=get("remix", switch=2, hold=0, every=1, kl_coefficient=0.5))
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    policy, _, _ = load_policy(MODEL)
    assert lines[1]["replay/share"] > 0 == lines[2]["replay/share"]
    for number, (step, line) in enumerate(zip(steps, lines, strict=True)):
        batch = jax.tree.map(jnp.asarray, step.scored.batch)
        mask = np.asarray(batch.action_mask)
        now, *others = (
            np.asarray(outputs_of(policy, steps[of].params, batch).logp, np.float64)[mask]
            for of in (number, 0 if number < 2 else 2, max(number - 1, 0))
        )
        for name, other in zip(("kl/reference", "kl/previous"), others, strict=True):
            l = now - other
            np.testing.assert_allclose(line[name], np.mean(np.exp(-l) - 1 + l), rtol=2e-3, atol=1e-7)
    assert max(line["kl/previous"] for line in lines) > 1e-6
    assert lines[2]["kl/reference"] < 1e-7 < lines[3]["kl/reference"]


@pytest.mark.heavy
def test_remix_passes_over_a_batch_twice_until_its_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def watched_learning(*given: Any) -> LearnedBatch:
        before = int(given[1].step)
        found = learn_batch(*given)
        taken.append(int(found.state.step) - before)
        return found

    monkeypatch.setattr(learning, "learn_batch", watched_learning)
    optimizer = OptimizerConfig(learning_rate=2e-3, schedule="linear")
    config = small_config(
        tmp_path, steps=4, algorithm="remix", hyperparameters={"switch": 2}, optimizer=optimizer, eval_size=0
    )
    train(config)
    assert taken == [4, 4, 2, 2]  # two minibatches in each pass
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    rates = [1 - before / 12 for before in (0, 4, 8, 10)]
    assert [line["learning_rate"] / 2e-3 for line in lines] == pytest.approx(rates, abs=1e-6)


def test_passes_end_with_the_steps_that_are_told() -> None:
    for until, steps in ((0, 5), (2, 5), (9, 5)):
        config = TrainConfig(epochs=3, epochs_until=until, steps=steps, minibatches=2)
        passes = [config.epochs_at(step) for step in range(steps)]
        assert passes == [1 if until and step >= until else 3 for step in range(steps)]
        assert config.gradient_steps == 2 * sum(passes)
    with pytest.raises(InputError, match="epochs_until is 2, but epochs is 1"):
        TrainConfig(epochs_until=2)
    with pytest.raises(InputError, match="rounds of ppo_outer_scale are of equal numbers of gradient steps"):
        check_method(TrainConfig(algorithm="ppo_outer_scale", epochs=2, epochs_until=2), mesh_of(""))
    remix = fitted(TrainConfig(algorithm="remix", hyperparameters={"switch": 7}))
    assert (remix.epochs, remix.epochs_until) == (2, 7)
    for settings, said in (({"epochs": 2, "epochs_until": 9}, "epochs_until is 9: give 7"), ({"epochs": 1}, "give 2")):
        with pytest.raises(InputError, match=said):
            check_method(TrainConfig(algorithm="remix", hyperparameters={"switch": 7}, **settings), mesh_of(""))


@pytest.mark.heavy
@pytest.mark.parametrize("name, of", [("salsa", {"other": 0.9}), ("tscac", {"policies": 0.9})])
def test_methods_train_by_name(tmp_path: Path, name: str, of: dict[str, float]) -> None:
    given: dict[str, Any] = {key: other_model(tmp_path / key, scale) for key, scale in of.items()}
    train(small_config(tmp_path, steps=2, algorithm=name, hyperparameters=given))
    assert len(lines_of(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.heavy
def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    other = str(MODEL.parent / "qwen3")
    with pytest.raises(InputError, match="same architecture"):
        train(small_config(tmp_path, steps=2, algorithm="salsa", hyperparameters={"other": other}))


def checked(rule: ReferenceRule, **settings: Any) -> None:
    check_method(TrainConfig(**settings), mesh_of(""), with_reference(rule))


def test_what_a_run_cannot_do_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(InputError, match=r"the reference of salsa needs other models: give --algorithm\.other PATH"):
        check_method(TrainConfig(algorithm="salsa"), mesh_of(""))
    with pytest.raises(InputError, match="average of weights, but with lora_rank"):
        checked(exponential_average(), lora_rank=4)
    with pytest.raises(InputError, match="reference_memory is host, but the reference"):
        checked(periodic_reset(2), reference_memory="host")
    checked(periodic_reset(2), lora_rank=4)


@pytest.mark.heavy
def test_the_snapshot_of_a_step_samples_in_it(tmp_path: Path) -> None:
    """Log-probabilities of the sampler are those of one of the policies so far, not always of the same."""
    rows = [{"prompt": f"number {i}:", "completion": f" {i} seven"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = small_config(
        tmp_path, algorithm="seppo", hyperparameters={"size": 4, "every": 1}, prompts=str(tmp_path / "rows.jsonl"),
        top_p=1.0, rewards=("given",), group_size=2, minibatches=1, eval_size=0, steps=4,
    )  # fmt: skip
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=3e-2))
    taken: list[Taken] = []
    with watched(taken):
        train(config)
    policy, sampled_by = load_policy(MODEL)[0], list[int]()
    weights = [{name: x for name, x in one.params.items() if name != REFERENCE} for one in taken]
    for number, one in enumerate(taken):
        batch = one.scored.batch
        sampled = np.asarray(batch.action_mask) & (np.asarray(batch.scores) == 0)[:, None]
        assert sampled.any()
        gaps = [
            np.abs(np.asarray(outputs_of(policy, params, batch).logp) - np.asarray(batch.behaviour_logp))[sampled].max()
            for params in weights[: number + 1]
        ]
        assert [gap < 1e-4 for gap in gaps].count(True) == 1, "the policies differ"
        sampled_by.append(int(np.argmin(gaps)))
    assert len(set(sampled_by)) > 1
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) and "rollout/failed_groups" not in line for line in lines)
    for line, number in zip(lines, sampled_by, strict=True):
        assert (abs(line["pairwise"] - np.log(2)) < 1e-6) == (number == line["step"] - 1), "the reference is the same"


def test_a_plan_counts_the_snapshots_of_a_reference_and_its_engine() -> None:
    config = TrainConfig(
        model=str(MODEL), algorithm="seppo", rewards=("given",), group_size=2, eval_size=0, max_new_tokens=8,
        same_task="row", hyperparameters={"size": 3},
    )  # fmt: skip
    held = held_by(shapes_of(config, topology_of("cpu:1")))
    assert held["reference"] == 3 * held["parameters"]
    assert rollout_of(config, make_algorithm(config)).demands.engines == 2
