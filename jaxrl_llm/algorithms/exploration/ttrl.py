from jaxrl_llm.advantages import group_relative, vote
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import AverageName, Code, NonNegative, Ours, Recalled, Ties
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import average_by_name, clipped_policy


@method(paper="arXiv 2504.16084", test="test_exploration.py::test_ttrl_against_a_loop")
@run_needs(answer_key="votes of answers; without it whole completions vote")
def ttrl(
    keep: Recalled[float | None] = 32,
    ties: Ours[Ties] = "content",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Recalled[NonNegative] = 0.0,
    average: Code[AverageName] = "sequence",
) -> Algorithm:
    """Test-Time Reinforcement Learning (TTRL).

    No labels: the most frequent answer of a group of samples is taken to be right, and the reward is agreement with it:
    r_i = 1 where answer_i is the majority's, else 0, also for samples without an answer. `keep` of the group's samples
    (None: all) are trained on, with GRPO's advantages among them; they are chosen at random (released code: the first).
    ties between equally frequent answers are broken by "content", independent of the order of samples, or in favour of
    the "first" sample (released code). PPO's clip with clip_low and clip_high; kl_coefficient > 0 adds the k3 penalty.
    average: GRPO's "sequence", or "token" as in the released code; see `objectives.averages.average_by_name`.

    Answers are info["answer_key"] int32[N] (-1: none), which rewards such as number_match give, else whole completions.
    Special rollout: 64 votes per prompt.
    """
    mean = average_by_name(average)
    objective = clipped_policy(clip_low, clip_high, mean, kl_coefficient=kl_coefficient)
    return Algorithm(chain(vote(keep, ties), group_relative()), objective)
