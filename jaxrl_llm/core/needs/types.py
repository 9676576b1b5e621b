"""A need as a value: what a method asks for beyond a sampled and scored batch."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.core.needs.placeholders import StandIn
from jaxrl_llm.core.trajectory import Array, PolicyOutputs, Trajectories

OWN = "the method's own rollout"


class Models(Protocol):
    """What the policies at hand say of the actions of a batch. Each forward pass is made once, and only if read."""

    @property
    def old(self) -> PolicyOutputs:
        """Of the weights before the update; `extras` has what the needs of the method `measure`."""

    @property
    def reference(self) -> PolicyOutputs:
        """Of the reference policy; InputError where there is none."""

    @property
    def previous(self) -> PolicyOutputs:
        """Of the weights before the last update; InputError where they are not kept."""

    @property
    def target_values(self) -> Array:
        """f32[N, L, heads]: values of the target critic; InputError where there is none."""

    @property
    def teacher(self) -> PolicyOutputs:
        """Of the teacher, after the prompts of info["teacher_tokens"] where the batch has some.

        It is the reference policy unless there is another one. `extras` has "top_logp", "most_probable" and
        "head_states" as they are needed.
        """

    @property
    def answers(self) -> Array:
        """f32[N, K]: the mean log-probability of the tokens of info["answer_tokens"] before each turn; NaN without."""

    @property
    def blanked(self) -> Array:
        """f32[N, L]: `old.logp`, but each turn's after info["blanked"] in place of the observation before it."""

    @property
    def affinity(self) -> Array:
        """f32[N, L]: sum over the vocabulary of sqrt(pi_old pi_reference); InputError as `reference`."""

    def of_states(self, function: Callable[[Array, Array], Array]) -> Array:
        """`function` of the last hidden states of the weights before the update [N, L, D] and the actions bool[N, L].

        For needs that measure "hidden".
        """

    def of_logp(self, function: Callable[[Array, Trajectories], Array]) -> Array:
        """`function` of the log-probabilities [N, L] of the weights before the update, and the batch."""


Compute = Callable[[Models, Trajectories, float | None], Array]


class Need(NamedTuple):
    """One thing that methods ask for."""

    name: str
    where: str  # a field of the batch, or an entry of its info or rewards; ":T" stands for the need's number
    shape: str  # "[N, L]", "[N]" ...
    meaning: str
    stand_in: StandIn
    compute: Compute | None = None  # by the learner; None: it is in the batch when the learner gets it
    measure: str | None = None  # what `compute` reads from `Models.old.extras`, see `models.outputs.Wanted`
    by_outputs: str | None = None  # the entry of outputs.extras with the same under the current weights
    provider: str | None = None  # what of a run provides it; None: the learner or the loop does by itself

    @property
    def text(self) -> str:
        """Where it is, its shape, what it means and what provides it."""
        current = "" if self.by_outputs is None else f" and outputs.extras[{self.by_outputs!r}] of the current weights,"
        provider = "" if self.provider is None else f" (provided by {self.provider})"
        return f"{self.where}{current} f32{self.shape}: {self.meaning}{provider}"

    def of(self, batch: Trajectories, number: float | None = None) -> Any:
        """What a batch has of it, an array or, for "feedback", a dict; None where it has nothing."""
        place, key = self.place(number)
        return getattr(batch, place) if not key else (getattr(batch, place) or {}).get(key)

    def put(self, batch: Trajectories, value: Array, number: float | None = None) -> Trajectories:
        """The batch with a value of it."""
        place, key = self.place(number)
        return batch.replace(**{place: {**(getattr(batch, place) or {}), key: value} if key else value})

    def place(self, number: float | None) -> tuple[str, str]:
        """The field of the batch, and the key in it where that is a dict, else ""."""
        field, _, entry = self.where.removeprefix("batch.").partition("[")
        key, _, carried = entry.strip("'\"]").partition(":")
        return field, f"{key}:{number:g}" if carried and number is not None else key


def in_info(name: str, shape: str, meaning: str, stand_in: StandIn, provider: str = OWN) -> Need:
    """A need of this name in the batch's `info`."""
    return Need(name, f"info[{name!r}]", shape, meaning, stand_in, provider=provider)


def own_rollout(name: str) -> str:
    """What provides a need for which the library has no rollout."""
    return f"--rollout FILE.py:FUNCTION, which returns a Rollout with provides={{{name!r}}} and writes info[{name!r}]"


def own_source(name: str) -> str:
    """What provides a need that no rollout can know."""
    return f"a source (training.loop.train) with provides={{{name!r}}} and info[{name!r}] in its batches"


def reward_entry(name: str, *built_in: str) -> str:
    """What provides a need that reward functions may return beside their scores."""
    own = f"FILE.py:FUNCTION whose file says FUNCTION.provides = {{{name!r}}}"
    return f"--rewards {' or '.join([*built_in, own])}"
