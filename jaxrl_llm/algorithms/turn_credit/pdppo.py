from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import explained_variance, needed_values, whiten_advantages
from jaxrl_llm.advantages.turns import TURNS, ends_of_turns, on_tokens, rewards_of_turns, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Fraction, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Array, Trajectories, chain, stateless_part
from jaxrl_llm.objectives import clipped_policy, entropy, head_value_loss


@method(paper="arXiv 2504.05150", test="test_pdppo.py::test_targets_and_advantages_are_the_loop")
@run_needs(turn_rewards="rewards of turns", turns="episodes of several turns")
@beside(
    "post_decision",
    "the state after the last token of a reply, before the observation; W is read one token before",
    "values after the last token",
)
@beside(
    "largest",
    "the larger of two advantages, one by each critic, whose expectation is above that of both",
    "the paper's equations of the two",
)
def pdppo(
    gamma: Ours[Fraction] = 1.0,
    lam: Ours[Fraction] = 0.95,
    last_token: Ours[Literal["own", "shared"]] = "own",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    entropy_coefficient: Ours[NonNegative] = 0.0,
    whiten: Ours[bool] = False,
) -> Algorithm:
    """Post-Decision Proximal Policy Optimization (PDPPO).

    A turn has two steps. The reply a_k to the conversation s_k gives the post-decision state (s_k, a_k), which nothing
    random parts from s_k, and then the environment answers at random. The critic has a head for each state: V is read
    at the first token of a reply, W at its last. With r_k the rewards of turns (the score is added to the last),

        W(s_k, a_k) <- r_k + gamma ((1 - lam) V(s_{k+1}) + lam y_V,k+1) = y_W,k    0 after the last turn
        V(s_k)      <- (1 - lam) W(s_k, a_k) + lam y_W,k = y_V,k
        A = W(s_k, a_k) - V(s_k) on the tokens of the reply

    so that no observation after the reply is in its advantage, where the sum of later errors in GAE has them all. With
    right values A is the expectation of that sum, given the reply. lam 0: each head learns from the other alone.
    A value depends on what comes before its token, so W sees all of a reply but its last token. last_token "own": that
    one has the advantage r_k + gamma V(s_{k+1}) - W(s_k, a_k), which is noise where the token only ends the reply, and
    all that is known of it where it says more; a reply of one token has no other. "shared": that of the reply.

    The loss is PPO's clip (clip_low, clip_high), averaged over tokens, and value_coefficient times the clipped
    (value_clip) squares of the heads, each averaged over turns, less entropy_coefficient times the entropy. whiten:
    advantages are standardised over tokens. That is off, as it makes the critic's errors as large as the signal where
    W - V is small: in the laboratory's `tool_first` the reward then falls again. A row is an episode, and its end ends
    it.

    The paper is of control: lot-sizing and a frozen lake, with networks of the state's variables, and an optimiser for
    each critic. What is here is its pair of critics on a random transition. We read its abstract and a summary, which
    has the larger of two advantages; the reading as turns, W - V, the targets and all numbers are ours.
    """
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * head_value_loss(HEADS, value_clip)
    credit = post_decision_advantages(gamma, lam, last_token)
    objective -= entropy_coefficient * entropy()
    return Algorithm(chain(credit, whiten_advantages()) if whiten else credit, objective)


HEADS = 2  # V, W


def post_decision_targets(
    rewards: Array, V: Array, W: Array, mask: Array, gamma: float | Array = 1.0, lam: float | Array = 0.95
) -> tuple[Array, Array, Array]:
    """(y_V, y_W, V of the next turn), f32[N, K] each, of turns; 0 outside the mask bool[N, K]. All f32[N, K].

    >>> one = jnp.ones((1, 2))
    >>> [x[0].tolist() for x in post_decision_targets(one, 2 * one, 3 * one, one > 0, 1.0, 0.0)]
    [[3.0, 3.0], [3.0, 1.0], [2.0, 0.0]]
    """

    def back(later: tuple[Array, Array], now: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        value, target = later
        r, v, w, there = now
        y_w = r + gamma * ((1 - lam) * value + lam * target)
        y_v = (1 - lam) * w + lam * y_w
        found = tuple(jnp.where(there, x, 0.0) for x in (y_v, y_w, value))
        return (jnp.where(there, v, value), jnp.where(there, y_v, target)), found

    zero = jnp.zeros(rewards.shape[0])
    over = tuple(jnp.where(mask, x, 0.0).T for x in (rewards, V, W))
    y_v, y_w, after = jax.lax.scan(back, (zero, zero), (*over, mask.T), reverse=True)[1]
    return y_v.T, y_w.T, after.T


@stateless_part(TURNS | needed_values(HEADS) | {"turn_rewards"})
def post_decision_advantages(
    batch: Trajectories, gamma: Fraction = 1.0, lam: Fraction = 0.95, last_token: Literal["own", "shared"] = "own"
) -> Trajectories:
    """A = W - V on the tokens of each reply, and what both heads learn; see `pdppo`.

    Writes info["head_returns"] f32[N, L, 2], NaN where a head is not trained, the control "head_turns" f32[2], how many
    turns train each, and "explained_variance" of V. 0 on turns that do not count.
    """
    values, mask, places = batch.need("values"), turn_mask(batch), ends_of_turns(batch)
    V, W = (jnp.take_along_axis(values[..., head], place, axis=1) for head, place in enumerate(places))
    rewards = rewards_of_turns(batch)
    y_v, y_w, after = post_decision_targets(rewards, V, W, mask, gamma, lam)
    known, number = turn_numbers(batch) >= 0, jnp.arange(batch.tokens.shape[1])
    first, last = (known & (on_tokens(place.astype(jnp.float32), batch) == number) for place in places)

    def told(x: Array, where: Array) -> Array:
        """On the tokens `where`, of turns that count."""
        return jnp.where(where, on_tokens(jnp.where(mask, x, jnp.nan), batch), jnp.nan)

    A = on_tokens(jnp.where(mask, W - V, 0.0), batch)
    if last_token == "own":
        A = jnp.where(last, on_tokens(jnp.where(mask, rewards + gamma * after - W, 0.0), batch), A)
    turns = jnp.sum(mask).astype(jnp.float32)
    return (
        batch.replace(advantages=A)
        .with_info(head_returns=jnp.stack([told(y_v, first), told(y_w, last)], axis=-1))
        .with_controls(head_turns=jnp.stack([turns, turns]), explained_variance=explained_variance(V, y_v, mask))
    )
