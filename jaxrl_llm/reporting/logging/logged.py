"""A run's logged completions as a batch, to compare the credit that other methods would give them."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.reporting.html.run_data import iterate_completions
from jaxrl_llm.reporting.statistics import as_number
from jaxrl_llm.utils.errors import InputError, shown


def logged_batch(run_folder: str | Path, step: int | None = None) -> tuple[Trajectories, list[list[str]]]:
    """The training completions of a step (default: the last one logged), and the texts of their tokens.

    The batch has only what is in completions.jsonl: actions, their log-probabilities and entropies (to four decimals),
    and rewards. Token ids are hashes of the texts. Raises InputError if there are no completions, or a line is damaged.
    """
    step, lines = _lines(run_folder, step)
    texts = [line["tokens"] for line in lines]
    N, L = len(lines), max(map(len, texts))
    action = np.arange(L) < np.asarray([len(text) for text in texts])[:, None]

    def padded(name: str) -> np.ndarray:
        out = np.zeros((N, L), np.float32)
        out[action] = [as_number(x) for line in lines for x in line.get(name) or [0.0] * len(line["tokens"])]
        return out

    ids = np.zeros((N, L), np.int32)
    ids[action] = [zlib.crc32(token.encode("utf-8", "replace")) % 2**31 for text in texts for token in text]
    prompts = np.asarray([line["prompt_id"] for line in lines], np.int32)
    names = sorted(set().union(*(line.get("rewards") or {} for line in lines)))

    def numbers(values: Iterable[Any]) -> jax.Array:
        return jnp.asarray([as_number(value) for value in values], jnp.float32)

    batch = Trajectories(
        tokens=jnp.asarray(ids),
        token_mask=jnp.asarray(action),
        action_mask=jnp.asarray(action),
        behaviour_logp=jnp.asarray(padded("logp")),
        policy_step=jnp.full((N, L), step, jnp.int32),
        turn=jnp.asarray(np.where(action, 0, -1).astype(np.int32)),
        group=jnp.asarray(np.unique(prompts, return_inverse=True)[1].astype(np.int32)),
        prompt_id=jnp.asarray(prompts),
        truncated=jnp.asarray([bool(line.get("truncated")) for line in lines]),
        rewards={name: numbers([(line.get("rewards") or {}).get(name) for line in lines]) for name in names},
        reward=numbers([line.get("reward") for line in lines]),
        entropy=jnp.asarray(padded("entropy")),
    )
    return batch, texts


def logged_prompts(run_folder: str | Path, step: int | None = None) -> list[str]:
    """The prompts of the rows of `logged_batch`, as text; empty where none is logged. Raises as it does."""
    return [line.get("prompt") or "" for line in _lines(run_folder, step)[1]]


def _lines(run_folder: str | Path, step: int | None) -> tuple[int, list[dict[str, Any]]]:
    """A step with training completions, the last by default, and its lines of completions.jsonl that have tokens."""
    path = Path(run_folder) / "completions.jsonl"
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise InputError(f"step is {shown(step)}, but must be the number of a step")
    lines: list[dict[str, Any]] = [line for _, line in iterate_completions(path)] if path.exists() else []
    lines = [line for line in lines if line["phase"] == "train"]
    steps = {line["step"] for line in lines}
    if not steps or (step is not None and step not in steps):
        found = f"has those of the steps {sorted(steps)}" if steps else "has none"
        raise InputError(f"no training completions to compare on: {path} {found}; see log_completions_every")
    step = max(steps) if step is None else step
    lines = [line for line in lines if line["step"] == step and line["tokens"]]
    if not lines:
        raise InputError(f"no training completions to compare on: those of step {step} in {path} have no tokens")
    if all(line.get("reward") is None for line in lines):
        raise InputError(f"no training completions to compare on: those of step {step} in {path} have no rewards")
    return step, lines
