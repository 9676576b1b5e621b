"""UI-R1 with its length reward (Enhancing Action Prediction of GUI Agents by RL)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.run_settings import rewards_up_to, run_settings
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import sequence_mean
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.rewards.compositions import with_length_beside_mates
from jaxrl_llm.rewards.transforms import rescore


@method(
    paper="arXiv 2503.21620",
    year=2025,
    test="test_reward_composed.py::test_ui_r1_is_its_worked_example_and_loop",
    beside={"vision": ("screens or images as they are; a prompt describes them", "a policy that sees")},
)
@run_settings(
    rewards_up_to(
        "right", "answer_tags", "gui_kind", "gui_click", why="rewards that add up to `right` in a right answer"
    )
)
def ui_r1(
    right: Annotated[float, CODE] = 3.0,
    slope: Annotated[float, CODE] = -0.5,
    offset: Annotated[float, CODE] = 0.5,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.04,
) -> Algorithm:
    """UI-R1 with its length reward (Enhancing Action Prediction of GUI Agents by RL).

    GRPO, with a term for the length that depends on how hard the prompt is. With p the share of right samples of a
    prompt (score at least `right`), the suitable length is B = p (mean length of the right ones) + (1 - p) (longest),
    and with x = (length - B)/B

        R = r + max(slope x + offset, 0.1) if right,   R = r + min(0.9 x - 0.1, -0.1) if wrong

    so that easy prompts get short answers. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3 penalty
    kl_coefficient. The rewards r themselves are the run's: the paper's are `--rewards answer_tags gui_kind gui_click`
    (tags, the kind of the action, a click inside the box) of 0 or 1 each, and right is their sum, 3. A run takes
    the sum of the weights of its rewards for `right`, so that the length term suits any task. Screenshots are out of
    scope: a prompt describes the screen.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    objective = regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(chain(rescore(with_length_beside_mates(right, slope, offset)), group_relative()), objective)
