"""The driver: runs the programs of many groups over one engine, and decides when a step has enough groups.

Programs are asyncio tasks. Between two calls of the engine they run until each of them waits for tokens, a score or an
external call. Pauses, new weights and restarts are invisible to a program: its `await` takes longer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import MakeEngine
from jaxrl_llm.rollouts.runtime.admission import Admit, Collected, Rule, admit_first
from jaxrl_llm.rollouts.runtime.external_calls import Meet, meet_here
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.rollouts.runtime.in_flight import InFlight
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Held
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers, sample_numbers
from jaxrl_llm.utils.threads import DISPATCH

Score = Callable[[Task, Sequence[Episode]], Awaitable[list[Episode]]]
T = TypeVar("T")


@dataclass(frozen=True)
class Driver:
    """Runs programs; see `run`. It keeps no state between calls."""

    rollout: Rollout
    make_engine: MakeEngine
    score: Score
    tokenizer: Any
    _: KW_ONLY
    context: int = 0  # tokens of the model's context; 0: unlimited
    step: int = 0  # training step of the weights
    chunk: int = 64  # decode steps between two checks of the programs
    time_limit: float = 60.0  # seconds that a program may wait for anything but the engine
    on_group: Callable[[int, Group], None] | None = None  # called with the index and value of each group that the step
    # takes, as soon as that is known
    admit: Admit = admit_first  # which complete groups a step takes, where its rule says how many; on hosts an exchange
    controls: Mapping[str, float] | None = None  # see `context.Tools`
    encode: Callable[..., list[int]] | None = None  # token ids of a prompt as the data set's; see `Tools.prompt`
    meet: Meet = meet_here  # for rollouts whose programs meet; on several hosts, an exchange
    strict: bool = False  # whether an environment that answers otherwise when asked again ends the run, not its group
    lock: AbstractContextManager[Any] = DISPATCH  # held while engines run: rewards may be models that score meanwhile

    def run(
        self, flight: Sequence[tuple[GroupLog, Task]], rule: Rule, numbers: Sequence[SampleNumbers] | None = None,
        held: Mapping[GroupKey, Held] = MappingProxyType({}),
    ) -> Collected:  # fmt: skip
        """Run the programs of the groups in flight, resuming from their logs, until the rule is satisfied.

        numbers: of each group's samples among those of its prompt; by default, `sample_numbers` of these groups.
        held: what the programs held when the last step left them unfinished, `Collected.held`.

        Returns complete groups with their episodes, and the others as logs to resume from. If a program raises or
        exceeds the time limit, its group ends as `failed`, with the episodes sampled so far; so it does where what it
        calls answers otherwise when it is asked again, unless the driver is strict.
        Raises KeyboardInterrupt after Ctrl-C, and NotDeterministicError for a program that deviates from its log.
        """
        numbers = sample_numbers([task for _, task in flight]) if numbers is None else numbers
        work = InFlight(self, flight, rule, numbers, held).main()
        if not _in_loop():
            return asyncio.run(work)
        with ThreadPoolExecutor(1) as thread:  # in a notebook, this thread already runs an event loop
            return thread.submit(asyncio.run, work).result()


def _in_loop() -> bool:
    # Of its own, because what is raised while an exception is handled keeps that one, and the frames of its traceback.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
