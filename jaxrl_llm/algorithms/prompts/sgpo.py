from dataclasses import replace
from typing import Annotated

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, Ours, Paper, Range
from jaxrl_llm.core.parts import part
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.utils.errors import InputError, shown


@method(paper="arXiv 2606.08854", test="test_curricula.py::test_the_worked_example_of_sgpo")
def sgpo(
    stage_steps: Ours[int] = 100,
    profile: Ours[str] = "",
    profile_samples: Paper[int] = 8,
    trivial: Paper[float] = 0.75,
    unsolved_share: Paper[float] = 0.1,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """Sorted Group Policy Optimization (sGPO: Trading Inference FLOPs).

    A profile of each prompt's success rate p before training decides which prompts are used, how many samples each
    gets, and in which order: p > trivial is dropped, of p = 0 a random share unsolved_share is kept, and

        G = 2 where p > 1/4,    4 where 1/8 < p <= 1/4,    8 where 0 < p <= 1/8,

    about the group that has one success. The prompts with G = 2 are trained on first, for stage_steps steps, then those
    with 4, then those with 8; the unsolved ones that are kept belong to each stage. Credit and loss are GRPO's
    (clip_low, clip_high, kl_coefficient) with the population standard deviation, so that A is 1 or -1 in a mixed pair.

    profile: the column of the data set with p; if empty, the first pass over the prompts measures it, with
    profile_samples samples each, and trains as GRPO does meanwhile. The run's group_size must be profile_samples; steps
    with smaller groups have more of them. The paper trains each stage to convergence.
    """
    rule = sorted_by_profile(stage_steps, profile or None, profile_samples, trivial, unsolved_share)
    return replace(grpo(clip_low, clip_high, kl_coefficient, ddof=0), curriculum=choose_prompts(rule, least_tried()))


GROUP_SIZES = (2, 4, 8)
_UNKNOWN, _TRIVIAL, _UNSOLVED, _LEFT_OUT = 0, 100, 101, 102  # classes of a profile beside the group sizes


def profile_class(rate: Array, trivial: float) -> Array:
    """uint8[n]: the group size 2, 4 or 8 of prompts by success rate f64[n], or the class trivial or unsolved.

    The size is the largest power of two up to 1/rate, from 2 to 8. A rate above `trivial` is trivial, 0 unsolved.

    >>> profile_class(np.arange(9) / 8, 0.75).tolist()
    [101, 8, 4, 2, 2, 2, 2, 100, 100]
    """
    size = np.exp2(np.floor(np.log2(1 / np.maximum(rate, 1 / 64)) + 1e-9))
    sizes = np.clip(size, GROUP_SIZES[0], GROUP_SIZES[-1])
    return np.where(rate > trivial, _TRIVIAL, np.where(rate <= 0, _UNSOLVED, sizes)).astype(np.uint8)


@part
def sorted_by_profile(
    steps: Count,
    column: str | None = None,
    samples: Annotated[int, Range(least=8)] = 8,
    trivial: Fraction = 0.75,
    unsolved: Fraction = 0.1,
) -> RuleOf:
    """Group sizes by success rate before training, and the prompts of each size in turn, the easiest first.

    A profile gives each prompt a class, see `profile_class`. Trivial prompts are dropped, and all unsolved ones but a
    random share `unsolved`. Prompts with groups of 2 are trained on for `steps` steps, then those with groups of 4, and
    those with groups of 8 to the end of the run; the unsolved ones belong to each. Sizes without a prompt are skipped.
    Groups are smaller than the run's `samples`, so a step has more of them: prompts times samples stays.

    column: has the success rates, measured before the run; None: the first pass over the set measures them, with
    `samples` samples a prompt. Raises InputError for rates outside 0 to 1, and where the run's group_size is not
    `samples`.
    """
    if samples % GROUP_SIZES[-1]:
        raise InputError(f"sorted_by_profile: samples is {samples}, but must be a multiple of {GROUP_SIZES[-1]}")

    def make(facts: PromptFacts) -> Machine:
        chance = np.random.default_rng([facts.seed, 4]).random(facts.size)[facts.rank]

        def classes(ids: Array, rate: Array) -> Array:
            found = profile_class(rate, trivial)
            return np.where((found == _UNSOLVED) & (chance[ids] >= unsolved), _LEFT_OUT, found)

        def turn(classes: Array, size: int, least: int) -> int:
            """The group size of the first cluster with prompts, from `least` on; else `size`."""
            return next((G for G in GROUP_SIZES if least <= G and np.any(classes == G)), size)

        start: State = {"class": np.full(facts.size, _UNKNOWN, np.uint8), "size": 0, "left": 0}
        if column is not None:
            rates = facts.column(column)
            if wrong := [x for x in rates if isinstance(x, bool | str) or not 0 <= x <= 1]:
                raise InputError(f"the column {column!r} has {shown(wrong[0])}, but must have rates from 0 to 1")
            start["class"] = classes(np.arange(facts.size), np.asarray(rates, np.float64)).astype(np.uint8)
            start["size"], start["left"] = turn(start["class"], GROUP_SIZES[-1], 0), steps

        def left_out(state: State, prompts: Prompts) -> Array:
            mine, now = state["class"][prompts.ids], state["size"]
            if now == 0:  # the first pass; what is measured waits for it to end
                return where(Why.LATER, mine != _UNKNOWN)
            later = (mine == _UNKNOWN) | ((mine > now) & (mine < _TRIVIAL))
            why = where(Why.LATER, later) + where(Why.EARLIER, (mine < now) & ~later)
            return why + where(Why.SOLVED, mine == _TRIVIAL) + where(Why.UNSOLVED, mine == _LEFT_OUT)

        def observe(state: State, outcome: Outcome) -> State:
            results = outcome.results
            if state["size"] == 0:
                new = state["class"][results.ids] == _UNKNOWN
                ids = results.ids[new]
                known = changed(state["class"], ids, classes(ids, results.mean[new]))
                if np.any(known == _UNKNOWN):
                    return {"class": known}
                return {"class": known, "size": turn(known, GROUP_SIZES[-1], 0), "left": steps}
            if state["left"] > 1:
                return {"left": state["left"] - 1}
            return {"size": turn(state["class"], state["size"], state["size"] + 1), "left": steps}

        def size(state: State, count: int) -> int:
            return count * samples // state["size"] if state["size"] else count

        def counts(state: State, prompts: Prompts, total: int, random: np.random.Generator) -> Array:
            each = state["size"] or samples
            if total != len(prompts.ids) * each:
                raise InputError(f"this curriculum is for groups of {samples} samples: set group_size to {samples}")
            return np.full(len(prompts.ids), each)

        def metrics(state: State) -> dict[str, float]:
            return {"group_size": float(state["size"])}

        reasons = (Why.SOLVED, Why.UNSOLVED, Why.LATER, Why.EARLIER)
        return Machine(start, None, left_out, size, counts, observe, metrics, reasons)

    return make
