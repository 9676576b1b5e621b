from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.advantages import generalised_advantages, kl_reward, whiten_advantages
from jaxrl_llm.advantages.returns import last_actions, scored_actions, terminal_rewards, whiten
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Ours, Paper, Positive, ZeroOrOne
from jaxrl_llm.core.parts import Array, Trajectories, chain, part, stateless_part
from jaxrl_llm.objectives import clipped_policy, value_loss
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.guidance.prefixes import reset_to_data
from jaxrl_llm.utils.errors import is_off


@part
def unless_cut_off(score: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the scores, but `score` for rows that reached the token limit."""
    return lambda b: jnp.where(b.truncated, score, b.scores)


@method(paper="arXiv 2404.08495", test="test_prefixed.py::test_drpo_by_loop")
def drpo_dataset_reset(
    column: Ours[str] = "response",
    share: Code[float] = 1.0,
    no_end_score: Code[float | None] = -1.0,
    kl_coefficient: Code[NonNegative] = 0.05,
    gamma: Code[float] = 1.0,
    lam: Code[float] = 0.95,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Code[NonNegative] = 0.1,
) -> Algorithm:
    """Dataset Reset Policy Optimization (DR-PO).

    PPO whose completions do not all start at the prompt. With probability `share` a sample is reset to a state of the
    data: with y* the response of the row's `column`, of L >= 2 tokens, it is given y*_1 ... y*_h, h uniform from 1 to
    L - 1, and the policy writes the rest; otherwise h = 0. The score is that of the whole text (no_end_score where it
    has no end token; None: its own score). Every action's reward gets -kl_coefficient (logp - logp_ref), rewards are
    divided by their standard deviation (about their mean, which stays), and with A from GAE (gamma, lam), R = A + V,
    and A then whitened,

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean_t max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    over the policy's own tokens t > h. The released code takes the value loss and the moments of rewards and advantages
    over the given tokens too, which also have a KL reward there. A given token comes before every action, so that apart
    from these moments A and R of the actions are the same without it; here the critic learns from the policy's own
    tokens only. Each sample draws its own h: the critic is the baseline, and no group is compared.
    """
    transforms = [
        *([] if no_end_score is None else [rescore(unless_cut_off(no_end_score))]),
        *([] if is_off(kl_coefficient) else [kl_reward(kl_coefficient)]),
        whiten_rewards(),
        generalised_advantages(gamma, lam),
        whiten_advantages(),
    ]
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip)
    return Algorithm(chain(*transforms), objective, rollout=reset_to_data(column, share))


@stateless_part()
def whiten_rewards(batch: Trajectories, ddof: ZeroOrOne = 1, epsilon: NonNegative = 1e-8) -> Trajectories:
    """Divide the rewards of the actions, `terminal_rewards`, by their standard deviation about their mean, which stays:

        r <- (r - mean) / sqrt(var + epsilon) + mean

    over the actions of scored rows. The scores stay as they are: `token_rewards` becomes what they lack, and includes
    what `turn_rewards` had. Chain this after what adds token rewards, and before what turns them into advantages.
    """
    new = whiten(terminal_rewards(batch), scored_actions(batch), ddof, epsilon, shift=False)
    score = jnp.where(last_actions(batch), jnp.nan_to_num(batch.scores)[:, None], 0.0)
    return batch.replace(token_rewards=new - score, turn_rewards=None)
