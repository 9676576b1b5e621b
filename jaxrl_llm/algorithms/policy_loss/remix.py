"""Reincarnating Mix-policy Proximal Policy Gradient (ReMix)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import OURS, PAPER, AtLeastOne, Fraction, NonNegative, NonNegativeInt, ZeroOrOne
from jaxrl_llm.core.reference import reset_at
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import entropy, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.anchors import centred_clip, mix_anchors, mixed_anchor
from jaxrl_llm.replay.base import times_as_many, whole_groups


@method(
    paper="arXiv 2507.06892",
    year=2025,
    test="test_trust_region.py::test_remix_by_loop",
    beside={"ratio": ("the raised ratio of updates to data, which falls to 1 at the switch", "--epochs, by hand")},
)
def remix(
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.001,
    entropy_coefficient: Annotated[NonNegative, OURS] = 0.0,
    hold: Annotated[NonNegative, PAPER] = 50,
    every: Annotated[AtLeastOne, PAPER] = 10,
    drop: Annotated[NonNegative, PAPER] = 0.1,
    least: Annotated[Fraction, PAPER] = 0.5,
    past_share: Annotated[float, PAPER] = 0.4,
    replay_age: Annotated[NonNegativeInt, PAPER] = 2,
    switch: Annotated[NonNegativeInt, PAPER] = 50,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Reincarnating Mix-policy Proximal Policy Gradient (ReMix).

    Batches of the first steps mix rollouts of the last few policies with fresh ones. c = pi_old / pi_behaviour centres
    the clip, and there are two anchors, the reference and the policy before the last update:

        loss = -token mean of min(rho A, clip(rho, c - clip_low, c + clip_high) A) - entropy_coefficient H
               + kl_coefficient [lambda k3(pi, reference) + (1 - lambda) k3(pi, previous)]
        lambda(t) = max(1 - drop ceil(max(t - hold, 0) / every), least)  in iteration t = 1, 2, ...

    rho is relative to the behaviour policy; c = 1 for fresh rollouts. A is GRPO's, with ddof and epsilon. At first
    `previous` has the initial weights; it is a further copy of what learns. The sources available to us print no
    coefficients, estimator or clip range.

    The first `switch` iterations: past_share of the groups of a batch come from the last replay_age steps, whole, each
    at most once; they join the fresh ones. Groups with equal rewards are not replayed. After them (the paper: 50 or
    100) all groups are fresh, so that the loss is PPO's clipped one, and the reference is no longer the initial policy
    but that of the switch. lambda goes on by its schedule, which the paper does not restart. The passes over each batch
    are the run's: two in the paper's first phase (--epochs 2), which here the second phase has as well.
    """
    objective = policy_gradient(token_ratio(), centred_clip(clip_low, clip_high), token_mean(), needs={"old_logp"})
    objective -= entropy_coefficient * entropy()
    objective += kl_coefficient * mixed_anchor("k3")
    check_number("past_share", past_share, least=0, below=1)
    check_number("switch", switch, least=0, whole=True)
    ratio = times_as_many(past_share / (1 - past_share))
    replay = whole_groups(**ratio, max_age=replay_age, until=switch) if past_share else None
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), mix_anchors(hold, every, drop, least))
    return Algorithm(transform, objective, replay=replay, reference=reset_at(switch))
