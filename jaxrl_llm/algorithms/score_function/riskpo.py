from typing import Literal

from jaxrl_llm.advantages import bundled_risk
from jaxrl_llm.algorithms.classic.reinforce import averaged_gradient
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, Fraction, NonNegative, Ours, Paper
from jaxrl_llm.objectives import clip


@method(paper="arXiv 2510.00911", test="test_sets.py::test_riskpo_is_the_loop")
def riskpo(
    alpha: Code[NonNegative] = 0.2,
    beta: Code[NonNegative] = 0.8,
    tail_weight: Code[NonNegative] = 1.5,
    bundle_size: Code[int] = 5,
    quantiles: Code[Literal["batch", "mix", "track"]] = "track",
    quantile_rate: Code[Fraction] = 0.1,
    credit: Code[Literal["score", "std", "sum_mean", "uniform"]] = "std",
    natural_baseline: Code[bool] = False,
    risk: Paper[Literal["mixed", "seeking"]] = "mixed",
    ragged: Ours[Literal["repeat", "smallest"]] = "repeat",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    average: Code[AverageName] = "token",
) -> Algorithm:
    """Risk-based Policy Optimization (RiskPO).

    Maximises a risk measure of the score with more weight on the tail below its alpha-quantile a, and none above its
    beta-quantile b. Scores X_j are sums over bundles of bundle_size prompts, with one response to each:

        A_j = (w g_C + g_R) / (w + 1) / std X,    g_C = -max(a - X, 0) / alpha,    w = tail_weight
        g_R = (max(X - a, 0) - max(X - b, 0) + c) / (beta - alpha),    c = a - b if natural_baseline else 0

    risk "seeking" has max(X - b, 0) / (1 - beta) in place of g_C. credit, the advantage of the response to question q:
    "uniform" A_j; "std" A_j / std_q; "score" 0.5 A_j if r > 0 else 1.5 A_j; "sum_mean" A_j d_q / sum_q d_q,
    d = r - mean_q (which diverges where the d_q nearly cancel). quantiles: "track" updates
    q <- q + quantile_rate (level - share of X < q) after each batch; "batch" uses those of the bundle's own X, to which
    the released "track" reduces; "mix" the mean of both. ragged, for groups of different sizes: as many X as the
    largest has responses ("repeat" cycles through the others) or as the smallest ("smallest"; the rest gets 0). A
    constant X has std 1. Bundles: info["bundle"] int32[N], or consecutive prompt ids. The loss is PPO's clip (clip_low,
    clip_high) without KL; average as in `grpo`.

    Defaults are those of the authors' script for DAPO-math, except credit, which is from the one for MATH (where beta
    is 0.9, with natural_baseline); both use verl's token mean.
    """
    transform = bundled_risk(
        risk, alpha, beta, tail_weight, bundle_size, quantiles, quantile_rate, credit, natural_baseline, ragged
    )
    return Algorithm(transform, averaged_gradient(clip(clip_low, clip_high), average))
