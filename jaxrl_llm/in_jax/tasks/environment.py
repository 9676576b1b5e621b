"""Environments over several turns as pure functions, and episodes with them.

N rows, P prompt tokens, H hidden numbers, K turns, O tokens of an observation, A tokens of a reply. Each turn is an
observation and then a reply, so that a completion has T = K (O + A) tokens. Lengths are fixed: a reply always has A
tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.task import Environment, Scores, State, Task
from jaxrl_llm.selection.rows import mix

Act = Callable[[Any, State, Array, Any], tuple[Any, Array, Any]]
"""(carry, states [N, ...], observations int32[N, O], inputs of the turn) -> carry, replies int32[N, A], what to
keep."""


class Played(NamedTuple):
    """N episodes. After its end an episode has the end token, false masks, and zeros."""

    tokens: Array  # int32[N, T]
    acted: Array  # bool[N, T] true on replies
    real: Array  # bool[N, T] true on replies and observations
    rewards: Array  # f32[N, K]
    states: Array  # uint32[N, K] before each turn
    played: Array  # bool[N, K] the turns that there were
    done: Array  # bool[N] whether the environment ended the episode
    last: State  # [N, ...]
    kept: Any  # what `Act` kept, [K, ...]

    def turns_of(self, values: Array) -> Array:
        """[N, T]: the values [N, K] of turns on their places."""
        return jnp.repeat(values, self.tokens.shape[1] // self.played.shape[1], axis=1)


def play(environment: Environment, prompts: Array, end: int, act: Act, carry: Any = None, inputs: Any = None) -> Played:
    """Episodes of prompts int32[N, P + H] in which `act` replies: a scan over turns.

    carry: for the first turn. inputs: [K, ...], of which each turn's are given to `act`.
    """
    length, K = environment.observation + environment.reply, environment.turns
    state, seen = jax.vmap(environment.reset)(prompts)
    N = prompts.shape[0]

    def turn(carry: tuple[Any, State, Array, Array], given: Any) -> tuple[Any, Any]:
        own, state, seen, done = carry
        number = mix(jax.vmap(environment.state_number)(state).astype(jnp.uint32))
        own, reply, kept = act(own, state, seen, given)
        after, following, reward, over = jax.vmap(environment.step)(state, reply)
        tokens = jnp.concatenate([seen, reply], axis=1)
        found = (tokens, jnp.where(done, 0.0, reward), jnp.where(done, 0, number), ~done, kept)
        unless_done = lambda old, new: jnp.where(done.reshape(N, *[1] * (new.ndim - 1)), old, new)  # noqa: E731
        return (own, jax.tree.map(unless_done, state, after), following, done | over), found

    begin = (carry, state, seen, jnp.zeros(N, bool))
    (_, state, _, done), (tokens, rewards, states, played, kept) = jax.lax.scan(turn, begin, inputs, length=K)
    played = played.T
    real = jnp.repeat(played, length, axis=1)
    tokens = jnp.where(real, tokens.transpose(1, 0, 2).reshape(N, K * length), end).astype(jnp.int32)
    acted = real & (jnp.arange(K * length) % length >= environment.observation)
    return Played(tokens, acted, real, rewards.T, states.T, played, done, state, kept)


def final_scores(environment: Environment, played: Played) -> tuple[Scores, Array]:
    """Components and final rewards f32[N] of episodes, without the rewards of turns."""
    return jax.vmap(environment.score)(played.last)


def replayed(environment: Environment, prompts: Array, end: int, tokens: Array) -> Played:
    """The episodes in which the replies are those of completions int32[N, T]; their observations are not read."""
    turns = tokens.reshape(tokens.shape[0], environment.turns, -1).transpose(1, 0, 2)
    replies = turns[:, :, environment.observation :]
    return play(environment, prompts, end, lambda own, state, seen, reply: (own, reply, None), inputs=replies)


def environment_task(
    name: str, vocabulary: int, prompt_length: int, hidden: int, end: int, sample: Callable[[Array], Array],
    number: Callable[[Array], Array], prompts: int, correct: str, environment: Environment,
) -> Task:  # fmt: skip
    """The task of an environment; see `Task` for the arguments. `score` plays the replies of a completion, and `answer`
    is an episode of the environment's best policy."""

    def best(own: Any, state: State, seen: Array, given: Any) -> tuple[Any, Array, None]:
        return own, jax.vmap(environment.best)(state), None

    def score(prompt: Array, completion: Array) -> tuple[Scores, Array]:
        played = replayed(environment, prompt[None], end, completion[None])
        components, final = final_scores(environment, played)
        return {name: x[0] for name, x in components.items()}, final[0] + jnp.sum(played.rewards[0])

    length = environment.turns * (environment.observation + environment.reply)
    return Task(
        name, vocabulary, prompt_length, length, end, sample,
        lambda prompt: play(environment, prompt[None], end, best).tokens[0],
        score, number, prompts, correct, hidden=hidden, environment=environment,
    )  # fmt: skip
