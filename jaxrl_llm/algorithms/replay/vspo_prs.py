"""VSPO with PRS (Enhancing Agentic RL with Progressive Reward Shaping)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.multi_reward import parse_weights
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, PAPER, NonNegative, ZeroOrOne
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, kl, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.objectives.off_policy import scale_by_info
from jaxrl_llm.replay.into_groups import valued_groups, with_staged_reward


@method(
    paper="arXiv 2512.07478",
    year=2025,
    test="test_replayed.py::test_vspo_is_the_loop",
    beside={"scores": ("length-aware BLEU and the judge of long answers", "the run's reward")},
)
def vspo_prs(
    copies: Annotated[float, OURS] = 2.0,
    highest: Annotated[float, OURS] = 1.0,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.2,
    kl_coefficient: Annotated[NonNegative, PAPER] = 0.001,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    weights: Annotated[str, OURS] = "",
) -> Algorithm:
    """VSPO with PRS (Enhancing Agentic RL with Progressive Reward Shaping).

    Value-based Sampling Policy Optimization: groups of equal rewards are replaced by other groups of the batch, drawn
    with probabilities proportional to difficulty times uncertainty, and repeated prompts are damped:

        V_g = (highest - mean_g) std_g,    A <- A min(n_g, copies)/n_g  for a group that is there n_g times

    The loss is GRPO's, the sequence mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3,
    A with ddof and epsilon. Progressive Reward Shaping: a stage counts only where those before it are met (> 0.5);
    weights "format=0.1,answer=1" names the rewards in the order of the stages, and their weights ("": the run's
    combination). The paper was not available to us: the damping and the form of the stages are our reading of its
    summary. With --tools or --environment the rows of a group are those of episodes, and its copies have their
    observations, which stay masked. Not here: length-aware BLEU and the judge of long answers.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=sequence_mean())
    replay, stages = valued_groups(copies, highest), parse_weights(weights)
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), scale_by_info("copy_weight"))
    return Algorithm(transform, objective, replay=with_staged_reward(replay, stages) if stages else replay)
