"""The samplers of a host: what a learner asks of them and gives them, and the one in a thread of this process."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rewards.streamed import StreamedScores
from jaxrl_llm.rollouts.asynchronous.rule import Asynchrony
from jaxrl_llm.rollouts.asynchronous.sampler import Entry, Sampler, Taken
from jaxrl_llm.rollouts.asynchronous.staleness import Waitlist
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.engines import engines_of, sampler_weights
from jaxrl_llm.rollouts.runtime.group_run import GroupRun
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Pool
from jaxrl_llm.rollouts.runtime.source import begin_groups, driver_of
from jaxrl_llm.rollouts.runtime.source_setup import Experience, ExperienceState
from jaxrl_llm.rollouts.runtime.sources import draw_prompts
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.threads import DISPATCH

Flight = Sequence[tuple[GroupLog, Task]]


class StepInputs(NamedTuple):
    """What the weights of a step, and all that is drawn with them, depend on besides the run's settings."""

    step: int
    key: jax.Array
    params: Params
    state: ExperienceState  # its controls and drafts


class Samplers(Protocol):
    """The samplers of a host, which tell of groups that are complete."""

    count: int

    def enter(self, given: StepInputs | None, flight: Flight, until: Sequence[int | None]) -> None:
        """Let weights (None: those there are) and groups come in. until: by sampler, see `Entry`."""

    def take(self, keys: Sequence[GroupKey]) -> Taken:
        """Take groups, which are complete."""

    def logs(self) -> Pool:
        """The logs of all groups that no step has taken, with the tokens drawn until now."""

    def mend(self) -> None:
        """Replace samplers that are lost by others, where there are some."""

    def end_step(self) -> bool:
        """Let go of the parameters of a step that has its groups. Whether samplers were replaced in it."""

    def close(self) -> None:
        """End them."""


class _Progress(Protocol):
    """Is told, from threads of the samplers, what becomes of groups; a `Waitlist` is one."""

    def ended(self, ended: Sequence[tuple[GroupRun, int]]) -> None:
        """Groups are complete, each since a chunk of its sampler."""

    def fail(self, error: BaseException) -> None:
        """No group will be complete any more."""


class Scene(NamedTuple):
    """What samplers work for."""

    setup: Experience
    rule: Asynchrony
    streamed: StreamedScores
    lock: AbstractContextManager[Any] = DISPATCH  # held while engines run

    def driver(self, given: StepInputs, weights: Weights) -> Driver:
        """The driver of the weights of a step."""
        setup = self.setup
        groups = -(-(self.rule.bound + 1) * setup.prompts_per_step // setup.hosts.units)
        make = engines_of(setup, groups, given.params, given.key, given.step, given.state, weights)
        self.streamed.state = setup.state(given.step)
        return driver_of(setup, self.streamed, make, given.step, given.state, lock=self.lock)


Open = Callable[[Scene, Waitlist], Samplers]


class InThread:
    """The sampler in a thread of this process."""

    count = 1

    def __init__(self, scene: Scene, progress: _Progress) -> None:
        self._scene, self._progress = scene, progress
        self._sampler: Sampler | None = None
        self._weights: Weights | None = None  # of the last step, where the next differ in adapters alone

    def enter(self, given: StepInputs | None, flight: Flight, until: Sequence[int | None]) -> None:
        """See `Samplers`."""
        driver = None
        if given is not None:
            setup = self._scene.setup
            with DISPATCH:
                weights = sampler_weights(setup, given.params, self._weights)
                driver = self._scene.driver(given, weights)
            self._weights = weights if setup.frozen else None
        self.begin(driver, flight, until[0])

    def begin(self, driver: Driver | None, flight: Flight, until: int | None) -> None:
        """`enter` with a driver of weights that are there already."""
        setup, told = self._scene.setup, self._progress
        if self._sampler is None:
            assert driver is not None
            self._sampler = Sampler(
                driver, told.ended, told.fail, setup.hosts.index, setup.hosts.units, self._scene.rule.keep
            )
        self._sampler.enter(Entry(driver, flight, until))

    def take(self, keys: Sequence[GroupKey]) -> Taken:
        """See `Samplers`."""
        assert self._sampler is not None
        return self._sampler.take(keys)

    def logs(self) -> Pool:
        """See `Samplers`."""
        assert self._sampler is not None
        return self._sampler.logs()

    def mend(self) -> None:
        """See `Samplers`: it is there as long as this process."""

    def end_step(self) -> bool:
        """See `Samplers`."""
        return False

    def close(self) -> None:
        """See `Samplers`."""
        if self._sampler is not None:
            self._sampler.close()


def new_groups(
    setup: Experience, state: ExperienceState, counts: Sequence[int], step: int, earlier: Sequence[int] = ()
) -> tuple[list[tuple[GroupLog, Task]], ExperienceState, int]:
    """(groups of new prompts that this host samples, the state after them, number of prompts dropped).

    counts: of each host. earlier: the prompts of the groups that began in this step before.
    """
    ids, curriculum, dropped = _prompts(setup, state.curriculum, sum(counts))
    first = sum(counts[: setup.hosts.index])
    new = begin_groups(setup, curriculum, ids, len(ids), step, earlier)[first : first + counts[setup.hosts.index]]
    return new, state._replace(curriculum=curriculum), dropped


def _prompts(setup: Experience, curriculum: Any, count: int) -> tuple[list[int], Any, int]:
    """The prompts of so many groups, those of one step after another."""
    ids, dropped = list[int](), 0
    while len(ids) < count:
        wanted = min(setup.prompts_per_step, count - len(ids))
        found, curriculum, lost = draw_prompts(setup.curriculum, setup.prompts, curriculum, wanted)
        if len(found) != wanted:
            raise InputError(
                f"max_staleness is above 0, but the curriculum chose {len(found)} prompts for {wanted} groups, which "
                "asynchronous sampling does not support: leave one of the two out"
            )
        ids, dropped = [*ids, *found], dropped + lost
    return ids, curriculum, dropped
