"""What a method may need beyond a sampled and scored batch: each need as a value.

A transform or an objective names its needs as texts, "old_logp"; a name may carry a number after a colon:
"internal_logp:6". A `Need` says what that is, how the learner computes it or what else provides it, and what stands in
for it where it is neither computed nor provided: in a report, a comparison, a test.
"""

from collections.abc import Iterable

import jax.numpy as jnp

from jaxrl_llm.core.needs.computed import COMPUTED
from jaxrl_llm.core.needs.provided import PROVIDED
from jaxrl_llm.core.needs.types import Need
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.utils.errors import InputError, unknown

OF_REFERENCE = ("reference_logp", "reference_affinity")
OF_TEACHER = ("teacher_logp", "teacher_entropy", "teacher_token_logp", "teacher_top", "teacher_states")
NEEDS = {need.name: need for need in (*COMPUTED, *PROVIDED)}


def need_of(need: str) -> Need:
    """The value of a need that is given as a text, "internal_logp:6"; InputError where there is no such name."""
    return NEEDS[value_of(need)[0]]


def value_of(need: str) -> tuple[str, float | None]:
    """Name and number of a need; InputError where there is no such name."""
    name, _, number = need.partition(":")
    if name not in NEEDS:
        raise no_need(name) or unknown("need", name, NEEDS)
    try:
        return name, float(number) if number else None
    except ValueError:
        raise InputError(f"the need {need!r} has the value {number!r}, which is not a number") from None


def no_need(name: str) -> InputError | None:
    """The error for a need of what needs no name; None for any other name."""
    why = f"outputs.{name} is always there" if name in ("logp", "outputs") else where_from(name)
    return InputError(f"{name!r} is no need: {why}; leave it out of needs") if why else None


def where_from(name: str) -> str:
    """Where a field of a batch comes from that is no need, in words; "" for any other name."""
    if name not in Trajectories.__dataclass_fields__:
        return ""
    if name in ("reward", "rewards"):
        return f"every scored batch has batch.{name}"
    if name in ("advantages", "returns", "weights", "controls"):
        return f"batch.{name} is what a transform before writes"
    if name in ("info", "totals"):
        return f"batch.{name} holds what others write"
    if Trajectories.__dataclass_fields__[name].default is None:
        return f"batch.{name} is what the source of the batch gives, where it has it"
    return f"batch.{name} is always there"


def values_of(needs: Iterable[str], name: str) -> list[float]:
    """The numbers with which `name` is needed, ascending."""
    found = (value_of(need) for need in needs)
    return sorted(number for known, number in found if known == name and number is not None)


def asks_for(needs: Iterable[str], *names: str) -> bool:
    """Whether one of these names is among the needs, whatever its number."""
    return any(value_of(need)[0] in names for need in needs)


def of_reference(needs: Iterable[str], teacher: bool = False) -> bool:
    """Whether some of them are computed from the reference policy. teacher: whether the teacher is another policy."""
    return asks_for(needs, *OF_REFERENCE) or (of_teacher(needs) and not teacher)


def of_teacher(needs: Iterable[str]) -> bool:
    """Whether some of them are computed from a teacher, which is the reference policy unless there is another one."""
    return asks_for(needs, *OF_TEACHER)


def of_previous(needs: Iterable[str]) -> bool:
    """Whether one of them is computed from the weights before the last update."""
    return "previous_logp" in set(needs)


def of_target(needs: Iterable[str]) -> bool:
    """Whether one of them is computed from a target critic."""
    return asks_for(needs, "target_values")


def fill_in(batch: Trajectories, needs: Iterable[str]) -> tuple[Trajectories, dict[str, Array], dict[str, str]]:
    """The batch with stand-ins for what it lacks of `needs`, the same for outputs.extras, and what each is in words.

    As if old, reference and tempered policies were the behaviour policy, and a critic knew nothing. An unknown entropy
    is 0.
    """
    if batch.entropy is None:
        batch = batch.replace(entropy=jnp.zeros(batch.tokens.shape))
    extras: dict[str, Array] = {}
    words: dict[str, str] = {}
    for text in sorted(needs):
        (name, number), need = value_of(text), need_of(text)
        if name == "feedback":  # absent before the first update
            continue
        if need.of(batch, number) is None:
            words[text] = need.stand_in.words
            if need.stand_in.value is not None:
                batch = need.put(batch, need.stand_in.value(batch, number), number)
        if need.by_outputs is not None:
            extras[need.by_outputs] = need.of(batch, number)
    return batch, extras, words
