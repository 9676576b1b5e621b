"""Adaptive Hints with Difficulty Priors (ADHint)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, NonNegative, ZeroOrOne
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, joint_key
from jaxrl_llm.core.transform import Transform, chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.hint_tokens import balanced_kinds, hinted_rows, hints_under_old, shielded_hints
from jaxrl_llm.rollouts.guidance.hint_lengths import hinted_by_failures
from jaxrl_llm.utils.errors import require_choice


@part
def apart_with_hints(credit: Transform) -> Transform:
    """A transform for which the plain and the hinted rows of a group are groups of their own."""

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        groups = joint_key(batch.group, hinted_rows(batch).astype(jnp.float32))
        state, out = credit.apply(state, batch.replace(group=groups))
        return state, out.replace(group=batch.group)

    return Transform(credit.init, apply, credit.needs | {"hint_tokens"})


@method(paper="arXiv 2512.13095", year=2025, test="test_hint_tokens.py::test_adhint_is_its_loop")
def adhint(
    hinted: Annotated[int, OURS] = 4,
    hint_low: Annotated[float, OURS] = 0.1,
    hint_high: Annotated[float, OURS] = 0.9,
    noise: Annotated[float, OURS] = 0.05,
    column: Annotated[str, OURS] = "solution",
    compared: Annotated[Literal["kind", "group"], OURS] = "kind",
    balance: Annotated[bool, OURS] = True,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Adaptive Hints with Difficulty Priors (ADHint).

    A group of plain samples comes first. D_N = 1 - their mean reward (within 0 and 1) is the difficulty, and unless it
    is 0, `hinted` more samples of the group begin with the first floor(w T) of the T tokens of a known solution, in a
    column of the data set:

        w = (hint_high - hint_low) D_N + hint_low + noise N(0, 1), within [0, 1]

    With D_H = 1 - the mean reward of these, A_i = (r_i - mean)/(std + epsilon) over the rows of its kind (compared
    "group": of both kinds) is multiplied, with balance, by rho = D_N/(D_N + D_H + epsilon) for plain rows with A > 0
    and hinted rows with A < 0, and by 1 - rho for the others, divided by the group's mean. The hint is trained on, too:

        loss = -mean_t c_t min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)

    c_t = exp(-|H_t - H_own| / H_own) on the tokens of a hint, with H_own the mean entropy of the row's continuation,
    c_t = 0 on those of a hint with A < 0, and c_t = 1 on all others. A hint's ratio is to the policy before the update,
    which scores it.

    The paper's schedule and masking rule are known to us; the forms of the weights rho and c_t, the normal noise, one
    hint for all hinted samples, and all numbers are ours, so results need not be the paper's. Without solutions this is
    `grpo` with a token mean.
    """
    require_choice("compared", compared, ("kind", "group"))
    credit = group_relative(ddof=ddof, epsilon=epsilon)
    credit = apart_with_hints(credit) if compared == "kind" else credit
    transforms = [hints_under_old(), credit, *([balanced_kinds(epsilon)] if balance else [])]
    objective = policy_gradient(token_ratio(), shielded_hints(clip(clip_low, clip_high)), token_mean())
    rollout = hinted_by_failures(column, hinted, hint_low, hint_high, noise)
    return Algorithm(chain(*transforms), objective, rollout=rollout)
