"""Tasks with many right answers, which a verifier tells from wrong ones: brackets, and short answers."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.task import Scores, Task, check_sizes, number_of


def brackets(length: int = 6, kinds: int = 2) -> Task:
    """Close what is open: the prompt is the beginning of a balanced text of brackets, the completion its rest.

    "balanced", the reward, is 1 where all is closed in order at the end, however long the way there. `answer` is the
    shortest rest.
    """
    check_sizes(length=(length, 1, 8), kinds=(kinds, 1, 4))
    # Token k opens a bracket of kind k, token kinds + k closes it.
    separator, end = 2 * kinds, 2 * kinds + 1
    T = length + 1

    def read(stack: Array, depth: Array, sound: Array, token: Array) -> tuple[Array, Array, Array]:
        """After one more bracket: int32[...] kinds that are open, how many they are, and whether all was in order."""
        opens, kind = token < kinds, token % kinds
        top = stack[jnp.maximum(depth - 1, 0)]
        stack = jnp.where(opens & (jnp.arange(stack.shape[0]) == depth), kind, stack)
        sound &= (token < 2 * kinds) & (opens | ((depth > 0) & (top == kind)))
        return stack, jnp.where(opens, depth + 1, depth - 1), sound

    def opened(prompt: Array) -> tuple[Array, Array, Array]:
        state = jnp.zeros(length + T, jnp.int32), jnp.int32(0), jnp.bool_(True)
        for i in range(length):
            state = read(*state, prompt[i])
        return state

    def sample(key: Array) -> Array:
        def step(state: tuple[Array, Array, Array], key: Array) -> tuple[tuple[Array, Array, Array], Array]:
            for_way, for_kind = jax.random.split(key)
            stack, depth, _ = state
            opens = (depth == 0) | jax.random.bernoulli(for_way)
            last = kinds + stack[jnp.maximum(depth - 1, 0)]
            token = jnp.where(opens, jax.random.randint(for_kind, (), 0, kinds), last)
            return read(*state, token), token

        state = jnp.zeros(length + T, jnp.int32), jnp.int32(0), jnp.bool_(True)
        _, shown = jax.lax.scan(step, state, jax.random.split(key, length))
        return jnp.append(shown, separator).astype(jnp.int32)

    def answer(prompt: Array) -> Array:
        stack, depth, _ = opened(prompt)
        place = depth - 1 - jnp.arange(T)
        return jnp.where(place >= 0, kinds + stack[jnp.maximum(place, 0)], end).astype(jnp.int32)

    def score(prompt: Array, completion: Array) -> tuple[Scores, Array]:
        state, ended = opened(prompt), jnp.bool_(False)
        for i in range(T):
            ended |= completion[i] == end
            after = read(*state, completion[i])
            state = jax.tree.map(lambda new, old, ended=ended: jnp.where(ended, old, new), after, state)
        balanced = (ended & state[2] & (state[1] == 0)).astype(jnp.float32)
        return {"balanced": balanced}, balanced

    return Task(
        "brackets", 2 * kinds + 2, length + 1, T, end, sample, answer, score,
        lambda prompt: number_of(prompt[:length], 2 * kinds), (2 * kinds) ** length, "balanced",
    )  # fmt: skip


def correct_and_short(base: int = 5, thoughts: int = 4, penalty: float = 0.5) -> Task:
    """Say (a + b) mod base, as the last token before the end; up to `thoughts` tokens before it are for nothing.

    The reward of a right answer is 1 without any, 1 - penalty with all of them. Components are "correct" and "short",
    the share of thoughts that were left out. Examples to imitate have any number of thoughts.
    """
    check_sizes(base=(base, 2, 10), thoughts=(thoughts, 1, 8))
    check_number("penalty", penalty, least=0, most=1)
    thought, equals, end = base, base + 1, base + 2
    T = thoughts + 2

    def sample(key: Array) -> Array:
        return jnp.append(jax.random.randint(key, (2,), 0, base), equals).astype(jnp.int32)

    def after(count: Array | int, prompt: Array) -> Array:
        """The right answer after so many thoughts."""
        place = jnp.arange(T)
        said = jnp.where(place == count, (prompt[0] + prompt[1]) % base, end)
        return jnp.where(place < count, thought, said).astype(jnp.int32)

    def score(prompt: Array, completion: Array) -> tuple[Scores, Array]:
        ends = completion == end
        length = jnp.where(jnp.any(ends), jnp.argmax(ends), 0)  # tokens before the end; 0 where there is none
        last = completion[jnp.maximum(length - 1, 0)]
        correct = ((length > 0) & (last == (prompt[0] + prompt[1]) % base)).astype(jnp.float32)
        short = jnp.where(length > 0, 1 - (length - 1) / thoughts, 0.0)
        return {"correct": correct, "short": short}, correct * (1 - penalty * (1 - short))

    return Task(
        "correct_and_short", base + 3, 3, T, end, sample, lambda prompt: after(0, prompt), score,
        lambda prompt: number_of(prompt[:2], base), base**2, "correct",
        example=lambda key, prompt: after(jax.random.randint(key, (), 0, thoughts + 1), prompt),
    )  # fmt: skip
