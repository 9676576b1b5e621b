"""Embeddings of a run's prompts: whose they are, that a resumed run has the same, and what reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.curriculum.embedded import EMBEDDING, FromEmbeddings
from jaxrl_llm.distributed import make_mesh
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.models.scores import pooled_states
from jaxrl_llm.training import begin, loop
from jaxrl_llm.training.setup import set_up
from jaxrl_llm.training.source import prompt_embeddings
from jaxrl_llm.utils.errors import InputError

SMALL = {
    "dots_rr": {"references": 6, "units": 8, "predictor_rate": 0.01},
    "v0_value": {"queries": 2, "bottleneck": 2, "width": 8, "layers": 1, "value_steps": 2, "pieces": 2},
}


def config_of(folder: Path, name: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "algorithm": name, "hyperparameters": SMALL[name], "steps": 4, "eval_size": 0, "minibatches": 1,
        "checkpoint_every": 2, "reward": "starts_even",
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


@pytest.mark.heavy
def test_they_are_those_of_each_prompt_alone(tmp_path: Path) -> None:
    """Prompts of different lengths, in several batches of rows; and on several devices."""
    config = config_of(tmp_path, "dots_rr")
    rows = [f'{{"prompt": "{"long " * (i % 7)}number {i}"}}\n' for i in range(23)]
    Path(config.prompts).write_text("".join(rows))
    (parts, state, _), pieces = set_up(config), 2
    found = prompt_embeddings(parts, state.params, pieces)
    for ids, own in zip(parts.prompts.ids, found, strict=True):
        tokens = np.asarray([ids], np.int32)
        alone = pooled_states(parts.policy, state.params, tokens, np.ones_like(tokens, bool), pieces)[0]
        np.testing.assert_allclose(own, alone, rtol=1e-4, atol=1e-5)
    if jax.device_count() > 1:
        mesh = make_mesh(devices=jax.devices()[:2])
        again = prompt_embeddings(parts._replace(mesh=mesh), jax.tree.map(np.asarray, state.params), pieces)
        np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_a_killed_run_goes_on_with_them(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same metrics and weights as a run that was not killed: the embeddings are of the initial weights, also after
    the weights have changed, and the networks are in the checkpoint."""
    config, made = config_of(tmp_path, name, optimizer=OptimizerConfig(learning_rate=0.01)), list[Any]()
    call = FromEmbeddings.__call__

    def watched(self: Any, rows: Any, seed: int) -> Any:
        made.append(np.stack([row[EMBEDDING] for row in rows]))
        return call(self, rows, seed)

    monkeypatch.setattr(FromEmbeddings, "__call__", watched)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    key = next(one for one in taken[0].after.curriculum if one.endswith(("_predictor", "_network")))
    start = taken[0].before.curriculum[key]
    assert not np.array_equal(taken[-1].after.curriculum[key], start), "it learns"
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    shutil.rmtree(other / "checkpoints" / "4")
    loop.train(loop.RunFolder(other).read_config(), resume=True)
    lines = runs.reproducible(Path(config.output) / "metrics.jsonl")
    assert runs.reproducible(other / "metrics.jsonl") == lines
    assert "curriculum/prediction_error" in lines[-1]
    runs.assert_equal_trees(runs.final_params(other), runs.final_params(Path(config.output)))
    assert len(made) == 2
    np.testing.assert_array_equal(made[0], made[1])


def test_prompts_that_are_read_as_they_are_drawn_have_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, "dots_rr")
    parts, state, _ = set_up(config)
    drawn = parts._replace(prompts=parts.prompts._replace(rows=iter(())))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the curriculum reads an embedding of every prompt, but prompts are read as"):
        begin.with_embeddings(config, drawn, state.params, None)

    def own(rows: Any) -> None:
        return None

    assert begin.with_embeddings(config, drawn, state.params, own) is own  # type: ignore[arg-type]
