from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.normalisation import moments
from jaxrl_llm.advantages.returns import explained_variance, needed_values
from jaxrl_llm.advantages.turns import TURNS, on_tokens, rewards_of_turns, turn_count, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, Ours, Positive
from jaxrl_llm.core.needs.placeholders import all_action
from jaxrl_llm.core.parts import Array, Trajectories, chain, stateless_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.objectives.values import head_value_loss

KEEP, SWITCH, SUBGOAL, NEW_SUBGOAL, ACTION = 1, 2, 3, 4, 5  # of info["plan"], see `rollouts.agents.plans`


@method(paper="arXiv 2602.16165", test="test_turn_planned.py::test_hiper_worked_example_and_loop")
@run_needs(
    plan="subgoals of the policy's own, between tags",
    turn_rewards="rewards of turns",
    turns="episodes of several turns",
)
def hiper(
    gamma: Code[float] = 1.0,
    lam_turn: Code[float] = 1.0,
    lam_segment: Code[float] = 0.95,
    whiten: Code[bool] = True,
    bootstrap_truncated: Code[bool] = True,
    keep_penalty: Code[float] = -0.3,
    keep_penalties: Code[Literal["fixed", "shared"]] = "fixed",
    inconsistency_penalty: Code[float] = -0.3,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    kl_coefficient: Code[NonNegative] = 0.01,
) -> Algorithm:
    """Hierarchical plan-execute RL (HiPER).

    Each reply decides whether to KEEP the subgoal or SWITCH to another, says the subgoal, and an action, each between
    tags (`rollouts.agents.plans.planned`). The turns of one subgoal are a segment. Generalised advantages of turns
    within segments credit the tokens of actions, those of segments the tokens of subgoals that begin one, and the
    return of the segment the tokens of decisions, each against a head of the critic
    (`plan_credit`; gamma, lam_turn, lam_segment). Other tokens get 0. whiten: each kind is
    standardised over turns. bootstrap_truncated: an episode that was cut off ends with the value of its last turn.

    A turn that keeps the subgoal gets keep_penalty (keep_penalties "shared", as for WebShop with -3.5: together its
    product with their share of the turns), and inconsistency_penalty if it says another one all the same. Penalties
    for invalid actions are the environment's. The loss is PPO's clip (clip_low, clip_high) and kl_coefficient k3,
    averaged over tokens, and value_coefficient times the clipped (value_clip) squares of the heads, each averaged over
    the turns that train it.

    Where the heads are read is not in what we read of the code: at the first token of their parts. A row is an episode.
    Without plans (--algorithm.without plan) every turn is in one segment and all its tokens are its action.
    """
    objective = clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(
        chain(
            plan_penalties(keep_penalty, inconsistency_penalty, keep_penalties),
            hierarchical_advantages(gamma, lam_turn, lam_segment, whiten, bootstrap_truncated),
        ),
        objective + value_coefficient * head_value_loss(HEADS, value_clip),
    )


HEADS = 3


class PlanCredit(NamedTuple):
    """Advantages and returns of the turns, f32[N, K] each, 0 outside the mask."""

    action: Array
    subgoal: Array  # on the first turn of each segment; 0 elsewhere
    decision: Array
    action_return: Array
    subgoal_return: Array
    decision_return: Array


def plan_credit(
    rewards: Array, starts: Array, mask: Array, values: Array, gamma: float = 1.0, lam_turn: float = 1.0,
    lam_segment: float = 0.95, bootstrapped: Array | None = None,
) -> PlanCredit:  # fmt: skip
    """Hierarchical advantage estimation (2602.16165): with segments of turns b_k to e_k,

        action:    delta_t = r_t + gamma V' - V_0(t),    A_t = delta_t + gamma lam_turn A_{t+1} within the segment,
                   V' = V_0(t+1) within it, V_1(b_{k+1}) at its end, 0 after the last turn
        subgoal:   R_k = sum_j gamma^j r_{b_k+j},    d = e_k - b_k + 1,
                   delta_k = R_k + gamma^d V_1(b_{k+1}) - V_1(b_k),    A_k = delta_k + gamma^d lam_segment A_{k+1}
        decision:  G_t = r_t + gamma G_{t+1} within the segment, V_1(b_{k+1}) after its end,    A_t = G_t - V_2(t)

    rewards f32[N, K]; starts bool[N, K]: turns that begin a segment, as the first one does in any case; mask: turns
    that are there; values f32[N, K, 3]. bootstrapped bool[N]: rows whose last turn takes its own V_0 for V', not 0.
    """
    N = rewards.shape[0]
    first = jnp.cumsum(mask, axis=1) == 1
    starts = mask & (starts | first)
    cut = jnp.zeros(N, bool) if bootstrapped is None else bootstrapped
    zero, no = jnp.zeros(N), jnp.zeros(N, bool)

    def back(later: tuple[Array, ...], now: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        follows, begins, V_0, V_1, A_0, A_1, R, G, discount = later
        r, start, there, v = now
        ends = ~follows | begins
        after = jnp.where(follows, V_1, 0.0)  # of the next segment, if the turn ends its own
        end_value = jnp.where(follows, V_1, jnp.where(cut, v[:, 0], 0.0))
        delta = r + gamma * jnp.where(ends, end_value, V_0) - v[:, 0]
        action = delta + jnp.where(ends, 0.0, gamma * lam_turn * A_0)
        # V_1 and A_1 are those of the next segment until the first turn of this one replaces them.
        own, steps = r + gamma * jnp.where(ends, 0.0, R), gamma * jnp.where(ends, 1.0, discount)
        beyond = own + steps * jnp.where(follows, V_1, 0.0)
        subgoal = beyond - v[:, 1] + steps * lam_segment * A_1
        decision = r + gamma * jnp.where(ends, after, G)
        keep = (
            follows | there, jnp.where(there, start, begins), jnp.where(there, v[:, 0], V_0),
            jnp.where(there & start, v[:, 1], V_1), jnp.where(there, action, A_0),
            jnp.where(there & start, subgoal, A_1), jnp.where(there, own, R), jnp.where(there, decision, G),
            jnp.where(there, steps, discount),
        )  # fmt: skip
        found = (
            jnp.where(there, action, 0.0), jnp.where(there & start, subgoal, 0.0),
            jnp.where(there, decision - v[:, 2], 0.0),
        )  # fmt: skip
        return keep, found

    over = (rewards.T, starts.T, mask.T, jnp.moveaxis(jnp.where(mask[..., None], values, 0.0), 1, 0))
    _, found = jax.lax.scan(back, (no, no, *[zero] * 7), over, reverse=True)
    action, subgoal, decision = (x.T for x in found)
    at = (mask, starts, mask)
    returns = [
        jnp.where(where, A + values[..., head], 0.0)
        for head, (A, where) in enumerate(zip((action, subgoal, decision), at, strict=True))
    ]
    return PlanCredit(action, subgoal, decision, *returns)


def spans_of(batch: Trajectories) -> tuple[Array, Array, Array]:
    """bool[N, L] each: the actions of scored rows that say the action, the subgoal, and the decision.

    Without info["plan"] all are action.
    """
    known = (batch.info or {}).get("plan")
    kind = jnp.nan_to_num(all_action(batch, None) if known is None else known)
    acted = (turn_numbers(batch) >= 0) & ~jnp.isnan(batch.scores)[:, None]
    return (
        acted & (kind == ACTION), acted & ((kind == SUBGOAL) | (kind == NEW_SUBGOAL)),
        acted & ((kind == KEEP) | (kind == SWITCH)),
    )  # fmt: skip


@stateless_part({"plan"})
def plan_penalties(
    batch: Trajectories, keep: float = 0.0, inconsistent: float = 0.0, of_keeps: Literal["fixed", "shared"] = "fixed"
) -> Trajectories:
    """Add to the rewards of turns that keep the subgoal `keep`, and `inconsistent` if they say another one nonetheless.

    of_keeps "shared": keep times the share of the episode's turns that keep it, divided among these. Without plans the
    batch stays as it is.
    """
    if "plan" not in (batch.info or {}):
        return batch
    mask = turn_mask(batch)
    kept = mask & said(batch, KEEP)
    one = jnp.full(mask.shape, keep)
    if of_keeps == "shared":  # keep * (n / T) / n
        one = keep / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    extra = jnp.where(kept, one, 0.0) + jnp.where(kept & said(batch, NEW_SUBGOAL), inconsistent, 0.0)
    own = jnp.zeros(mask.shape) if batch.turn_rewards is None else jnp.nan_to_num(batch.turn_rewards)
    return batch.replace(turn_rewards=own + extra)


@stateless_part(TURNS | needed_values(HEADS) | {"plan", "turn_rewards"})
def hierarchical_advantages(
    batch: Trajectories,
    gamma: Fraction = 1.0,
    lam_turn: Fraction = 1.0,
    lam_segment: Fraction = 0.95,
    whiten: bool = True,
    bootstrap_truncated: bool = False,
) -> Trajectories:
    """Advantages of plans (`plan_credit`) on the tokens that say each part; 0 on others.

    Each head is read at the first token of its part, where that is not said yet, or of the turn that lacks it. whiten:
    each kind of advantage is standardised over the turns of the batch that say its part (the subgoal's over first turns
    of segments), by the population's deviation + 1e-8. Writes info["head_returns"] f32[N, L, 3], NaN where a head is
    not trained, the control "head_turns" f32[3], how many turns train each, and "explained_variance" of head 0.
    """
    mask, spans = turn_mask(batch), spans_of(batch)
    values = batch.need("values")
    begins = first_places(turn_numbers(batch) >= 0, batch)
    places = [jnp.where(in_turns(span, batch), first_places(span, batch), begins) for span in spans]
    last = batch.tokens.shape[1] - 1
    read = [
        jnp.take_along_axis(values[..., head], jnp.minimum(place, last), axis=1) for head, place in enumerate(places)
    ]
    cut = batch.truncated if bootstrap_truncated else None
    starts = said(batch, SWITCH)
    credit = plan_credit(
        rewards_of_turns(batch), starts, mask, jnp.stack(read, axis=-1), gamma, lam_turn, lam_segment, cut
    )
    first = mask & (jnp.cumsum(mask, axis=1) == 1)
    at = [mask & in_turns(span, batch) for span in spans]
    at[1] = at[1] & (starts | first)
    total = jnp.zeros(batch.tokens.shape)
    for A, where, span in zip(credit[:3], at, spans, strict=True):
        A = standardised(A, where) if whiten else A
        total = jnp.where(span, on_tokens(jnp.where(where, A, 0.0), batch), total)
    told = jax.vmap(lambda row, value, place: row.at[place].set(value, mode="drop"))
    returns = [
        told(jnp.full(batch.tokens.shape, jnp.nan), G, jnp.where(where, place, last + 1))
        for G, where, place in zip(credit[3:], at, places, strict=True)
    ]
    counts = jnp.stack([jnp.sum(where) for where in at]).astype(jnp.float32)
    explained = explained_variance(read[0], credit.action_return, at[0])
    return (
        batch.replace(advantages=total)
        .with_info(head_returns=jnp.stack(returns, axis=-1))
        .with_controls(head_turns=counts, explained_variance=explained)
    )


def in_turns(mask: Array, batch: Trajectories) -> Array:
    """bool[N, K]: the turns with a token of the mask bool[N, L]."""
    return first_places(mask, batch) < batch.tokens.shape[1]


def first_places(mask: Array, batch: Trajectories) -> Array:
    """int32[N, K]: the place of each turn's first token of the mask; L where it has none."""
    L, turns = batch.tokens.shape[1], turn_count(batch)
    number = turn_numbers(batch)
    places = jnp.where(mask & (number >= 0), jnp.arange(L), L)
    own = number[:, :, None] == jnp.arange(turns)
    return jnp.min(jnp.where(own, places[:, :, None], L), axis=1).astype(jnp.int32)


def said(batch: Trajectories, kind: int) -> Array:
    """bool[N, K]: the turns with a token of this kind."""
    known = (batch.info or {}).get("plan")
    return jnp.zeros(turn_mask(batch).shape, bool) if known is None else in_turns(known == kind, batch)


def standardised(values: Array, mask: Array) -> Array:
    """(x - mean) / (deviation + 1e-8) over the mask, whose deviation is the population's; 0 outside of it."""
    mean, variance = moments(values, mask, 0)
    return jnp.where(mask, (values - mean) / (jnp.sqrt(variance) + 1e-8), 0.0)
