"""Needs of methods that only some runs provide: a run without one is refused unless it excludes it by name.

`algorithms.method.Facts` says of each method what it needs; --algorithm.without NEED, several separated by commas,
excludes them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxrl_llm.algorithms import CATALOGUE
from jaxrl_llm.algorithms.method import facts_of
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import NEEDS, need_of
from jaxrl_llm.rewards.specs import component_name, unweighted
from jaxrl_llm.rewards.workers.loading import declared
from jaxrl_llm.utils.errors import InputError, unknown


def needs_of(method: str) -> Mapping[str, str]:
    """The needs of a method of the catalogue that only some runs provide; none for any other."""
    facts = facts_of(CATALOGUE[method]) if method in CATALOGUE else None
    return {} if facts is None else facts.needs


def missing(method: str) -> dict[str, tuple[str, str]]:
    """What a method lacks in a run with the default rollout, by name: what it is, and what would provide it."""
    return {name: (what, NEEDS[name].provider or "") for name, what in needs_of(method).items()}


def names_in(without: str | Iterable[str]) -> tuple[str, ...]:
    """The names in a comma-separated text, or in a sequence.

    >>> names_in(" tree, answer_key "), names_in("")
    (('tree', 'answer_key'), ())
    """
    parts = without.split(",") if isinstance(without, str) else without
    return tuple(name for part in parts if (name := str(part).strip()))


def check_whole(
    method: str,
    needs: Iterable[str] = (),
    without: str | Iterable[str] = (),
    provided: Iterable[str] = (),
    option: str = "--algorithm.without {}",
) -> None:
    """InputError, in one line, unless the run provides or excludes each need of the method.

    needs: those of the algorithm. without: names of excluded needs. provided: needs that the run provides, such as its
    rollout's `provides`. option: how `without` is given, for the message. Also raises InputError for a name in
    `without` that is no need of the method which a part of the run would provide.
    """
    given = names_in(without)
    own = {need_of(need).name for need in needs if need_of(need).provider}  # which the method's rollout may provide
    known = {*missing(method), *own}
    for name in given:
        if name not in known:
            raise unknown(f"part that {method} lacks", name, known)
    if unmet := _unmet(needs, {*given, *provided}):
        said = "; ".join(_use(name, needs_of(method).get(name)) for name in unmet)
        names = ",".join([*given, *unmet])
        raise InputError(f"{method} needs {said}. To train without: {option.format(names)}")


def check_needs(needs: Iterable[str], provided: Iterable[str]) -> None:
    """InputError, in one line, if an algorithm that is given as a value needs what the run does not provide."""
    if unmet := _unmet(needs, set(provided)):
        raise InputError("the algorithm needs " + "; ".join(_use(name) for name in unmet))


def _unmet(needs: Iterable[str], provided: set[str]) -> list[str]:
    """The sorted names of the needs that nothing provides: neither the learner, the loop nor `provided`."""
    return [name for need in sorted(needs) if need_of(need).provider and (name := need_of(need).name) not in provided]


def _use(name: str, what: str | None = None) -> str:
    """An unmet need, and what would provide it."""
    return f"{name} ({what or NEEDS[name].meaning}), which no part of this run provides: use {NEEDS[name].provider}"


def going_without(algorithm: Algorithm, names: Iterable[str]) -> Algorithm:
    """The algorithm without some of its needs, for which it then uses its own defaults."""
    dropped, transform, objective = set(names), algorithm.transform, algorithm.objective
    return replace(
        algorithm,
        transform=replace(transform, needs=transform.needs - dropped),
        objective=replace(objective, needs=objective.needs - dropped),
        phases=None if algorithm.phases is not None and algorithm.phases.provides & dropped else algorithm.phases,
    )


def provided_by_rewards(rewards: Iterable[str]) -> set[str]:
    """The needs that the named reward functions provide, as components of the reward or as entries beside it."""
    listed = list(rewards)
    parts = {name for name in map(component_name, listed) if name in NEEDS and NEEDS[name].where.startswith("rewards[")}
    return parts | {name for text in listed for name in declared(unweighted(text)) if name in NEEDS}
