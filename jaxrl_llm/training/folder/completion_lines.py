"""What a run's folder holds of its steps: completions token by token, groups, and why prompts are left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxrl_llm.curriculum.excluded import WORDS, Why
from jaxrl_llm.reporting.html.conversations import common_prefix
from jaxrl_llm.reporting.html.run_data import CORRECT

if TYPE_CHECKING:
    from jaxrl_llm.core.source import Step
    from jaxrl_llm.core.trajectory import Trajectories
    from jaxrl_llm.rewards.scoring import Scored


def completion_lines(
    tokenizer: Any, scored: Scored, rows: Sequence[dict[str, Any]], groups: int, judge: str | None = None
) -> Iterator[dict[str, Any]]:
    """The completions of the first `groups` groups of a batch.

    rows: of the data set, one for each group. judge: the reward that is 1 for a correct answer, if any. What reward
    functions logged for a completion is its "logged". "group" tells groups of one prompt apart, "sample" the samples of
    a group; rows of one episode are one sample, and "row" tells those apart. A conversation also has its "context", the
    whole text that the policy saw first, with what its environment said and its tools are, what was given between its
    replies, and the rewards of its turns; a tree's path, how it begins.
    """
    import jax  # here: the module of run folders needs no JAX

    from jaxrl_llm.sampling import completion_ids

    batch = jax.device_get(scored.batch)  # an element of an array on a mesh is a program of its own
    chosen = np.flatnonzero(np.asarray(batch.group) < groups)
    ids, action = completion_ids(batch), np.asarray(batch.action_mask)
    fields = {"advantage": batch.advantages, "logp": batch.behaviour_logp, "entropy": batch.entropy}
    values = {name: None if x is None else np.asarray(x) for name, x in fields.items()}
    rewards = {name: np.asarray(x) for name, x in (batch.rewards or {}).items()}
    past = np.asarray((batch.info or {}).get("replayed", np.zeros(len(ids)))) > 0
    number, place = dict[int, int](), 0
    first_turn = np.asarray((batch.info or {}).get("first_turn", np.full(len(ids), np.nan)))  # NaN: no agent's
    begins = shared_beginnings(batch)
    extras = {name: x for name, x in scored.logged.extras.items() if len(x) == len(ids)}
    for i in chosen:
        group = int(batch.group[i])
        place = place + 1 if first_turn[i] > 0 else 0  # rows of an episode follow each other
        number[group] = number.get(group, -1) + (place == 0)
        answer = rows[group].get("answer")
        prompt = rows[group]["prompt"]
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        yield {
            "prompt_id": int(batch.prompt_id[i]),
            "group": group,
            "sample": number[group],
            **({"row": place} if place else {}),
            "prompt": prompt,
            "tokens": [tokenizer.decode([token]) for token in ids[i]],
            **{k: None if v is None else [round(float(x), 4) for x in v[i][action[i]]] for k, v in values.items()},
            "reward": _number(np.asarray(batch.reward)[i]),
            "rewards": {name: _number(x[i]) for name, x in rewards.items()},
            "answer": None if answer is None else str(answer),
            "truncated": bool(batch.truncated[i]),
            **({"logged": {name: x[i] for name, x in extras.items()}} if extras else {}),
            **({"replayed": True} if past[i] else {}),
            **({"correct": bool(rewards[judge][i] >= CORRECT)} if judge in rewards else {}),
            **_conversation(tokenizer, batch, int(i)),
            **({"begins": begins[int(i)]} if int(i) in begins else {}),
        }


def _conversation(tokenizer: Any, batch: Trajectories, i: int) -> dict[str, Any]:
    """ "given": pairs of the number of sampled tokens before and a text that was given there; "turn_rewards"; "turn",
    the number of the row's first turn, if its episode has an earlier row."""
    found: dict[str, Any] = {}
    first = float((batch.info or {}).get("first_turn", np.full(i + 1, np.nan))[i])  # NaN: no episode of an agent
    if not np.isnan(first):
        real, action = np.asarray(batch.token_mask[i]), np.asarray(batch.action_mask[i])
        before = np.cumsum(action) == 0
        found["context"] = tokenizer.decode(np.asarray(batch.tokens[i])[real & before].tolist())
    if runs := given_runs(np.asarray(batch.token_mask[i]), np.asarray(batch.action_mask[i])):
        tokens = np.asarray(batch.tokens[i])
        found["given"] = [[before, tokenizer.decode(tokens[places].tolist())] for before, places in runs]
    if batch.turn_rewards is not None:
        found["turn_rewards"] = [_number(x) for x in np.asarray(batch.turn_rewards[i])[: len(runs) + 1]]
    if first > 0:
        found["turn"] = int(first)
    return found


def given_runs(real: npt.NDArray[Any], action: npt.NDArray[Any]) -> list[tuple[int, npt.NDArray[Any]]]:
    """The runs of given tokens behind the first action of a row: how many actions come before, and their places.

    >>> real, action = np.array([1, 1, 1, 1, 1, 0], bool), np.array([0, 1, 0, 0, 1, 0], bool)
    >>> [(before, places.tolist()) for before, places in given_runs(real, action)]
    [(1, [2, 3])]
    """
    before = np.cumsum(action)
    places = np.flatnonzero(real & ~action & (before > 0))
    return [(int(count), places[before[places] == count]) for count in np.unique(before[places])]


def shared_beginnings(batch: Trajectories) -> dict[int, tuple[int, int]]:
    """For rows of trees that share sampled tokens with earlier rows of their group: the number in the group of the one
    that shares most, and of those tokens. Rows have an entry `node` of info where they are paths of trees."""
    nodes: Mapping[str, Any] = batch.info or {}
    if "node" not in nodes:
        return {}
    node, action, group = (np.asarray(x) for x in (nodes["node"], batch.action_mask, batch.group))
    paths = [node[i][action[i]] for i in range(len(group))]
    found: dict[int, tuple[int, int]] = {}
    for i, path in enumerate(paths):
        earlier = np.flatnonzero(group[:i] == group[i])
        counts = [common_prefix(path, paths[j]) for j in earlier]
        if counts and max(counts) > 0:
            best = int(np.argmax(counts))
            found[i] = best, counts[best]
    return found


def _number(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None


def write_left_out(path: Path, step: int, why: np.ndarray) -> None:
    """Replace a file of why each prompt is not drawn after `step` steps, uint8[P] of `excluded.Why`, with its words."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez_compressed(file, step=step, why=why, words=np.asarray([WORDS[reason] for reason in Why]))
    os.replace(new, path)


def group_line(found: Step, judge: str | None = None) -> dict[str, list[Any]]:
    """The groups that a step sampled, those that it does not train on among them, without replayed ones.

    Of each group: prompt, its id; samples, scored ones; reward, their mean; right, how many are correct; equal, 1 if
    their rewards are. left_out, if any group is: null, or why the step does not train on it. Groups without a score and
    second prompts (info "part" above 0) are not listed. judge: the reward that is 1 for a correct answer; without it
    the only reward, or their combination, is.
    """
    groups: list[tuple[Any, ...]] = [(*one, None) for one in _groups(found.sampled or found.scored, judge)]
    groups += [(*one, why) for scored, why in found.others for one in _groups(scored, judge)]
    names = ("prompt", "samples", "reward", "right", "equal", "left_out")
    columns = {name: [one[place] for one in groups] for place, name in enumerate(names)}
    return columns if any(columns["left_out"]) else {name: columns[name] for name in names[:-1]}


def _groups(scored: Scored, judge: str | None) -> list[tuple[int, int, float, int, int]]:
    """(prompt, samples, mean reward, correct samples, whether rewards are equal) of each group, in their order."""
    batch = scored.batch
    if batch.reward is None:
        return []
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    rewards = batch.rewards or {}
    if judge not in rewards and len(rewards) == 1:
        judge = next(iter(rewards))
    right = np.asarray(rewards.get(judge or "", reward)) >= CORRECT
    part = np.asarray((batch.info or {}).get("part", np.zeros(len(group))))
    known = ~np.isnan(reward) & ~(part > 0)
    _, first, place = np.unique(group[known], return_index=True, return_inverse=True)
    out = []
    for number, prompt in enumerate(np.asarray(batch.prompt_id)[known][first].tolist()):
        own = known.nonzero()[0][place == number]
        values = reward[own]
        equal = int(values.min() == values.max())
        out.append((prompt, len(own), round(float(values.mean()), 6), int(right[own].sum()), equal))
    return out
