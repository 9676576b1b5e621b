from jaxrl_llm.advantages import clip_advantages, group_relative, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.algorithm import TurnPhases
from jaxrl_llm.core.annotations import Code, NonNegative, ZeroOrOne
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import clip, policy_gradient, regularised, scale_by_info, sequence_mean, span_ratio


@method(paper="arXiv 2602.06554", test="test_sequence_level.py::test_seeupo_is_the_loop_with_two_turns")
@run_needs(turns="episodes of several turns")
@beside("orders", "turns forward and in random order, ablations", "other phases")
def seeupo(
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.002,
    limit: Code[float] = 3.0,
    ddof: Code[ZeroOrOne] = 1,
    factor_clip: Code[float] = 0.2,
) -> Algorithm:
    """Sequence-Level Sequential Update Policy Optimisation (SeeUPO).

    The turns of an episode are treated as agents that share weights and are updated one after the other, the last turn
    first. A_i = R_i - mean_g R (no group deviation), standardised over the batch (ddof) and clipped to +-limit. In the
    phase of turn t, whose tokens alone count, old log-probabilities are computed anew, and

        loss = -1/N sum_i 1/|o_i| sum_t min(s M_i A_i, clip(s, 1 - clip_low, 1 + clip_high) M_i A_i)
               + kl_coefficient mean k3

    with s the turn's geometric mean ratio, differentiated per token as in `gspo_token`, N the episodes that have the
    turn, and the mean of k3 over these of the mean over tokens. M_i is the ratio, clipped to 1 +- factor_clip, by which
    the phases of later turns changed theirs (`core.algorithm.TurnPhases`). A batch takes as many updates as its
    longest episode has turns. For a single turn the method is GSPO with batch-normalised advantages. The paper's other
    orders of turns, forward and random, are ablations and not here.

    Without the turn factor (--algorithm.without turn_factor) all turns are updated at once.
    """
    average = sequence_mean()
    ratio = span_ratio("turn", against="old", gradient="token")
    credit = (group_relative("none"), whiten_advantages("sequences", ddof), clip_advantages(limit))
    objective = policy_gradient(ratio, clip(clip_low, clip_high), average)
    return Algorithm(
        chain(*credit, scale_by_info("turn_factor")), regularised(objective, average, kl_coefficient=kl_coefficient),
        phases=TurnPhases(factor_clip),
    )  # fmt: skip
