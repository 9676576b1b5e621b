"""Tasks whose prompts and rewards are JAX functions, so that a whole training run is one compiled program.

P prompt tokens, T completion tokens at most. Functions take one prompt; callers `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import InputError, unknown

Array = jax.Array


class Task(NamedTuple):
    """A distribution of prompts, and what completions of them are worth. Tokens are 0 .. vocabulary - 1.

    A completion is int32[T]: the policy's tokens up to its end token, and the end token from there on.
    """

    name: str
    vocabulary: int
    prompt_length: int  # P, the same for all prompts
    completion_length: int  # T, the end token included
    end: int  # the token that ends a completion
    sample: Callable[[Array], Array]  # key -> prompt int32[P]
    answer: Callable[[Array], Array]  # prompt -> the right completion int32[T]
    score: Callable[[Array, Array], tuple[dict[str, Array], Array]]  # prompt, completion -> components, reward f32[]
    number: Callable[[Array], Array]  # prompt -> int32[], another for each prompt, 0 .. prompts - 1
    prompts: int  # how many there are


def _digits_of(number: Array, count: int, base: int) -> Array:
    """int32[count], the least significant first."""
    return (number // base ** jnp.arange(count)) % base


def _number_of(digits: Array, base: int) -> Array:
    """int32[] of digits int32[n], the least significant first."""
    return jnp.sum(digits * base ** jnp.arange(digits.shape[0]))


def addition(digits: int = 2, base: int = 10) -> Task:
    """Add two numbers of `digits` digits: the answer to "37+25=" is "260" and the end, least significant digit first.

    In that order a carry is known before it is needed. Rewards in [0, 1]: "digits", the share of the answer's
    digits that are right in their place, "exact", 1 for the whole answer with its end, and their mean.
    """
    check_number("digits", digits, least=1, most=4, whole=True)
    check_number("base", base, least=2, most=10, whole=True)
    plus, equals, end = base, base + 1, base + 2

    def terms(prompt: Array) -> tuple[Array, Array]:
        first, second = prompt[:digits], prompt[digits + 1 : 2 * digits + 1]
        return _number_of(first[::-1], base), _number_of(second[::-1], base)

    def sample(key: Array) -> Array:
        numbers = jax.random.randint(key, (2, digits), 0, base)
        return jnp.concatenate([numbers[0], jnp.array([plus]), numbers[1], jnp.array([equals])]).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        first, second = terms(prompt)
        result = _digits_of(first + second, digits + 1, base)
        return jnp.append(result, end).astype(jnp.int32)

    def score(prompt: Array, completion: Array) -> tuple[dict[str, Array], Array]:
        right = (completion == answer(prompt)).astype(jnp.float32)
        components = {"digits": jnp.mean(right[:-1]), "exact": jnp.min(right)}
        return components, 0.5 * (components["digits"] + components["exact"])

    def number(prompt: Array) -> Array:
        first, second = terms(prompt)
        return first * base**digits + second

    prompts = base ** (2 * digits)
    return Task("addition", base + 3, 2 * digits + 2, digits + 2, end, sample, answer, score, number, prompts)


def sequence_lock(length: int = 4, symbols: int = 6) -> Task:
    """Open a lock: the prompt shows a key of `length` symbols; the answer repeats it, and then the end.

    The reward is sparse: "open" is 1 for the whole right sequence and 0 for all others.
    """
    check_number("length", length, least=1, most=8, whole=True)
    check_number("symbols", symbols, least=2, most=10, whole=True)
    separator, end = symbols, symbols + 1

    def sample(key: Array) -> Array:
        return jnp.append(jax.random.randint(key, (length,), 0, symbols), separator).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        return jnp.append(prompt[:length], end).astype(jnp.int32)

    def score(prompt: Array, completion: Array) -> tuple[dict[str, Array], Array]:
        opened = jnp.all(completion == answer(prompt)).astype(jnp.float32)
        return {"open": opened}, opened

    def number(prompt: Array) -> Array:
        return _number_of(prompt[:length], symbols)

    prompts = symbols**length
    return Task("sequence_lock", symbols + 2, length + 1, length + 1, end, sample, answer, score, number, prompts)


TASKS: dict[str, Callable[..., Task]] = {"addition": addition, "sequence_lock": sequence_lock}


def get_task(name: str, **options: int) -> Task:
    """A task by its name. InputError for an unknown name or option."""
    if not isinstance(name, str) or name not in TASKS:
        raise unknown("task", name, TASKS)
    try:
        return TASKS[name](**options)
    except TypeError:
        raise InputError(f"the task {name!r} does not have all of the options {', '.join(options)}") from None
