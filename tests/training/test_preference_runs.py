"""Runs of methods of given responses: metrics, masks, held-out figures, rows that are left out, and resumption."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.rollouts.runtime import engines
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.reference import check_kept
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy
TRL = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")


def config_of(folder: Path, rows: list[dict[str, Any]], name: str = "dpo", **changes: Any) -> TrainConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"reward": "even", "prompts": str(folder / "rows.jsonl"), "top_p": 1.0, "minibatches": 1, **changes}
    config = runs.small_config(folder, algorithm=name, **settings)
    default = TrainConfig()
    given: dict[str, Any] = {"rewards": default.rewards, "group_size": changes.get("group_size", default.group_size)}
    return TrainConfig(**{
        field: given.get(field, getattr(config, field)) for field in TrainConfig.__dataclass_fields__
    })  # fmt: skip


def pairs(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"prompt": f"number {i:02d}:", "chosen": f" {i} {i % 3}", "rejected": " none" * (1 + i % 2)}
        for i in range(count)
    ]


def test_a_run_on_pairs_that_is_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_weights(*unused: Any, **also: Any) -> None:
        raise AssertionError("nothing is sampled")

    monkeypatch.setattr(engines, "take_weights", no_weights)
    rows = [*pairs(), {"prompt": "the same", "chosen": " yes", "rejected": " yes"}]
    config, taken = config_of(tmp_path, rows, eval_size=3), list[runs.Taken]()
    with runs.watched(taken):
        summary = runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 4
    for line in lines:
        assert set(TRL) <= set(line)
        assert line["rewards/margins"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"], abs=1e-5)
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-5), "policy and reference begin equal"
    assert lines[-1]["rewards/margins"] > 0
    assert set(TRL) <= set(summary["eval_after"])
    assert summary["eval_after"]["loss"] < summary["eval_before"]["loss"]
    by_prompt = {one["prompt"]: one for one in rows}
    batch, tokenizer = taken[0].scored.batch, load_tokenizer(str(runs.MODEL))
    for row, (ids, action) in enumerate(zip(np.asarray(batch.tokens), np.asarray(batch.action_mask), strict=True)):
        prompt = tokenizer.decode(ids[: np.argmax(action)], skip_special_tokens=True).strip()
        said = by_prompt[prompt]["chosen" if batch.reward[row] else "rejected"]
        whole = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        assert ids[action].tolist() == whole[: config.max_new_tokens]
    assert untimed(runs.resumed_copy(tmp_path, [4])) == untimed(tmp_path / "run")


def test_a_reference_on_disk_changes_nothing_and_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"eval_size": 3, "steps": 3, "checkpoint_every": 1}
    usual = runs.train(config_of(tmp_path, pairs(), output=str(tmp_path / "usual"), **settings))
    counts = list[str]()
    for name in ("run", "again"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "jaxrl_llm.training"):
            config = config_of(tmp_path, pairs(), output=str(tmp_path / name), reference_memory="disk", **settings)
            summary = runs.train(config)
        counts += [text.split(": ")[1].split(",")[0] for text in caplog.messages if "the initial policy" in text]
        for key in ("loss", "rewards/margins"):
            assert summary["eval_after"][key] == pytest.approx(usual["eval_after"][key], abs=1e-6)
        for one, other in zip(untimed(tmp_path / "usual"), untimed(tmp_path / name), strict=True):
            for key in ("loss", "grad_norm", "rewards/margins"):
                assert one[key] == pytest.approx(other[key], abs=1e-6)
    assert counts == ["24 rows computed", "0 rows computed"]
    assert untimed(runs.resumed_copy(tmp_path, [3])) == untimed(tmp_path / "run")
    (file,) = (tmp_path / "cache" / "jaxrl_llm" / "reference").iterdir()
    file.write_bytes(b"damaged")
    runs.train(config_of(tmp_path, pairs(), output=str(tmp_path / "c"), reference_memory="disk", **settings))
    assert "is written anew" in caplog.text
    rows = [{"prompt": f"{i}:", "completion": f" {i}", "label": bool(i % 2)} for i in range(10)]
    with pytest.raises(InputError, match="a source gives rows that are not known before"):
        check_kept(config, algorithms.get("dpo"), own_source=True)
    with pytest.raises(InputError, match="makes rows of other rows"):
        runs.train(config_of(tmp_path, rows, "kto", output=str(tmp_path / "d"), reference_memory="disk", eval_size=0))


def untimed(run: Path) -> list[dict[str, Any]]:
    """The run's metrics without times."""
    timed = ("seconds", "tokens_per_second", "compiles", "goodput", *runs.TIMED)
    lines = runs.lines_of(run / "metrics.jsonl")
    return [{name: x for name, x in line.items() if not name.startswith(timed)} for line in lines]


def test_a_run_on_verdicts_measures_mismatched_completions(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {i:02d}:", "completion": f" {i}", "label": bool(i % 2)} for i in range(10)]
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config_of(tmp_path, rows, "kto", steps=2, eval_size=0))
    batch = taken[0].scored.batch
    measured = np.asarray((batch.info or {})["measured"]) > 0
    assert measured.tolist() == [False, True] * 4
    own, other = (np.asarray(batch.tokens)[measured == side] for side in (False, True))
    action = np.asarray(batch.action_mask)[~measured]
    answers = [row[mask].tolist() for row, mask in zip(own, action, strict=True)]
    mismatched = [row[mask].tolist() for row, mask in zip(other, np.asarray(batch.action_mask)[measured], strict=True)]
    assert mismatched == [*answers[1:], answers[0]]
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert {"kl", *TRL} <= set(lines[1])


def test_rows_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    same = [{"prompt": "a b", "chosen": "x", "rejected": "x"}] * 4
    with pytest.raises(InputError, match="equal in every row"):
        runs.train(config_of(tmp_path, same, eval_size=0))
    with pytest.raises(InputError, match="'rejected'"):
        runs.train(config_of(tmp_path, [{"prompt": "a b", "chosen": "x"}], eval_size=0))


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def talks(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {i}?"},
                {"role": "assistant", "content": f"{i}"},
                {"role": "user", "content": "and then?"},
                {"role": "assistant", "content": f"{i + 1}"},
            ]
        }
        for i in range(count)
    ]


def test_a_supervised_run_on_conversations_ends_when_it_gets_no_better(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "eval_size": 4, "eval_every": 2, "eval_patience": 1, "epochs_of_data": 8.0, "checkpoint_every": 2,
        "prompts_per_step": 2, "max_new_tokens": 40, "max_prompt_tokens": 60,
    }  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(runs.MODEL, model)
    written = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**written, "chat_template": TEMPLATE}))
    rate = {
        "model": str(model),
        "optimizer": dataclasses.replace(runs.small_config(tmp_path).optimizer, learning_rate=0.1),
    }
    config = config_of(tmp_path, talks(8), "sft", hyperparameters={"turns": "all"}, **settings, **rate)
    taken = list[runs.Taken]()
    with runs.watched(taken):
        summary = runs.train(config)
    batch, tokenizer = taken[0].scored.batch, load_tokenizer(str(model))
    for ids, action in zip(np.asarray(batch.tokens), np.asarray(batch.action_mask), strict=True):
        cuts = np.split(ids, np.flatnonzero(np.diff(action)) + 1)
        first, second = (tokenizer.decode(part).removesuffix(tokenizer.eos_token) for part in cuts[1:4:2])
        assert first in tokenizer.decode(cuts[0]), "the first question names the number"
        assert int(second) == int(first) + 1
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["signal"] == 1 and 0 <= line["mean_token_accuracy"] <= 1 for line in lines)
    ended = summary["steps"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 16
    assert 2 <= ended < 16, "a learning rate of 0.1 soon makes it worse"
    assert summary["eval_best"]["step"] == ended - 2
    assert untimed(runs.resumed_copy(tmp_path, [ended])) == untimed(tmp_path / "run")


def test_whole_texts_are_learnt_from_their_second_token(tmp_path: Path) -> None:
    rows = [{"text": f"{i} and {i + 1} are two numbers."} for i in range(8)]
    config, taken = config_of(tmp_path, rows, "sft", eval_size=2, eval_every=2, max_new_tokens=32), list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    tokenizer = load_tokenizer(str(runs.MODEL))
    wanted = {tuple([*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]) for row in rows}
    seen = set()
    for one in taken:
        batch = one.scored.batch
        for ids, there, action in zip(
            *(np.asarray(x) for x in (batch.tokens, batch.token_mask, batch.action_mask)), strict=True
        ):
            seen.add(tuple(ids[there].tolist()))
            np.testing.assert_array_equal(action[there], np.arange(there.sum()) > 0)
    assert seen <= wanted
    assert len(seen) == 6
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["nll"] < lines[0]["nll"]
    with pytest.raises(InputError, match="the rows are whole texts"):
        runs.train(
            dataclasses.replace(
                config, algorithm="grpo", rewards=runs.small_config(tmp_path).rewards, output=str(tmp_path / "other")
            )
        )
    with pytest.raises(InputError, match="no place for a system prompt"):
        runs.train(dataclasses.replace(config, system_prompt="Count.", output=str(tmp_path / "another")))


def test_degraded_responses_are_told_apart(tmp_path: Path) -> None:
    said = "seven elephants crossed rivers before sunrise"
    rows = [{"prompt": f"{i}:", "chosen": f"{said} {i}", "rejected": f"none {said}"} for i in range(8)]
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config_of(tmp_path, rows, "spo_self_supervised", hyperparameters={"degrees": 3}, eval_size=0))
    batch = taken[0].scored.batch
    degree, length = np.asarray((batch.info or {})["degree"]), np.asarray(batch.action_mask).sum(1)
    assert degree.tolist() == [0, 0, 1, 2, 1, 2] * 4
    assert (length.reshape(-1, 6)[:, [2, 4]] > length.reshape(-1, 6)[:, [3, 5]]).all()
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["degree/loss"] == pytest.approx(np.log(3), abs=1e-5), "the head begins at 0"
    assert lines[-1]["degree/loss"] < lines[0]["degree/loss"]


def test_responses_behind_codes_and_their_goal(tmp_path: Path) -> None:
    taken, tokenizer = list[runs.Taken](), load_tokenizer(str(runs.MODEL))
    with runs.watched(taken):
        runs.train(
            config_of(tmp_path, pairs(), "oppo", hyperparameters={"codes": 3, "rate": 1.0}, eval_size=0, group_size=6)
        )
    batch = taken[0].scored.batch
    assert np.asarray((batch.info or {})["code"]).tolist() == [0, 1, 2] * 8
    assert np.asarray(batch.reward).tolist() == [1, 1, 1, 0, 0, 0] * 4
    for row, (ids, action) in enumerate(zip(np.asarray(batch.tokens), np.asarray(batch.action_mask), strict=True)):
        whole = tokenizer.decode(ids[: np.argmax(action)], skip_special_tokens=True).replace(" ", "")
        assert whole.startswith(f"[style{row % 3}]number")
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["goal/0"] == pytest.approx(2 / 3)
    assert lines[-1]["goal/0"] != pytest.approx(2 / 3)
    assert all(sum(line[f"goal/{k}"] for k in range(3)) == pytest.approx(1) for line in lines)
    assert lines[-1]["latent/likelihood"] < lines[0]["latent/likelihood"]


def test_lists_and_indicators_of_pairs(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"{i}:",
            "completions": [f" {k}" for k in range(2 + i % 3)],
            "labels": [0.1 * k for k in range(2 + i % 3)],
        }
        for i in range(10)
    ]
    config = config_of(tmp_path, rows, "lipo", steps=4, eval_size=0, output=str(tmp_path / "lists"))
    runs.train(dataclasses.replace(config, group_size=4))
    lines = runs.lines_of(tmp_path / "lists" / "metrics.jsonl")
    assert lines[0]["signal"] == 1
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"]
    fast = dataclasses.replace(runs.small_config(tmp_path).optimizer, learning_rate=0.05)
    settings: dict[str, Any] = {"steps": 12, "eval_every": 1, "eval_patience": 2, "eval_size": 3, "optimizer": fast}
    summary = runs.train(
        config_of(tmp_path, pairs(), "likelihood_overopt_indicators", hyperparameters={"top": 3}, **settings)
    )
    best = summary["eval_best"]
    assert 0 < best["indicators/top_mass"] <= 1
    assert best["indicators/top_entropy"] > summary["eval_after"]["indicators/top_entropy"]
    assert summary["steps"] == best["step"] + 2
