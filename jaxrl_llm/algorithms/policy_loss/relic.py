import math

import jax.numpy as jnp

from jaxrl_llm.advantages import whiten_advantages
from jaxrl_llm.advantages.functional import gae, terminal_rewards
from jaxrl_llm.advantages.returns import at_last_action, explained_variance, needed_values, scored_actions
from jaxrl_llm.advantages.tokens import newest_window, unfinished_rows
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, Fraction, FractionNumber, NonNegative, OfRun, Ours, Positive
from jaxrl_llm.core.parts import Array, Trajectories, chain, stateless_part
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.objectives import clipped_policy, entropy, value_loss


@method(paper="arXiv 2410.02751", test="test_relic.py::test_it_is_the_loop")
@beside(
    "sink_kv",
    "a learned key and value in attention, which mean that nothing is there (Sink-KV)",
    "the run's --sink-slots, with all weights trained: 0 by default",
)
def relic(
    full_every: Ours[Count] = 4,
    segments: Ours[Count] = 8,
    gamma: Ours[Fraction] = 1.0,
    lam: Ours[Fraction] = 0.95,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    entropy_coefficient: Ours[NonNegative] = 0.0,
    whiten: Ours[bool] = True,
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Partial updates within very long episodes (ReLIC).

    A step ends when each episode has a window of l new tokens or is finished, and trains on all that are in flight,
    with PPO's losses of policy and critic on the tokens of S:

        S = the newest window                where the episode goes on, and this is not its full_every-th window
        S = all tokens of the episode so far    in every full_every-th window, and where the episode is finished
        delta_t = r_t + gamma V_{t+1} - V_t,    V_{n+1} = V_n where the episode goes on after n tokens, else 0
        A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t

    Each token of S sees the whole episode before it, and the next window is drawn with keys and values of the new
    weights: a step continues an episode from its tokens, with an environment too. Ratios are to the policy that drew
    the token, which for older windows is an older one; clip_low and clip_high bound them, value_clip the critic's step;
    value_coefficient is the weight of its loss. entropy_coefficient: entropy bonus. whiten: A is standardised over the
    tokens of S.

    l is the run's `segment_tokens`, or the longest completion, max_length, divided by `segments`. Without windows
    (segments 1), as in the laboratory, it is `ppo` without a penalty. With full_every 1 no update is partial.

    `t_ppo` trains the policy on windows alone, and the critic once an episode is finished. Here the critic learns in
    each update, from its own value at the end of a window. The paper is of embodied agents with images, in contexts of
    64,000 steps, and its model has Sink-KV: each key-value head also has n learned keys and values without position,
    0 at first, and gives sum_j softmax(q k_j / sqrt(d)) v_j over those and tokens. A run has them with `sink_slots` n,
    which train with all weights, so not beside LoRA, and which stay in the run's own checkpoints. By default it has
    none, since they change a model that was trained without.
    """
    window = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip)
    credit = partial_updates(full_every, gamma, lam)
    return Algorithm(
        chain(credit, whiten_advantages()) if whiten else credit,
        objective - entropy_coefficient * entropy(),
        strategy=Partial(segment_tokens=window, train_unfinished=True),
    )


def windows_so_far(batch: Trajectories) -> Array:
    """int32[N]: in how many steps, one after the other, a row's actions were drawn; 0 without an action."""
    step, acted = batch.policy_step, jnp.any(batch.action_mask, axis=1)
    first = jnp.min(jnp.where(batch.action_mask, step, 2**30), axis=1)
    newest = jnp.max(jnp.where(batch.action_mask, step, -1), axis=1)
    return jnp.where(acted, newest - first + 1, 0).astype(jnp.int32)


@stateless_part(needed_values())
def partial_updates(
    batch: Trajectories, full_every: Count = 4, gamma: FractionNumber = 1.0, lam: FractionNumber = 0.95
) -> Trajectories:
    """Generalised advantages of episodes so far; other tokens than those of S, see `relic`, weigh nothing.

    A row that goes on has the reward 0 so far, and no score is read. One without new tokens, that waits for its group,
    weighs nothing. Writes the control "explained_variance", over S.
    """
    goes_on, window = unfinished_rows(batch), newest_window(batch)
    known = batch.replace(reward=jnp.where(goes_on, 0.0, batch.scores))
    V, mask = batch.need("values"), scored_actions(known)
    after = jnp.where(goes_on, at_last_action(V, batch), 0.0)
    A, R = gae(terminal_rewards(known), V, mask, gamma, lam, bootstrap=after)
    full = ~goes_on | (jnp.any(window, axis=1) & (windows_so_far(batch) % full_every == 0))
    now = mask & (window | full[:, None])
    before = jnp.ones(batch.tokens.shape) if batch.weights is None else batch.weights
    return known.replace(
        advantages=jnp.where(now, A, 0.0), returns=jnp.where(now, R, 0.0), weights=before * now
    ).with_controls(explained_variance=explained_variance(V, R, now))
