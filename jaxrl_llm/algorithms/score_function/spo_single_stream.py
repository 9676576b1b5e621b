"""Single-stream Policy Optimization (SPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.trackers import tracked_baseline
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.run_settings import one_sample, run_settings
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, RUN, Count, Fraction, NonNegative, NonNegativeInt
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.trackers import tracked_uncertainty
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay.drift_probe import last_responses
from jaxrl_llm.rollouts.programs import group, with_start_value


@method(paper="arXiv 2509.13232", year=2025, test="test_critic_free.py::test_spo_is_the_loop_over_updates")
@run_settings(one_sample("one response to each prompt, whose baseline is the prompt's own history"))
def spo_single_stream(
    half_life: Annotated[float, PAPER] = 0.06,
    least_kept: Annotated[Fraction, PAPER] = 0.875,
    most_kept: Annotated[Fraction, PAPER] = 0.96,
    prompts: Annotated[Count | None, RUN] = None,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.28,
    epsilon: Annotated[NonNegative, PAPER] = 1e-8,
    least_weight: Annotated[float, CODE] = 0.05,
    stored: Annotated[NonNegativeInt, OURS] = 16384,
    profile: Annotated[str, OURS] = "",
    profile_samples: Annotated[int, PAPER] = 8,
) -> Algorithm:
    """Single-stream Policy Optimization (SPO).

    No groups: the baseline is a tracker's estimate for the prompt, and advantages are standardised over the batch.

        A = r - v(x),    A <- (A - mean) / (std + epsilon),    and then the tracker is updated,
        alpha <- k alpha + r,    beta <- k beta + 1 - r,    v = alpha / (alpha + beta)
        k = clip(2^(-D / half_life), least_kept, most_kept)

    in PPO's clipped loss (clip_low, clip_high), mean over tokens. D is how far the policy moved since it last answered
    x: the mean over the tokens of that response of |log pi_now - log pi_then|, both before the update of their step, by
    the learner; 0 at the first visit. (The code has both after it.) The run keeps the last responses of `stored`
    prompts, and the forward pass before an update reads those of the batch's prompts; no gradient step does. Where a
    response is no longer kept, k = least_kept.

    Prompts are drawn without replacement in proportion to sqrt(v (1 - v)) + least_weight. Trackers start at v = 0.5
    with the weight of one observation; or, with the column `profile` of the data set, which has the mean reward of
    profile_samples samples of each prompt before training, at v = (n mean + 1/2)/(n + 1) with the weight
    1/(1 - least_kept). prompts: size of the tracker (None: one entry for each prompt of the run); prompt ids beyond it
    share entries. Several responses to a prompt are one update. The run's group_size should be 1.
    """
    column, offline = profile or None, profile_samples if profile else 0
    rule = tracked_uncertainty(least_weight, half_life, least_kept, most_kept, column, profile_samples)
    transform = tracked_baseline(prompts, half_life, least_kept, most_kept, epsilon, offline)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        transform, objective, curriculum=choose_prompts(rule), replay=last_responses(stored),
        rollout=with_start_value(group(), profile) if profile else None,
    )  # fmt: skip
