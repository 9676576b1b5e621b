"""An engine that goes on with new weights and with its caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import renewed
from jaxrl_llm.sampling.weights import take_weights

FIRST, REST = [5, 9, 200, 17, 3], [40, 41, 42]
FAMILIES = ("llama_tied", "qwen3_5", "mixtral")
Params = dict[str, Any]


def settings() -> DrawSettings:
    return DrawSettings(seed_of(jax.random.key(0)), jnp.float32(1), None, None, jnp.asarray([-1], jnp.int32))


def requests(prompts: list[list[int]], first: int = 0) -> list[Request]:
    return [
        Request(tuple(prompt), 12, first + number, sample)
        for number, prompt in enumerate(prompts)
        for sample in range(2)
    ]


def begun(model: Any, prompts: list[list[int]], rows: int = 4, speculative_tokens: int = 0) -> Engine:
    """An engine that has drawn 5 tokens of each row."""
    asked = requests(prompts)
    weights = take_weights(model.policy, model.params)
    size = size_for(asked * rows, rows)
    engine = Engine(model.policy, weights, settings(), size, speculative_tokens=speculative_tokens, turns=True)
    for request in asked:
        engine.submit(request)
    while engine.stats.steps < 4:
        engine.step(1)
    return engine


def go_on(engine: Engine, model: Any, params: Params) -> tuple[Engine, Stats]:
    stats = Stats()
    return renewed(engine, take_weights(model.policy, params), settings(), 1, stats), stats


def over(engine: Engine) -> list[Completion]:
    found = []
    while engine.busy:
        found += engine.step(4)
    return sorted(found, key=lambda one: one.index)


def again(model: Any, params: Params, engine: Engine) -> list[Completion]:
    """The completions of the same requests by an engine of the new weights, which computes all caches again."""
    left = sorted(engine.withdraw(), key=lambda one: one.index)
    asked = requests([FIRST, REST])
    weights = take_weights(model.policy, params)
    new = Engine(model.policy, weights, settings(), size_for(asked, 4), policy_step=1, turns=True)
    for request, one in zip(asked, left, strict=True):
        new.submit(replace(request, begun=one.tokens))
    return over(new)


def assert_same(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.tokens.token, other.tokens.token)
        np.testing.assert_allclose(one.tokens.logp, other.tokens.logp, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(one.tokens.policy_step, other.tokens.policy_step)


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_that_the_new_weights_would_fill_alike_are_as_if_computed_again(family: str, vectors: Any) -> None:
    """New weights of the last norm change what is drawn, but no key, value or state."""
    model = vectors(family)
    norm = model.params["final_norm"]
    params = {**model.params, "final_norm": norm * jnp.linspace(0.2, 2.0, norm.size)}
    kept, stats = go_on(begun(model, [FIRST, REST]), model, params)
    found, wanted = over(kept), again(model, params, begun(model, [FIRST, REST]))
    assert_same(found, wanted)
    old = over(begun(model, [FIRST, REST]))
    assert any((one.tokens.token != other.tokens.token).any() for one, other in zip(found, old, strict=True))
    assert all(one.tokens.policy_step.tolist() == [0] * 5 + [1] * 7 for one in found)
    assert stats.prompt_tokens == stats.continued_tokens == 0, "nothing is computed again"
    assert stats.tokens == 4 * 7


def test_caches_of_other_weights_are_kept(vectors: Any) -> None:
    model = vectors("llama_tied")
    params = jax.tree.map(lambda x: 1.5 * x, model.params)
    found = over(go_on(begun(model, [FIRST, REST]), model, params)[0])
    fresh = again(model, params, begun(model, [FIRST, REST]))
    gaps = [np.abs(one.tokens.logp - other.tokens.logp)[5] for one, other in zip(found, fresh, strict=True)]
    assert max(gaps) > 1e-3


def test_a_prompt_without_rows_is_computed_again_and_one_with_rows_is_shared(vectors: Any) -> None:
    model = vectors("llama_tied")
    engine = begun(model, [FIRST])
    over(engine)
    engine, stats = go_on(engine, model, model.params)
    for request in requests([FIRST], first=1):
        engine.submit(request)
    engine.step(1)
    assert stats.prompt_tokens == len(FIRST)
    engine, stats = go_on(engine, model, model.params)
    for request in requests([FIRST], first=2):
        engine.submit(request)
    engine.step(1)
    assert stats.prompt_tokens == 0


@pytest.mark.heavy
def test_rows_that_decode_by_speculation_go_on(vectors: Any) -> None:
    model = vectors("llama_tied")
    engine = begun(model, [FIRST], rows=64, speculative_tokens=2)
    assert engine.tail is not None
    found = over(go_on(engine, model, model.params)[0])
    wanted = over(begun(model, [FIRST], rows=64))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.tokens.token, other.tokens.token)
