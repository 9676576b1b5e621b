from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AboveOne, Code, NonNegative, Paper, Scale, ZeroOrOne
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.auxiliary_prompts import with_predictions


@method(
    paper="arXiv 2510.03259",
    test="test_own_rollouts.py::test_masa_rewards_predictions_of_rate_length_and_notions_in_a_group_of_their_own",
)
@beside("efficient", "MASA-efficient: cloning, gating, cutoff by the predictions", "a rollout that stops early")
def masa(
    predictions: Paper[int | None] = None,
    levels: Code[int] = 8,
    base: Paper[float] = 0.01,
    inclusive: Code[bool] = False,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    dual_clip: Code[AboveOne | None] = 10.0,
    scale: Code[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Meta-Awareness via Self-Alignment (MASA).

    Beside its solutions of a problem, the policy answers a second prompt, which asks for a prediction of them: their
    length l, the share d of right ones (a whole number of `levels`), and the notions they use. With l_i, c_i and t_i
    the tokens, correctness (score > 0.5) and text of solution i,

        r_length = 1 if min_{c_i = 1} l_i < l < max_{c_i = 1} l_i, else 0     (inclusive: <=; the paper's form)
        r_rate   = base^|d - mean c|
        r_notion = share of the predicted notions, without those of the problem's text, that more right than wrong t_i
                   contain
        r        = (r_length + r_rate + r_notion)/3, with 0 for a field that is missing

    Predictions (as many as solutions where `predictions` is None) are a group of their own with A = (r - mean)/std,
    like the solutions with their scores (`scale` is the divisor), and one token mean of the clipped surrogate
    (clip_low, clip_high, dual_clip) is over both; no KL. Notions are compared as text, in lower case and
    without the s of a plural.

    A step has more rows than prompts_per_step x group_size: those of the predictions. The paper's faster variant, which
    clones expert predictions, skips problems by their predicted rate and stops long solutions, is not included.
    """
    objective = clipped_policy(clip_low, clip_high, dual=dual_clip)
    credit = group_relative(scale, ddof=ddof, epsilon=epsilon)
    return Algorithm(credit, objective, rollout=with_predictions(predictions, levels, base, inclusive))
