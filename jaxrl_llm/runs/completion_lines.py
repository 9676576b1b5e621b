"""Completions as the lines of completions.jsonl, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.reporting.run_data import CORRECT

if TYPE_CHECKING:
    from jaxrl_llm.rewards.scoring import Scored


def completion_lines(
    tokenizer: Any, scored: Scored, rows: Sequence[dict[str, Any]], groups: int, judge: str | None = None
) -> Iterator[dict[str, Any]]:
    """The completions of the first `groups` groups of a batch.

    rows: of the data set, one for each group. judge: the reward that is 1 for a correct answer, if any.
    """
    from jaxrl_llm.sampling import completion_ids  # here: the module of run folders needs no JAX

    batch = scored.batch
    chosen = np.flatnonzero(np.asarray(batch.group) < groups)
    ids, action = completion_ids(batch), np.asarray(batch.action_mask)
    fields = {"advantage": batch.advantages, "logp": batch.behaviour_logp, "entropy": batch.entropy}
    values = {name: None if x is None else np.asarray(x) for name, x in fields.items()}
    rewards = {name: np.asarray(x) for name, x in (batch.rewards or {}).items()}
    past = np.asarray((batch.info or {}).get("replayed", np.zeros(len(ids)))) > 0
    number: dict[int, int] = {}
    for i in chosen:
        group = int(batch.group[i])
        number[group] = number.get(group, -1) + 1
        answer = rows[group].get("answer")
        yield {
            "prompt_id": int(batch.prompt_id[i]),
            "sample": number[group],
            "prompt": _prompt_text(rows[group]["prompt"]),
            "tokens": [tokenizer.decode([token]) for token in ids[i]],
            **{k: None if v is None else [round(float(x), 4) for x in v[i][action[i]]] for k, v in values.items()},
            "reward": _number(np.asarray(batch.reward)[i]),
            "rewards": {name: _number(x[i]) for name, x in rewards.items()},
            "answer": None if answer is None else str(answer),
            "truncated": bool(batch.truncated[i]),
            **({"replayed": True} if past[i] else {}),
            **({"correct": bool(rewards[judge][i] >= CORRECT)} if judge in rewards else {}),
        }


def _prompt_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _number(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None
