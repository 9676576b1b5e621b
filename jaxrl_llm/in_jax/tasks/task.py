"""What a task in JAX is. P prompt tokens, T completion tokens at most; functions take one prompt, callers `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array

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


def observed(task: Task, key: Array, components: Scores, reward: Array) -> tuple[Scores, Array]:
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
