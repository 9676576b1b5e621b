"""What is still in the cache is not computed again: a prompt that comes back, a fork, a conversation's next turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import KINDS
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import Completion, Prefix, Request, Tokens
from jaxrl_llm.sampling.resume.kv_offload import Kept, absolute_step, best_reuse
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.weights import take_weights

PROMPT = (5, 9, 200, 17, 3)
LIMIT = 40


def engine_of(model: Any, rows: int = 2, dtype: Any = None, parked: int | None = None) -> Engine:
    """An engine with room for two prompts."""
    sampling = DrawSettings(seed_of(jax.random.key(0)), jnp.float32(1), None, None, jnp.asarray([-1], jnp.int32))
    asked = [Request(PROMPT, LIMIT, 0, i) for i in range(rows)] + [Request((*PROMPT, 1), LIMIT, 1, 0)] * rows
    return Engine(
        model.policy, take_weights(model.policy, model.params), sampling,
        size_for(asked, rows)._replace(parked=parked or 0), cache_dtype=dtype, stats=Stats(), turns=parked is not None,
    )  # fmt: skip


def finish(engine: Engine, *requests: Request) -> list[Completion]:
    """The completions of requests, in their order."""
    numbers, found = [engine.submit(request) for request in requests], dict[int, Completion]()
    while engine.busy:
        found |= {completion.index: completion for completion in engine.step(3)}
    return [found[number] for number in numbers]


def given_tokens(*ids: int) -> Tokens:
    zeros = np.zeros(len(ids), np.float32)
    return Tokens(np.asarray(ids, np.int32), zeros, zeros, zeros - np.inf, zeros, np.zeros(len(ids), np.int32))


def alike(one: Completion, other: Completion, atol: float = 2e-5) -> None:
    assert one.tokens.token.tolist() == other.tokens.token.tolist()
    np.testing.assert_allclose(one.tokens.logp, other.tokens.logp, rtol=0, atol=atol)


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(["llama", "gemma2", *KINDS], ["gemma2", "qwen3_5"]))
def test_a_conversation_that_comes_back(family: str, vectors: Any) -> None:
    """Its second turn is what an engine computes that never saw the first, and what the trainer computes."""
    model = vectors(family)
    engine = engine_of(model)
    (first,) = finish(engine, Request(PROMPT, 12, 0, 0))
    begun = first.tokens.followed_by(given_tokens(80, 81, 82, 83))
    turn = Request(PROMPT, begun.size + 8, 0, 0, begun, given=begun.size)
    (second,) = finish(engine, turn)
    assert engine.stats.reused_tokens == 11, "all but the last token of the first turn"
    assert engine.stats.prompts == 1, "the prompt went through the model once"
    fresh = engine_of(model)
    alike(second, finish(fresh, turn)[0])
    assert fresh.stats.reused_tokens == 0
    action = np.concatenate([np.ones(12, bool), np.zeros(4, bool), np.ones(8, bool)])
    batch = assemble([BatchRow(PROMPT, second.tokens, True, 0, 0, action)], 1.0, False)
    outputs = jax.jit(policy_outputs, static_argnums=0)(model.policy, model.params, batch)
    bound = 3e-4 if model.policy.config.recurrent else 1e-4
    assert np.abs(np.asarray(outputs.logp) - batch.behaviour_logp)[np.asarray(batch.action_mask)].max() < bound


def turns_of(engine: Engine, conversations: int, together: bool) -> dict[int, Completion]:
    """Three turns of six tokens, with observations of four. together: no turn begins before the last one has ended."""
    prompts = [PROMPT, (*PROMPT, 1)]
    turn, last, who, back = [0] * conversations, dict[int, Completion](), dict[int, int](), list[int]()

    def submit(i: int) -> None:
        begun = given_tokens()
        if turn[i]:
            begun = last[i].tokens.followed_by(given_tokens(80 + i, 90 + turn[i], 82, 83))
        asked = Request(prompts[i % 2], begun.size + 6, i % 2, i, begun, given=begun.size)
        who[engine.submit(asked)] = i
        turn[i] += 1

    for i in range(conversations):
        submit(i)
    while engine.busy:
        for completion in engine.step(5):
            i = who[completion.index]
            last[i] = completion
            back += [i] if turn[i] < 3 else []
        while back and not (together and engine.busy):
            submit(back.pop(0))
    return last


@pytest.mark.parametrize("together", [True, False])
def test_conversations_that_take_turns_in_few_rows_are_computed_once(together: bool, vectors: Any) -> None:
    """They give up their rows and come back; the ring KV cache, of 40 columns, goes round meanwhile."""
    model = vectors("gemma2")
    engine, other = engine_of(model, parked=4), engine_of(model)
    found, fresh = turns_of(engine, 5, together), turns_of(other, 5, together)
    for i in range(5):
        alike(found[i], fresh[i])
    assert engine.stats.prompt_tokens == len(PROMPT) * 2 + 1
    assert engine.stats.continued_tokens == 5 * 2 * 4, "observations alone; the last token of a turn for that of theirs"
    assert engine.stats.reused_tokens == 5 * (5 + 15), "what a turn had before"
    assert other.stats.continued_tokens > 2 * engine.stats.continued_tokens


@pytest.mark.heavy
@pytest.mark.parametrize("parked", [None, 0, 2])
@pytest.mark.parametrize("place", [6, 12])
def test_forks_of_a_completion(place: int, parked: int | None, vectors: Any) -> None:
    """Also more forks than rows: the first take copies, the others come when the row is somebody else's."""
    model = vectors("llama")
    engine = engine_of(model, rows=3, parked=parked)
    (trunk,) = finish(engine, Request(PROMPT, 12, 0, 0))
    forks = [Request(PROMPT, 20, 0, 5 + i, trunk.tokens.first(place), given=place) for i in range(5)]
    found = finish(engine, *forks)
    assert engine.stats.reused_tokens >= 3 * min(place - 1, 11)
    for one, other in zip(found, finish(engine_of(model, rows=3), *forks), strict=True):
        alike(one, other)
    assert len({tuple(one.tokens.token.tolist()) for one in found}) == 5


@pytest.mark.heavy
def test_a_store_of_eight_bits(vectors: Any) -> None:
    model = vectors("llama")
    engine = engine_of(model, dtype=jnp.int8)
    (first,) = finish(engine, Request(PROMPT, 12, 0, 0))
    turn = Request(PROMPT, 20, 0, 0, first.tokens.followed_by(given_tokens(80, 81)), given=14)
    (second,) = finish(engine, turn)
    (other,) = finish(engine_of(model, dtype=jnp.int8), turn)
    assert engine.stats.reused_tokens == 11
    np.testing.assert_allclose(second.tokens.logp[:15], other.tokens.logp[:15], atol=0.05)


def test_a_prompt_that_comes_back(vectors: Any) -> None:
    """Its slot still holds it, as long as no other prompt needed the room."""
    engine = engine_of(vectors("llama"))
    finish(engine, Request(PROMPT, 4, 0, 0))
    finish(engine, Request((1, 2, 3), 4, 1, 0))
    finish(engine, Request(PROMPT, 4, 0, 1))
    assert engine.stats.prompts == 2
    for number in range(engine.shape.prompts):
        finish(engine, Request((7, 8, number), 4, 9 + number, 0))
    before = engine.stats.prompts
    finish(engine, Request(PROMPT, 4, 0, 2))
    assert engine.stats.prompts == before + 1


def test_what_the_ring_has_overwritten_is_computed_again(vectors: Any) -> None:
    model = vectors("llama")
    engine = engine_of(model)
    (first,) = finish(engine, Request(PROMPT, 12, 0, 0))
    finish(engine, Request((*PROMPT, 1), LIMIT, 1, 0))  # takes the other row, for as many steps as the ring has columns
    turn = replace(Request(PROMPT, 20, 0, 0), begun=first.tokens, given=12)
    (second,) = finish(engine, turn)
    assert engine.stats.reused_tokens == 0
    alike(second, finish(engine_of(model), turn)[0])


@pytest.mark.heavy
def test_weights_that_grow_the_engine_lose_nothing(vectors: Any) -> None:
    """A request that does not fit makes the engine larger; rows that decode go on from their tokens."""
    model = vectors("llama")
    engine = engine_of(model)
    short, long = Request(PROMPT, LIMIT, 0, 0), Request(tuple(range(3, 60)), 100, 1, 0)
    engine.submit(short)
    engine.step(5)
    engine.submit(long)
    found = {completion.index: completion for completion in iter_all(engine)}
    alike(found[0], finish(engine_of(model), short)[0], 1e-4)
    alike(found[1], finish(engine_of(model), long)[0], 1e-4)


def iter_all(engine: Engine) -> list[Completion]:
    out = []
    while engine.busy:
        out += engine.step(8)
    return out


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 64), st.integers(0, 400), st.data())
def test_the_step_of_a_column(columns: int, steps: int, data: st.DataObject) -> None:
    written = data.draw(st.integers(max(steps - columns, 0), max(steps - 1, 0)))
    if steps:
        assert absolute_step(steps, written % columns, columns) == written


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_which_row_is_reused_against_a_ring_written_out(data: st.DataObject) -> None:
    """The ring itself, as a list of which (row's token) each column holds: what is taken over is really there."""
    columns = data.draw(st.sampled_from([8, 16]))
    n = data.draw(st.integers(6, 2 * columns))
    start = data.draw(st.integers(0, 20))
    last = start + n - 1  # token j is drawn at step start + j, its keys are written at the next one
    steps = last + 1 + data.draw(st.integers(0, 12))
    ring: dict[int, int] = {}
    for step in range(start + 1, steps):
        ring[step % columns] = step - start - 1 if step <= last else -1
    begun = list(range(n))[: data.draw(st.integers(2, n))] + data.draw(st.lists(st.just(99), max_size=3))
    kept, prompt = {3: Kept(Prefix((1,)), np.arange(n), last)}, Prefix((1,))
    found = best_reuse(kept, prompt, np.asarray(begun), steps, columns)
    for other in (Prefix((2,)), Prefix((1,), adapter=1)):
        assert best_reuse(kept, other, np.asarray(begun), steps, columns) is None
    if found is None:
        return
    own = len(begun) - 1
    assert found.usable <= min(n - 1, own)
    for token in range(max(found.usable - columns, 0), found.usable):
        wanted = (steps - own + token) % columns
        if own - token <= columns:
            assert ring[(wanted - found.shift) % columns] == token
