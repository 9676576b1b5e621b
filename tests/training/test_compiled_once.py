"""A run whose prompts and completions differ in length compiles nothing of sampling or update after its first step."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import small_config, train

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.learner.packed_sizes import Room
from jaxrl_llm.rewards.groups import widened
from jaxrl_llm.training.full_size import at_full_width, room_of

COMPILED = "/jax/core/compile/backend_compile_duration"


def test_no_program_is_compiled_after_the_first_step(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(24) // 2 + 9)
    rows = [{"prompt": string.ascii_letters[i] * int(n), "answer": "0"} for i, n in enumerate(lengths)]
    (tmp_path / "varied.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_config(
        tmp_path, prompts=str(tmp_path / "varied.jsonl"), prompts_per_step=3, group_size=5, minibatches=3, steps=8,
        max_new_tokens=16, top_p=1.0, eval_size=0, checkpoint_every=0, stop=tuple(string.ascii_letters[::3]),
    )  # fmt: skip
    metrics, found = tmp_path / "run" / "metrics.jsonl", list[tuple[int, str]]()

    def heard(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if event == COMPILED:
            found.append((len(metrics.read_text().splitlines()) if metrics.exists() else 0, fun_name))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        train(config)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    taken = [json.loads(line)["completion/tokens"] for line in metrics.read_text().splitlines()]
    assert len(set(taken)) > 4, "completions differ in length"
    assert any("update" in name for step, name in found if step == 0)
    assert [name for step, name in found if 0 < step < config.steps] == [], "but what the last checkpoint checks"


def batch_of(columns: int) -> Trajectories:
    tokens = np.arange(2 * columns, dtype=np.int32).reshape(2, columns)
    zeros, real = np.zeros((2, columns), np.float32), np.ones((2, columns), bool)
    return Trajectories(
        tokens=tokens, token_mask=real, action_mask=real, behaviour_logp=zeros, policy_step=tokens, turn=tokens,
        group=np.zeros(2, np.int32), prompt_id=np.zeros(2, np.int32), truncated=np.zeros(2, bool),
        temperature=np.ones(2, np.float32), info={"by_row": np.ones(2, np.float32), "by_token": zeros},
    )  # fmt: skip


def test_columns_that_are_added_are_padding() -> None:
    batch = batch_of(5)
    wide = widened(batch, 8)
    assert wide.tokens.shape == wide.behaviour_logp.shape == wide.info["by_token"].shape == (2, 8)
    assert not wide.token_mask[:, 5:].any()
    assert not wide.action_mask[:, 5:].any()
    assert (wide.turn[:, 5:] == -1).all()
    np.testing.assert_array_equal(wide.tokens[:, :5], batch.tokens)
    np.testing.assert_array_equal(wide.info["by_row"], batch.info["by_row"])
    assert widened(batch, 5) is batch


@pytest.mark.parametrize(("room", "columns"), [(Room(9, 4), 14), (Room(400, 200), 5), (None, 5), (Room(2, 2), 8)])
def test_few_columns_are_as_many_in_all_steps(room: Room | None, columns: int) -> None:
    assert at_full_width(batch_of(5), room).tokens.shape == (2, columns)


def test_the_room_of_a_run() -> None:
    prompts = PromptSet([{}], [[1]], usual=7)
    assert room_of(prompts, 3) == Room(7, 3)
    assert room_of(prompts._replace(usual=0), 3) is None
