from jaxrl_llm.algorithms.method import Algorithm, beside, judge_among_rewards, method, run_settings
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import staged
from jaxrl_llm.objectives import pairwise
from jaxrl_llm.rollouts.judges.judged import Criterion, by_criteria, judged
from jaxrl_llm.rollouts.pairs import best_and_worst_of

TASK = "Every step of the reasoning serves the task."
GROUNDING = "What it says of the situation agrees with what the prompt shows of it."
HISTORY = "It is consistent with the steps that were taken before."


@method(paper="arXiv 2502.20742", test="test_judged_methods.py::test_spo_structured_scores_pairs_and_stages")
@beside("vision", "images of the situation as they are; a prompt describes it", "a policy that sees")
@run_settings(*judge_among_rewards())
def spo_structured(
    judge: Ours[str] = "policy",
    samples: Ours[Count] = 1,
    relevance: Ours[NonNegative] = 1.0,
    grounding: Ours[NonNegative] = 1.0,
    history: Ours[NonNegative] = 1.0,
    beta: Ours[Positive] = 0.1,
    column: Ours[str] = "stage",
    order: Ours[str] = "",
    stage_steps: Ours[Count] = 100,
) -> Algorithm:
    """Structured Preference Optimization for long-horizon planning (SPO).

    A judge checks each sampled chain of reasoning by several criteria: whether it serves the task, agrees with what is
    seen, and is consistent with the steps before. With s_k how often the k-th is met, in `samples` answers, and the
    weights w = relevance, grounding, history,

        score = sum_k w_k s_k / sum_k w_k

    and the best and the worst of a group are the chosen and the rejected response of `dpo` with its beta. Training goes
    from short tasks to long ones: each value of `column` is a stage of stage_steps steps, in ascending order or in
    `order`, values with commas between them, such as ultra-short,short,medium,long.

    judge: "policy", "reference", a URL or a model (docs/rewards.md). The abstract, which is all that we have, gives no
    formula: weights, pairs and stages are the smallest reading of it, and the criteria's words are ours.
    """
    weights = {TASK: relevance, GROUNDING: grounding, HISTORY: history}
    criteria = tuple(Criterion(text, weight) for text, weight in weights.items() if weight)
    names = tuple(name.strip() for name in order.split(",") if name.strip())
    return Algorithm(
        chain(), pairwise(beta=beta), choose_prompts(staged(column, stage_steps, order=names)),
        rollout=best_and_worst_of(judged(by_criteria(criteria, judge, samples=samples))),
    )  # fmt: skip
