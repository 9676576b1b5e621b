"""Implicit step rewards (iStar, first posted as OPRL)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxrl_llm.advantages.turns.implicit import IMPLICIT, above_first_turns, implicit_rewards
from jaxrl_llm.advantages.turns.turns import compared, of_episode, same_group, turn_advantages
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.turn_credit.gigpo import clipped
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, PAPER, NonNegative
from jaxrl_llm.objectives.preference.implicit import implicit_preference
from jaxrl_llm.utils.errors import require_choice

FORMS: dict[str, dict[str, Any]] = {
    "rloo": {"baseline": "leave_one_out"},
    "grpo": {"scale": "std"},
    "centred": {},
}


@method(
    paper="arXiv 2509.19199",
    year=2025,
    test="test_turn_models.py::test_istar_worked_example",
    needs={"state_key": "how many turns there are", "turns": "episodes of several turns"},
)
@presets(
    paper={"over": "sum", "steps": "all", "success": None},
    code={"over": "mean", "steps": "first", "success": 0.0},
)
def istar(
    beta: Annotated[NonNegative, PAPER] = 0.05,
    step_weight: Annotated[float, PAPER] = 1.0,
    form: Annotated[Literal["rloo", "grpo", "centred"], PAPER] = "rloo",
    over: Annotated[Literal["sum", "mean"], PAPER] = "sum",
    steps: Annotated[Literal["all", "first"], PAPER] = "all",
    success: Annotated[float | None, OURS] = None,
    reward_coefficient: Annotated[NonNegative, OURS] = 1.0,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, PAPER] = 0.0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Implicit step rewards (iStar, first posted as OPRL).

    A second copy of the policy, pi_phi, learns beside it by DPO which episodes of a prompt are better. Its log-ratio to
    the policy before the update, summed over the tokens of a turn, is the reward of that turn:

        r_t = beta sum_l (log pi_phi(y_l) - log pi_old(y_l)),    D = sum_t r_t
        L_phi = reward_coefficient mean over pairs of -log sigmoid(D(+) - D(-))
        A_t = f(R) + step_weight f(r_t),    f(x) = n / (n - 1) (x - mean x)

    R is the return of the episode; f(R) is over the episodes of the group, and f(r_t) over all turns of these. form:
    "rloo" is as above, "centred" without the factor, and "grpo" with 1 / (deviation + epsilon) in its place (n - 1).
    A_t is on all tokens of the turn, in PPO's clip (clip_low, clip_high) with kl_coefficient k3, averaged over tokens.
    Turns are scored with pi_phi as it was before the update, which then changes both models, each by its own loss. A
    row is an episode.

    preset "code": as in the released code D is the mean of the turns' rewards (over "mean"), the baseline of a turn is
    over the first turns of the group's episodes (steps "first"), and pairs are of returns above `success` and others.
    success None: of all returns that differ, for graded outcomes. Penalties for invalid actions (0.1) are the
    environment's.

    pi_phi takes the memory of a second model that is trained, all of it with adapters too. It is not sampled from, and
    ends with the run. --optimizer.critic-learning-rate is its learning rate (the paper: 1e-6, twice that of the
    policy), and one bound of the gradient is for both.
    """
    require_choice("form", form, tuple(FORMS))
    require_choice("steps", steps, ("all", "first"))
    chosen, rewards = FORMS[form], implicit_rewards(beta)
    if steps == "all":
        step = compared(rewards, same_group(), epsilon=epsilon, **chosen)
    else:
        step = above_first_turns(rewards, epsilon=epsilon, **chosen)
    credit = turn_advantages(
        of_episode(epsilon=epsilon, **chosen), step, weights=(1.0, step_weight), needs={"state_key", *IMPLICIT}
    )
    objective = clipped(clip_low, clip_high, kl_coefficient)
    return Algorithm(credit, objective + reward_coefficient * implicit_preference(beta, over, success))
