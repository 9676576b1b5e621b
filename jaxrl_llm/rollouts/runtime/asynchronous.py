"""The asynchronous source: groups are sampled in a thread beside the updates, with bounded staleness.

It is the standard source with another way to the groups of a step. The loop that calls it is the same: when it asks for
the batch of a step, the weights of that step go to the sampler with the groups that they admit (`staleness`), and the
batch is of groups that are complete by then.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.source import Source, Step
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rewards.streamed import StreamedScores
from jaxrl_llm.rollouts.runtime.collate import program_metrics, rows_of, to_batch
from jaxrl_llm.rollouts.runtime.continuous import Entry, Sampler, Taken
from jaxrl_llm.rollouts.runtime.engines import engines_of
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, Pool
from jaxrl_llm.rollouts.runtime.source import begun, continued, driver_of, experience, score
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.source_state import ExperienceState
from jaxrl_llm.rollouts.runtime.sources import draw, rollout_metrics
from jaxrl_llm.rollouts.runtime.staleness import Waiting, admitted, taken
from jaxrl_llm.rollouts.runtime.step_order import NEVER, StepOrder, entries_of, write_order
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import interruptible
from jaxrl_llm.utils.threads import DISPATCH


@dataclass(frozen=True)
class Asynchrony:
    """How sampling runs beside updates."""

    bound: int
    """Most staleness, at least 1: the learner's step less that of the weights with which a group was admitted."""
    steps: int
    """Of the run."""
    record: Path | None = None
    """The file of the order in which weights came in and groups were taken."""
    repeat: Sequence[StepOrder] = ()
    """Such an order, which is repeated."""
    turns: bool = False
    """Whether sampler and learner take turns, since both run programs on the same several devices."""


class _Both(NamedTuple):
    """Two locks as one."""

    first: threading.Lock
    second: threading.Lock

    def __enter__(self) -> None:
        self.first.acquire()
        self.second.acquire()

    def __exit__(self, *unused: object) -> None:
        self.second.release()
        self.first.release()


def asynchronous(setup: Experience, rule: Asynchrony) -> Source:
    """The source of an asynchronous run. See `experience`; `setup.beside` and `setup.partial` are set here.

    Its state is what the standard source's is. The sampler begins with the first call of `next`, and again after one of
    `load` or `init`, from the groups in the state's pool. A checkpoint has the logs of all groups that no step has
    taken, with the tokens drawn until then. InputError for what needs all groups of a step in that step.
    """
    _check(setup)
    setup = dataclasses.replace(setup, beside=True, partial=Partial(oversample=rule.bound + 1.0))
    beside = _Beside(rule)
    source = experience(setup, beside.step)

    def anew(function: Any) -> Any:
        def begin(*arguments: Any) -> Any:
            beside.close()
            return function(*arguments)

        return begin

    def save(state: ExperienceState) -> Any:
        return source.save(beside.with_pool(state))

    return source._replace(
        init=anew(source.init), load=anew(source.load), save=save, close=beside.close, paused=beside.paused
    )


def _check(setup: Experience) -> None:
    what = ""
    if setup.hosts.count > 1:
        what = "runs on one host"
    elif setup.dynamic_sampling is not None:
        what = "does not replace groups without a learning signal"
    elif setup.partial is not None:
        what = "leaves unfinished groups to later steps itself"
    elif setup.stream_rewards:
        what = "scores groups when a step takes them, so that stream_rewards changes nothing"
    elif setup.rollout.demands.given:
        what = "samples, but all episodes of this rollout are given"
    elif setup.rollout.demands.league:
        what = "has the weights of one policy, but this rollout draws from a league"
    elif setup.rollout.hook is not None and not setup.rollout.hook.lasting:
        what = f"continues episodes under new weights, but the hook {setup.rollout.hook.name} is of one step"
    if what:
        raise InputError(f"max_staleness is above 0, but asynchronous sampling {what}: leave one of the two out")


class _Beside:
    """The sampler of a source, once its first step has begun."""

    def __init__(self, rule: Asynchrony) -> None:
        self.rule, self.in_flight = rule, 0
        self.sampler: Sampler | None = None
        # The state at the beginning of the last step, the same with its prompts drawn, and what the step has taken.
        self.begun: tuple[ExperienceState, ExperienceState] | None = None
        self.unlearned: Pool = ()
        self.streamed: StreamedScores | None = None
        self.turn = threading.Lock()  # held while the sampler must not run programs
        self.lock = _Both(self.turn, DISPATCH)
        if rule.turns:
            self.turn.acquire()

    def step(
        self, setup: Experience, state: ExperienceState, params: Params, key: jax.Array, step: int
    ) -> tuple[Step, ExperienceState]:
        """Let weights and groups come in, and take the groups of a step."""
        rule, wanted = self.rule, setup.prompts_per_step
        in_flight = len(state.pool) if self.sampler is None else self.in_flight
        # None where a run goes on that is to have fewer steps than were admitted.
        missing = max(admitted(step, rule.bound, wanted, rule.steps) - step * wanted - in_flight, 0)
        ids, curriculum, dropped = _drawn(setup, state.curriculum, missing)
        drawn = state._replace(curriculum=curriculum)
        self.begun, self.unlearned, state = (state, drawn), (), drawn
        new = begun(setup, curriculum, ids, len(ids), step)
        with setup.clock("transfer"), DISPATCH:
            make = engines_of(setup, (rule.bound + 1) * wanted, params, key, step, state)
        first = self.sampler is None
        if first and step and rule.repeat:
            raise InputError("a run that repeats the order of another cannot be resumed: begin it anew")
        if self.streamed is None:
            self.streamed = StreamedScores(setup.rewards, setup.policy.tokenizer)
        self.streamed.state = setup.state(step)
        driver = driver_of(setup, self.streamed, make, step, state, lock=self.lock)
        until = entries_of(rule.repeat).get(step + 1, NEVER) if rule.repeat else None
        entry = Entry(driver, new if not first else [*continued(setup, state.pool), *new], until)
        if self.sampler is None:
            self.sampler = Sampler(entry)
        else:
            self.sampler.enter(entry)
        with self.given_turn():
            with setup.clock("groups"), interruptible() as interrupted:
                found = self.sampler.take(lambda waiting: self._choose(waiting, step, wanted), interrupted)
            self.unlearned = found.logs
            with setup.clock("score"):
                batch = to_batch(found.groups, setup.sampling, step)
                scored = score(setup, found.groups, batch, self.streamed, step)
        self.in_flight = in_flight + missing - wanted
        if rule.record is not None:
            write_order(rule.record, StepOrder(step, found.entered, [log.key for log in found.logs], first))
        first_steps = np.repeat([log.key.first_step for log in found.logs], [len(one.episodes) for one in found.groups])
        # Tokens that are trained on but were not drawn, such as those of hints, are no older than their group.
        drawn = np.maximum(scored.batch.policy_step, first_steps[:, None])
        age = (step - drawn)[np.asarray(scored.batch.action_mask)]
        metrics = rollout_metrics(found.stats, dropped) | program_metrics(found.groups)
        metrics |= _metrics(found, age, rule.bound) | {"rollout/pool": float(self.in_flight)}
        return Step(scored, rows_of(found.groups), metrics), state._replace(pool=())

    def _choose(self, waiting: Sequence[Waiting], step: int, wanted: int) -> list[GroupKey] | None:
        if not self.rule.repeat:
            return taken(waiting, step, self.rule.bound, wanted)
        known, keys = {one.key: one.ended for one in waiting}, self.rule.repeat[step].groups
        if [key for key in keys if key not in known] and any(key.first_step == step for key in known):
            raise InputError("the order to repeat is of a run with other prompts or settings: repeat it with its own")
        return keys if all(known.get(key) is not None for key in keys) else None

    def with_pool(self, state: ExperienceState) -> ExperienceState:
        """The state with all groups that were not learned from: also those of a step that was left in the middle."""
        if self.sampler is None or self.begun is None:
            return state
        with self.given_turn():
            pool = self.sampler.logs()
        before, drawn = self.begun
        return drawn._replace(pool=(*self.unlearned, *pool)) if state is before else state._replace(pool=pool)

    def close(self) -> None:
        """End the sampler."""
        if self.sampler is not None:
            with self.given_turn():
                self.sampler.close()
            self.sampler = None
        if self.streamed is not None:
            self.streamed.close()
            self.streamed = None

    @contextmanager
    def given_turn(self) -> Iterator[None]:
        """Context manager in which the sampler may run programs."""
        if not self.rule.turns:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which the sampler runs no programs."""
        with nullcontext() if self.rule.turns else self.turn:
            yield


def _drawn(setup: Experience, curriculum: Any, count: int) -> tuple[list[int], Any, int]:
    """The prompts of so many groups, those of one step after another."""
    ids, dropped = list[int](), 0
    while len(ids) < count:
        wanted = min(setup.prompts_per_step, count - len(ids))
        found, curriculum, lost = draw(setup.curriculum, setup.prompts, curriculum, wanted)
        if len(found) != wanted:
            raise InputError(
                f"max_staleness is above 0, but the curriculum chose {len(found)} prompts for {wanted} groups, which "
                "asynchronous sampling does not support: leave one of the two out"
            )
        ids, dropped = [*ids, *found], dropped + lost
    return ids, curriculum, dropped


def _metrics(found: Taken, age: np.ndarray, bound: int) -> dict[str, float]:
    """Metrics of a step: the staleness of its tokens, the groups in flight, and what the sampler did since the last.

    age: steps, of each token.
    """
    size = max(age.size, 1)
    return {
        "rollout/staleness": float(age.sum()) / size,
        "rollout/stale_tokens": float(np.sum(age > 0)) / size,
        "rollout/oldest": float(age.max(initial=0)),
        **{f"staleness/{steps}": float(np.sum(age == steps)) / size for steps in range(bound + 1)},
        "rollout/tokens_per_second": sum(one.tokens for one in found.stats) / max(found.seconds["decoding"], 1e-9),
        "sampler/decoding_seconds": found.seconds["decoding"],
        "sampler/idle_seconds": found.seconds["idle"],
    }
