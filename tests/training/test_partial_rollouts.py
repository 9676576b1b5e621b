"""Runs whose steps end before their longest completions do."""

from __future__ import annotations

import logging
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs
from heavy import few
from test_resume import STEPS, assert_same_run

from jaxrl_llm import algorithms
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.update import gradient, prepare
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.rollouts.runtime.sources import rollout_metrics
from jaxrl_llm.sampling import sample
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.full_size import fill_up
from jaxrl_llm.training.rollout import strategy_of
from jaxrl_llm.utils.errors import InputError

LIMIT = 12
SEGMENT = 5
# Some 20 of the 257 tokens end a completion: two in five reach the limit, so that all batches are of one shape.
TAIL: dict[str, Any] = {
    "max_new_tokens": LIMIT, "stop": tuple(string.ascii_letters[:20]), "slots": 6, "minibatches": 1, "steps": STEPS,
    "eval_size": 0, "keep_checkpoints": 3, "optimizer": OptimizerConfig(learning_rate=3e-4),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "oversample": {"oversample": 2.0},
    "segments": {"oversample": 1.5, "segment_tokens": SEGMENT},
}


class Kept:
    """A finished run, and what each of its steps collected under which weights."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.steps = config, list[runs.Taken]()
        with runs.watched(self.steps):
            runs.train(config)

    @property
    def folder(self) -> Path:
        return Path(self.config.output)


@pytest.fixture(scope="module", params=few(WAYS, []))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kept(way: str, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(runs.small_config(tmp_path_factory.mktemp(way), **TAIL, **WAYS[way]))


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict]:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    return lambda folder: loop.resume(str(folder))


def test_log_probabilities_are_those_of_the_weights_of_each_token(kept: Kept) -> None:
    """Completions that continue under newer weights: each token is checked against the weights that sampled it."""
    policy, _, _ = load_policy(runs.MODEL, dtype="float32")
    recompute = jax.jit(policy_outputs, static_argnums=0)
    mixed, old = 0, 0
    for step, collected in enumerate(kept.steps):
        batch = collected.scored.batch
        action, drawn = np.asarray(batch.action_mask), np.asarray(batch.policy_step)
        assert drawn[action].max() <= step
        mixed += sum(len(set(drawn[i][action[i]])) > 1 for i in range(len(drawn)))
        old += (drawn[action] < step).sum()
        for of in np.unique(drawn[action]):
            logp = np.asarray(recompute(policy, kept.steps[of].params, batch).logp)
            here = action & (drawn == of)
            np.testing.assert_allclose(np.asarray(batch.behaviour_logp)[here], logp[here], rtol=0, atol=1e-4)
    assert mixed >= 3, "no completion has tokens of two policies: this test shows nothing"
    assert old >= 20


def test_weights_of_other_steps_give_other_log_probabilities(kept: Kept) -> None:
    """Otherwise the test above would pass with any weights."""
    policy, _, _ = load_policy(runs.MODEL, dtype="float32")
    batch = kept.steps[0].scored.batch
    logp = jax.jit(policy_outputs, static_argnums=0)(policy, kept.steps[-1].params, batch).logp
    action = np.asarray(batch.action_mask)
    assert np.abs(np.asarray(logp) - np.asarray(batch.behaviour_logp))[action].max() > 1e-2


def test_what_the_metrics_say(kept: Kept, way: str) -> None:
    lines = runs.lines_of(kept.folder / "metrics.jsonl")
    assert len(lines) == STEPS
    for step, (line, collected) in enumerate(zip(lines, kept.steps, strict=True)):
        batch = collected.scored.batch
        age = (step - np.asarray(batch.policy_step))[np.asarray(batch.action_mask)]
        groups = len(collected.scored.texts) // 4
        assert line["rollout/stale_tokens"] == pytest.approx((age > 0).mean())
        assert line["rollout/staleness"] == pytest.approx(age.mean())
        assert (line["rollout/groups"], line["rollout/pool"]) == (groups, len(collected.pool))
        assert line["completion/tokens"] == len(age), "rows that fill up are not counted"
        assert 0 < line["rollout/occupancy"] <= 1
        flight = Partial(**WAYS[way]).in_flight(4)
        assert groups + len(collected.pool) == flight
        assert groups == 4 if way == "oversample" else 1 <= groups <= 4
    assert any(line["rollout/stale_tokens"] > 0 for line in lines)
    assert lines[0]["rollout/stale_tokens"] == 0
    if way == "segments":
        assert {line["rollout/groups"] for line in lines} != {4.0}, "a step with fewer groups is what this is about"


def test_every_prompt_is_trained_in_its_turn(kept: Kept) -> None:
    """Groups of the pool are trained or still there; new ones come from the stream, whose order has no gap."""
    groups = {}
    for collected in kept.steps:
        trained = np.asarray(collected.scored.batch.prompt_id)[::4].tolist()
        waiting = [(group.prompt_id, group.first_step) for group in collected.pool]
        assert waiting == sorted(waiting, key=lambda entry: entry[1]), "the oldest first"
        before, after = [g.prompt_id for g in collected.before.pool], trained + [g.prompt_id for g in collected.pool]
        for prompt_id in before:
            after.remove(prompt_id)
        for prompt_id in after:
            groups[prompt_id] = groups.get(prompt_id, 0) + 1
    # 12 prompts, each once an epoch.
    assert max(groups.values()) - min(groups.get(i, 0) for i in range(12)) <= 1


def test_a_segment_is_what_a_step_adds(kept: Kept, way: str) -> None:
    """Tokens of each step in samples that have not ended: a segment, or several where none was complete after one."""
    if way != "segments":
        pytest.skip("of segments")
    for step, collected in enumerate(kept.steps):
        open_samples = [s for s in collected.waiting if not s.ended and s.tokens.size < LIMIT]
        sizes = {int((sample.tokens.policy_step == step).sum()) for sample in open_samples}
        assert len(sizes) <= 1
        assert sizes <= {SEGMENT, 2 * SEGMENT}


def test_the_pool_goes_on_from_a_checkpoint(kept: Kept, tmp_path: Path, resumed: Callable[[Path], dict]) -> None:
    run, step = tmp_path / "run", 4
    shutil.copytree(kept.folder, run)
    for later in range(step + 2, STEPS + 1, 2):
        shutil.rmtree(run / "checkpoints" / str(later))
    assert kept.steps[step - 1].pool, "an empty pool shows nothing"
    assert any(sample.tokens.size for sample in kept.steps[step - 1].waiting)
    resumed(run)
    assert_same_run(run, kept.folder)


def test_a_damaged_pool_is_noticed(
    kept: Kept, way: str, tmp_path: Path, resumed: Callable[[Path], dict], caplog: pytest.LogCaptureFixture
) -> None:
    if way != "segments":
        pytest.skip("of one way")
    run = tmp_path / "run"
    shutil.copytree(kept.folder, run)
    shutil.rmtree(run / "checkpoints" / "6")
    for file in (run / "checkpoints" / "4" / "arrays").glob("**/d/*"):
        file.write_bytes(file.read_bytes()[:20])
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm"):
        resumed(run)
    assert "/4 is damaged and skipped" in caplog.text
    assert_same_run(run, kept.folder)


@pytest.mark.parametrize("size", [0, 3])
def test_arrays_of_any_shape_in_a_checkpoint(tmp_path: Path, size: int) -> None:
    """Their shapes are in the checkpoint itself. Two of them with other shapes; empty ones; none."""
    params, state = {"w": jnp.arange(4.0)}, {"x": jnp.zeros(2)}
    arrays = {"a": np.zeros(0, np.int32), "b": np.full((size, 2), -np.inf, np.float32)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, params, state, {"n": 1})
    checkpoints.save(2, params, state, {"n": 2}, arrays)
    checkpoints.close()
    opened = Checkpoints(tmp_path)
    found = opened.latest(params, state)
    assert found is not None
    assert found.meta == {"n": 2}
    runs.assert_equal_trees(found.arrays, arrays)
    only = opened.latest(params)
    assert only is not None
    assert only.arrays == {}
    opened._manager.delete(2)
    older = opened.latest(params, state)
    assert older is not None
    assert (older.meta, older.arrays) == ({"n": 1}, {})
    opened.close()


@pytest.mark.heavy
def test_rows_that_fill_up_change_nothing(vectors: Any) -> None:
    """The same gradient from two groups and from two groups and two empty ones; advantages and loss by GRPO."""
    model = vectors("llama_tied")
    prompts = [[5, 9, 200], [7, 1, 60, 61]]
    batch = sample(model.policy, model.params, prompts, jax.random.key(0), group_size=2, max_new_tokens=6)
    batch = batch.replace(reward=jnp.asarray([1.0, 0.0, 0.25, 1.0]))
    filled = fill_up(batch, 8, 2)
    assert filled.tokens.shape[0] == 8
    assert filled.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not filled.action_mask[4:].any()
    assert np.asarray(filled.token_mask)[4:].sum(axis=1).tolist() == [3] * 4, "a prompt each"
    assert fill_up(batch, 4, 2) is batch
    small = fill_up(batch, 10, 5)  # a rollout may give fewer rows than a group has
    assert small.group[4:].tolist() == [small.group[3] + 1] * 5 + [small.group[3] + 2]
    assert not small.action_mask[4:].any()
    grpo = algorithms.get("grpo", kl_coefficient=0.0)
    grad_fn = jax.jit(gradient, static_argnums=(0, 1))
    found = []
    for rows in (batch, filled):
        _, ready = prepare(grpo.transform, grpo.transform.init(), rows)
        slices = plan_steps(ready).slices
        found.append(grad_fn(model.policy, grpo.objective, model.params, ready, slices))
    (one, metrics), (other, more) = found
    for name, value in metrics.items():
        np.testing.assert_allclose(more[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert max(np.abs(x).max() for x in jax.tree.leaves(one)) > 1e-3
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_which_strategy_a_run_has() -> None:
    grpo, dapo, off = algorithms.get("grpo"), algorithms.get("dapo"), TrainConfig()
    assert strategy_of(off, grpo) is None
    assert strategy_of(TrainConfig(oversample=1.5), grpo) == Partial(1.5)
    assert strategy_of(TrainConfig(segment_tokens=64), grpo) == Partial(1.0, 64)
    asks = algorithms.Algorithm(grpo.transform, grpo.objective, strategy=Partial(3.0))
    assert strategy_of(off, asks) == Partial(3.0)
    assert strategy_of(TrainConfig(oversample=1.5), asks) == Partial(1.5), "the run's settings win"
    with pytest.raises(InputError, match=r"resamples groups .* partial rollouts \(oversample, segment_tokens\)"):
        strategy_of(TrainConfig(oversample=2.0, algorithm="dapo"), dapo)
    assert strategy_of(TrainConfig(algorithm="dapo"), dapo) is None


def test_settings_out_of_range(tmp_path: Path) -> None:
    for wrong, message in (
        ({"oversample": 0.5}, "oversample is 0.5"),
        ({"segment_tokens": -1}, "segment_tokens is -1"),
    ):
        with pytest.raises(InputError, match=message):
            TrainConfig(**wrong)
    config = runs.small_config(tmp_path, algorithm="dapo", oversample=2.0)
    with pytest.raises(InputError, match="leave out one of the two"):
        loop.train(config)
    assert not Path(config.output).exists()


def test_figures_of_several_rollouts() -> None:
    """Two rollouts of 4 and 2 rows: 8 and 6 of 4 x 4 and 2 x 4 row-steps; rates of the sums."""
    one = Stats(rows=4, steps=4, live=8, tokens=10, prompt_tokens=6, padded_tokens=8, first_token=0.5, seconds=2.0)
    two = Stats(rows=2, steps=4, live=6, tokens=8, prompt_tokens=3, padded_tokens=4, first_token=0.1, seconds=1.0)
    found = rollout_metrics([one, two])
    assert found["rollout/occupancy"] == pytest.approx(14 / 24)
    assert found["rollout/tokens_per_second"] == pytest.approx(6.0)
    assert found["rollout/steps"] == 8
    assert found["rollout/prompt_padding"] == pytest.approx(0.25)
    assert found["rollout/first_token_seconds"] == 0.5
    assert rollout_metrics([one]) == one.metrics()
    assert rollout_metrics([])["rollout/occupancy"] == 0
