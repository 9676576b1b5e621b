"""The same loop over batches that are not sampled: supervised steps, and a file of scored trajectories."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Source
from jaxrl_llm.core.transform import stateless
from jaxrl_llm.models import load_policy
from jaxrl_llm.objectives import imitation
from jaxrl_llm.rollouts.runtime import engines
from jaxrl_llm.rollouts.runtime.offline import demonstrations, trajectories
from jaxrl_llm.sampling import completion_ids, sample
from jaxrl_llm.training import loop
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.errors import InputError

SUPERVISED = Algorithm(stateless(lambda batch: batch.replace(advantages=batch.action_mask * 1.0)), imitation())
ROWS = [{"prompt": f"number {i:02d}:", "answer": "odd" if i % 2 else "even"} for i in range(12)]


@pytest.fixture(autouse=True)
def no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is made, and no report drawn."""

    def none(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("nothing is to be sampled")

    monkeypatch.setattr(engines, "engine_of", none)
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)


@pytest.mark.heavy
def test_supervised_steps_learn_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    def source(parts: RunParts) -> Source:
        return demonstrations(parts.tokenizer, ROWS, 4)

    config = runs.small_config(
        tmp_path, steps=6, group_size=1, eval_size=0, minibatches=1, top_p=1.0, keep_checkpoints=3
    )
    loop.train(config, algorithm=SUPERVISED, source=source)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert lines[-1]["imitation"] < 0.9 * lines[0]["imitation"]
    assert lines[0]["imitation"] == pytest.approx(lines[0]["loss"])
    assert not any(name.startswith("rollout/") for line in lines for name in line)
    # Four rows a step, each row once in three steps.
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    for step in (4, 6):
        shutil.rmtree(other / "checkpoints" / str(step))
    loop.train(
        loop.RunFolder(other).read_config(), resume=True, algorithm=SUPERVISED, source=source,
    )  # fmt: skip
    assert runs.reproducible(other / "metrics.jsonl") == runs.reproducible(Path(config.output) / "metrics.jsonl")
    runs.assert_equal_trees(runs.final_params(other), runs.final_params(Path(config.output)))


def test_demonstrations_are_the_tokens_of_prompt_and_answer() -> None:
    _, _, tokenizer = load_policy(runs.MODEL)
    source = demonstrations(tokenizer, ROWS, 12)
    found, state = source.next(source.init(), None, jax.random.key(0), 0)
    batch = found.scored.batch
    assert sorted(batch.prompt_id.tolist()) == list(range(12))
    for row, prompt_id in enumerate(batch.prompt_id):
        real = batch.tokens[row][batch.token_mask[row]].tolist()
        assert real[:-1] == tokenizer.encode(ROWS[prompt_id]["prompt"] + ROWS[prompt_id]["answer"])
        assert real[-1] == tokenizer.eos_token_id
    saved, arrays = source.save(state)
    again = source.load(json.loads(json.dumps(saved)), arrays)
    first, second = (source.next(at, None, jax.random.key(0), 1)[0].scored.batch for at in (state, again))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    with pytest.raises(InputError, match="row 1 has no text in the column 'answer': found 3"):
        demonstrations(tokenizer, [ROWS[0], {"prompt": "a", "answer": 3}], 1)


def test_trajectories_of_a_file_are_trained_on(tmp_path: Path) -> None:
    """What the initial policy wrote, with its log-probabilities: the first ratio is one, and better rows gain."""
    policy, params, _ = load_policy(runs.MODEL)
    prompts = [[5, 9, 200], [7, 1, 60, 61]]
    batch = sample(policy, params, prompts, jax.random.key(0), group_size=2, max_new_tokens=6, stop_token_ids=[])
    path = tmp_path / "trajectories.jsonl"
    lines = [
        {
            "prompt": prompts[row // 2], "completion": ids, "group": row // 2, "reward": float(row % 2),
            "logp": np.asarray(batch.behaviour_logp)[row][np.asarray(batch.action_mask)[row]].tolist(),
        }
        for row, ids in enumerate(completion_ids(batch))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def source(parts: RunParts) -> Source:
        return trajectories(path, parts.tokenizer, 2)

    config = runs.small_config(
        tmp_path, steps=2, prompts_per_step=2, group_size=2, minibatches=1, eval_size=0, top_p=1.0
    )
    loop.train(config, source=source)
    found = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert found[0]["mismatch"] < 1e-5
    assert found[0]["reward/mean"] == 0.5
    assert found[1]["mismatch"] > 1e-4, "the file stays what it was, and the policy does not"
    guided = {"algorithm": "icpo_in_context", "output": str(tmp_path / "guided")}
    with pytest.raises(InputError, match=r"icpo_in_context needs guided .* no part of this run provides"):
        loop.train(dataclasses.replace(config, **guided), source=source)

    def declared(parts: RunParts) -> Source:
        return source(parts)._replace(provides=frozenset({"guided"}))

    with pytest.raises(InputError, match=r"the batch has no info\['guided'\], though"):
        loop.train(dataclasses.replace(config, **guided), source=declared)
    path.write_text('{"prompt": [1], "completion": [2, 3], "logp": [-1.0], "reward": 1, "group": 0}\n')
    with pytest.raises(InputError, match=r"line 1 of .* is not a trajectory .*: it needs a prompt, and a logp"):
        source(types.SimpleNamespace(tokenizer=policy.tokenizer))  # type: ignore[arg-type]
