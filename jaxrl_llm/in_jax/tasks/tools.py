"""Tasks of agents: a tool that must be called before an answer, and a search whose results are mostly beside the
point."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.tasks.task import Environment, Scores, Task, check_sizes, environment_task, number_of
from jaxrl_llm.selection.rows import mix
from jaxrl_llm.utils.errors import InputError


class _Asked(NamedTuple):
    """Where an episode of `tool_first` is."""

    questions: Array  # int32[n]
    values: Array  # int32[n]
    number: Array  # of the question that is asked now
    known: Array  # whether the tool has told its value
    right: Array  # questions that were answered rightly
    calls: Array
    failed: Array


def tool_first(questions: int = 5, symbols: int = 5, spare: int = 0, outcome: float = 0.25) -> Task:
    """Answer each of so many questions with a value that only the tool knows, anew in every episode.

    An observation is a word and a symbol: the question, or the value that the tool gave, or that there is none. A reply
    is a verb and a symbol: to call the tool with a question, or to answer. The best policy calls once before each
    answer, and there are `spare` turns more than that needs. A right answer is worth (1 - outcome) / (2 questions) in
    its turn, and so is the first call for each question that gives its value; the next question comes after any answer.
    "right", worth `outcome`, is 1 where all answers were right. A guess is right once in `symbols`. The tool called
    with another symbol than the question gives nothing, which counts as a failed call.
    """
    check_sizes(questions=(questions, 1, 5), symbols=(symbols, 2, 8), spare=(spare, 0, 16))
    check_number("outcome", outcome, least=0, most=1)
    call, say, question, value, nothing, begin, end = range(symbols, symbols + 7)

    def sample(key: Array) -> Array:
        drawn = jax.random.randint(key, (2 * questions,), 0, symbols)
        return jnp.concatenate([jnp.array([begin]), drawn]).astype(jnp.int32)

    def seen(state: _Asked, word: Array | int) -> Array:
        at = jnp.minimum(state.number, questions - 1)
        symbol = jnp.where(word == value, state.values[at], state.questions[at])
        return jnp.stack([jnp.asarray(word), symbol]).astype(jnp.int32)

    def reset(prompt: Array) -> tuple[_Asked, Array]:
        none = jnp.int32(0)
        state = _Asked(prompt[1 : questions + 1], prompt[questions + 1 :], none, jnp.bool_(False), none, none, none)
        return state, seen(state, question)

    def step(state: _Asked, reply: Array) -> tuple[_Asked, Array, Array, Array]:
        at = jnp.minimum(state.number, questions - 1)
        calls, answers = reply[0] == call, reply[0] == say
        hit = calls & (reply[1] == state.questions[at])
        right = answers & (reply[1] == state.values[at])
        reward = (1 - outcome) / (2 * questions) * (right | (hit & ~state.known))
        after = state._replace(
            number=state.number + answers, known=(state.known | hit) & ~answers, right=state.right + right,
            calls=state.calls + calls, failed=state.failed + (calls & ~hit),
        )  # fmt: skip
        word = jnp.where(hit, value, jnp.where(calls, nothing, question))
        return after, seen(after, word), reward, after.number == questions

    def score(state: _Asked) -> tuple[Scores, Array]:
        right = (state.right == questions).astype(jnp.float32)
        return {"right": right}, outcome * right

    def best(state: _Asked) -> Array:
        at = jnp.minimum(state.number, questions - 1)
        known = jnp.stack([jnp.int32(say), state.values[at]])
        return jnp.where(state.known, known, jnp.stack([jnp.int32(call), state.questions[at]])).astype(jnp.int32)

    environment = Environment(
        2 * questions + spare, 2, 2, reset, step, lambda state: 2 * state.number + state.known, score, best,
        lambda state: (state.calls.astype(jnp.float32), state.failed.astype(jnp.float32)),
    )  # fmt: skip
    return environment_task(
        "tool_first", end + 1, 1, 2 * questions, end, sample, lambda prompt: number_of(prompt[1:], symbols),
        symbols ** (2 * questions), "right", environment,
    )  # fmt: skip


class Sought(NamedTuple):
    """Where an episode of `search` is."""

    order: Array  # int32[n]: each term's passage names the next one
    found: Array  # terms of the chain whose passages were found
    answered: Array  # whether the answer was right
    calls: Array
    failed: Array


def search(hops: int = 3, terms: int = 6, passages: int = 3, spare: int = 0, outcome: float = 0.25) -> Task:
    """Follow a chain of terms through passages, most of which are distractors, and name its end.

    The prompt is the first term. A reply is a verb and a term: to search for it, or to answer. A search gives
    `passages` passages, each a subject and an object: that about the term names the next one, the others are about
    other terms and say what is false. The best policy needs `hops` searches and then the answer; there are `spare`
    turns more. The first search for each next term of the chain is worth (1 - outcome) / hops. "right", worth
    `outcome`, is 1 for the answer after `hops` terms; any answer ends the episode. A search for what is no term gives
    nothing: a failed call.
    """
    check_sizes(terms=(terms, 3, 8), hops=(hops, 1, 7), passages=(passages, 1, 6), spare=(spare, 0, 16))
    check_number("outcome", outcome, least=0, most=1)
    for name, number, least in (("hops", hops, hops + 1), ("passages", passages, passages)):
        if least > terms:
            raise InputError(f"{name} is {number}, too many for {terms} terms: give more terms")
    look, say, nothing, end = range(terms, terms + 4)

    def sample(key: Array) -> Array:
        return jax.random.permutation(key, terms).astype(jnp.int32)

    def seen(order: Array, term: Array) -> Array:
        following = jnp.zeros(terms, jnp.int32).at[order].set(jnp.roll(order, -1))
        chance = mix(mix(number_of(order, terms).astype(jnp.uint32)) + term.astype(jnp.uint32))
        away = (jnp.arange(passages) + (chance % passages).astype(jnp.int32)) % passages
        about = (term + away) % terms
        wrong = 1 + (mix(chance + about.astype(jnp.uint32)) % (terms - 1)).astype(jnp.int32)
        said = (following[about] + jnp.where(away == 0, 0, wrong)) % terms
        return jnp.stack([about, said], axis=1).reshape(-1).astype(jnp.int32)

    def reset(prompt: Array) -> tuple[Sought, Array]:
        none = jnp.int32(0)
        return Sought(prompt, none, jnp.bool_(False), none, none), jnp.full(2 * passages, nothing, jnp.int32)

    def step(state: Sought, reply: Array) -> tuple[Sought, Array, Array, Array]:
        verb, term = reply[0], reply[1]
        looks, says, known = verb == look, verb == say, term < terms
        on = looks & (state.found < hops) & (term == state.order[state.found])
        right = says & (state.found == hops) & (term == state.order[hops])
        after = state._replace(
            found=state.found + on, answered=state.answered | right, calls=state.calls + looks,
            failed=state.failed + (looks & ~known),
        )  # fmt: skip
        shown = jnp.where(looks & known, seen(state.order, jnp.minimum(term, terms - 1)), nothing)
        return after, shown, (1 - outcome) / hops * on, says

    def score(state: Sought) -> tuple[Scores, Array]:
        right = state.answered.astype(jnp.float32)
        return {"right": right}, outcome * right

    def best(state: Sought) -> Array:
        return jnp.stack([jnp.where(state.found < hops, look, say), state.order[state.found]]).astype(jnp.int32)

    environment = Environment(
        hops + 1 + spare, 2 * passages, 2, reset, step, lambda state: state.found, score, best,
        lambda state: (state.calls.astype(jnp.float32), state.failed.astype(jnp.float32)),
    )  # fmt: skip
    return environment_task(
        "search", end + 1, 1, terms - 1, end, sample, lambda prompt: number_of(prompt, terms), terms**terms, "right",
        environment,
    )  # fmt: skip
