"""The second set of samples at another temperature, over the fake engine."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeEngine, Words, begin, score, token_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.regularisation.aepo_arbitrary_entropy import with_tempered
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.program_host import Draws
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Collected, Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError


def ran(
    rollout: Rollout, prompts: int = 6, step: int = 0, **controls: float
) -> tuple[Collected, dict[float | None, list[Request]]]:
    """What the driver collected, and the requests of the engine at each temperature."""
    engines: dict[float | None, FakeEngine] = {}

    def make(requests: object, draws: Draws, stats: Stats) -> FakeEngine:
        assert draws.temperature not in engines
        engines[draws.temperature] = FakeEngine(100, step)
        return engines[draws.temperature]

    flight = begin(range(prompts), 4, step)
    tasks = [Task({"prompt": ""}, log.prompt, log.prompt_id, log.samples, 8) for log in flight]
    driver = Driver(rollout, make, score, Words(), step=step, controls=controls)
    found = driver.run(list(zip(flight, tasks, strict=True)), Rule())
    return found, {heat: engine.requests for heat, engine in engines.items()}


def test_a_share_of_zero_is_a_group() -> None:
    plain, requests = ran(group())
    none, same = ran(with_tempered(1.2, 0.0))
    assert set(requests) == set(same) == {None}
    assert [[e.tokens for e in one.episodes] for one in plain.groups] == [
        [e.tokens for e in one.episodes] for one in none.groups
    ]


def test_every_prompt_is_sampled_again_at_the_temperature_of_the_controller() -> None:
    for controls, heat in (({}, 1.2), ({"temperature": 0.8}, 0.8), ({"temperature": 1.0}, 1.0)):
        found, requests = ran(with_tempered(1.2, 1.0), **controls)
        assert set(requests) == {None, heat}
        assert len(requests[None]) == len(requests[heat]) == 24
        for one in found.groups:
            assert [e.info["tempered"] for e in one.episodes] == [0.0] * 4 + [1.0] * 4
            assert [e.own.token[0] for e in one.episodes] == [token_of(one.task.prompt_id, i, 0) for i in range(8)]


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 1000))
def test_the_choice_depends_on_prompt_and_step_alone(step: int) -> None:
    counts = [len(one.episodes) for one in ran(with_tempered(1.2, 0.5), 40, step)[0].groups]
    assert counts[:20] == [len(one.episodes) for one in ran(with_tempered(1.2, 0.5), 20, step)[0].groups]
    assert 8 <= counts.count(8) <= 32


def test_controls_are_in_the_checkpoint() -> None:
    state = ExperienceState({"epoch": 0}, {}, (), Drafts(), {"temperature": 0.8})
    again = loaded(*saved(state))
    assert dict(again.controls) == {"temperature": 0.8}
    assert dict(loaded(*saved(state._replace(controls={}))).controls) == {}


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan])
def test_a_temperature_must_be_above_0(wrong: float) -> None:
    async def program(tools: Tools, task: Task) -> list[object]:
        with pytest.raises(InputError, match="temperature is"):
            await tools.sample(task.prompt, temperature=wrong)
        with pytest.raises(InputError, match="not given with greedy"):
            await tools.sample(task.prompt, temperature=1.0, greedy=True)
        return [await tools.sample(task.prompt, number=i) for i in range(task.samples)]

    assert not ran(Rollout(program), 1)[0].groups[0].failed
