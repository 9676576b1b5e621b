"""What `policy_outputs` shall find beside log-probabilities and entropies."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxrl_llm.core.needs import NEEDS, need_of, value_of, values_of
from jaxrl_llm.utils.errors import InputError


class Wanted(NamedTuple):
    """What `policy_outputs` shall find beside log-probabilities and entropies; static."""

    # Of `readings.READINGS`, or "scores", "experts", "router_load", "elbo_terms", "perturbation" (alone).
    names: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()  # "tempered_logp:T" for each, a multiple of the sampling temperature
    layer: int = 0  # of "internal_logp", counting from 1
    heat: float = 0.0  # of "heated_logp", a multiple of the sampling temperature
    top: int = 0  # of "top_tokens" and "top_logp"; of "most_probable"
    beta: float = 0.0  # of "teacher_divergence"
    masks: int = 0  # of "elbo_terms"


NOTHING = Wanted()
# What objectives find in outputs.extras.
DURING_UPDATE = tuple(need.name for need in NEEDS.values() if need.by_outputs is not None)


# Needs of which a step has one number at most, and the word for it.
ONE_VALUE = (("teacher_divergence", "beta"), ("internal_logp", "layer"), ("heated_logp", "temperature"))


def _at_most_one(needs: list[str], name: str, word: str) -> list[float]:
    if len(found := list(values_of(needs, name))) > 1:
        raise InputError(f"{name} is needed with {len(found)} {word}s, {found}, but only one {word} is supported")
    return found


def wanted_of(needs: Iterable[str], names: Iterable[str] | None = None) -> Wanted:
    """What `policy_outputs` must find for some needs; with `names`, those whose outputs.extras objectives read."""
    needs = [need for need in needs if names is None or value_of(need)[0] in set(names)]
    betas, layers, heats = (_at_most_one(needs, *one) for one in ONE_VALUE)
    known = map(need_of, needs)
    measures = {found for need in known if (found := need.measure if names is None else need.by_outputs) is not None}
    return Wanted(
        names=tuple(sorted(measures - {"tempered_logp"})),
        temperatures=tuple(values_of(needs, "tempered_logp")),
        layer=int(layers[0]) if layers else 0,
        heat=heats[0] if heats else 0.0,
        top=int(max([*values_of(needs, "top_tokens"), *values_of(needs, "top_logp")], default=0)),
        beta=betas[0] if betas else 0.0,
        masks=int(max(values_of(needs, "elbo_terms"), default=0)),
    )


OF_TEACHER = {"teacher_logp": "top_logp", "teacher_top": "most_probable", "teacher_states": "head_states"}


def wanted_of_teacher(needs: Iterable[str]) -> Wanted:
    """What `policy_outputs` must find of a teacher for some needs."""
    needs = list(needs)
    names = {OF_TEACHER[name] for need in needs if (name := value_of(need)[0]) in OF_TEACHER}
    return Wanted(tuple(sorted(names)), top=int(max(values_of(needs, "teacher_top"), default=0)))
