from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper, Recalled
from jaxrl_llm.rollouts.guidance.prefixes import prefixed_groups


@method(
    paper="arXiv 2601.18795",
    test="test_own_rollouts.py::test_prefixrl_compares_samples_after_the_same_prefix_and_trains_on_none_of_it",
)
def prefixrl(
    column: Ours[str] = "trace",
    prefix_low: Recalled[float] = 0.4,
    prefix_high: Recalled[float] = 0.8,
    prefixes: Ours[int] = 1,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.0,
) -> Algorithm:
    """On-policy RL on prefixes of off-policy traces (PrefixRL, Reuse your FLOPs).

    The prompts are all problems x, and for hard ones also (x, y*_1 ... y*_k), with y* a right trace that was found
    before, by rejection sampling or by another model. The trace's beginning is given as if the policy had written it:

        o ~ pi(. | x, y*_1 ... y*_k),    r = reward of y*_1 ... y*_k o,    A = (r - mean)/(std + 1e-6)

    over the samples of one context (x, k), and GRPO's clipped loss (clip_low, clip_high; kl_coefficient times k3) on o
    alone: no likelihood and no importance weight of the prefix. The method is a choice of contexts, so any on-policy
    loss would do.

    Rollout: a row's `column` stores its traces, a text or a list of texts, and is empty for problems that are not hard.
    A visit of a hard problem makes the plain group and `prefixes` more, each of one trace, cut at a share of its length
    that is uniform from prefix_low to prefix_high. Traces come from `jaxrl sample`, say; the method does not look for
    them. A step has more rows than prompts_per_step x group_size where problems are hard. Without traces it is GRPO.
    """
    plain = grpo(clip_low, clip_high, kl_coefficient)
    return replace(plain, rollout=prefixed_groups(column, prefix_low, prefix_high, prefixes))
