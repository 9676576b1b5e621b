"""Soft thoughts of the engine: those of a loop of one row without caches, whoever shares the rows, continued too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import quick_compiles
from jaxrl_kernels.sample.noise import OF_TOKENS, bits_at, gumbel, row_keys

from jaxrl_llm import sample
from jaxrl_llm.core.soft_thinking import SoftThinking, no_thoughts
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.rollouts.runtime.replay_log import CallKey, GroupLog, PartialSample, from_arrays, to_arrays
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.errors import InputError

V, END, STOP, LONGEST = 16, 10, 15, 40
CONFIG = ModelConfig(
    family="llama", vocab_size=V, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.35,
    eos_token_ids=(STOP,),
)  # fmt: skip
PARAMS = init_params(jax.random.key(0), CONFIG, scale=0.2)
KEY = jax.random.key(7)
THINKING = SoftThinking(top_k=4, top_p=0.9, gumbel_temperature=0.5, end=END)
PROMPTS = [(1, 2, 4), (6, 7, 8, 9, 10, 11, 12, 13, 14)]
REQUESTS = [Request(PROMPTS[n % 2], 20 - n, 30 + n % 2, n // 2) for n in range(8)]


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles() -> Iterator[None]:
    with quick_compiles():
        yield


def policy_of(**changes: Any) -> Policy:
    return Policy(CONFIG, thinking=dataclasses.replace(THINKING, **changes))


def rollout(policy: Policy, requests: Sequence[Request], slots: int = 3, **others: Any) -> list[Completion]:
    settings = settings_of(policy, KEY, **{name: others.pop(name) for name in ("temperature",) if name in others})
    found = stream(policy, take_weights(policy, PARAMS), requests, settings, slots=slots, **others)
    return sorted(found, key=lambda one: one.index)


@jax.jit
def forward(table: Any, ids: Any) -> Any:
    """Logits [LONGEST, V] after tokens of a table of embeddings."""
    params = {**PARAMS, "embed": table}
    places, real = jnp.arange(LONGEST)[None], jnp.ones((1, LONGEST), jnp.int32)
    hidden, _ = Policy(CONFIG).forward(params, ids[None], places, real)
    return Policy(CONFIG).logits_of(params, hidden)[0]


def alone(thinking: SoftThinking, asked: Request, seed: int, records: Any) -> list[tuple[int, Any, float]]:
    """Token, record and log-probability of each place, from the definition: each mixture is a row of the table.

    records: the engine's, of which mixtures are made, as rounding would grow from each to the next.
    """
    table, ids = np.zeros((V + LONGEST, 16), np.float32), np.zeros(LONGEST, np.int32)
    table[:V], ids[: len(asked.prompt)] = PARAMS["embed"], asked.prompt
    thinks, out = True, list[tuple[int, Any, float]]()
    for place in range(len(records)):
        at = len(asked.prompt) + place
        logits = np.asarray(forward(table, ids))[at - 1].astype(np.float64)
        keys = row_keys(jnp.asarray([[seed, asked.prompt_id, asked.sample, place]], jnp.uint32))
        noise = np.asarray(gumbel(bits_at(keys, OF_TOKENS, jnp.arange(V)[None])))[0].astype(np.float64)
        record, logp = np.full((3, thinking.top_k), -1.0), 0.0
        if thinks:
            best = np.argsort(-logits)[: thinking.top_k]
            p = np.exp(logits[best]) / np.exp(logits[best]).sum()
            n = int(np.searchsorted(np.cumsum(p), thinking.top_p) + 1)
            p, eps = p[:n] / p[:n].sum(), noise[best[:n]]
            if thinking.density == "mean":
                p, eps = p + 1e-6, np.clip(eps, -1.5, 3)
            record[:, :n] = best[:n], np.log(p) + eps, np.log(p)
            terms = -eps - np.exp(-eps)
            logp = terms[np.log(p) > -3].mean() if thinking.density == "mean" else terms.sum()
            own = records[place][:, records[place][0] >= 0].astype(np.float64)
            y = np.exp(own[1] / thinking.gumbel_temperature)
            token = int(best[np.argmax(record[1, :n])])
            table[V + place], ids[at] = (y / y.sum()) @ np.asarray(PARAMS["embed"])[own[0].astype(int)], V + place
            thinks = token != END
        else:
            token = ids[at] = int(np.argmax(logits + noise))
            logp = logits[token] - np.log(np.exp(logits).sum())
        out.append((token, record, float(logp)))
        if token == STOP:
            break
    return out


@pytest.mark.parametrize("density", ["mean", "sum"])
def test_the_engine_is_a_loop_of_one_row_without_caches(density: Any) -> None:
    policy = policy_of(density=density)
    seed = int(settings_of(policy, KEY).seed)
    answered = 0
    for asked, one in zip(REQUESTS, rollout(policy, REQUESTS), strict=True):
        assert policy.thinking is not None
        assert one.tokens.thoughts is not None
        expected = alone(policy.thinking, asked, seed, one.tokens.thoughts)
        assert one.tokens.token.tolist() == [token for token, _, _ in expected]
        assert one.tokens.size == asked.limit or one.tokens.token[-1] == STOP
        np.testing.assert_allclose(one.tokens.thoughts, [record for _, record, _ in expected], atol=2e-5)
        np.testing.assert_allclose(one.tokens.logp, [logp for *_, logp in expected], atol=2e-5)
        ends = np.flatnonzero(one.tokens.token == END)
        if len(ends) and ends[0] + 1 < one.tokens.size:  # thoughts, with the token that ends them, then the answer
            soft = one.tokens.thoughts[:, 0, 0] >= 0
            np.testing.assert_array_equal(soft, np.arange(one.tokens.size) <= ends[0])
            answered += 1
    assert answered >= 2


def same(a: Completion, b: Completion) -> None:
    assert a.tokens.token.tolist() == b.tokens.token.tolist()
    for x, y in ((a.tokens.thoughts, b.tokens.thoughts), (a.tokens.logp, b.tokens.logp)):
        np.testing.assert_allclose(x, y, atol=1e-4)  # type: ignore[arg-type]


def test_rows_do_not_depend_on_others_and_continue_where_they_were() -> None:
    """In other slots, one by one, and paused after every few tokens, also through the log of a checkpoint."""
    policy = policy_of()
    whole = rollout(policy, REQUESTS, slots=8)
    for one in rollout(policy, [REQUESTS[5]]):
        same(one, whole[5])
    parts: dict[int, Completion] = {}
    for pause in (1, 2, 7, 12, 20):
        asked = [n for n in range(8) if n not in parts or parts[n].unfinished]
        requests = []
        for n in asked:
            begun = parts[n].tokens if n in parts else REQUESTS[n].begun
            call, drawn = CallKey(n, 0, 0), PartialSample(begun)
            (log,) = from_arrays(to_arrays((GroupLog((1,), 0, 1, 0, {call: drawn}),)))
            requests.append(dataclasses.replace(REQUESTS[n], begun=log.drawn[call].tokens, pause_at=pause))
        parts |= {asked[one.index]: one for one in rollout(policy, requests)}
    for n in range(8):
        same(parts[n], whole[n])
    assert max(one.tokens.size for one in whole) > 12


def test_a_request_that_needs_more_room_does_not_change_the_others() -> None:
    """The engine grows, and computes what rows hold again, of their mixtures."""
    from jaxrl_llm.sampling.capacity import size_for
    from jaxrl_llm.sampling.engine import Engine

    policy = policy_of()
    engine = Engine(policy, take_weights(policy, PARAMS), settings_of(policy, KEY), size_for(REQUESTS[:2], 4))
    for request in REQUESTS[:2]:
        engine.submit(request)
    found = [*engine.step(1), *engine.step(4)]
    engine.submit(Request(tuple(range(6, 16)) * 7, 40, 9))
    while engine.busy:
        found += engine.step()
    by_number = {one.index: one for one in found}
    for n, one in enumerate(rollout(policy, REQUESTS[:2])):
        same(by_number[n], one)


def test_towards_temperature_zero_of_the_noise_it_is_discrete_sampling() -> None:
    """Of all tokens and the same noise: the most heavily weighed one is the Gumbel-max draw, and it is all weight."""
    thinking = policy_of(top_k=V, top_p=1.0, gumbel_temperature=1e-4, density="sum")
    plain = rollout(Policy(CONFIG), REQUESTS)
    for one, expected in zip(rollout(thinking, REQUESTS), plain, strict=True):
        assert one.tokens.token.tolist() == expected.tokens.token.tolist()
    warm = rollout(policy_of(top_k=V, top_p=1.0, gumbel_temperature=2.0, density="sum"), REQUESTS)
    assert [one.tokens.token.tolist() for one in warm] != [one.tokens.token.tolist() for one in plain]


def test_without_temperature_there_is_no_noise() -> None:
    (one,) = rollout(policy_of(), REQUESTS[:1], temperature=0.0)
    assert one.tokens.thoughts is not None
    soft = one.tokens.thoughts[:, 0] >= 0
    np.testing.assert_array_equal(one.tokens.thoughts[:, 1][soft], one.tokens.thoughts[:, 2][soft])


def test_forbidden_tokens_are_in_no_mixture() -> None:
    allowed = [2, END, STOP, 9, 11, 12]
    batch = sample(
        policy_of(), PARAMS, [list(PROMPTS[0])], KEY, group_size=4, max_new_tokens=12, allowed=allowed, top_k=2
    )
    ids = np.asarray(batch.thoughts)[:, :, 0]
    assert {*ids[ids >= 0].astype(int).tolist()} <= {*allowed}
    assert np.asarray(batch.thoughts).shape == (4, batch.tokens.shape[1], 3, 4)


@pytest.mark.parametrize(
    ("policy", "others", "said"),
    [
        (policy_of(), {"speculative_tokens": 2}, "soft thinking does not support speculative_tokens"),
        (policy_of(end="</think>"), {}, "thoughts end with '</think>', but the policy has no tokenizer"),
        (policy_of(top_k=V + 1), {}, "soft thinking mixes 17 tokens, but the model has 16: lower top_k"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(policy: Policy, others: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        rollout(policy, REQUESTS[:1], **others)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top_k": 0}, "top_k of SoftThinking is 0"),
        ({"top_p": 0.0}, "top_p of SoftThinking is 0"),
        ({"gumbel_temperature": 0.0}, "gumbel_temperature of SoftThinking is 0"),
        ({"end": -2}, "end of SoftThinking is -2"),
        ({"end": ""}, "end of SoftThinking is ''"),
        ({"density": "median"}, "density"),
        ({"top_p": jnp.float32(0.5)}, "is an array, but is part of the program"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SoftThinking(**given)


def test_the_end_is_one_token() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(letter) for letter in text]

    assert SoftThinking(end="a").end_token(Letters()) == ord("a")
    with pytest.raises(InputError, match="'ab', which is 2 tokens of this model"):
        SoftThinking(end="ab").end_token(Letters())


def test_records_of_ordinary_tokens_are_of_none() -> None:
    found = np.asarray(partial(no_thoughts, THINKING)(2, 5))
    assert found.shape == (2, 5, 3, 4)
    assert (found == -1).all()
