"""Trees in runs: methods by name, and what the engine draws and the update holds of tokens that completions share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.learner.prefix_trie import TokenRows, prefix_tries
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.rollouts.trees import tree
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.sampling.stats import Stats

SMALL: dict[str, dict[str, Any]] = {
    "spo_segment": {"continuations": 2, "interval": 2},
    "treepo": {"segment": 2, "first_most": 2, "rounds": 1},
    "branchgrpo": {"forks": 2, "spacing": 3},
    "latr": {"windows": "2", "absolute": 0.001, "relative": 0.5},
    "ettrl": {"trees": 2, "forks": 1, "branches": 1},
    "pav": {"continuations": 2},
}


def learned(folder: Path, name: str, **changes: Any) -> list[dict[str, Any]]:
    config = runs.small_config(
        folder, algorithm=name, **{"hyperparameters": SMALL[name], "steps": 2, "eval_size": 0, "minibatches": 1,
                                   "top_p": 1.0, **changes},
    )  # fmt: skip
    runs.train(config)
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert np.isfinite(line["loss"])
        assert "rollout/failed_groups" not in line
        assert line["mismatch"] < 1e-4
    return lines


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_it_trains_by_name(name: str, tmp_path: Path) -> None:
    # Rewards give the answers' keys, which are for votes.
    changes: dict[str, Any] = {"rewards": ("number_match",)} if name == "ettrl" else {}
    lines = learned(tmp_path, name, **changes)
    assert all(line["rollout/leaves"] >= 4 for line in lines)
    if name in ("branchgrpo", "ettrl", "treepo"):
        assert all(line["rollout/shared_tokens"] > 0 for line in lines)
    if name != "ettrl":  # a policy that writes noise seldom has a majority
        assert any(line["grad_norm"] > 0 for line in lines)


@pytest.mark.heavy
def test_a_greedy_tree_trains(tmp_path: Path) -> None:
    """The update finds the log-probabilities that the sampler noted of greedy tokens; see `learned`."""
    options = {**SMALL["latr"], "greedy": True, "until": 4, "edit": None}
    lines = learned(tmp_path, "latr", hyperparameters=options)
    assert all(line["rollout/leaves"] >= 4 for line in lines)
    assert all(line["rollout/shared_tokens"] > 0 for line in lines)


@pytest.mark.heavy
def test_spo_on_trees(tmp_path: Path) -> None:
    """Of eight leaves, where a group has four samples: a step has twice as many rows."""
    lines = learned(tmp_path, "spo_segment", hyperparameters={"form": "tree", "segment": 2, "branches": 2})
    assert all(line["rollout/leaves"] > 4 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)


@pytest.mark.heavy
def test_shared_tokens_are_drawn_once_and_held_once() -> None:
    """A tree of 16 leaves over a prompt of 1,024 tokens, with forks at the prompt and each 256 tokens later."""
    policy, params, _ = load_policy(runs.MODEL)
    policy = replace(policy, config=replace(policy.config, max_positions=4096, eos_token_ids=()))
    prompt = [1 + i * i % 250 for i in range(1024)]
    rows, counts = [{"prompt": "a"}], list[Stats]()
    setup = Experience(
        policy, PromptSet(rows, [prompt]), [Reward(lambda completions: [0.0] * len(completions))],
        shuffled_epochs(rows, seed=0), SamplingConfig(max_new_tokens=1024), tree(0, 256, 512, 768),
        prompts_per_step=1, group_size=16, watch=counts.append,
    )  # fmt: skip
    source = experience(setup)
    found, _ = source.next(source.init(), params, jax.random.key(0), 0)
    batch, once = found.scored.batch, 256 * (2 + 4 + 8 + 16)
    assert np.asarray(batch.action_mask).sum(axis=1).tolist() == [1024] * 16
    assert sum(one.tokens for one in counts) == once == 7680
    assert sum(one.prompt_tokens for one in counts) == 1024
    assert found.metrics["rollout/shared_tokens"] == pytest.approx(1 - once / (16 * 1024))
    tokens = TokenRows(*map(np.asarray, (batch.tokens, batch.token_mask, batch.action_mask, batch.group)))
    (trie,) = prefix_tries(tokens, np.arange(16))
    held = trie.prefix + int((trie.lengths - trie.shared).sum())
    # By hand, of all but last tokens, whose states the update does not need. Two leaves may draw the same by chance.
    known: dict[tuple[int, int], int] = {}
    for row in tokens.tokens:
        state = 0
        for token in row[: 2 * 1024 - 1].tolist():
            state = known.setdefault((state, token), len(known) + 1)
    assert held == len(known) <= 1024 + once - 16
    assert held > 1024 + once - 64
