"""Zone of Proximal Policy Optimization (ZPPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.zero_variance_groups import at_most_parts, informative_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import OURS, PAPER, Fraction, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.failed_prompts import hard_buffer
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.guidance.candidates import with_candidates


@method(paper="arXiv 2606.18216", year=2026, test="test_prefixed.py::test_zppo_worked_example_and_loop")
def zppo(
    column: Annotated[str, OURS] = "teacher",
    threshold: Annotated[float, PAPER] = 0.5,
    teachers: Annotated[int, PAPER] = 4,
    words: Annotated[int, PAPER] = 512,
    rewriter: Annotated[str | None, OURS] = None,
    replay_share: Annotated[Fraction, PAPER] = 0.25,
    second_share: Annotated[float, PAPER] = 0.25,
    most_stored: Annotated[int, PAPER] = 10_000,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.28,
    dual_clip: Annotated[float | None, PAPER] = 10.0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Zone of Proximal Policy Optimization (ZPPO).

    A frozen teacher answers in the prompts of hard problems, and every trained token is the policy's. A problem x whose
    samples have a mean reward rbar_x < threshold gets groups of further prompts:

        BCQ    a right response of the teacher and a wrong sample, shuffled: one is right, one is wrong
        NCQ    all wrong samples, and the distinct answers that they state

    BCQ needs a right one among `teachers` responses. Of these groups a step keeps second_share times the number of new
    problems, in ascending order of rbar_x, BCQ before NCQ. With S the groups whose rewards differ,

        A'_i = r_i - mean_g,    A_i = (A'_i - mu_S)/(sigma_S + epsilon) in S, else 0

    with moments over all rows of S, and the loss is a token mean of the clipped surrogate (clip_low, clip_high,
    dual_clip), without KL. Problems with rbar_x < threshold enter a buffer of most_stored problems, first in, first
    out, and leave it when rbar_x >= threshold; replay_share times as many problems as new ones are drawn from it.

    Rollout: the row's `column` has the teacher's responses, a text or a list of texts: the teacher is frozen, so it
    may answer before the run. Candidates are rewritten in at most `words` tokens, by `rewriter` (FILE.py:FUNCTION of
    problem and solution, a call of the teacher, as in the paper) or, with None, by the policy. Groups beyond the bound
    are sampled and left out, because which are kept is known only when all problems are answered.
    """
    check_number("replay_share", replay_share, least=0)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(
        chain(at_most_parts(second_share, replay_share, threshold, most_stored), informative_relative(epsilon)),
        objective,
        curriculum=hard_buffer(replay_share, threshold, most_stored),
        rollout=with_candidates(column, threshold, teachers, words, rewriter),
    )
