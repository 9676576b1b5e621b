from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AboveOne, Count, NonNegative, OfRun, Ours, Paper, Scale, ZeroOrOne
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import clipped_policy, constant, importance_correction


@method(paper="arXiv 2603.21065", test="test_mismatch.py::test_hispo_is_the_loop")
@beside("prover", "the proving environment and its checks", "the run's environment")
def hispo(
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.28,
    dual_clip: Ours[AboveOne] = 3.0,
    sequence_bound: Ours[float] = 0.2,
    token_bound: Ours[float] = 0.3,
    max_length: OfRun[Count | None] = None,
    scale: Paper[Scale] = "std",
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Hierarchical Importance Sampling Policy Optimization (LongCat-Flash-Prover).

    Masks first whole sequences, then single tokens, on which trainer and sampler disagree. With
    d = pi_old / pi_behaviour, s_i its geometric mean over the response, and rho = pi / pi_behaviour,

        H_it = [|s_i - 1| < sequence_bound] [|d_it - 1| < token_bound]
        loss = -1/(N max_length) sum_i sum_t H_it term(rho, A),  term = min(rho, 1 + clip_high) A where A >= 0,
                                                                 clip(rho, 1 - clip_low, dual_clip) A where A < 0

    The clip acts on the full ratio, not on pi / pi_old. The paper prints none of the bounds; we interpret dual_clip as
    a ratio. max_length: the generation budget, a constant as in the paper's text; None is the longest row, as in its
    formula (there of the group, here of the batch). A as in grpo (scale, ddof, epsilon).
    """
    objective = clipped_policy(clip_low, clip_high, constant(max_length), dual=dual_clip)
    masks = (
        importance_correction("geometric", "reject", 1 - sequence_bound, 1 + sequence_bound),
        importance_correction("token", "reject", 1 - token_bound, 1 + token_bound),
    )
    return Algorithm(chain(group_relative(scale, ddof=ddof, epsilon=epsilon), *masks), objective)
