from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper
from jaxrl_llm.rollouts.auxiliary_prompts import recycled


@method(
    paper="arXiv 2509.22624", test="test_own_rollouts.py::test_spark_asks_of_its_own_answers_what_it_knows_to_be_right"
)
@beside("questions", "questions about questions", "one more round of second prompts")
@beside("vision", "screens or images as they are; a prompt describes them", "a policy that sees")
def spark_co_evolving(
    share: Code[float] = 0.5,
    pointwise: Code[float] = 0.3,
    whole: Code[float] = 0.5,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.001,
) -> Algorithm:
    """Synergistic Policy And Reward Co-Evolving Framework (SPARK).

    The scored samples of a problem become questions with known answers, and the policy that answers them learns to
    judge and to correct its own responses:

        all right    "is the answer a_1 right?": yes
        all wrong    "is the answer a_j right?", j random: no
        mixed        with probability `pointwise` "is a_j right?", j right or wrong alike;
                     else "which of a_i and a_j is right?", one right and one wrong in random order: A or B
        any wrong    the problem again, with a wrong attempt: its whole text with probability `whole`, else its answer

    A judgement's reward is 1 if its boxed answer is the label, a correction's is the run's. Each question has a group
    of its own, and every group the loss of GRPO (clip_low, clip_high, kl_coefficient times k3, A = (r - mean)/std).

    share: the probability with which a problem's judging question is asked, and its correcting one. The released code
    asks 32 of each among 64 problems at most, in an update of their own once a cache has enough of them; here questions
    are answered in the step that makes them, and share its update. It has more rows then, but the policy that answers
    is the one that is judged. Questions about questions are not asked. Images are out of scope.
    """
    return replace(grpo(clip_low, clip_high, kl_coefficient), rollout=recycled(share, pointwise, whole))
