"""Tasks whose answer is one sequence: sums, sorted and copied symbols, locks, reversals; and pairs of such answers."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.task import Scores, Task, all_or_nothing, check_sizes, digits_of, in_place, number_of


def addition(digits: int = 2, base: int = 10) -> Task:
    """Add two numbers of `digits` digits: the answer to "37+25=" is "260" and the end, least significant digit first.

    In that order a carry is known before it is needed. Rewards in [0, 1]: "digits", the share of the answer's
    digits that are right in their place, "exact", 1 for the whole answer with its end, and their mean.
    """
    check_sizes(digits=(digits, 1, 4), base=(base, 2, 10))
    plus, equals, end = base, base + 1, base + 2

    def terms(prompt: Array) -> tuple[Array, Array]:
        first, second = prompt[:digits], prompt[digits + 1 : 2 * digits + 1]
        return number_of(first[::-1], base), number_of(second[::-1], base)

    def sample(key: Array) -> Array:
        numbers = jax.random.randint(key, (2, digits), 0, base)
        return jnp.concatenate([numbers[0], jnp.array([plus]), numbers[1], jnp.array([equals])]).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        first, second = terms(prompt)
        return jnp.append(digits_of(first + second, digits + 1, base), end).astype(jnp.int32)

    def number(prompt: Array) -> Array:
        first, second = terms(prompt)
        return first * base**digits + second

    return Task(
        "addition", base + 3, 2 * digits + 2, digits + 2, end, sample, answer, in_place(answer, "digits"), number,
        base ** (2 * digits), "exact",
    )  # fmt: skip


def sequence_lock(length: int = 4, symbols: int = 6) -> Task:
    """Open a lock: the prompt shows a key of `length` symbols; the answer repeats it, and then the end.

    The reward is sparse: "open" is 1 for the whole right sequence and 0 for all others.
    """
    check_sizes(length=(length, 1, 8), symbols=(symbols, 2, 10))
    separator, end = symbols, symbols + 1

    def sample(key: Array) -> Array:
        return jnp.append(jax.random.randint(key, (length,), 0, symbols), separator).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        return jnp.append(prompt[:length], end).astype(jnp.int32)

    return Task(
        "sequence_lock", symbols + 2, length + 1, length + 1, end, sample, answer, all_or_nothing(answer, "open"),
        lambda prompt: number_of(prompt[:length], symbols), symbols**length, "open",
    )  # fmt: skip


def noisy_verifier(length: int = 3, symbols: int = 6, false_negative: float = 0.2, false_positive: float = 0.1) -> Task:
    """`sequence_lock` whose verifier errs: it denies a right answer with one probability, and grants a wrong one with
    another, anew for each completion. Training sees its verdicts; results are of the truth."""
    for name, value in (("false_negative", false_negative), ("false_positive", false_positive)):
        check_number(name, value, least=0, below=0.5)
    task = sequence_lock(length, symbols)

    def observe(key: Array, components: Scores, reward: Array) -> tuple[Scores, Array]:
        errs = jax.random.uniform(key) < jnp.where(reward > 0.5, false_negative, false_positive)
        seen = jnp.where(errs, 1 - reward, reward)
        return {"open": seen}, seen

    return task._replace(name="noisy_verifier", observe=observe)


def sorting(length: int = 4, symbols: int = 6) -> Task:
    """Sort `length` symbols, with the score of `addition`: "places" is the share of symbols that are in their place."""
    check_sizes(length=(length, 2, 8), symbols=(symbols, 2, 10))
    task = sequence_lock(length, symbols)

    def answer(prompt: Array) -> Array:
        return jnp.append(jnp.sort(prompt[:length]), task.end).astype(jnp.int32)

    return task._replace(name="sorting", answer=answer, score=in_place(answer, "places"), correct="exact")


def noisy_copying(length: int = 3, noise: int = 3, symbols: int = 4) -> Task:
    """Copy `length` symbols that stand among `noise` others, which mean nothing and are to be left out.

    Which places are noise differs from prompt to prompt. The score is that of `sorting`.
    """
    check_sizes(length=(length, 1, 8), noise=(noise, 1, 8), symbols=(symbols, 2, 10))
    nothing, separator, end = symbols, symbols + 1, symbols + 2

    def sample(key: Array) -> Array:
        for_symbols, for_places = jax.random.split(key)
        shown = jax.random.randint(for_symbols, (length + noise,), 0, symbols)
        rank = jax.random.permutation(for_places, length + noise)
        return jnp.append(jnp.where(rank < length, shown, nothing), separator).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        return jnp.append(prompt[jnp.argsort(prompt[:-1] == nothing, stable=True)[:length]], end).astype(jnp.int32)

    return Task(
        "noisy_copying", symbols + 3, length + noise + 1, length + 1, end, sample, answer, in_place(answer, "places"),
        lambda prompt: number_of(prompt[:-1], symbols + 1), (symbols + 1) ** (length + noise), "exact",
    )  # fmt: skip


def long_tail(levels: int = 5, symbols: int = 4, exponent: float = 2.0) -> Task:
    """Reverse 1 to `levels` symbols, of which n are shown with a probability in proportion to n ** -exponent.

    Most prompts are easy, and the hard ones rare. "exact" is 1 for the whole answer with its end, and 0 for all others.
    """
    check_sizes(levels=(levels, 2, 8), symbols=(symbols, 2, 10))
    check_number("exponent", exponent, least=0, most=10)
    blank, separator, end = symbols, symbols + 1, symbols + 2

    def sample(key: Array) -> Array:
        for_level, for_symbols = jax.random.split(key)
        level = 1 + jax.random.categorical(for_level, -exponent * jnp.log(jnp.arange(1, levels + 1)))
        shown = jax.random.randint(for_symbols, (levels,), 0, symbols)
        return jnp.append(jnp.where(jnp.arange(levels) < level, shown, blank), separator).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        place = jnp.sum(prompt[:levels] != blank) - 1 - jnp.arange(levels + 1)
        return jnp.where(place >= 0, prompt[jnp.maximum(place, 0)], end).astype(jnp.int32)

    return Task(
        "long_tail", symbols + 3, levels + 1, levels + 1, end, sample, answer, all_or_nothing(answer, "exact"),
        lambda prompt: number_of(prompt[:levels], symbols + 1), (symbols + 1) ** levels, "exact",
    )  # fmt: skip


def preferences(length: int = 4, symbols: int = 6, errors: float = 0.5, sharpness: float = 8.0) -> Task:
    """`sorting` with pairs of responses to each prompt, for methods that learn from given ones (`Task.pairs`).

    A response is the right one, each symbol of which is replaced with the probability `errors` by a random one. Of two
    responses with the shares s and s' of symbols in their place, the first is chosen with the probability
    sigmoid(sharpness (s - s')), as Bradley and Terry have it. The policy begins as an imitation of such responses, the
    reference of these methods. Other methods sample, and learn from the reward.
    """
    check_number("errors", errors, above=0, most=1)
    check_number("sharpness", sharpness, above=0)
    task = sorting(length, symbols)

    def response(key: Array, prompt: Array) -> Array:
        wrong = jax.random.uniform(key, (length,)) < errors
        other = jax.random.randint(jax.random.fold_in(key, 1), (length,), 0, symbols)
        return jnp.where(jnp.append(wrong, False), jnp.append(other, task.end), task.answer(prompt)).astype(jnp.int32)

    def pairs(key: Array, prompt: Array) -> tuple[Array, Array]:
        *each, for_judge = jax.random.split(key, 3)
        first, second = (response(one, prompt) for one in each)
        share, other = (jnp.mean((said == task.answer(prompt))[:-1], dtype=jnp.float32) for said in (first, second))
        wins = jax.random.bernoulli(for_judge, jax.nn.sigmoid(sharpness * (share - other)))
        return jnp.where(wins, first, second), jnp.where(wins, second, first)

    return task._replace(name="preferences", pairs=pairs, example=response)
