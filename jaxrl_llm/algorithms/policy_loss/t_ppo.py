import math

import jax.numpy as jnp

from jaxrl_llm.advantages.functional import reward_to_go, terminal_rewards
from jaxrl_llm.advantages.returns import explained_variance, needed_values, scored_actions
from jaxrl_llm.advantages.tokens import extended_gae, newest_window, unfinished_rows
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, FractionNumber, NonNegative, OfRun, Ours, Positive
from jaxrl_llm.core.parts import Trajectories, stateless_part, totals_of
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.objectives import clipped_policy, value_loss


@method(paper="arXiv 2506.15050", test="test_truncated.py::test_it_is_its_loop")
def t_ppo(
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = None,
    value_coefficient: Ours[NonNegative] = 1.0,
    gamma: Ours[float] = 1.0,
    lam: Ours[float] = 0.95,
    segments: Ours[Count] = 3,
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Truncated Proximal Policy Optimization (T-PPO).

    A step ends when each completion has a window of l new tokens or is finished, and trains on all completions. The
    policy is trained on the windows only, with the extended GAE over their tokens t up to the last one, n,

        delta_t = r_t + gamma V_{t+1} - V_t,  V_{n+1} = V_n where the completion continues, 0 where it is finished
        A_t = sum over j >= t of (gamma lam)^(j-t) delta_j
        loss = -mean over the windows' tokens of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    and the critic on all tokens of the completions that were finished in this step: value_coefficient/2 times the mean
    of (V - R)^2 with R their final reward (lambda 1, gamma 1). Without a finished completion there is no value loss.
    value_clip as in `ppo` (the paper has none). A completion that waits for the rest of its group is in the batch with
    zero weight.

    l is the run's `segment_tokens`, or the longest completion, max_length, divided by `segments`: 8k of 24k in the
    paper. With segments 1 every completion is finished in its step, as in a rollout without windows. While the critic
    is untrained, windows before the last have no learning signal: train it first (the run's `critic_steps`).
    """
    window = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip)
    strategy = Partial(segment_tokens=window, train_unfinished=True)
    return Algorithm(windowed_advantages(gamma, lam), objective, strategy=strategy)


@stateless_part(needed_values())
def windowed_advantages(batch: Trajectories, gamma: FractionNumber = 1.0, lam: FractionNumber = 0.95) -> Trajectories:
    """`extended_gae` of `terminal_rewards` for the policy, Monte Carlo returns for the critic.


    Only the newest window has advantages and keeps its weights. Rows finished in this step have `returns`, the
    undiscounted reward-to-go of each of their actions, in all their windows; the critic does not train on other rows.
    info["value_weights"] f32[N, L] are the weights of `value_loss`: equal on the tokens that the critic trains on, 0
    elsewhere, their sum the number of rows with an action; all 0 if no row was finished. Finished rows without a score
    have advantages 0. The reward of an unfinished row is ignored. combine: maps the values of several heads to one;
    have advantages 0. The reward of an unfinished row is ignored. Writes the control "explained_variance", of the
    returns by the values.
    """
    values = batch.need("values")
    window, unfinished = newest_window(batch), unfinished_rows(batch)
    # An unfinished row has no terminal reward yet.
    known = batch.replace(reward=jnp.where(unfinished, 0.0, batch.scores))
    rewards, scored = terminal_rewards(known), scored_actions(known)
    advantages = extended_gae(rewards, values, window & scored, unfinished, gamma, lam)
    ended = (jnp.any(window, axis=1) & ~unfinished)[:, None] & scored
    returns = jnp.where(ended, reward_to_go(rewards, ended), 0.0)
    trained = jnp.where(ended, batch.loss_weights, 0.0)
    total = jnp.sum(trained)
    rows = totals_of(batch.replace(totals=None))["rows"]
    return (
        batch.replace(advantages=advantages, returns=returns, weights=batch.loss_weights * window)
        .with_info(value_weights=jnp.where(total > 0, trained * rows / jnp.where(total > 0, total, 1.0), 0.0))
        .with_controls(explained_variance=explained_variance(values, returns, ended))
    )
