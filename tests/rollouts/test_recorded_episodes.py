"""Recorded experts through programs: forks, given tokens, pauses, logs, and rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, Ran, begin

from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.replay import buffers
from jaxrl_llm.rewards.scoring import Scored, concatenate_groups
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.programs import forked, group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.rollouts.runtime.replay_log import from_arrays, to_arrays
from jaxrl_llm.sampling.requests import Completion
from jaxrl_llm.sampling.routed_experts import with_experts
from jaxrl_llm.sampling.sampler import SamplingConfig


def experts_of(places: np.ndarray, step: int) -> np.ndarray:
    """int8[n, 1, 2] of tokens at these places of a row: the place, and the step in which it was computed."""
    return np.stack([places, np.full(len(places), step)], axis=1)[:, None].astype(np.int8)


class Recording(FakeEngine):
    """An engine that records experts."""

    def recorded(self, completion: Completion) -> Completion:
        asked, tokens = self.requests[completion.index], completion.tokens
        if tokens.size == asked.begun.size:
            return completion
        P = len(asked.prompt)
        found = with_experts(
            tokens._replace(experts=None), experts_of(P - 1 + np.arange(tokens.size), self.step_number)
        )
        if asked.begun.experts is not None:
            found = with_experts(asked.begun, found.experts[: asked.begun.size]).followed_by(
                found.after(asked.begun.size)
            )  # type: ignore[index]
        if not asked.begun.size:  # the first is drawn from the prompt's state
            found.experts[0] = experts_of(np.asarray([P - 1]), self.step_number)[0]  # type: ignore[index]
        return replace(completion, tokens=found, prompt_experts=experts_of(np.arange(P), self.step_number))

    def step(self, chunk: int) -> list[Completion]:
        return [self.recorded(one) for one in super().step(chunk)]

    def withdraw(self) -> list[Completion]:
        return [self.recorded(one) for one in super().withdraw()]


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_engine.FakeEngine", Recording)


async def _conversation(tools: Tools, task: Task) -> Sequence[Episode]:
    episodes = []
    for number in range(task.samples):
        episode = await tools.sample(task.prompt, number=number, limit=5)
        for _ in range(2):
            episode = await tools.sample(episode + given([7, 8, 9]), limit=3)
        episodes.append(episode)
    return episodes


async def _prefixed(tools: Tools, task: Task) -> Sequence[Episode]:
    start = Episode(task.prompt, task.prompt_id) + given([4, 5])
    return [await tools.sample(start, number=number) for number in range(task.samples)]


PROGRAMS = {
    "group": group(), "forked": forked(2), "conversation": Rollout(_conversation, demands=Demands(turns=3)),
    "prefixed": Rollout(_prefixed),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_token_but_the_last_has_its_experts(name: str) -> None:
    ran = Ran(begin(range(3), 2), Rule(), PROGRAMS[name])
    batch = to_batch(ran.found.groups, SamplingConfig(), 0)
    experts, real = np.asarray(batch.experts)[:, :, 0, 0], np.asarray(batch.token_mask)
    for row, mask in zip(experts, real, strict=True):
        size = mask.sum()
        assert row.tolist() == [*range(size - 1), *[-1] * (len(row) - size + 1)]


def test_a_paused_completion_keeps_the_experts_of_its_steps() -> None:
    """Also through a checkpoint."""
    pool, seen = begin(range(4), 3), 0
    for step in range(6):
        ran = Ran(pool, Rule(segment_tokens=3), step=step)
        if ran.found.groups:
            batch = to_batch(ran.found.groups, SamplingConfig(), step)
            experts, action = np.asarray(batch.experts)[:, :, 0], np.asarray(batch.action_mask)
            of_action = np.roll(experts, 1, axis=1)[action]  # of the token before each
            np.testing.assert_array_equal(of_action[:, 1], np.asarray(batch.policy_step)[action])
            np.testing.assert_array_equal(of_action[:, 0], np.nonzero(action)[1] - 1)
            assert (experts[:, 0] == 0).all(), "the prompt has those of the step in which it was first computed"
            seen += 1
        arrays = to_arrays(ran.pool)
        pool = from_arrays(arrays)
        if pool:
            again = to_arrays(pool)
            assert arrays.keys() == again.keys()
            assert {"experts", "before", "before_length"} <= arrays.keys()
            assert all(np.array_equal(arrays[key], again[key]) for key in arrays)
    assert seen > 1


def test_a_row_under_another_prompt_has_none() -> None:
    """Its tokens were computed after another prompt; the routers choose, as for texts that nothing sampled."""
    ran = Ran(begin([0], 2), Rule())
    (one,) = ran.found.groups
    kept, moved = one.episodes[0], one.episodes[1].trained_under([3, 3, 3])
    batch = to_batch([one._replace(episodes=[kept, moved])], SamplingConfig(), 0)
    assert (np.asarray(batch.experts)[1] == -1).all()
    assert (np.asarray(batch.experts)[0, :2] >= 0).all()


def test_an_episode_that_is_cut_keeps_what_its_actions_need() -> None:
    ran = Ran(begin([1], 2), Rule(), PROGRAMS["conversation"])
    episode = max(ran.found.groups[0].episodes, key=lambda episode: episode.size)
    whole = episode.experts
    assert whole is not None
    for size in range(1, episode.size + 1):
        cut = episode.first(size)
        until = 2 + int(np.flatnonzero(cut.actions)[-1])  # of the prompt's two tokens and those before the last action
        np.testing.assert_array_equal(cut.experts[:until], whole[:until])  # type: ignore[index]
        assert (whole[:until] >= 0).all()


def test_groups_and_stores_pad_with_none() -> None:
    """Batches of different widths, one of which has no experts, and rows that are stored for replay."""

    def scored(prompts: Sequence[int], experts: bool) -> Scored:
        batch = to_batch(Ran(begin(prompts, 2), Rule()).found.groups, SamplingConfig(), 0)
        reward: Any = np.zeros(len(batch.tokens), np.float32)
        batch = batch.replace(reward=reward, rewards={}, **({} if experts else {"experts": None}))
        return Scored(batch, [""] * len(reward), {})

    first, second = scored(range(4), True), scored([5], False)
    both = concatenate_groups([first, second]).batch
    width = first.batch.tokens.shape[1]
    np.testing.assert_array_equal(np.asarray(both.experts)[:8, :width], first.batch.experts)
    assert (np.asarray(both.experts)[8:] == -1).all()
    stored = buffers.to_rows(first)
    back = buffers.to_scored(buffers.take(stored, range(8)), np.asarray(first.batch.group), width, {}).batch
    np.testing.assert_array_equal(back.experts, first.batch.experts)
