from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AverageName, Code, Count, NonNegative, OfRun, Ours, Paper
from jaxrl_llm.rollouts.guidance.hints import from_column
from jaxrl_llm.rollouts.guidance.repair import rescued, succeeds


@method(
    paper="arXiv 2510.19807",
    test="test_own_rollouts.py::test_scaf_grpo_replaces_one_failure_by_the_right_answer_of_the_weakest_hint",
)
@beside("options", "the options replace_hint_prompt and 6+1+1 of the code", "other repairs of a group")
def scaf_grpo(
    hints_from: Paper[int | None] = None,
    column: Ours[str] = "hints",
    success: Code[float] = 0.0,
    accuracy: Ours[str | None] = None,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    entropy_coefficient: Code[NonNegative] = 0.0,
    epsilon: Code[NonNegative] = 1e-6,
    average: Code[AverageName] = "token",
    max_length: OfRun[Count | None] = None,
    total_steps: OfRun[Count | None] = None,
) -> Algorithm:
    """Scaffolded Group Relative Policy Optimization (Scaf-GRPO).

    Hints of several levels, written beforehand, are a column of the data set: a list of tiers (knowledge, planning,
    solution), each a list of parts; a level shows the first parts of one tier. For a group in which no sample succeeds
    (reward > success; accuracy: this component of it) one answer is sampled with each level. Of those that succeed the
    one of the lowest level replaces the first sample of the group, together with its prompt, so that it is on-policy;
    without one the group stays as it is. Then A_i = (r_i - mean_g)/(std_g + epsilon) with one success in G, and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - entropy_coefficient H

    hints_from: the first step with hints; None: after 15 % of total_steps, as the paper says, or step 50, as in the
    released script, where that is unknown. The options to train on the hinted answer under the plain prompt, or on
    both, are not implemented. The released code leaves out the second tier, and so may the column. average: see grpo
    ("constant" divides by max_length).
    """
    base = grpo(
        clip_low, clip_high, 0.0, entropy_coefficient, epsilon=epsilon, average=average, max_length=max_length
    )  # fmt: skip
    if hints_from is None:
        hints_from = 50 if total_steps is None else round(0.15 * total_steps)
    return replace(base, rollout=rescued(from_column(column), succeeds(success, accuracy), hints_from))
