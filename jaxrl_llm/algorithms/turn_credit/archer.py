"""Actor-Critic Framework with a Hierarchical Structure (ArCHer).

A turn is one step of a decision process: the state is the conversation before it, the action the whole reply. Heads 0
and 1 of the critic are Q_1 and Q_2 of a reply, read at its last token; heads 2 and 3 are V_1 and V_2 of the state, read
at the first token of the reply. A value depends on what comes before its token, so Q sees all of a reply but its last
token, which in a finished one only says that it ends.

A state is all that the policy sees before a reply. A new reply at a stored state is a draw of the current policy, which
a critic can judge; the environment does not hear it, so it has no reward and nothing follows.
"""

import math
from asyncio import gather
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.filters import replayed_rows
from jaxrl_llm.advantages.returns import needed_values
from jaxrl_llm.advantages.turns import (
    TURNS,
    acted_turns,
    ends_of_turns,
    on_tokens,
    rewards_of_turns,
    turn_mask,
    turn_numbers,
)
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, NonNegativeInt, Ours
from jaxrl_llm.core.parts import Array, Trajectories, Transform, batch_part, chain, counted, part, stateless_part
from jaxrl_llm.core.reference import exponential_average
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.records import PromptFacts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome
from jaxrl_llm.objectives import constant, head_value_loss, log_probability, policy_gradient, token_ratio
from jaxrl_llm.replay.base import whole_groups
from jaxrl_llm.rollouts.episode import given
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, group

COLUMN, RESAMPLED = "stored_states", "resampled"
HEADS = 4  # Q_1, Q_2, V_1, V_2
FIRST_NUMBER = 2**19  # of samples, above those of a group's own
Where = tuple[list[int], list[int]]  # token ids of a prompt, and of what comes between it and a reply


def following(values: Array, mask: Array) -> Array:
    """f32[N, K, H]: the values of the next turn of the row, 0 for the last; mask bool[N, K]: turns that are there.

    >>> following(jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([[True, False, True]]))[0, :, 0].tolist()
    [3.0, 3.0, 0.0]
    """

    def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        own, there = now
        return jnp.where(there[:, None], own, later), later

    turns = (jnp.moveaxis(values, 1, 0), mask.T)
    return jnp.moveaxis(jax.lax.scan(back, jnp.zeros_like(values[:, 0]), turns, reverse=True)[1], 0, 1)


@method(paper="arXiv 2402.19446", test="test_turn_models.py::test_archer_worked_example")
@run_needs(turn_rewards="rewards of turns", turns="episodes of several turns")
@beside("token_baseline", "a baseline by token, an option of the code", "a head of the critic for tokens")
@beside("last_token", "Q of a reply sees all but its last token", "values after the last token")
def archer(
    gamma: Code[float] = 0.95,
    rate: Code[Fraction] = 0.1,
    critic_updates: Code[int] = 20,
    value_coefficient: Code[NonNegative] = 2.0,
    replay_share: Ours[Fraction] = 1.0,
    replay_groups: Ours[NonNegativeInt] = 1024,
    states: Ours[int] = 8,
) -> Algorithm:
    """Actor-Critic Framework with a Hierarchical Structure (ArCHer).

    Two levels. Above, each turn is one step, whose state o is the conversation and whose action a is a whole reply; a
    critic of these is trained off-policy, by bootstrapping from a target critic (bars). Below, the tokens of a reply
    get the critic's advantage of it. With two heads i for each of Q and V:

        y_Q,i = r + gamma Vbar_i(o'), or r for the last turn;    y_V,i = Qbar_i(o, a), a from the policy
        L_critic = value_coefficient/2 sum_i (mean (Q_i - y_Q,i)^2 + mean (V_i - y_V,i)^2)
        target <- (1 - rate) target + rate critic    after each update
        A = min(Q_1, Q_2)(o, a) - min(V_1, V_2)(o),    L_pi = -mean over turns of A sum_t log pi(a_t)

    critic_updates: updates at first in which only the critic learns. Q is read at the last token of a reply, before it
    is said, V at the first; a row is an episode, and its end ends it, also where a limit does.

    Q learns from the step's transitions and from replayed ones: round(replay_share n) groups to the n of the step,
    drawn uniformly from the newest replay_groups, as whole episodes. V and the policy learn where a is a draw of the
    policy: at the step's own states, and at `states` stored ones for each prompt, drawn uniformly, where the policy
    replies anew (`replying_at_stored_states`). The paper has all of them from one buffer of 100,000 transitions. Its
    critic takes 50 epochs and then its policy 3, with new replies in each; here both are updated together, as often as
    --epochs says, with the targets and advantages of the step's beginning. The critic is a copy of the model, or shares
    its states (--critic); the paper's is a smaller encoder. A baseline by token, an option of the code, is not here.
    """
    objective = "actor" * policy_gradient(token_ratio(), log_probability(), constant("turns"))
    objective += value_coefficient * head_value_loss(HEADS, None)
    return Algorithm(
        chain(advantages_of_replies(gamma), actor_after(critic_updates)),
        objective,
        curriculum=in_epochs(kept_states(states)),
        rollout=replying_at_stored_states(states),
        replay=whole_groups(replay_share, groups=replay_groups, equal=True),
        target=exponential_average(1 - rate),
    )


@stateless_part(TURNS | needed_values(HEADS) | {f"target_values:{HEADS}", "replayed", "resampled", "turn_rewards"})
def advantages_of_replies(batch: Trajectories, gamma: Fraction = 0.95) -> Trajectories:
    """A = min(Q_1, Q_2) - min(V_1, V_2) on the tokens of each reply, and the critic's targets (2402.19446).

    Q_i learns r + gamma Vbar_i(o') from transitions, replayed ones too: all turns of scored rows. V_i learns Qbar_i(o,
    a), and the policy from A, where a is a draw of the policy: in the rows of the step, and in those of replies that
    were drawn anew at earlier states (info["resampled"]), which are no transitions. Tokens of replayed rows have
    advantage 0. Qbar and Vbar are of the target critic. r is the reward of the turn, with the score on the last one.

    Writes info["head_returns"] f32[N, L, 4], NaN where a head is not trained, and the controls "head_turns" f32[4], how
    many turns train each, and "turns", turns that train the policy per row of the batch.
    """
    anew = batch.entry(RESAMPLED, 0) > 0
    mask = turn_mask(batch) & ~anew[:, None]
    own = (mask | (acted_turns(batch) & anew[:, None])) & ~replayed_rows(batch)[:, None]
    first, last = ends_of_turns(batch)

    def read(values: Array, place: Array) -> Array:
        return jnp.take_along_axis(values, place[:, :, None], axis=1)

    values, target = batch.need("values"), batch.need("target_values")
    Q, V = read(values[..., :2], last), read(values[..., 2:], first)
    y_q = rewards_of_turns(batch)[..., None] + gamma * following(read(target[..., 2:], first), mask)
    y_v = read(target[..., :2], last)
    A = jnp.where(own, jnp.min(Q, axis=-1) - jnp.min(V, axis=-1), 0.0)
    acted = turn_numbers(batch) >= 0
    returns = []
    for place, where, y in ((last, mask, y_q), (first, own, y_v)):
        here = acted & (on_tokens(place.astype(jnp.float32), batch) == jnp.arange(batch.tokens.shape[1]))
        for head in range(2):
            told = on_tokens(jnp.where(where, y[..., head], jnp.nan), batch)
            returns.append(jnp.where(here, told, jnp.nan))
    count = jnp.sum(own).astype(jnp.float32)
    rows = jnp.maximum(jnp.sum(jnp.any(batch.action_mask, axis=1)), 1)
    counts = jnp.stack([jnp.sum(mask).astype(jnp.float32)] * 2 + [count] * 2)
    return (
        batch.replace(advantages=on_tokens(A, batch))
        .with_info(head_returns=jnp.stack(returns, axis=-1))
        .with_controls(head_turns=counts, turns=jnp.maximum(count, 1) / rows)
    )


@part
def actor_after(updates: NonNegativeInt) -> Transform:
    """Write the control "actor": 0 in the first so many updates, in which only the critic learns, and then 1."""
    return counted(lambda t, batch: batch.with_controls(actor=jnp.where(t < updates, 0.0, 1.0)))


@batch_part
def kept_states(
    facts: PromptFacts, samples: NonNegativeInt, episodes: NonNegativeInt = 1024, column: str = COLUMN
) -> Machine:
    """Give each row `samples` states of the episodes of earlier steps, in a column.

    States are drawn uniformly, of any prompt, from those before the turns of the newest `episodes` rows that had a
    score; fewer than `samples` until there are as many. The metric curriculum/states counts them.
    """

    empty: State = {
        "tokens": np.zeros(0, np.int32), "lengths": np.zeros(0, np.int64), "places": np.zeros((0, 3), np.int64),
        "steps": 0,
    }  # fmt: skip

    def observe(state: State, outcome: Outcome) -> State:
        found = [found for found in _rows_of(outcome.step) if found[1]]
        own = [one[: at[-1][1]] for one, at in found]  # after the last state nothing is needed
        old = len(state["lengths"])
        places = [(old + number, start, place) for number, (_, at) in enumerate(found) for start, place in at]
        lengths = np.concatenate([state["lengths"], np.asarray([len(one) for one in own], np.int64)])
        tokens = np.concatenate([state["tokens"], *own]).astype(np.int32)
        table = np.concatenate([state["places"], np.asarray(places, np.int64).reshape(-1, 3)])
        if gone := max(len(lengths) - episodes, 0):
            tokens, lengths = tokens[lengths[:gone].sum() :], lengths[gone:]
            table = table[table[:, 0] >= gone] - np.asarray([gone, 0, 0])
        return {"steps": state["steps"] + 1, "tokens": tokens, "lengths": lengths, "places": table}

    def columns(state: State, ids: np.ndarray) -> list[dict[str, Any]]:
        table = state["places"]
        begins = np.cumsum(state["lengths"]) - state["lengths"]
        random = np.random.default_rng([facts.seed, state["steps"]])
        chosen = random.permutation(len(table))[: samples * len(ids)]

        def of(number: int) -> Where:
            row, start, place = table[number]
            own = state["tokens"][begins[row] : begins[row] + place].tolist()
            return own[:start], own[start:]

        return [{column: [of(int(n)) for n in chosen[i :: len(ids)]]} for i in range(len(ids))]

    return Machine(
        empty, observe=observe, metrics=lambda state: {"states": float(len(state["places"]))}, columns=columns
    )


def _rows_of(step: Step) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Of each scored row of a step, that was not drawn at a stored state: its tokens, and for each turn the places of
    the row's first action and of the turn's."""
    batch = (step.sampled or step.scored).batch
    real, turn = np.asarray(batch.token_mask).astype(bool), np.asarray(batch.turn)
    tokens, known = np.asarray(batch.tokens), ~np.isnan(np.asarray(batch.need("reward"), np.float64))
    marks = (batch.info or {}).get(RESAMPLED)
    known &= True if marks is None else ~(np.nan_to_num(np.asarray(marks)) > 0)
    out = []
    for row in np.flatnonzero(known & (turn >= 0).any(axis=1)):
        of_turn = turn[row][real[row]]
        first = [int(np.argmax(of_turn == number)) for number in np.unique(of_turn[of_turn >= 0])]
        out.append((tokens[row][real[row]], [(first[0], place) for place in first]))
    return out


@part
def replying_at_stored_states(states: NonNegativeInt, column: str = COLUMN) -> Rollout:
    """The run's rollout, and beside its episodes one reply at each state in the rows' `column`, as rows of their own.

    The column has pairs of token ids, of a prompt and of what follows it before the reply, at most `states`;
    `kept_states` fills it, and without it there are no such rows. They have no score, and are in another group than the
    episodes. Provides resampled.
    """

    def wrapped(inner: Rollout) -> Rollout:
        limits = getattr(inner.agent, "limits", None)

        async def program(tools: Tools, task: Task) -> list[Episode]:
            async def reply(number: int, where: Where) -> Episode:
                start, between = where
                state = Episode(tuple(start), task.prompt_id, FIRST_NUMBER + number)
                state = state + given(between) if between else state
                found = await tools.sample(state, limit=getattr(limits, "turn_tokens", None))
                return found.scored(math.nan).with_info(**{RESAMPLED: 1.0})

            known = [where for where in task.row.get(column) or () if tools.fits([*where[0], *where[1]])]
            own, replies = await gather(
                inner.program(tools, task), gather(*(reply(number, where) for number, where in enumerate(known)))
            )
            part = 1 + max(one.part for one in own)
            return [*(one.with_info(**{RESAMPLED: 0.0}) for one in own), *(replace(one, part=part) for one in replies)]

        return replace(
            inner,
            program=program,
            name=f"{inner.name}, replies at stored states",
            provides=inner.provides | {RESAMPLED},
            wrap=wrapped,
            demands=replace(
                inner.demands, variable_size=True, max_episodes=lambda samples: inner.rows(samples) + states
            ),
        )

    return wrapped(group())
