from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import drop_rows, mixed_groups, truncated_rows, uniform_groups
from jaxrl_llm.advantages.multi_reward import mixed_by, uniform_by
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.algorithm import DynamicSampling
from jaxrl_llm.core.annotations import AboveOne, AverageName, Code, Count, NonNegative, OfRun, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import average_by_name, clipped_policy
from jaxrl_llm.rewards.transforms import soft_overlong_penalty


@method(paper="arXiv 2503.14476", test="test_group_relative.py::test_dapo_is_the_loop")
@presets(paper={"average": "prompt"}, code={"average": "token", "dual_clip": 10.0})
def dapo(
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    dynamic_sampling: Paper[bool] = True,
    rounds: Code[Count] = 10,
    accuracy: Ours[str | None] = None,
    overlong_buffer: Ours[int | None] = None,
    max_length: OfRun[Count | None] = None,
    overlong_filter: Paper[bool] = False,
    average: Code[AverageName] = "token",
    dual_clip: Paper[AboveOne | None] = None,
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Decoupled Clip and Dynamic Sampling Policy Optimization (DAPO).

    GRPO without KL and with four changes:
    1. clip-higher: min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with clip_high > clip_low;
    2. dynamic_sampling: prompts are sampled, for up to `rounds` batches, until enough groups are neither all right nor
       all wrong; the other groups are dropped. Decided by the component `accuracy`, or by the combined reward before
       the penalty of 4, which would make equally right answers differ;
    3. token mean: the sum over all tokens of the batch / their number;
    4. soft overlong penalty: 0 up to max_length - overlong_buffer tokens, then falling linearly to -1 at max_length,
       added to the reward; off unless both are given (paper: 4096 of 20480; the run fills in max_length).
    overlong_filter (ablated in the paper): truncated samples leave the loss, but not the statistics of their group.

    average: the paper's formula divides by the tokens of a prompt's group, then averages over prompts ("prompt"); its
    code, like all others, divides by those of the whole batch ("token", the default). dual_clip: 10 in the authors'
    recipe, not in the paper. preset "paper" or "code" sets both. A = (r - mean) / (std + epsilon) with ddof. The
    paper's rewards are -1 and 1.
    """
    uniform, mixed = (uniform_groups, mixed_groups) if accuracy is None else (uniform_by(accuracy), mixed_by(accuracy))
    steps = [drop_rows(uniform)] if dynamic_sampling else []
    if overlong_buffer is not None and max_length is not None:
        steps.append(soft_overlong_penalty(max_length, overlong_buffer))
    steps.append(group_relative(ddof=ddof, epsilon=epsilon))
    if overlong_filter:
        steps.append(drop_rows(truncated_rows))
    mean = average_by_name(average, max_length)
    resample = DynamicSampling(mixed, rounds) if dynamic_sampling else None
    return Algorithm(chain(*steps), clipped_policy(clip_low, clip_high, mean, dual=dual_clip), curriculum=resample)
