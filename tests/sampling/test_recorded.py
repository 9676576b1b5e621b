"""The experts of tokens that an engine records: those of the pass that gave the token's key and value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sample
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Request, Tokens, concatenate_tokens
from jaxrl_llm.sampling.routed_experts import in_order, pad_experts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.weights import take_weights

PROMPTS = [[5, 9, 200, 17, 3], [40, 41, 42]]
outputs = jax.jit(policy_outputs, static_argnums=(0, 4))


def check(model: Any, batch: Trajectories) -> None:
    """All tokens but the last of each row have the experts that the trainer's forward pass gives them."""
    found = outputs(model.policy, model.params, batch.replace(experts=None), None, Wanted(names=("experts",)))
    real = np.asarray(batch.token_mask)
    seen = real & (np.cumsum(real, axis=1) < real.sum(axis=1, keepdims=True))
    experts = np.asarray(batch.experts)
    np.testing.assert_array_equal(experts[seen], np.asarray(found.extras["experts"])[seen])
    assert (experts[~seen] == -1).all()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_sampled_and_prompt_tokens(family: str, vectors: Any) -> None:
    """With more samples than slots, which start and end at different steps; and sampling is as without."""
    model = vectors(family)
    asked: dict[str, Any] = {"group_size": 3, "max_new_tokens": 9, "slots": 4, "stop_token_ids": list(range(128, 160))}
    plain = sample(model.policy, model.params, PROMPTS, jax.random.key(0), **asked)
    batch = sample(model.policy, model.params, PROMPTS, jax.random.key(0), record_experts=True, **asked)
    assert plain.experts is None
    assert jax.tree.all(jax.tree.map(np.array_equal, batch.replace(experts=None), plain))
    assert len({*np.asarray(batch.token_mask).sum(axis=1).tolist()}) > 2
    assert batch.experts.dtype == jnp.int8
    check(model, batch)


def test_a_dense_model_records_nothing(vectors: Any) -> None:
    model = vectors("llama_tied")
    assert (
        sample(model.policy, model.params, PROMPTS, jax.random.key(0), max_new_tokens=4, record_experts=True).experts
        is None
    )


@pytest.mark.heavy
def test_speculation_records_them_too(vectors: Any) -> None:
    model = vectors("mixtral")
    batch = sample(
        model.policy, model.params, [PROMPTS[0] * 4], jax.random.key(3), record_experts=True, speculative_tokens=2,
        temperature=0.0, max_new_tokens=24, stop_token_ids=[], stats=(stats := Stats()),
    )  # fmt: skip
    assert stats.drafted > 0
    check(model, batch)


def engine_of(model: Any, requests: list[Request], rows: int) -> Engine:
    sampling = DrawSettings(seed_of(jax.random.key(0)), jnp.float32(1), None, None, jnp.asarray([-1], jnp.int32))
    return Engine(
        model.policy, take_weights(model.policy, model.params), sampling, size_for(requests, rows), record_experts=True
    )


def finish(engine: Engine, *requests: Request) -> list[Completion]:
    numbers, found = [engine.submit(request) for request in requests], dict[int, Completion]()
    while engine.busy:
        found |= {completion.index: completion for completion in engine.step(3)}
    return [found[number] for number in numbers]


def given_tokens(*ids: int) -> Tokens:
    zeros = np.zeros(len(ids), np.float32)
    return Tokens(np.asarray(ids, np.int32), zeros, zeros, zeros - np.inf, zeros, np.zeros(len(ids), np.int32))


def batch_of(*completions: Completion) -> Trajectories:
    prompt = tuple(PROMPTS[0])
    rows = [
        BatchRow(prompt, c.tokens, True, 0, 0, experts=in_order(len(prompt), c.prompt_experts, c.tokens))
        for c in completions
    ]
    return assemble(rows, 1.0, False)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.heavy
def test_given_tokens_of_a_conversation(fresh: bool, vectors: Any) -> None:
    """Its second turn, in an engine that still has the first in its cache, and in one that computes it again. A third
    request is longer than there is room for, so that the engine grows while the second decodes."""
    model, prompt = vectors("mixtral"), tuple(PROMPTS[0])
    first = Request(prompt, 12, 0, 0)
    engine = engine_of(model, [first, first], 2)
    (turn,) = finish(engine, first)
    begun = turn.tokens.followed_by(given_tokens(80, 81, 82, 83))
    assert begun.experts is not None
    assert (begun.experts[12:] == -1).all()
    if fresh:
        engine = engine_of(model, [first, first], 2)
    number = engine.submit(Request(prompt, begun.size + 8, 0, 0, begun, given=begun.size))
    found = {completion.index: completion for completion in engine.step(3)}
    engine.submit(Request(prompt, 40, 0, 1, given_tokens(7)))  # a prefix of one token, given from the start
    while engine.busy:
        found |= {completion.index: completion for completion in engine.step(3)}
    check(model, batch_of(found[number], found[number + 1]))


@pytest.mark.heavy
def test_tokens_keep_the_experts_of_the_time_they_were_drawn(vectors: Any) -> None:
    """A paused completion goes on in an engine with other weights, which computes its keys again."""
    model, prompt = vectors("mixtral"), tuple(PROMPTS[0])
    first = Request(prompt, 12, 0, 0, pause_at=6)
    (paused,) = finish(engine_of(model, [first], 1), first)
    other = jax.tree.map(lambda x: x[..., ::-1] if x.shape[-1] == model.policy.config.num_experts else x, model.params)
    engine = engine_of(model, [first], 1)
    engine.weights = take_weights(model.policy, other)
    (found,) = finish(engine, Request(prompt, 12, 0, 0, paused.tokens))
    np.testing.assert_array_equal(found.tokens.experts[:6], paused.tokens.experts)
    assert (found.tokens.experts >= 0).all()


def test_rows_without_experts_among_others() -> None:
    experts = np.arange(4, dtype=np.int8).reshape(2, 1, 2)
    both = concatenate_tokens([given_tokens(1, 2, 3), given_tokens(4, 5)._replace(experts=experts)])
    assert both.experts is not None
    assert both.experts.tolist() == [[[-1, -1]]] * 3 + experts.tolist()
    assert both.first(4).after(3).experts.tolist() == [[[0, 1]]]  # type: ignore[union-attr]
    assert concatenate_tokens([NO_TOKENS, given_tokens(1)]).experts is None
    of_prompt = np.full((2, 1, 2), 9, np.int8)
    row = in_order(2, of_prompt, both)
    assert row is not None
    assert row[:, 0, 0].tolist() == [9, 9, -1, -1, 0, 2, -1]
    assert in_order(2, None, given_tokens(1)) is None
    assert pad_experts([None, row], 8)[:, :, 0, 0].tolist() == [[-1] * 8, [9, 9, -1, -1, 0, 2, -1, -1]]  # type: ignore[index]
    assert pad_experts([None, None], 8) is None
