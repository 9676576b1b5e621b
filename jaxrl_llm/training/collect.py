"""One step's experience: prompts drawn, completions sampled and scored, uninformative groups replaced."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data import PromptStream
from jaxrl_llm.models.policy import Params
from jaxrl_llm.sampling import sample
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import Scored, score_batch
from jaxrl_llm.training.run_folder import Clock
from jaxrl_llm.training.setup import Parts
from jaxrl_llm.trajectory import Trajectories

Rows = list[dict[str, Any]]
PADDING = {"turn": -1, "support_floor": -np.inf}  # of [N, L] fields; 0 of the others


class Collected(NamedTuple):
    """A scored batch, the data set row of each of its groups, and how many batches of prompts it took."""

    scored: Scored
    rows: Rows
    rounds: int


def collect(
    parts: Parts, config: TrainConfig, params: Params, stream: PromptStream, key: jax.Array, step: int, clock: Clock
) -> Collected:
    """Sample and score `prompts_per_step` groups; where the method resamples, until so many are informative.

    Where the rounds end before there are enough, uninformative groups of the last round fill up.
    """
    curriculum = parts.algorithm.curriculum
    if curriculum is None:
        return Collected(*_round(parts, config, params, stream, key, step, clock), 1)
    kept: list[tuple[Scored, dict[str, Any]]] = []
    spare: list[tuple[Scored, dict[str, Any]]] = []
    rounds = 0
    while rounds < curriculum.rounds and len(kept) < config.prompts_per_step:
        round_key = jax.random.fold_in(key, rounds) if rounds else key
        scored, rows = _round(parts, config, params, stream, round_key, step, clock)
        good = np.asarray(curriculum.informative(scored.batch))[:: config.group_size]
        groups = [(_group(scored, i, config.group_size), row) for i, row in enumerate(rows)]
        kept += [group for group, fine in zip(groups, good, strict=True) if fine]
        spare = [group for group, fine in zip(groups, good, strict=True) if not fine]
        rounds += 1
    chosen = (kept + spare)[: config.prompts_per_step]
    return Collected(_join([scored for scored, _ in chosen]), [row for _, row in chosen], rounds)


def _round(
    parts: Parts, config: TrainConfig, params: Params, stream: PromptStream, key: jax.Array, step: int, clock: Clock
) -> tuple[Scored, Rows]:
    rows, ids = next(stream)
    prompts = [parts.prompts.ids[i] for i in ids]
    common: dict[str, Any] = {
        "prompt_ids": ids.tolist(), "max_new_tokens": config.max_new_tokens, "policy_step": step, "stop": config.stop,
        "rows_at_once": config.rows_at_once, "mesh": parts.mesh,
    }  # fmt: skip
    greedy = "greedy_reward" in parts.algorithm.needs
    with clock("sample"):
        batch = sample(
            parts.policy, params, prompts, key, group_size=config.group_size, temperature=config.temperature,
            top_p=config.top_p, top_k=config.top_k, min_p=config.min_p, **common,
        )  # fmt: skip
        likeliest = sample(parts.policy, params, prompts, key, temperature=0.0, **common) if greedy else None
    with clock("score"):
        scored = score_batch(parts.rewards, parts.tokenizer, rows, batch)
        if likeliest is not None:
            best = score_batch(parts.rewards, parts.tokenizer, rows, likeliest).batch.scores
            scored = scored._replace(batch=scored.batch.with_info(greedy_reward=best[batch.group]))
    return scored, rows


def _group(scored: Scored, number: int, size: int) -> Scored:
    """The rows of one group. Failures are not known by row: the first group has them all."""
    place = slice(number * size, (number + 1) * size)
    failures = {name: 0 if number else count for name, count in scored.failures.items()}
    return Scored(jax.tree.map(lambda x: np.asarray(x)[place], scored.batch), scored.texts[place], failures)


def _join(groups: list[Scored]) -> Scored:
    """One batch of groups of possibly different widths, numbered in their order."""
    width = max(group.batch.tokens.shape[1] for group in groups)

    def widened(batch: Trajectories, number: int) -> Trajectories:
        wide = {
            name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=PADDING.get(name, 0))
            for name, x in vars(batch).items()
            if isinstance(x, np.ndarray) and x.ndim == 2
        }
        return batch.replace(**wide, group=np.full(batch.group.shape, number, np.int32))

    batches = [widened(group.batch, number) for number, group in enumerate(groups)]
    return Scored(
        jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x)), *batches),
        [text for group in groups for text in group.texts],
        {name: sum(group.failures[name] for group in groups) for name in groups[0].failures},
    )
