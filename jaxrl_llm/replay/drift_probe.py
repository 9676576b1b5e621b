"""A replay that brings earlier responses back to be measured: how likely they are now, compared with then."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, marked, take, to_rows
from jaxrl_llm.rewards.scoring import Scored

_NOT_READ = ("token:entropy", "token:untruncated_logp")  # of a response that is only measured


@part
def last_responses(prompts: int = 16_384) -> Replay:
    """Bring back the last response to each prompt of the batch, with info["measured"] 1: no update trains on it.

    The store has one response of each prompt, those of the `prompts` prompts that were answered last. Its
    `behaviour_logp` is what the learner computed before the update on that response, once there was one, and not what
    the sampler did: the two differ by rounding, which would count as a move of the policy.
    """
    check_number("prompts", prompts, least=0, whole=True)

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        asked, past = np.asarray(scored.batch.prompt_id), dict[str, np.ndarray]()
        if count(state):
            past = take(state, np.flatnonzero(np.isin(state["row:prompt_id"], asked)))
        found = mixed(scored, fresh, past, group, group.max() + 1 + np.arange(count(past)))
        # Where each row is in the mixed batch, whose first rows these are, in the order of their groups.
        place = np.empty(len(group), np.int64)
        place[np.argsort(group, kind="stable")] = np.arange(len(group))
        light = {name: x for name, x in fresh.items() if name not in _NOT_READ}
        new = marked(light, item=buffers.next_item(state) + np.arange(len(group)), step=step, place=place)
        answered: Any = np.asarray(scored.batch.action_mask).any(axis=1)
        new = keep(new, answered)
        old = marked(state, place=-1) if count(state) else {}
        store = buffers.newest(buffers.newest_of_prompts(join(old, new), 1), prompts) if prompts else {}
        batch = found.batch
        return found._replace(batch=batch.with_info(measured=(batch.info or {})["replayed"])), store

    def learned(state: Store, batch: Trajectories) -> Store:
        if not count(state):
            return state
        which = np.flatnonzero(state["of:place"] >= 0)
        rows = state["of:place"][which]
        old_logp: Any = np.asarray(batch.need("old_logp"))[rows]
        told = old_logp[np.asarray(batch.token_mask)[rows]]
        after = buffers.with_tokens(state, which, "behaviour_logp", told)
        return marked(after, place=-1)

    return Replay(
        dict, mix, frozenset({"replayed", "measured"}), buffers.metrics, lambda rows: 2 * rows, learned=learned
    )
