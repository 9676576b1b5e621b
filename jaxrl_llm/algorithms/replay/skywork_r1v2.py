from dataclasses import replace

from jaxrl_llm.advantages.filters import keep_stored_advantages
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours, ZeroOrOne
from jaxrl_llm.core.parts import chain
from jaxrl_llm.replay.base import refilled


@method(paper="arXiv 2504.16656", test="test_skywork_r1v2.py::test_it_is_the_loop_over_refilled_steps")
@beside("vision", "the vision tower and its pairs", "images")
def skywork_r1v2(
    buffer_rows: Ours[NonNegativeInt] = 2048,
    max_age: Ours[Count | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Group-relative policy optimisation with a Selective Sample Buffer (Skywork R1V2).

    The second stage of the paper; the first is a run of `mpo`, whose weights this one starts from (--model RUN). GRPO
    whose groups of equal rewards, which teach nothing, are filled up from a buffer: it has the newest `buffer_rows`
    rows with A != 0, of at most max_age steps before (None: any), and as many rows as the equal groups had are drawn
    from it in proportion to |A|, each at most once. With A of a row's own group, at the time when it was sampled,

        A = (r - mean_g)/(std_g + epsilon)
        loss = mean over rows of -(1/|y|) sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + kl_coefficient k3(pi, reference)

    and rho relative to the policy that sampled the token, of drawn rows an earlier one. Where the buffer has too few,
    equal groups stay. The paper's reward is a rule's accuracy, a format and a reward model's score: --rewards
    number_match answer_tags model:PATH. Size, age limit and weights of the buffer are read from its description.
    """
    base = grpo(clip_low, clip_high, kl_coefficient, ddof=ddof, epsilon=epsilon)
    before = chain(base.transform, keep_stored_advantages())
    return replace(base, transform=before, replay=refilled(buffer_rows, max_age, ddof, epsilon))
