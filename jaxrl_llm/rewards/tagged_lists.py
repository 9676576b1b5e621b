"""Answers that are lists of objects between tags: <think>...</think><answer>[{...}, ...]</answer>.

A list is read as JSON or as a Python literal. Imports neither NumPy nor JAX.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.verifiers import last_tagged, matching, text_of

TAGS = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def answer_tags(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1.0 if the whole completion is <think>...</think><answer>...</answer>, else 0.0; see `verifiers.matching`."""
    return matching(TAGS.fullmatch, completions, reply_start)


def one_answer(completions: Sequence[Any], **_: Any) -> list[float]:
    """How nearly a completion has one tagged answer: 1 - min((blocks - 1)/turns, 1); 0 without one, or unbalanced tags.

    The form that `grpo_roc` prefers among right episodes, as the component `one_answer*0` of the reward. turns: the
    messages of the policy, 1 for a text.

    >>> one_answer(["<answer>4</answer>", "4", "<answer>4", "<answer>3</answer> or <answer>4</answer>"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [_one_answer(one) for one in completions]


def _one_answer(completion: Any) -> float:
    said = [completion]
    if not isinstance(completion, str):
        said = [str(one.get("content") or "") for one in completion if one.get("role") == "assistant"]
    text = "\n".join(said)
    blocks = text.count("<answer>")
    if not blocks or blocks != text.count("</answer>"):
        return 0.0
    return 1.0 - min((blocks - 1) / max(len(said), 1), 1.0)


def read(text: str) -> Any:
    """JSON or a Python literal; None for anything else."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None


def listed(text: str) -> list[dict[str, Any]]:
    """The objects of a completion's tagged list; none where there is no such list."""
    found = read(last_tagged(text) or "")
    found = [found] if isinstance(found, dict) else found
    return found if isinstance(found, list) and all(isinstance(one, dict) for one in found) else []


def numbers(value: Any, count: int) -> tuple[float, ...] | None:
    """Finite numbers; None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return None
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e9 for x in value):
        return None
    return tuple(map(float, value))


def pairs(completions: Sequence[Any], column: Sequence[Any]) -> list[tuple[str, Any]]:
    """The text of each completion with its entry of a column."""
    return list(zip(map(text_of, completions), column, strict=True))
