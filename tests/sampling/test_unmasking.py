"""Unmasking against a slow loop, one forward pass of one row at a time; and the engine around it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxrl_kernels import sample_logits

from jaxrl_llm.models.config import Unmasking
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.policy import Policy, init_params
from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.sampler import sample, settings_of
from jaxrl_llm.sampling.stream import engine_of
from jaxrl_llm.sampling.unmasking.unmask import PASSES
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.errors import InputError

V, MASK, STOP = 24, 23, 1
CONFIG = dataclasses.replace(
    from_hf({
        "model_type": "llada", "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 32,
        "vocab_size": V, "max_sequence_length": 96, "mask_token_id": MASK, "eos_token_id": STOP, "weight_tying": True,
    }),
    unmasking=Unmasking(MASK, 6, 2),
)  # fmt: skip
POLICY = Policy(CONFIG)
PARAMS = init_params(jax.random.key(3), CONFIG, scale=0.5)
WEIGHTS = take_weights(POLICY, PARAMS)
PROMPTS = ((5, 6, 7), (9, 4), (12, 3, 8, 2))


def requests(count: int = 2, limit: int = 15, **more: Any) -> list[Request]:
    return [Request(p, limit, i, n, **more) for i, p in enumerate(PROMPTS) for n in range(count)]


def run(asked: list[Request], slots: int = 0, temperature: float = 1.0, chunks: int | None = None, **more: Any) -> Any:
    settings = settings_of(POLICY, jax.random.key(0), temperature)
    engine = engine_of(POLICY, WEIGHTS, settings, size_for(asked, slots), **more)
    for request in asked:
        engine.submit(request)
    found: dict[int, Completion] = {}
    while engine.busy and (chunks is None or chunks > 0):
        found |= {one.index: one for one in engine.step(1)}
        chunks = None if chunks is None else chunks - 1
    return found | {one.index: one for one in engine.withdraw()}


def slow(request: Request, temperature: float = 1.0) -> list[int]:
    """The tokens of one request, a pass of one row at a time, without shapes that are padded."""
    settings = settings_of(POLICY, jax.random.key(0), temperature)
    ids: list[int] = []
    while len(ids) < request.limit and STOP not in ids:
        block: list[int | None] = [None] * 6
        for i, token in enumerate(request.fixed[len(ids) : len(ids) + 6]):
            block[i] = token if token >= 0 else None
        number = 0
        while True:
            stop = block.index(STOP) if STOP in block else 6
            free = [i for i in range(stop) if block[i] is None]
            if not free:
                break
            row = [*request.prompt, *ids, *(MASK if token is None else token for token in block)]
            logits = POLICY.logits(PARAMS, jnp.asarray([row]))[0, -6:]
            place = len(ids) + np.arange(6) + PASSES * number
            keys = np.stack(
                [np.full(6, int(settings.seed)), np.full(6, request.prompt_id), np.full(6, request.sample), place], 1
            )
            divided = logits / (temperature or 1.0)
            token, logp, _ = sample_logits(divided, jnp.asarray(keys, jnp.uint32), temperature=float(temperature > 0))
            sure = sorted(free, key=lambda i: (int(token[i]) == MASK, -float(logp[i]), i))
            for i in sure[:2]:
                block[i] = int(token[i])
            number += 1
        if any(token is None for token in block):
            return [*ids, *block[: block.index(STOP) + 1]]  # type: ignore[list-item]
        ids += block  # type: ignore[arg-type]
    end = ids.index(STOP) + 1 if STOP in ids else request.limit
    return ids[: min(end, request.limit)]


@pytest.mark.parametrize("temperature", [1.0, 0.0, 1.7])
def test_it_draws_what_a_slow_loop_draws(temperature: float) -> None:
    asked = requests(3)
    found = run(asked, temperature=temperature)
    for index, request in enumerate(asked):
        assert found[index].tokens.token.tolist() == slow(request, temperature)
    if temperature == 1:
        assert any(one.ended for one in found.values()), "one of them stops by itself"


def test_tokens_do_not_depend_on_the_rows_beside() -> None:
    asked = requests(3)
    whole, few = run(asked), run(asked, slots=2)
    for index in whole:
        np.testing.assert_array_equal(whole[index].tokens.token, few[index].tokens.token)
        np.testing.assert_allclose(whole[index].tokens.logp, few[index].tokens.logp, atol=1e-5)


def test_what_is_withdrawn_goes_on_from_its_tokens() -> None:
    asked = requests(2)
    whole, begun = run(asked), run(asked, chunks=1)
    assert {one.tokens.size for one in begun.values() if one.unfinished} == {6}
    again = [dataclasses.replace(r, begun=begun[i].tokens) for i, r in enumerate(asked) if begun[i].unfinished]
    left = [i for i in range(len(asked)) if begun[i].unfinished]
    for index, one in zip(left, run(again).values(), strict=True):
        np.testing.assert_array_equal(one.tokens.token, whole[index].tokens.token)
        assert one.ended == whole[index].ended


def test_a_pause_within_a_block_changes_no_token_before_it() -> None:
    asked = requests(2)
    whole = run(asked)
    for index, one in run([dataclasses.replace(r, pause_at=4) for r in asked]).items():
        np.testing.assert_array_equal(one.tokens.token, whole[index].tokens.token[:4])


def test_fixed_tokens_stay_and_the_others_are_drawn_around_them() -> None:
    fixed = (-1, 17, -1, -1, 18, 18, -1, -1, 16)
    asked = requests(3, fixed=fixed)
    found, free = run(asked), run(requests(3))
    for index, request in enumerate(asked):
        ids = found[index].tokens.token.tolist()
        assert ids == slow(request)
        for place, token in enumerate(fixed[: len(ids)]):
            assert token in (-1, ids[place])
    assert any(found[i].tokens.token[0] != free[i].tokens.token[0] for i in found), "what comes before them sees them"


def test_the_update_finds_the_same_log_probabilities() -> None:
    for temperature in (1.0, 0.6):
        batch = sample(
            POLICY, PARAMS, PROMPTS, jax.random.key(2), group_size=4, max_new_tokens=15, temperature=temperature
        )
        found = policy_outputs(POLICY, PARAMS, batch)
        np.testing.assert_allclose(found.logp, jnp.where(batch.action_mask, batch.behaviour_logp, 0), atol=2e-6)
        np.testing.assert_allclose(found.entropy, jnp.where(batch.action_mask, batch.entropy, 0), atol=2e-6)
    assert len({int(n) for n in batch.lengths}) > 1


def test_a_mask_is_drawn_only_where_nothing_else_is_left() -> None:
    """A model that knows nothing else: all its responses are masks, and it ends."""
    params = PARAMS | {"embed": PARAMS["embed"].at[MASK].set(8.0 * jnp.sign(PARAMS["embed"][MASK]))}
    batch = sample(POLICY, params, PROMPTS[:1], jax.random.key(2), max_new_tokens=6)
    assert int(batch.lengths[0]) == 6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"turns": True}, "one turn"),
        ({"cache_dtype": "int8"}, "nothing is cached"),
        ({"speculative_tokens": 2}, "speculative_tokens"),
    ],
)
def test_what_it_cannot_do_is_refused(more: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(requests(), **more)


def test_a_causal_model_writes_around_no_fixed_tokens() -> None:
    policy = Policy(dataclasses.replace(CONFIG, unmasking=None))
    engine = engine_of(policy, WEIGHTS, settings_of(policy, jax.random.key(0)), size_for(requests()))
    assert isinstance(engine, Engine)
    with pytest.raises(InputError, match="fixed tokens"):
        engine.submit(requests(fixed=(-1, 3))[0])
    with pytest.raises(InputError, match="engine_of"):
        Engine(POLICY, WEIGHTS, settings_of(POLICY, jax.random.key(0)), size_for(requests()))
