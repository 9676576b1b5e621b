"""A curriculum that asks hard problems again until the policy solves enough of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, State, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs

Score = Callable[[Trajectories], Any]  # batch -> f32[N]


def solved_by(step: Step, score: Score | None = None) -> dict[int, float]:
    """The mean reward of each prompt's samples, in the order of the batch, without those of second prompts.

    score: of the rows f32[N]; None: the run's reward.
    """
    batch = step.scored.batch
    ids, reward = np.asarray(batch.prompt_id), np.asarray(batch.need("reward"), np.float64)
    if score is not None:
        reward = np.asarray(score(batch), np.float64)
    part = (batch.info or {}).get("part")
    counts = ~np.isnan(reward) & (np.ones(len(ids), bool) if part is None else ~(np.asarray(part) > 0))
    return {int(i): float(reward[counts & (ids == i)].mean()) for i in dict.fromkeys(ids[counts].tolist())}


@part
def hard_buffer(
    share: float = 0.25, threshold: float = 0.5, most: Count = 10_000, every: Count = 1, score: Score | None = None
) -> MakeCurriculum:
    """Shuffled epochs, and `share` times as many problems from a buffer of those with a mean reward below `threshold`.

    A problem enters the buffer when its mean reward is below the threshold, and leaves it when it is not. Beyond `most`
    problems, the one that has been in it for longest leaves. Problems are drawn from it uniformly and without
    replacement; where it has too few, new ones of the epoch take their places. every: draw from it every so many times
    only. score: of the rows f32[N] of a batch, instead of the reward. The metrics curriculum/buffer and
    curriculum/replayed are its size, and the problems that the last step took from it.
    """
    check_number("share", share, least=0)

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        stream = shuffled_epochs(rows, seed)

        def init() -> State:
            return {"stream": stream.init(), "buffer": [], "drawn": 0, "replayed": 0}

        def select(state: State, count: int) -> tuple[np.ndarray, State]:
            due = state["drawn"] % every == every - 1
            wanted = min(int(count * share / (1 + share) + 0.5), len(state["buffer"])) if due else 0
            new, after = stream.select(state["stream"], count - wanted)
            free = [i for i in state["buffer"] if i not in set(new.tolist())]
            if len(free) < wanted:  # problems that the epoch asks now anyway
                more, after = stream.select(after, wanted - len(free))
                new, wanted = np.concatenate([new, more]), len(free)
            random = np.random.default_rng([seed, state["drawn"]])
            old = random.choice(np.asarray(free, np.int32), wanted, replace=False)
            state = {**state, "stream": after, "drawn": state["drawn"] + (count > 0), "replayed": wanted}
            return np.concatenate([new, old]).astype(np.int32), state

        def observe(state: State, step: Step) -> State:
            solved = solved_by(step, score)
            kept = [i for i in state["buffer"] if solved.get(i, -np.inf) < threshold]
            hard = [i for i, rate in solved.items() if rate < threshold and i not in set(kept)]
            return {**state, "buffer": [*kept, *hard][-most:]}

        def metrics(state: State) -> dict[str, float]:
            return {
                "curriculum/buffer": float(len(state["buffer"])),
                "curriculum/replayed": float(state["replayed"]),
            }

        return Curriculum(init, select, observe, metrics=metrics)

    return make
