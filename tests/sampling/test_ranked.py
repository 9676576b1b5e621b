"""The most probable tokens that an engine records, and completions that begin with one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from conftest import quick_compiles

from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.errors import InputError

PROMPT = (3, 5, 7, 9, 11, 2, 4, 8)
REQUESTS = [Request(PROMPT, 24 if number == 1 else 4, 0, number) for number in range(16)]


def completed(model: Any, requests: list[Request], stop: int = -1, **how: Any) -> dict[int, Completion]:
    with quick_compiles():
        settings = settings_of(model.policy, jax.random.key(0), stop_token_ids=[stop])
        engine = Engine(
            model.policy, take_weights(model.policy, model.params), settings, size_for(requests, 16), ranked=2, **how
        )
        for request in requests:
            engine.submit(request)
        found: dict[int, Completion] = {}
        while engine.busy:
            found |= {one.index: one for one in engine.step()}
    return found


def logp_of(model: Any, ids: tuple[int, ...], own: int) -> np.ndarray:
    """f64[own, V]: log-probabilities at the last tokens, of whole sequences without a cache."""
    logits = np.asarray(model.policy.logits(model.params, np.asarray([ids], np.int32))[0, -own - 1 : -1], np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_they_are_those_of_the_model_and_a_fork_goes_on_from_one(vectors: Any, speculative_tokens: int) -> None:
    """Through the ring cache and through speculation, in which the last rows of sixteen decode."""
    model = vectors("llama_tied")
    found = completed(model, REQUESTS, speculative_tokens=speculative_tokens)
    for number in (0, 1):
        tokens = found[number].tokens
        exact = logp_of(model, (*PROMPT, *tokens.token.tolist()), tokens.size)
        ids = np.argsort(-exact, axis=1)[:, :2]
        np.testing.assert_array_equal(tokens.most_probable[:, 0], ids)
        for kind in (1, 2):
            np.testing.assert_allclose(tokens.most_probable[:, kind], np.take_along_axis(exact, ids, axis=1), atol=2e-4)
    parent, place = found[1].tokens, 6
    begun = parent.first(place).followed_by(parent.instead(place, 1))
    fork = completed(model, [Request(PROMPT, 24, 0, 40, begun, given=place)])[0].tokens
    assert fork.token[:place].tolist() == parent.token[:place].tolist()
    assert fork.token[place] == parent.most_probable[place, 0, 1]
    exact = logp_of(model, (*PROMPT, *fork.token.tolist()), fork.size)
    own = np.take_along_axis(exact, fork.token[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(fork.logp, own, atol=2e-4, err_msg="of the forced token too")


def test_a_stop_token_that_it_begins_with_ends_a_completion(vectors: Any) -> None:
    model = vectors("llama_tied")
    parent = completed(model, REQUESTS)[1].tokens
    begun = parent.first(6).followed_by(parent.instead(6, 1))
    stop = int(begun.token[-1])
    asked = [Request(PROMPT, 24, 0, 40, begun, given=6), Request(PROMPT, 24, 0, 41, begun, given=7)]
    ended, earlier = completed(model, asked, stop)[0], completed(model, asked, stop)[1]
    assert (ended.ended, ended.tokens.size) == (True, 7)
    assert earlier.tokens.size > 7, "a token of an earlier turn ends nothing"


def test_tokens_without_a_record_say_so(vectors: Any) -> None:
    tokens = completed(vectors("llama_tied"), REQUESTS)[0].tokens
    bare = dataclasses.replace(REQUESTS[0], begun=tokens._replace(ranked=None)).begun
    for one in (bare, bare.followed_by(tokens)):
        with pytest.raises(InputError, match="did not record the most probable tokens"):
            one.instead(0, 1)
