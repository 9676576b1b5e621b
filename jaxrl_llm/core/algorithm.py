"""`Algorithm`: a method as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxrl_llm.core.annotations import Fraction, Routing
from jaxrl_llm.core.arguments.checks import check_fields, check_value, kinds_of
from jaxrl_llm.core.needs import of_target
from jaxrl_llm.core.outer_loop import OuterLoop
from jaxrl_llm.core.reference import ReferenceRule
from jaxrl_llm.core.repr import expression_of, layout, record
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.rules import DynamicSampling, Partial
from jaxrl_llm.core.source import MakeCurriculum, Replay
from jaxrl_llm.core.trajectory import WITHOUT_SCORE, Array, Trajectories, counted_alone
from jaxrl_llm.core.transform import Guarded, Objective, Transform
from jaxrl_llm.utils.errors import InputError


@dataclass(frozen=True)
class _CountedAlone:
    """Rows without a score have no actions, so that they change no other row."""

    marks: tuple[str, ...]  # of rows that count without a score

    def __call__(self, batch: Trajectories) -> Trajectories:
        return counted_alone(batch, self.marks)


def _of_counted_rows(transform: Transform, needs: frozenset[str]) -> Transform:
    """The transform, which prints as it did, on the rows that count to a method with these needs."""
    function = transform.apply.function if isinstance(transform.apply, Guarded) else transform.apply
    rows = _CountedAlone(tuple(mark for mark in WITHOUT_SCORE if mark in needs))
    found = replace(transform, apply=Guarded(function, rows))
    if (expression := expression_of(transform)) is not None:
        record(found, expression)
    return found


@dataclass(frozen=True, repr=False)
class Algorithm:
    """A `transform` from rewards to advantages, an `objective` from advantages to a loss, and rules for rollouts.

    The transform sees rows that nothing scored (a reward of NaN) as rows without actions, and so does the objective
    after it: they weigh nothing and change no other row.
    `needs` names what the loop must provide beyond a sampled and scored batch. What comes before the batch: `rollout`
    is the program that samples a group (None: `rollouts.programs.group`); `curriculum` chooses prompts, a function
    (training rows, seed) -> `Curriculum`, or is the rule by which groups without a signal are replaced; `replay` mixes
    in what was sampled before; a `strategy` requests partial rollouts. The run's settings override them. `reference`
    says which policy the reference is (None: the initial one). `routing` says whose choice of experts the update of a
    mixture of experts replays: the "rollout"'s (R3), that which the weights before the update "recompute" (R2), or
    "none"'s; for other models it means nothing. `phases` make an update for each turn of the episodes (None: one for
    all). `target` says how the target critic, which starts as a copy of the critic, follows it after each update; the
    methods that need "target_values" have one. `outer` says where rounds of updates begin (None: where the last ended).

    Its repr is the code that composes it; a notebook shows its equations too. Raises InputError for a part of another
    type, such as a factory that was not called.
    """

    transform: Transform
    objective: Objective
    curriculum: DynamicSampling | MakeCurriculum | None = None
    strategy: Partial | None = None
    rollout: Rollout | None = None
    replay: Replay | None = None
    reference: ReferenceRule | None = None
    routing: Routing = "none"
    phases: TurnPhases | None = None
    target: ReferenceRule | None = None
    outer: OuterLoop | None = None

    def __post_init__(self) -> None:
        for name, kind in kinds_of(Algorithm).items():
            check_value(f"an algorithm's {name}", getattr(self, name), kind)
        object.__setattr__(self, "transform", _of_counted_rows(self.transform, self.needs))
        if self.phases is not None and "old_logp" not in self.needs:
            raise InputError("an algorithm's phases need a ratio to the old policy: take one against='old'")
        if of_target(self.needs) != (self.target is not None and self.target.update is not None):
            raise InputError(
                "an algorithm needs 'target_values' and has a target that moves, such as "
                "references.exponential_average(0.9), or neither"
            )

    @property
    def resampling(self) -> DynamicSampling | None:
        """The rule by which groups without a signal are replaced, if that is the curriculum."""
        return self.curriculum if isinstance(self.curriculum, DynamicSampling) else None

    @property
    def prompts(self) -> MakeCurriculum | None:
        """The function that makes the curriculum, if it chooses prompts."""
        return None if isinstance(self.curriculum, DynamicSampling) else self.curriculum

    @property
    def needs(self) -> frozenset[str]:
        """What must be computed or provided beyond a scored batch, names of `jaxrl_llm.core.needs`."""
        return self.transform.needs | self.objective.needs

    __repr__ = layout

    def _repr_markdown_(self) -> str:
        """For notebooks: the equations in LaTeX, and the code."""
        from jaxrl_llm.algorithms.equations import markdown  # here: the types know no method, whose parts it reads

        return markdown(self)


TURN_FACTOR = "turn_factor"


@dataclass(frozen=True, repr=False)
class TurnPhases:
    """Update turn T - 1, then T - 2, ... then 0 of all episodes, each from the parameters that the last one left.

    In the phase of turn t only the tokens of that turn have a weight in the objective, `old_logp` and all else that the
    method needs is of the parameters at its start, and info["turn_factor"] is M: 1 at first, and after the phase of t

        M <- clip(M q, 1 - e, 1 + e),    q = clip(exp(mean over the turn's tokens of log pi_after - log pi_before))

    as `objectives.off_policy.compounded` has it, e = clip. Episodes without a turn t keep their M. Rows of one episode
    (info["episode"], info["first_turn"]) share it. The transform is applied in each phase. InputError for a clip that
    is not from 0 to 1.
    """

    clip: Fraction = 0.2

    def __post_init__(self) -> None:
        check_fields(self)

    __repr__ = layout

    @property
    def provides(self) -> frozenset[str]:
        """The needs that the phases provide."""
        return frozenset({TURN_FACTOR})


def turn_in_episode(batch: Trajectories) -> Array:
    """int32[N, L]: number of each action's turn in its episode; -1 elsewhere."""
    first = (batch.info or {}).get("first_turn")
    before = 0 if first is None else jnp.nan_to_num(first).astype(jnp.int32)[:, None]
    return jnp.where(batch.action_mask, batch.turn + before, -1).astype(jnp.int32)
