"""States of conversations of earlier steps, at which the policy replies anew: a curriculum keeps them for a rollout.

A state is all that the policy sees before a reply. A new reply at a stored state is a draw of the current policy, which
a critic can judge; the environment does not hear it, so it has no reward and nothing follows.
"""

from __future__ import annotations

import math
from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, State, Step
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs

RESAMPLED = "resampled"
COLUMN = "stored_states"
FIRST_NUMBER = 2**19  # of samples, above those of a group's own
Where = tuple[list[int], list[int]]  # token ids of a prompt, and of what comes between it and a reply


@part
def kept_states(samples: int, episodes: int = 1024, column: str = COLUMN) -> MakeCurriculum:
    """Shuffled epochs, with `samples` states of the episodes of earlier steps in a column of each row.

    States are drawn uniformly, of any prompt, from those before the turns of the newest `episodes` rows that had a
    score; fewer than `samples` until there are as many. The metric curriculum/states counts them.
    """
    check_number("samples", samples, least=0, whole=True)
    check_number("episodes", episodes, least=0, whole=True)

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        stream = shuffled_epochs(rows, seed)

        def init() -> State:
            none: dict[str, np.ndarray] = {
                "tokens": np.zeros(0, np.int32), "lengths": np.zeros(0, np.int64), "places": np.zeros((0, 3), np.int64),
            }  # fmt: skip
            return {"stream": stream.init(), "steps": 0, **none}

        def select(state: State, count: int) -> tuple[np.ndarray, State]:
            ids, at = stream.select(state["stream"], count)
            return ids, {**state, "stream": at}

        def observe(state: State, step: Step) -> State:
            found = [found for found in _rows_of(step) if found[1]]
            own = [one[: at[-1][1]] for one, at in found]  # after the last state nothing is needed
            old = len(state["lengths"])
            places = [(old + number, start, place) for number, (_, at) in enumerate(found) for start, place in at]
            lengths = np.concatenate([state["lengths"], np.asarray([len(one) for one in own], np.int64)])
            tokens = np.concatenate([state["tokens"], *own]).astype(np.int32)
            table = np.concatenate([state["places"], np.asarray(places, np.int64).reshape(-1, 3)])
            if gone := max(len(lengths) - episodes, 0):
                tokens, lengths = tokens[lengths[:gone].sum() :], lengths[gone:]
                table = table[table[:, 0] >= gone] - np.asarray([gone, 0, 0])
            return {**state, "steps": state["steps"] + 1, "tokens": tokens, "lengths": lengths, "places": table}

        def columns(state: State, ids: np.ndarray) -> list[dict[str, Any]]:
            table, begins = state["places"], np.cumsum(state["lengths"]) - state["lengths"]
            random = np.random.default_rng([seed, state["steps"]])
            chosen = random.permutation(len(table))[: samples * len(ids)]

            def of(number: int) -> Where:
                row, start, place = table[number]
                own = state["tokens"][begins[row] : begins[row] + place].tolist()
                return own[:start], own[start:]

            return [{column: [of(int(n)) for n in chosen[i :: len(ids)]]} for i in range(len(ids))]

        def metrics(state: State) -> dict[str, float]:
            return {"curriculum/states": float(len(state["places"]))}

        return Curriculum(init, select, observe, metrics=metrics, columns=columns)

    return make


def _rows_of(step: Step) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Of each scored row of a step, that was not drawn at a stored state: its tokens, and for each turn the places of
    the row's first action and of the turn's."""
    batch = (step.sampled or step.scored).batch
    real, turn = np.asarray(batch.token_mask).astype(bool), np.asarray(batch.turn)
    tokens, known = np.asarray(batch.tokens), ~np.isnan(np.asarray(batch.need("reward"), np.float64))
    marks = (batch.info or {}).get(RESAMPLED)
    known &= True if marks is None else ~(np.nan_to_num(np.asarray(marks)) > 0)
    out = []
    for row in np.flatnonzero(known & (turn >= 0).any(axis=1)):
        of_turn = turn[row][real[row]]
        first = [int(np.argmax(of_turn == number)) for number in np.unique(of_turn[of_turn >= 0])]
        out.append((tokens[row][real[row]], [(first[0], place) for place in first]))
    return out


@part
def replying_at_stored_states(states: int, column: str = COLUMN) -> Rollout:
    """The run's rollout, and beside its episodes one reply at each state in the rows' `column`, as rows of their own.

    The column has pairs of token ids, of a prompt and of what follows it before the reply, at most `states`;
    `kept_states` fills it, and without it there are no such rows. They have no score, and are in another group than the
    episodes. Provides resampled.
    """
    check_number("states", states, least=0, whole=True)

    def wrapped(inner: Rollout) -> Rollout:
        limits = getattr(inner.agent, "limits", None)

        async def program(tools: Tools, task: Task) -> list[Episode]:
            async def reply(number: int, where: Where) -> Episode:
                start, between = where
                state = Episode(tuple(start), task.prompt_id, FIRST_NUMBER + number)
                state = state + given(between) if between else state
                found = await tools.sample(state, limit=getattr(limits, "turn_tokens", None))
                return found.scored(math.nan).with_info(**{RESAMPLED: 1.0})

            known = [where for where in task.row.get(column) or () if tools.fits([*where[0], *where[1]])]
            own, replies = await gather(
                inner.program(tools, task), gather(*(reply(number, where) for number, where in enumerate(known)))
            )
            part = 1 + max(one.part for one in own)
            return [*(one.with_info(**{RESAMPLED: 0.0}) for one in own), *(replace(one, part=part) for one in replies)]

        return replace(
            inner, program=program, name=f"{inner.name}, replies at stored states", ragged=True, around=wrapped,
            provides=inner.provides | {RESAMPLED}, most=lambda samples: inner.rows(samples) + states,
        )  # fmt: skip

    return wrapped(group())
