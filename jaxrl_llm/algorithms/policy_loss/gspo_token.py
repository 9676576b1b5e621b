from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale, ZeroOrOne
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, sequence_ratio


@method(paper="arXiv 2507.18071", test="test_sequence_level.py::test_gspo_is_the_loop")
def gspo_token(
    clip_low: Paper[NonNegative] = 3e-4,
    clip_high: Paper[NonNegative] = 4e-4,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """GSPO with Token-Level Advantages (GSPO, section GSPO-token).

    As gspo, but each token has the value s_i and the gradient of its own log-probability,
    s_it = sg(s_i) exp(logp_it - sg(logp_it)), and is clipped by its own advantage:

        loss = -1/N sum_i 1/|o_i| sum_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)

    With GRPO's advantages (scale, ddof, epsilon), equal on all tokens of a response, it is exactly gspo; use it with
    transforms whose advantages differ between tokens.
    """
    objective = policy_gradient(sequence_ratio(gradient="token"), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
