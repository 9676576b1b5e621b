"""A curriculum with a pool of solved problems, which shows each prompt those that are most like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, State, Step
from jaxrl_llm.curriculum.neighbours import WIDTH, text_features
from jaxrl_llm.rollouts.guidance.hints import problem_of
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs

EXAMPLE = "Problem: {problem}\nSolution: {solution}"


def nearest(query: np.ndarray, features: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` rows of features f32[n, D] with the largest product with query f32[D], the largest first.

    Of equal ones the later row comes first.
    """
    order = np.lexsort((-np.arange(len(features)), -(features @ query)))
    return [int(i) for i in order[:count]]


@part
def solved_examples(
    examples: int = 2, pool: int = 1000, success: float = 0.0, column: str = "solved_examples", text: str = EXAMPLE
) -> MakeCurriculum:
    """Shuffled epochs, with solved problems of the steps before, like the prompt's own, in a column of each row.

    The pool holds a completion with a reward above `success` of each problem that has had one, of several the first in
    the newest batch; it holds the `pool` problems that were solved last. A prompt gets the `examples` problems, others
    than itself, with the largest cosine of `text_features`, written as `text`, the most similar one last, next to the
    problem. Prompts of token ids have no text, and neither give nor get examples. Nothing is computed where `examples`
    is 0. The metric curriculum/pool is the number of problems in the pool.
    """
    check_number("examples", examples, least=0, whole=True)
    check_number("pool", pool, least=1, whole=True)
    check_number("success", success)

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        stream = shuffled_epochs(rows, seed)

        def init() -> State:
            empty: dict[str, np.ndarray] = {
                "pool_ids": np.zeros(0, np.int32), "pool_features": np.zeros((0, WIDTH), np.float32),
                "pool_sizes": np.zeros(0, np.int64), "pool_text": np.zeros(0, np.uint8),
            }  # fmt: skip
            return {"stream": stream.init(), **empty}

        def select(state: State, count: int) -> tuple[np.ndarray, State]:
            ids, at = stream.select(state["stream"], count)
            return ids, {**state, "stream": at}

        def observe(state: State, step: Step) -> State:
            found = dict(zip(state["pool_ids"].tolist(), texts_in(state), strict=True))
            for prompt, solution in solutions(step, success).items():
                if examples and (problem := problem_of(rows[prompt])):
                    found.pop(prompt, None)  # so that it is the newest
                    found[prompt] = text.format(problem=problem, solution=solution)
            kept = list(found.items())[-pool:]
            known = dict(zip(state["pool_ids"].tolist(), state["pool_features"], strict=True))
            features = [known[i] if i in known else text_features(problem_of(rows[i])) for i, _ in kept]
            coded = [one.encode() for _, one in kept]
            return {
                **state,
                "pool_ids": np.asarray([i for i, _ in kept], np.int32),
                "pool_features": np.stack(features) if features else np.zeros((0, WIDTH), np.float32),
                "pool_sizes": np.asarray([len(one) for one in coded], np.int64),
                "pool_text": np.frombuffer(b"".join(coded), np.uint8).copy(),
            }

        def columns(state: State, ids: np.ndarray) -> list[dict[str, Any]]:
            texts = texts_in(state)

            def of(prompt: int) -> list[str]:
                problem, others = problem_of(rows[prompt]), np.flatnonzero(state["pool_ids"] != prompt)
                if not problem or not examples:
                    return []
                chosen = nearest(text_features(problem), state["pool_features"][others], examples)
                return [texts[int(others[i])] for i in reversed(chosen)]

            return [{column: of(int(prompt))} for prompt in ids]

        def metrics(state: State) -> dict[str, float]:
            return {"curriculum/pool": float(len(state["pool_ids"]))}

        return Curriculum(init, select, observe, metrics=metrics, columns=columns)

    return make


def texts_in(state: Mapping[str, Any]) -> list[str]:
    """The texts of a pool, the oldest first."""
    ends, text = np.cumsum(state["pool_sizes"]), state["pool_text"].tobytes()
    return [text[end - size : end].decode() for end, size in zip(ends, state["pool_sizes"], strict=True)]


def solutions(step: Step, success: float) -> dict[int, str]:
    """By prompt, the first completion of a step whose reward is above `success`."""
    batch, out = step.scored.batch, dict[int, str]()
    reward = np.asarray(batch.need("reward"), np.float64)
    for row, prompt in enumerate(np.asarray(batch.prompt_id).tolist()):
        if reward[row] > success:
            out.setdefault(prompt, step.scored.texts[row])
    return out
