from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Paper
from jaxrl_llm.core.parts import part
from jaxrl_llm.curriculum.budgets import apportion
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import PromptFacts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2511.06307", test="test_curricula.py::test_drive_keeps_the_prompts_that_fail")
@beside("supervised", "the curated supervised stage before it", "supervised training before the run")
@beside("limits", "other token limits in the second stage", "a second run")
def drive_pre_grpo(
    first_steps: Paper[int] = 32,
    phases: Paper[str] = "72x64,50x32,25x32",
    times: Paper[int] = 8,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """Data curation for RL with verifiable reward in competitive programming (DRIVE).

    A curriculum of two stages over GRPO (clip_low, clip_high, kl_coefficient). For first_steps steps all prompts are
    tried in turn, with the run's group_size; then come `phases`, "72x64,50x32" for 64 steps on 72 prompts, then 32 on
    50. A phase has the prompts of the one before that were solved least,

        P_k = the n_k prompts of P_{k-1} with the lowest mean reward,

    each with `times` as many samples, and a step has so many fewer prompts. The paper measures the rates with the
    policy at the start of a phase; ours are those of each prompt's last group. Ties are broken at random, prompts that
    were never tried come last, and prompts with a rate of 0 stay. Both stages have the run's max_new_tokens (paper: 24k
    tokens, then 32k). The tests that score programs are a reward function of the run.
    """
    rule = hardest_in_phases(first_steps, parse_phases(phases), times)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(rule, least_tried()))


def parse_phases(text: str) -> tuple[tuple[int, int], ...]:
    """(prompts, steps) of each phase.

    >>> parse_phases("72x64, 50x32")
    ((72, 64), (50, 32))
    """
    found = [one.strip().split("x") for one in text.split(",") if one.strip()]
    if not found or not all(len(one) == 2 and all(x.isdigit() and int(x) for x in one) for one in found):
        raise InputError(f"drive_pre_grpo: phases is {text!r}, but must be PROMPTSxSTEPS,... such as 72x64,50x32")
    return tuple((int(n), int(steps)) for n, steps in found)


@part
def hardest_in_phases(first_steps: Count, phases: Sequence[tuple[Count, Count]], times: Count = 1) -> RuleOf:
    """All prompts for `first_steps` steps, then phases with the hardest ones only, each with `times` as many samples.

    phases: (n, steps) of each. A phase has those n prompts of the one before whose last group had the lowest mean
    reward; ties are broken at random, and prompts without a group come last. The last phase lasts to the end of the
    run. In phases a step has fewer prompts, so that the number of its samples stays.
    """
    starts = np.cumsum([first_steps, *(steps for _, steps in phases)])[:-1] if phases else np.zeros(0, np.int64)

    def make(facts: PromptFacts) -> Machine:
        def observe(state: State, outcome: Outcome) -> State:
            phase = int(np.sum(outcome.before.step + 1 >= starts))
            if phase == state["phase"]:
                return {}
            every = outcome.everything()
            rate = np.where(np.isnan(every.rate), np.inf, every.rate)
            rate[~state["members"][every.ids]] = np.nan  # sorted behind all others
            ties = np.random.default_rng([facts.seed, 3, phase]).random(len(rate))
            hardest = every.ids[np.lexsort((ties, rate))][: phases[phase - 1][0]]
            members = np.zeros(facts.size, bool)
            members[hardest] = state["members"][hardest]
            return {"phase": phase, "members": members}

        return Machine(
            {"phase": 0, "members": np.ones(facts.size, bool)},
            excluded=lambda state, prompts: where(Why.EASIER, ~state["members"][prompts.ids]),
            size=lambda state, count: count if state["phase"] == 0 else -(-count // times),
            counts=lambda state, prompts, total, random: apportion(np.ones(len(prompts.ids)), total),
            observe=observe,
            metrics=lambda state: {"phase": float(state["phase"]), "members": float(np.sum(state["members"]))},
            reasons=(Why.EASIER,),
        )

    return make
