from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import thompson


@method(paper="arXiv 2511.18902", test="test_curricula.py::test_vade_tries_prompts_that_are_solved_half_the_time")
def vade(
    kept: Ours[float] = 0.9,
    faded: Ours[float] = 0.99,
    prior_count: Ours[float] = 1.0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """Variance-Aware Dynamic Sampling via Online Difficulty Estimation (VADE).

    A Beta posterior of the success rate of every prompt, and Thompson sampling of the most informative prompts:

        p_q ~ Beta(alpha_q, beta_q), and the B prompts with the largest p_q (1 - p_q) are tried

    With c of G samples right, alpha <- kept alpha + c and beta <- kept beta + G - c for prompts that were tried; the
    others go back to the prior, Beta(prior_count, prior_count), of which they keep the share `faded` of their distance
    in each step. Credit and loss are those of GRPO (clip_low, clip_high, kl_coefficient).

    The equations of the paper were not available: the information p (1 - p) and the form of the two decays are ours. In
    sets of more than 65,536 prompts a step considers that many, chosen at random. Images are not supported.
    """
    curriculum = choose_prompts(thompson(), noise=0.0, prior=(prior_count, prior_count), kept=kept, faded=faded)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=curriculum)
