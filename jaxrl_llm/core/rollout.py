"""`Rollout`: a program that samples one group of episodes, and what a run must know of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.population import League, Population
from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.core.soft_thinking import SoftThinking
from jaxrl_llm.utils.errors import InputError, shown

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.context import Tools
    from jaxrl_llm.rollouts.episode import Episode

AHEAD = 4  # decode steps after which the answer to an external call counts
OBSERVATION = 32  # tokens per observation that the engine initially has room for


@dataclass(frozen=True)
class Task:
    """The input of a program: a prompt of the data set, and limits."""

    row: Mapping[str, Any]  # row of the data set, whose columns may contain hints, answers or tools
    prompt: tuple[int, ...]  # token ids of the prompt
    prompt_id: int  # index of the row
    samples: int  # number of episodes that the program must return
    limit: int  # most tokens of a completion


Program = Callable[["Tools", Task], Awaitable[Sequence["Episode"]]]
Drawing = Hook | Population | SoftThinking
"""How tokens are drawn otherwise: through a hook, by the members of a population, or as mixtures of tokens."""


@dataclass(frozen=True)
class Demands:
    """What a program demands of the engine, and of a plan of its memory, before the first group."""

    turns: int = 1
    """Most completions of an episode, for which the engine initially has room."""
    longest: int | None = None
    """Most tokens of an episode after its prompt, for which the engine has room; None: by `turns`."""
    min_samples: int = 1
    """Fewest samples of a group that it needs."""
    variable_size: bool = False
    """The program may return any number of episodes, at least one, and not as many as the task has samples."""
    max_episodes: Callable[[int], int] | None = None
    """Of a group's samples, the most episodes that a program of variable size returns, for `jaxrl plan`."""
    at_once: bool = False
    """The program asks for all of its samples at the beginning. Otherwise the driver looks more often whether one has
    what it waits for, so that what it asks for next is decoded while long completions of other groups go on."""
    forks: tuple[int, ...] = ()
    """Numbers of tokens of a completion after which it forks; a run is refused that reaches none of those above 0."""
    max_wait_steps: int | None = AHEAD
    """Decode steps of others while an external call is answered; None: until it is. See `external_calls`."""
    meets: bool = False
    """The programs of a step wait for each other, see `Tools.meet`; then all groups of a step begin and end in it."""
    given: bool = False
    """All of its episodes are the data set's, with their rewards: it asks for no sample, and is evaluated so too."""
    ranked: int = 0
    """Of the policy that learns, how many of the most probable tokens the sampler records at each place of a sample,
    `Tokens.ranked`; a program may begin a fork with one of them."""
    reference: bool = False
    """Its programs also draw from the reference policy, see `Tools.sample`; that needs memory for another engine."""
    league: League | None = None
    """Earlier policies that its programs also draw from, which needs memory for them and for an engine of each."""

    @property
    def engines(self) -> int:
        """Those that sample at a time at most, each with weights and caches of its own."""
        return 1 + self.reference + (0 if self.league is None else self.league.size)


@dataclass(frozen=True, repr=False)
class Rollout:
    """A program, and what a run must know of it before the first group."""

    program: Program
    name: str = "program"
    provides: frozenset[str] = field(default_factory=frozenset)
    """Names of `jaxrl_llm.core.needs` that its episodes provide; "environment" where they have its reward."""
    columns: tuple[str, ...] = ()
    """Columns of the data set that it reads; "one|other" where a row has one of several."""
    demands: Demands = field(default_factory=Demands)
    drawing: Drawing | None = None
    """How the samples of the policy that learns are drawn; None: plainly, at the run's temperature. See `drawn`."""
    wrap: Callable[[Rollout], Rollout] | None = None
    """Of a method's rollout: what it makes of the run's own, such as the agents of an environment."""
    agent: Any = None
    """Of agents, how their episodes are made, `rollouts.agents.AgentSettings`, which another rollout may fork."""

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise InputError(f"a rollout's program is {shown(self.program)}, but must be an async function")
        if self.thinking is not None and (self.converses or self.demands.reference or self.demands.league is not None):
            what = "goes on after observations" if self.converses else "also draws from other policies"
            raise InputError(
                f"the rollout {self.name} {what}, but soft thinking is of one completion of the policy that learns: "
                "leave out one of the two"
            )

    __repr__ = layout

    @property
    def hook(self) -> Hook | None:
        """What tokens are drawn through, see `rollouts.programs`."""
        return self.drawing if isinstance(self.drawing, Hook) else None

    @property
    def population(self) -> Population | None:
        """Whose members draw its samples, see `rollouts.programs.evolved`."""
        return self.drawing if isinstance(self.drawing, Population) else None

    @property
    def thinking(self) -> SoftThinking | None:
        """How its samples think before they answer, see `rollouts.programs.softly`."""
        return self.drawing if isinstance(self.drawing, SoftThinking) else None

    @property
    def converses(self) -> bool:
        """Whether its episodes go on after observations."""
        return "turns" in self.provides

    def rows(self, samples: int) -> int:
        """Episodes of a group of `samples`, at most; of a program that does not say so, as many as samples."""
        most = self.demands.max_episodes
        return samples if most is None else most(samples)

    def room(self, limit: int, context: int = 0) -> int:
        """Tokens after the prompt for which the engine initially has room. It grows if an episode needs more.

        limit: of a completion. context: tokens of the model's context, which bounds it; 0: unlimited.
        """
        turns, longest = self.demands.turns, self.demands.longest
        if longest is None and turns == 1:
            return bucket(limit, least=4)
        wanted = turns * (limit + OBSERVATION) if longest is None else longest
        return bucket(min(wanted, context or wanted))


def drawn(rollout: Rollout, drawing: Drawing, name: str, provides: Iterable[str] = ()) -> Rollout:
    """A rollout whose samples are drawn so, with a name appended to its own, which provides these names besides.

    InputError for one that is drawn otherwise already.
    """
    if rollout.drawing is not None:
        raise InputError(
            f"the rollout {rollout.name} {_how(rollout.drawing)} already, and cannot be one that {_how(drawing)}: "
            "leave out one of the two"
        )
    return replace(rollout, name=f"{rollout.name}, {name}", provides=rollout.provides | {*provides}, drawing=drawing)


def _how(drawing: Drawing) -> str:
    if isinstance(drawing, Hook):
        return f"draws through the hook {drawing.name}"
    return "is drawn by members of a population" if isinstance(drawing, Population) else "thinks softly"
