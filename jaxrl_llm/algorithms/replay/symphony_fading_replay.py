from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, NonNegativeInt, Ours, Positive, ZeroOrOne
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.replay.base import faded, whole_groups


@method(paper="arXiv 2512.10477", test="test_replayed.py::test_symphony_is_the_loop_over_replayed_groups")
@presets(
    first={"fade": 7.0, "fade_power": 2.0, "fade_tail": 0.0},
    second={"fade": 70.0, "fade_power": 30.0, "fade_tail": 0.02},
)
def symphony_fading_replay(
    fade: Code[NonNegative] = 7.0,
    fade_power: Code[Positive] = 2.0,
    fade_tail: Code[NonNegative] = 0.0,
    replay_share: Ours[Fraction] = 1.0,
    replay_groups: Ours[NonNegativeInt] = 1024,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Fading replay (Symphony: A Heuristic Normalized Calibrated Advantage Actor Critic).

    Stored data are not cut off at an age, but become rarer: with x = i/n for data of the i-th of the n steps in the
    store (the newest: x = 1),

        p proportional to tanh(fade x^fade_power + fade_tail x^2)

    round(replay_share m) groups are drawn with replacement and join the m groups of a step. The paper controls robots
    by an actor and a critic. Here GRPO takes their place: A is within the group, with ddof and epsilon, and the loss is
    the token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho relative to the policy that sampled
    the token. The store has the newest replay_groups groups with different rewards.

    preset "first" is the code's first version (fade 7, fade_power 2, fade_tail 0), "second" its second (70, 30, 0.02),
    a sharp recent part with a weak tail.
    """
    replay = whole_groups(replay_share, faded(fade, fade_power, fade_tail), replay_groups)
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), clipped_policy(clip_low, clip_high), replay=replay)
