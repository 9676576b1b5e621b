"""Rollouts by name, for configurations."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rewards.workers.loading import load_function
from jaxrl_llm.rollouts.agents.program import semi_online, similar_states
from jaxrl_llm.rollouts.auxiliary_prompts import recycled, with_predictions
from jaxrl_llm.rollouts.guidance.candidates import with_candidates
from jaxrl_llm.rollouts.guidance.prefixes import hinted_by_failures, prefixed_groups, reset_to_data, two_policies
from jaxrl_llm.rollouts.guidance.repair import hinted
from jaxrl_llm.rollouts.guidance.responses import demonstrated, demonstrated_before
from jaxrl_llm.rollouts.judges.judged import judged_anchor, judged_grades, judged_pairs, judged_rubric
from jaxrl_llm.rollouts.lookahead import near_ties
from jaxrl_llm.rollouts.programs import down_sampled, forked, group, top_nsigma
from jaxrl_llm.rollouts.trees import budgeted_tree, entropy_forks, tree, valued
from jaxrl_llm.utils.errors import InputError, shown, unknown

_ROLLOUTS: tuple[Callable[..., Rollout], ...] = (
    group, down_sampled, hinted, forked, tree, budgeted_tree, entropy_forks, near_ties, valued, demonstrated,
    demonstrated_before, reset_to_data, prefixed_groups, hinted_by_failures, two_policies, with_predictions, recycled,
    with_candidates, top_nsigma, semi_online, similar_states, judged_pairs, judged_anchor, judged_grades, judged_rubric,
)  # fmt: skip
NAMED = {rollout.__name__: rollout for rollout in _ROLLOUTS}


def _argument(text: str) -> int | float | str:
    if text.isdigit():
        return int(text)
    return float(text) if re.fullmatch(r"-?[0-9]*\.?[0-9]+", text) else text


def rollout_by_name(spec: str) -> Rollout:
    """The rollout NAME, NAME(ARGUMENT, ...), path/to/file.py:FUNCTION or package.module:FUNCTION.

    The function is a program, async (tools, task) -> episodes, or takes no arguments and returns a `Rollout`.
    Raises InputError for an unknown name, wrong arguments, and a file or function that cannot be loaded.

    >>> rollout_by_name("forked(8, 16)").name
    'forked(8, 16)'
    """
    if found := re.fullmatch(r"(\w+)(?:\((.*)\))?", spec.strip()):
        name, arguments = found[1], [part.strip() for part in (found[2] or "").split(",") if part.strip()]
        if name not in NAMED:
            raise unknown("rollout", name, NAMED)
        try:
            inspect.signature(NAMED[name]).bind(*arguments)
        except TypeError:
            raise InputError(f"the rollout {spec} has arguments that {name} does not take") from None
        return NAMED[name](*map(_argument, arguments))
    if ":" not in spec:
        raise unknown("rollout", spec, NAMED)
    function: Any = load_function(spec, "a rollout").function
    if inspect.iscoroutinefunction(function):
        return Rollout(function, spec)
    try:
        made = function()
    except TypeError as error:
        raise InputError(f"the rollout {spec} cannot be built: {error}") from None
    if not isinstance(made, Rollout):
        raise InputError(f"the rollout {spec} returns {shown(made)}, but must be an async function or return a Rollout")
    return made
