"""Judges in the real sampler: one verdict from the policy, the reference and another model, and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.algorithms.judged import urpo
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.judges.questions import Comparison
from jaxrl_llm.rewards.specs import judge
from jaxrl_llm.rollouts.judges.answerers import Answerer, model, policy, reference
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.judges.judged import by_win_rate, judged
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling import sample
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy
ROWS: list[dict[str, Any]] = [{"prompt": "1 + 2 ="}, {"prompt": "two more"}]
PAIRS = "{problem} A: {first} B: {second}"


def parity(text: str) -> float:
    """A verdict of a model that writes noise; it is right for neither place."""
    return float(sum(map(ord, text)) % 3) / 2


def test_the_policy_the_reference_and_another_model_answer_alike() -> None:
    """All three are the same weights, and take the most probable tokens; the answers are those of `sample`."""
    own, params, tokenizer = load_policy(runs.MODEL)
    prompts = PromptSet(ROWS, [tuple(tokenizer.encode(row["prompt"])) for row in ROWS])
    found: dict[str, Any] = {}
    judges: dict[str, Answerer] = {
        "policy": policy(6, temperature=0), "reference": reference(6, temperature=0),
        "model": model(str(runs.MODEL), 6),
    }  # fmt: skip
    for name, by in judges.items():
        setup = Experience(
            own, prompts, [Reward(judge)], shuffled_epochs(ROWS, 0), SamplingConfig(max_new_tokens=5, slots=6),
            judged(by_win_rate(pair_judge(by, Comparison(PAIRS, parity)))), prompts_per_step=2, group_size=3,
            reference=params, time_limit=500,
        )  # fmt: skip
        source = experience(setup)
        found[name], _ = source.next(source.init(), params, jax.random.key(1), 0)
    batch = found["policy"].scored.batch
    scores = np.asarray(batch.reward)
    np.testing.assert_allclose(scores.reshape(2, 3).sum(1), 1.5)
    assert len(np.unique(scores)) > 1
    for name in ("reference", "model"):
        np.testing.assert_array_equal(scores, np.asarray(found[name].scored.batch.reward), name)
    texts = found["policy"].scored.texts

    def answer(problem: str, first: str, second: str) -> str:
        text = PAIRS.format(problem=problem, first=first, second=second)
        said = sample(own, params, [text], jax.random.key(0), max_new_tokens=6, temperature=0.0)
        return str(tokenizer.decode(np.asarray(said.tokens)[0][np.asarray(said.action_mask)[0]].tolist(),
                                    skip_special_tokens=True))  # fmt: skip

    problem = found["policy"].rows[0]["prompt"]
    group = texts[:3]
    first_wins = {(i, j): parity(answer(problem, group[i], group[j])) for i in range(3) for j in range(3) if i != j}
    for i in range(3):
        wins = [(first_wins[i, j] + 1 - first_wins[j, i]) / 2 for j in range(3) if j != i]
        assert scores[i] == pytest.approx(np.mean(wins))
    bias = [sum(first_wins[i, j] + first_wins[j, i] - 1 for i in range(3) for j in range(i)) / 3]
    assert np.asarray(batch.info["judge/position_bias"])[0] == pytest.approx(bias[0])


FILE = """
from jaxrl_llm.rewards.judges.questions import Comparison
from jaxrl_llm.rollouts.judges.answerers import policy
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.judges.judged import by_win_rate, judged


def parity(text):
    return float(sum(map(ord, text)) % 3) / 2


def pairs():
    return judged(by_win_rate(pair_judge(policy(4), Comparison("{problem} {first} {second}", parity))))
"""


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    (folder / "own.py").write_text(FILE)
    settings = {"reward": "even", "eval_size": 0, "steps": 2, **changes}
    config = runs.small_config(folder, **settings)
    return TrainConfig(**{
        name: ("judge",) if name == "rewards" and "rewards" not in changes else getattr(config, name)
        for name in TrainConfig.__dataclass_fields__
    })  # fmt: skip


def test_a_run_on_win_rates(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout=f"{tmp_path}/own.py:pairs")
    runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["reward/mean"] == pytest.approx(0.5, abs=1e-6) for line in lines)
    assert all(line["judge/unparsed"] == 0 for line in lines)
    assert all(-1 <= line["judge/position_bias"] <= 1 for line in lines)


def test_a_run_whose_judge_states_nothing_and_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="eval_size"):
        runs.train(config_of(tmp_path, rollout="judged_pairs", eval_size=4))
    with pytest.raises(InputError, match="asks none"):
        runs.train(config_of(tmp_path))
    config = config_of(tmp_path, rollout="judged_pairs(reference)")
    runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["judge/unparsed"] == 1 for line in lines), "the tiny model writes noise"
    assert all(line["loss"] == 0 for line in lines)


def test_a_policy_plays_and_referees_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of urpo mixes rows of three kinds; the tiny model writes no scores, which is counted."""
    monkeypatch.setattr(urpo, "SCORE", "{problem} {responses} {count}")  # its context has 128 tokens
    rows = [
        {"prompt": "1 + 2 =", "answer": "3"}, {"prompt": "two more", "answer": ""},
        {"prompt": "say a", "answer": "", "chosen": "a", "rejected": "b"},
        {"prompt": "say b", "answer": "", "completions": ["a", "b", "c"], "labels": [0, 1, 0.5]},
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps: list[runs.Taken] = []
    config = runs.small_config(
        tmp_path, algorithm="urpo", prompts=str(tmp_path / "rows.jsonl"), eval_size=0, steps=2, top_p=1.0
    )
    with runs.watched(steps):
        runs.train(config)
    line = runs.lines_of(tmp_path / "run" / "metrics.jsonl")[0]
    assert line["judge/agreement"] == -1
    assert line["judge/unparsed"] == 1
    batch = steps[0].scored.batch
    of = {
        row["prompt"]: np.asarray(batch.reward)[np.asarray(batch.prompt_id) == place] for place, row in enumerate(rows)
    }
    assert ((of["1 + 2 ="] >= 0) & (of["1 + 2 ="] <= 1)).all()
    assert np.isnan(of["two more"]).all(), "a referee that states nothing"
    assert (of["say a"] == -1).all()
    assert (of["say b"] == -1).all()
