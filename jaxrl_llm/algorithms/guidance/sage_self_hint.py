from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AverageName, Count, NonNegative, OfRun, Ours, Paper, ZeroOrOne
from jaxrl_llm.rollouts.guidance.hints import own_levels
from jaxrl_llm.rollouts.guidance.repair import retried, succeeds


@method(
    paper="arXiv 2602.03143", test="test_own_rollouts.py::test_sage_trains_on_the_first_level_of_its_hints_that_helps"
)
@beside("light", "SAGE-light: a level of each prompt, by epoch", "a curriculum of levels")
def sage_self_hint(
    levels: Paper[int] = 3,
    tries: Ours[int] = 3,
    column: Ours[str] = "solution",
    success: Paper[float] = 0.0,
    accuracy: Ours[str | None] = None,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    kl_coefficient: Paper[NonNegative] = 0.0,
    ddof: Paper[ZeroOrOne] = 0,
    epsilon: Ours[NonNegative] = 1e-6,
    average: Ours[AverageName] = "token",
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Self-hint aligned GRPO with privileged supervision (SAGE).

    For a group without a success (reward > success; accuracy: this component of it) the policy of the step writes
    hints of rising strength, all `levels` in one answer, from the solution in a column of the data set: the key idea, a
    direction, detailed guidance, never the answer. For each level in turn the group is sampled again, all samples with
    the same hint, until one succeeds. The last group is trained on, with the hint h in its prompt: A_i = (r_i -
    mean_g)/(std_g + epsilon) with ddof 0, and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3,
        rho = pi(y_t | x, h, y_<t) / pi_behaviour(y_t | x, h, y_<t)

    tries: answers of the policy among which one must have a JSON list of that many texts; without one the group stays
    as it is (rollout/unhinted counts such groups; the released code takes an earlier step's hint). The paper writes
    A log pi, summed over tokens; its code has the clipped ratio of the base algorithm. average: see grpo ("constant"
    divides by max_length). The variant SAGE-light, with one level for each prompt that changes between epochs, is not
    implemented.
    """
    base = grpo(
        clip_low, clip_high, kl_coefficient, ddof=ddof, epsilon=epsilon, average=average, max_length=max_length
    )  # fmt: skip
    return replace(base, rollout=retried(own_levels(column, levels, tries), succeeds(success, accuracy)))
