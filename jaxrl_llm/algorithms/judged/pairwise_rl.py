from dataclasses import replace

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, beside, judge_among_rewards, method, run_settings
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Positive
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.judges.judged import against_anchor, judged


@method(paper="arXiv 2504.04950", test="test_judged_methods.py::test_pairwise_rl_worked_example")
@beside("training", "the training of the judge on both orders of human pairs", "supervised steps on its verdicts")
@beside("probability", "the probability of the judge's yes token as its score", "the mean of several answers")
@run_settings(*judge_among_rewards())
def pairwise_rl(
    column: Ours[str] = "anchor",
    judge: Ours[str] = "reference",
    samples: Ours[Count] = 1,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.05,
    gamma: Ours[float] = 1.0,
    lam: Ours[float] = 0.95,
) -> Algorithm:
    """Pairwise Proximal Policy Optimization against anchor responses (Pairwise-RL).

    A judge always reads pairs, in training as in use: a response is compared with the anchor of its prompt, a response
    in a column, and `ppo` raises the probability of beating it. With s(y, y') how often the judge prefers y when it is
    shown first, the reward at the last token is

        w = (s(y, anchor) + 1 - s(anchor, y)) / 2,   0 to 1

    in which what the judge gives to a place cancels. The critic estimates the probability that a beginning will win.
    judge: "policy", "reference", a URL or a model (docs/rewards.md); samples: its answers in each order, whose mean is
    s. clip_low, clip_high, value_clip, kl_coefficient, gamma and lam as in `ppo`. The paper's equations were not
    available to us.
    """
    base = ppo(
        clip_low=clip_low, clip_high=clip_high, value_clip=value_clip, kl_coefficient=kl_coefficient, gamma=gamma,
        lam=lam,
    )  # fmt: skip
    return replace(base, rollout=judged(against_anchor(column, pair_judge(judge, samples=samples))))
