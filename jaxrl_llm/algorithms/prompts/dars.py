import math
from collections.abc import Sequence
from typing import Literal

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import drop_rows, uniform_groups
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AtLeastTwo, Code, Divisor, NonNegative
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.episode import known_scores
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part, scored_samples


@method(paper="arXiv 2508.13755", test="test_own_rollouts.py::test_dars_samples_more_of_a_prompt_the_fewer_are_right")
def dars(
    rule: Code[Literal["equal", "hard"]] = "equal",
    most_samples: Code[AtLeastTwo | None] = None,
    scale: Code[Divisor] = "none",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
) -> Algorithm:
    """Difficulty Adaptive Rollout Sampling (DARS: Depth-Breadth Synergy in RLVR).

    The sizes of a prompt's N advantages add up to N S, S = 2 a (1 - a) at the accuracy a, so that hard prompts count
    less. Prompts with a < 0.5 therefore get a second stage of samples,

        rule "equal"  ceil((N/2 - N S) / S) more, up to the peak of N S        (the paper's ET)
        rule "hard"   ceil(((1 - a) N - N S) / S) more, harder ones beyond it  (HW)

    a is 0.5/N if no sample is right, and a prompt has at most most_samples (None: 32 for "equal", 64 for "hard").
    scale "std" divides the advantages by the standard deviation, and takes S = 2 sqrt(a (1 - a)) and the peak N. Over
    both stages, A_i = r_i - mean_g, without prompts that are all right or all wrong, in PPO's clipped loss (clip_low,
    clip_high), mean over tokens. DARS-B, the large breadth, is a setting of the run: many prompts_per_step, one
    minibatch, 2 epochs.
    """
    return Algorithm(
        chain(drop_rows(uniform_groups), group_relative(scale)),
        clipped_policy(clip_low, clip_high),
        rollout=topped_up(most_samples or (64 if rule == "hard" else 32), rule, scale == "std"),
    )


def extra_samples(rate: float, first: int, most: int, rule: Literal["equal", "hard"], scaled: bool = False) -> int:
    """Samples beside the `first` ones, after which a prompt's advantages add up to a target; 0 from a rate of 0.5 on.

    N samples at the success rate a have advantages r - a whose sizes add up to N S, S = 2 a (1 - a), which is N/2 at
    most; divided by the standard deviation (scaled) S = 2 sqrt(a (1 - a)), and N at most. The target of "equal" is that
    peak, and of "hard" 2 (1 - a) times the peak. A rate of 0 counts as 0.5/N. With the first there are at most `most`.

    >>> [extra_samples(right / 8, 8, 64, "equal") for right in range(5)]
    [27, 11, 3, 1, 0]
    """
    if rate >= 0.5:
        return 0
    a = 0.5 / first if rate < 1e-6 else rate
    share, peak = (2 * math.sqrt(a * (1 - a)), first) if scaled else (2 * a * (1 - a), first / 2)
    target = peak if rule == "equal" else 2 * (1 - a) * peak
    return max(0, min(math.ceil((target - first * share) / share - 1e-9), most - first))


@program_part(
    "topped_up({most}, {rule})",
    demands=lambda most, **_: Demands(variable_size=True, max_episodes=lambda G: max(G, most)),
)
async def topped_up(
    tools: Tools, task: Task, most: AtLeastTwo = 32, rule: Literal["equal", "hard"] = "equal", scaled: bool = False
) -> list[Episode]:
    """A group of samples, and a second stage with more of them for prompts that fewer than half of the first solve.

    See `extra_samples` for their number; `most` bounds the group. The success rate is the mean reward of the first
    samples, each clipped to [0, 1]; without a score there is no second stage. Groups differ in size.
    """
    first = await scored_samples(tools, task.prompt, range(task.samples))
    rate = success_rate(first)
    extra = 0 if rate is None else extra_samples(rate, len(first), most, rule, scaled)
    later = range(task.samples, task.samples + extra)
    return [*first, *await scored_samples(tools, task.prompt, later)]


def success_rate(episodes: Sequence[Episode]) -> float | None:
    """The mean of the rewards, each clipped to [0, 1]; None if no episode has a score."""
    known = known_scores(episodes)
    return float(known.clip(0.0, 1.0).mean()) if known.size else None
