"""Sources that do not sample: demonstrations for supervised steps, and trajectories from a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.core.source import Source, Step
from jaxrl_llm.data.chat.encode import encode_prompt
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.utils.errors import InputError, shown


def demonstrations(
    tokenizer: Any, rows: Sequence[dict[str, Any]], batch_size: int, *, column: str = "answer", seed: int = 0
) -> Source:
    """Supervised steps on `batch_size` rows in random order, each a prompt followed by the text of a column.

    The actions are the text's tokens and the end-of-sequence token; the reward is 1. Raises InputError for a row
    without text in the column.
    """
    encoded = []
    for number, row in enumerate(rows):
        text = row.get(column)
        if not isinstance(text, str) or not text:
            raise InputError(f"row {number} has no text in the column {column!r}: found {shown(text)}")
        answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        encoded.append((encode_prompt(tokenizer, row["prompt"]), np.asarray(answer, np.int32), text))
    curriculum = shuffled_epochs(list(rows), seed)

    def following(state: Any, params: Any, key: Any, step: int) -> tuple[Step, Any]:
        ids, state = curriculum.select(state, batch_size)
        lines = [
            BatchRow(encoded[i][0], _tokens_of(encoded[i][1]), False, int(i), group)
            for group, i in enumerate(ids.tolist())
        ]
        texts = [encoded[i][2] for i in ids]
        return Step(_scored(lines, np.ones(len(ids), np.float32), texts), [dict(rows[i]) for i in ids], {}), state

    def load(saved: Any, arrays: Any) -> Any:
        curriculum.select(saved["curriculum"], 0)  # for its own check
        return saved["curriculum"]

    return Source(curriculum.init, following, lambda state: ({"curriculum": state}, {}), load)


def trajectories(path: Path, tokenizer: Any, groups_per_step: int) -> Source:
    """Scored trajectories from a file, `groups_per_step` groups a step in the file's order, repeating the file.

    Each line of the file is a JSON object: "prompt" and "completion", lists of token ids; "logp", log-probabilities of
    the completion's tokens under the policy that sampled them; "reward"; "group", the same for all completions of a
    group. Raises InputError for a malformed line, and for a file with fewer groups than a step takes.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            if len(entry["logp"]) != len(entry["completion"]) or not entry["prompt"]:
                raise ValueError("it needs a prompt, and a logp for each token of the completion")
            groups.setdefault(entry["group"], []).append({**entry, "reward": float(entry["reward"])})
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"line {number} of {path} is not a trajectory (prompt, completion, logp, reward, group): {error}"
            ) from None
    whole = list(groups.values())
    if len(whole) < groups_per_step:
        raise InputError(f"{path} has {len(whole)} groups, but a step takes {groups_per_step}")

    def batch(step: int) -> Step:
        chosen = [(step * groups_per_step + i) % len(whole) for i in range(groups_per_step)]
        lines, entries = [], [entry for number in chosen for entry in whole[number]]
        for place, number in enumerate(chosen):
            for entry in whole[number]:
                ids, logp = np.asarray(entry["completion"], np.int32), np.asarray(entry["logp"], np.float32)
                lines.append(BatchRow(entry["prompt"], _tokens_of(ids, logp), False, number, place))
        texts = [tokenizer.decode(entry["completion"], skip_special_tokens=True) for entry in entries]
        rewards = np.asarray([entry["reward"] for entry in entries], np.float32)
        rows = [{"prompt": tokenizer.decode(whole[number][0]["prompt"])} for number in chosen]
        return Step(_scored(lines, rewards, texts), rows, {})

    def load(saved: Any, arrays: Any) -> Any:
        return ()

    return Source(lambda: (), lambda state, params, key, step: (batch(step), state), lambda state: ({}, {}), load)


def _tokens_of(ids: np.ndarray, logp: np.ndarray | None = None) -> Tokens:
    """`Tokens` from token ids and, if known, their log-probabilities; everything else is 0."""
    zeros = np.zeros(ids.shape, np.float32)
    floor, logp = np.full(ids.shape, -np.inf, np.float32), zeros if logp is None else logp
    return Tokens(ids, logp, zeros, floor, logp, np.zeros(ids.shape, np.int32))


def _scored(rows: Sequence[BatchRow], reward: np.ndarray, texts: list[str]) -> Scored:
    """The rows as a batch with their rewards f32[N]."""
    batch = assemble(rows, 1.0, False)
    return Scored(batch.replace(reward=reward, rewards={}), texts, {})
