"""Scored batches of random rows, and what a replay makes of a sequence of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.algorithms.replay.a2pr import best_of_prompt
from jaxrl_llm.algorithms.replay.spear import own_good_rows
from jaxrl_llm.algorithms.replay.wmar_reservoir_replay import recent_and_reservoir
from jaxrl_llm.core.source import Replay
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.replay import base, into_groups
from jaxrl_llm.rewards.scoring import Scored

REPLAYS = {
    "whole_groups": base.whole_groups(groups=5),
    "faded": base.whole_groups(draw=base.faded(), groups=5, **base.times_as_many(1.5)),
    "young": base.whole_groups(max_age=1),
    "recent_and_reservoir": recent_and_reservoir(0.7, 6, 5),
    "own_good_rows": own_good_rows(2, 8, 2),
    "refilled": base.refilled(9, 3),
    "swapped_successes": into_groups.swapped_successes(each=2),
    "random place": into_groups.swapped_successes(into_groups.none_above(0.5), 0.5, 1, "random"),
    "added": into_groups.swapped_successes(into_groups.none_above(0.5), 0.5, 1, "added"),
    "best_of_prompt": best_of_prompt(4),
}


def scored_of(rewards: list[list[float]], prompts: list[int], step: int, seed: int = 0) -> Scored:
    """Groups with these rewards; lengths, and everything else about a row, are random numbers."""
    random = np.random.default_rng([seed, step])
    reward = np.asarray([r for group in rewards for r in group], np.float32)
    N, L, sizes = len(reward), int(random.integers(4, 9)), [len(group) for group in rewards]
    length = random.integers(3, L + 1, N)
    mask = np.arange(L) < length[:, None]
    action = mask & (np.arange(L) >= 2)
    batch = Trajectories(
        tokens=np.where(mask, random.integers(1, 99, (N, L)), 0).astype(np.int32), token_mask=mask, action_mask=action,
        behaviour_logp=np.where(action, -random.gamma(2.0, 0.5, (N, L)), 0).astype(np.float32),
        policy_step=np.full((N, L), step, np.int32) * mask, turn=np.where(action, 0, -1).astype(np.int32),
        group=np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
        prompt_id=np.repeat(prompts, sizes).astype(np.int32), truncated=random.random(N) < 0.5,
        temperature=np.ones(N, np.float32), rewards={"right": reward, "form": random.random(N).astype(np.float32)},
        reward=reward, info={"guided": random.integers(0, 2, N).astype(np.float32), "part": mask * 1.0},
    )  # fmt: skip
    return Scored(batch, [f"{step}.{i} \u00e9" for i in range(N)], {"right": 0, "form": 1})


def facts(scored: Scored, i: int) -> tuple[Any, ...]:
    """All about row i but its group and its width."""
    b: Any = scored.batch
    n = int(b.token_mask[i].sum())
    return (
        scored.texts[i], b.tokens[i, :n].tolist(), b.action_mask[i, :n].tolist(), b.behaviour_logp[i, :n].tolist(),
        b.policy_step[i, :n].tolist(), b.turn[i, :n].tolist(), int(b.prompt_id[i]), bool(b.truncated[i]),
        float(b.reward[i]), {k: float(x[i]) for k, x in b.rewards.items()}, float(b.info["guided"][i]),
        b.info["part"][i, :n].tolist(),
    )  # fmt: skip


def all_facts(scored: Scored) -> list[tuple[Any, ...]]:
    return [facts(scored, i) for i in range(len(scored.texts))]


def some_steps(number: int, seed: int = 3, groups: int = 3, size: int = 3) -> list[Scored]:
    random = np.random.default_rng(seed)
    return [
        scored_of(
            [random.integers(0, 2, int(random.integers(1, size + 1))).astype(float).tolist() for _ in range(groups)],
            random.permutation(4)[:groups].tolist(), step, seed,
        )
        for step in range(number)
    ]  # fmt: skip


def run(replay: Replay, steps: list[Scored], state: Any = None, first: int = 0) -> tuple[list[Scored], Any]:
    state, out = replay.init() if state is None else state, []
    for step, scored in enumerate(steps, first):
        found, state = replay.mix(state, scored, step, 100 + step)
        out.append(found)
    return out, state
