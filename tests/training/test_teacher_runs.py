"""Runs with a teacher: metrics, resumption, adapters, a mesh, a column of given responses, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from compiling import with_devices

from jaxrl_llm.models import load_policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.teacher import load_teacher
from jaxrl_llm.utils.errors import InputError

TEACHER = runs.MODEL.parent / "gemma2"
OTHER = runs.MODEL.parent / "qwen3"


def config_of(folder: Path, name: str = "gkd", **changes: Any) -> TrainConfig:
    usual = {"teacher": str(TEACHER), "minibatches": 1, "top_p": 1.0, "eval_size": 0}
    return runs.small_config(folder, algorithm=name, **{**usual, **changes})


def values_of(folder: Path, name: str = "distillation") -> list[float]:
    return [line[name] for line in runs.lines_of(folder / "run" / "metrics.jsonl")]


@pytest.mark.heavy
def test_it_nears_its_teacher_and_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    runs.train(config_of(tmp_path, hyperparameters={"beta": 1.0}, steps=6, checkpoint_every=3))
    found = values_of(tmp_path)
    assert found[-1] < 0.9 * found[0]
    resumed = runs.resumed_copy(tmp_path, [6])
    assert runs.reproducible(resumed / "metrics.jsonl") == runs.reproducible(tmp_path / "run" / "metrics.jsonl")
    runs.assert_equal_trees(runs.final_params(tmp_path / "run"), runs.final_params(resumed))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "changes"),
    [("gkd", {"lora_rank": 2, "hyperparameters": {"top_k": 4}}), ("minillm", {"minibatches": 2})],
    ids=["adapters", "clipped"],
)
def test_adapters_and_several_steps(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    runs.train(config_of(tmp_path, name, steps=2, **changes))
    assert np.isfinite(values_of(tmp_path)).all()
    assert values_of(tmp_path)[0] > 0


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "tensor=2,fsdp=2"])
def test_on_a_mesh_the_divergence_is_that_of_one_device(tmp_path: Path, mesh: str) -> None:
    (tmp_path / "alone").mkdir()
    runs.train(config_of(tmp_path / "alone", steps=2))
    config = config_of(tmp_path, steps=2, mesh=mesh, micro_batches=2)
    process = runs.start("train", *runs.as_arguments(config), XLA_FLAGS=with_devices(4))
    assert process.wait(300) == 0, process.communicate()[1]
    np.testing.assert_allclose(values_of(tmp_path)[0], values_of(tmp_path / "alone")[0], rtol=1e-5)


@pytest.mark.heavy
def test_policy_gradient_from_the_teacher(tmp_path: Path) -> None:
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config_of(tmp_path, "iw_opd", steps=2))
    batch, (policy, params, _) = taken[0].scored.batch, load_policy(TEACHER)
    action = np.asarray(batch.action_mask)
    logits = policy.logits(params, batch.tokens, batch.token_mask)[:, :-1]
    logp = jax.nn.log_softmax(policy.without_unknown(logits))
    taught = np.take_along_axis(np.asarray(logp), np.asarray(batch.tokens)[:, 1:, None], -1)[..., 0]
    expected = (np.asarray(batch.behaviour_logp)[:, 1:] - taught)[action[:, 1:]].mean()
    assert values_of(tmp_path, "teacher/log_ratio")[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.heavy
def test_each_row_learns_from_its_own_teacher(tmp_path: Path) -> None:
    paths, rows = {"old": str(TEACHER), "new": str(OTHER)}, []
    for i in range(8):
        rows.append({"prompt": f"number {i:02d}:", "answer": "", "teacher": ("old", "new")[i % 2]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"prompts": str(tmp_path / "rows.jsonl"), "teacher": ",".join(f"{k}={v}" for k, v in paths.items())}
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config_of(tmp_path, "iw_opd", steps=2, checkpoint_every=1, **given))
    batch = taken[0].scored.batch
    action, tokens = np.asarray(batch.action_mask)[:, 1:], np.asarray(batch.tokens)[:, 1:, None]
    ratios = []
    for path in paths.values():
        policy, params, _ = load_policy(path)
        logits = policy.without_unknown(policy.logits(params, batch.tokens, batch.token_mask)[:, :-1])
        taught = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens, -1)[..., 0]
        ratios.append(np.asarray(batch.behaviour_logp)[:, 1:] - taught)
    odd = np.asarray(batch.prompt_id)[:, None] % 2 == 1
    assert {*odd[:, 0].tolist()} == {False, True}
    expected = np.where(odd, ratios[1], ratios[0])[action].mean()
    assert values_of(tmp_path, "teacher/log_ratio")[0] == pytest.approx(expected, rel=1e-4)
    for wrong in ratios:
        assert wrong[action].mean() != pytest.approx(expected, rel=1e-3)
    resumed = runs.resumed_copy(tmp_path, [2])
    assert runs.reproducible(resumed / "metrics.jsonl") == runs.reproducible(tmp_path / "run" / "metrics.jsonl")


def test_several_teachers_are_refused_where_they_cannot_be_told_apart(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {i:02d}:", "answer": "", "teacher": "old" if i else "odd"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"hyperparameters": {"top_k": 3}, "prompts": str(tmp_path / "rows.jsonl")}
    for changes, message in [
        ({"teacher": f"a={TEACHER},b={OTHER}"}, "compares whole distributions, .*give top_k, or one teacher"),
        ({"teacher": f"a={TEACHER},b=http://host/v1#m", **few}, "is a server, which teaches alone"),
        ({"teacher": f"a={TEACHER},a={OTHER}", **few}, "has a name twice"),
        ({"teacher": f"old={TEACHER},new={OTHER}", **few}, "prompt 0 has 'odd' in the column 'teacher': give one of"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            runs.train(config_of(tmp_path, **changes))
        assert "\n" not in str(caught.value)


@pytest.mark.heavy
def test_some_responses_are_given(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {i:02d}:", "completion": f" {i}", "answer": ""} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"prompts": str(tmp_path / "rows.jsonl"), "hyperparameters": {"student_share": 0.5, "top_k": 3}}
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config_of(tmp_path, steps=3, **given))
    marks = np.concatenate([(one.scored.batch.info or {})["demonstrated"] for one in taken])
    assert 0 < marks.sum() < len(marks)


@pytest.mark.heavy
def test_the_policy_itself_after_a_demonstration(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {i:02d}:", "completion": f" {i}", "answer": ""} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"prompts": str(tmp_path / "rows.jsonl"), "teacher": None, "steps": 4}
    runs.train(config_of(tmp_path, "sdft", **given, hyperparameters={"decay": 0.5}))
    assert min(values_of(tmp_path)) > 0
    resumed = runs.resumed_copy(tmp_path, [4])
    assert runs.reproducible(resumed / "metrics.jsonl") == runs.reproducible(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "adapters").mkdir()
    runs.train(config_of(tmp_path / "adapters", "sdft", **given, hyperparameters={"decay": 0.0}, lora_rank=2))


def test_what_has_no_teacher_and_who_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gkd learns from a teacher: give one, --teacher PATH"):
        runs.train(config_of(tmp_path, teacher=None))
    with pytest.raises(InputError, match="grpo has no teacher: leave it out"):
        runs.train(config_of(tmp_path, "grpo"))
    with pytest.raises(InputError, match="teacher is ''"):
        runs.train(config_of(tmp_path, teacher=""))


def test_a_teacher_of_other_tokens_is_refused_in_a_line(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(TEACHER, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    policy, _, own = load_policy(runs.MODEL)
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(InputError, match="has another tokenizer: token 1") as found:
        load_teacher(config_of(tmp_path, teacher=str(other)), policy, own, mesh)
    assert "\n" not in str(found.value)
