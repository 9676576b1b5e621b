"""What a task in JAX is, and episodes of those with an environment over several turns, as pure functions.

P prompt tokens, T completion tokens at most; functions take one prompt, callers `vmap`. N rows, H hidden numbers, K
turns, O tokens of an observation, A tokens of a reply. Each turn is an observation and then a reply, so that a
completion has T = K (O + A) tokens. Lengths are fixed: a reply always has A tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.selection.rows import mix

Scores = dict[str, Array]  # components of a reward, f32[] each
Score = Callable[[Array, Array], tuple[Scores, Array]]  # prompt, completion -> components, reward f32[]
State = Any  # of an environment: a pytree of arrays


class Environment(NamedTuple):
    """Functions of one episode, of which callers make rows by `vmap`; they are pure, so chance is in the prompt's H
    hidden numbers, which all episodes of a group share.

    A state is any pytree of arrays. Rewards of turns and the final reward add up to the episode's return.
    """

    turns: int  # K
    observation: int  # O
    reply: int  # A
    reset: Callable[[Array], tuple[State, Array]]
    """prompt int32[P + H] -> state, first observation int32[O]"""
    step: Callable[[State, Array], tuple[State, Array, Array, Array]]
    """state, reply int32[A] -> state, observation int32[O], reward of the turn f32[], whether the episode is over
    bool[]"""
    state_number: Callable[[State], Array]
    """state -> int32[], equal for states that a method may compare with each other; within a group"""
    score: Callable[[State], tuple[Scores, Array]]
    """last state -> components, final reward f32[]"""
    best: Callable[[State], Array]
    """state -> a reply int32[A] of the best policy that is known"""
    calls: Callable[[State], tuple[Array, Array]] | None = None
    """last state -> calls of tools, and how many of them failed, f32[] each. None: there are no tools."""


class Task(NamedTuple):
    """A distribution of prompts, and what completions of them are worth. Tokens are 0 .. vocabulary - 1.

    A completion is int32[T]: the policy's tokens up to its end token, and the end token from there on. In a task of
    several turns some places of it are the environment's, see `given` and `environment`.
    """

    name: str
    vocabulary: int
    prompt_length: int  # P, the same for all prompts
    completion_length: int  # T, the end token included
    end: int  # the token that ends a completion
    sample: Callable[[Array], Array]  # key -> prompt int32[P], and after it what is hidden
    answer: Callable[[Array], Array]  # prompt -> a completion int32[T] of the best reward
    score: Score
    number: Callable[[Array], Array]  # prompt -> int32[], another for each prompt, 0 .. prompts - 1
    prompts: int  # how many numbers there are
    correct: str  # the component that is 1 where a completion is right, and 0 elsewhere
    best: float = 1.0
    """The expected reward of the best policy that is known; `answer` earns it."""
    given: Callable[[Array, Array, Array], Array] | None = None
    """(prompt, completion of which the tokens before a place are known, place) -> the environment's token int32[]
    there, or -1 where the policy chooses. None: the policy chooses all."""
    example: Callable[[Array, Array], Array] | None = None
    """(key, prompt) -> a completion int32[T] for a policy to imitate before reinforcement learning; None: `answer`."""
    pairs: Callable[[Array, Array], tuple[Array, Array]] | None = None
    """(key, prompt) -> a chosen and a rejected completion int32[T], as a data set of preferences has them. None: there
    are no given responses."""
    observe: Callable[[Array, Scores, Array], tuple[Scores, Array]] | None = None
    """(key, components, reward) -> what training is told of them, of the final reward with an environment. None: the
    truth."""
    hidden: int = 0
    """Numbers that follow the P tokens of a prompt, wherever one is passed: the policy does not see them."""
    environment: Environment | None = None
    """Answers each turn of the policy, with a state and rewards of turns; `given` is None then."""


def told_rewards(task: Task, key: Array, components: Scores, reward: Array) -> tuple[Scores, Array]:
    """Components and rewards f32[N] as training is told of them."""
    if task.observe is None:
        return components, reward
    return jax.vmap(task.observe)(jax.random.split(key, reward.shape[0]), components, reward)


def digits_of(number: Array, count: int, base: int) -> Array:
    """int32[count], the least significant first."""
    return (number // base ** jnp.arange(count)) % base


def number_of(digits: Array, base: int) -> Array:
    """int32[] of digits int32[n], the least significant first."""
    return jnp.sum(digits * base ** jnp.arange(digits.shape[0]))


def in_place(answer: Callable[[Array], Array], name: str) -> Score:
    """A score with credit for parts: `name`, the share of the answer's tokens that are right in their place; "exact",
    1 for the whole answer with its end; and their mean, the reward."""

    def score(prompt: Array, completion: Array) -> tuple[Scores, Array]:
        right = (completion == answer(prompt)).astype(jnp.float32)
        components = {name: jnp.mean(right[:-1]), "exact": jnp.min(right)}
        return components, 0.5 * (components[name] + components["exact"])

    return score


def all_or_nothing(answer: Callable[[Array], Array], name: str) -> Score:
    """A sparse score: `name` is 1 for the whole answer with its end, and 0 for all others."""

    def score(prompt: Array, completion: Array) -> tuple[Scores, Array]:
        right = jnp.all(completion == answer(prompt)).astype(jnp.float32)
        return {name: right}, right

    return score


def check_sizes(**sizes: tuple[Any, int, int]) -> None:
    """InputError unless each is a whole number in its range: name=(value, least, most)."""
    for name, (value, least, most) in sizes.items():
        check_number(name, value, least=least, most=most, whole=True)


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

        def unless_done(old: Array, new: Array) -> Array:
            return jnp.where(done.reshape(N, *[1] * (new.ndim - 1)), old, new)

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
