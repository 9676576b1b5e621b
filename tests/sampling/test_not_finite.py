"""Logits that are not finite are named, whichever way a token is drawn; requests that cannot be are refused at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import quick_compiles
from heavy import few

from jaxrl_llm import sample
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.requests import NO_TOKENS, Request, Tokens, first_not_finite
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.errors import InputError

KEY = jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles() -> Iterator[None]:
    """Many programs, each soon run."""
    with quick_compiles():
        yield


@pytest.fixture(scope="module")
def llama(vectors: Any) -> Any:
    return vectors("llama")


def with_nan(params: Any, name: str, place: Any = (0,)) -> Any:
    """The parameters with one number that is not finite."""
    where = params["layers"] if name in params["layers"] else params
    changed = {**where, name: where[name].at[place].set(jnp.nan)}
    return {**params, "layers": changed} if where is params["layers"] else changed


WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "greedy": {"temperature": 0.0},
    "filters": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "allowed": {"allowed": list(range(1, 50))},
    "allowed, greedy": {"allowed": list(range(1, 50)), "temperature": 0.0},
    "int8 cache": {"cache_dtype": jnp.int8},
}


@pytest.mark.heavy
@pytest.mark.parametrize("way", few(WAYS, ["fused", "filters"]))
def test_a_nan_weight_is_named_whichever_way_a_token_is_drawn(way: str, llama: Any) -> None:
    """It is a norm's, so that all hidden states are NaN, from the first token on."""
    params = with_nan(llama.params, "final_norm")
    message = r"logits are not finite at token 1 of the completion of prompt 7, sample 0: check the weights$"
    with pytest.raises(InputError, match=message):
        sample(llama.policy, params, [[5, 9]], KEY, prompt_ids=[7], max_new_tokens=4, **WAYS[way])


def test_a_logit_of_a_token_that_is_not_allowed_counts_too(llama: Any) -> None:
    params = with_nan(llama.params, "unembed", (200, 3))
    with pytest.raises(InputError, match="logits are not finite at token 1 of"):
        sample(llama.policy, params, [[5, 9]], KEY, max_new_tokens=4, allowed=list(range(1, 50)))


@pytest.mark.heavy
def test_a_later_token_is_named_by_its_place_and_at_once(llama: Any) -> None:
    """The embedding of the third token is NaN: the fourth cannot be drawn, long before the completion's end."""
    good = sample(llama.policy, llama.params, [[5, 9]], KEY, max_new_tokens=100, stop_token_ids=[])
    own = np.asarray(good.tokens)[0, 2:102].tolist()
    assert own.index(own[2]) == 2
    params = with_nan(llama.params, "embed", (own[2],))
    stats_before_the_end = []

    def watch(index: int, tokens: np.ndarray) -> None:
        stats_before_the_end.append(len(tokens))

    settings = DrawSettings(seed_of(KEY), jnp.float32(1.0), None, None, jnp.asarray([-1], jnp.int32))
    weights = take_weights(llama.policy, params)
    with pytest.raises(InputError, match="not finite at token 4 of the completion of prompt 0, sample 0"):
        list(stream(llama.policy, weights, [Request((5, 9), 100)], settings, chunk=8, watch=watch))
    assert max(stats_before_the_end, default=0) < 16


def test_infinite_log_probabilities_that_are_right_are_no_fault(llama: Any) -> None:
    """The floor without filters, and tokens that a mask forbids; a log-probability of a drawn token is finite."""
    found = sample(llama.policy, llama.params, [[5, 9]], KEY, max_new_tokens=6, allowed=[3], stop_token_ids=[])
    assert np.asarray(found.tokens)[0, 2:8].tolist() == [3] * 6
    one = np.zeros(1, np.float32)
    tokens = Tokens(np.asarray([3]), one - 80.0, one, one - np.inf, one - 1e4, np.asarray([0]))
    assert first_not_finite(tokens) is None
    assert first_not_finite(NO_TOKENS) is None
    for field, value in (("token", -1), ("logp", -np.inf), ("logp", np.nan), ("untruncated_logp", np.nan)):
        bad = tokens._replace(**{field: np.asarray([value])})
        assert first_not_finite(tokens.followed_by(bad)) == 1


REQUEST = Request((5, 9), 4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (dataclasses.replace(REQUEST, prompt=()), r"request 1: the prompt is \(\), but must be a tuple"),
        (dataclasses.replace(REQUEST, prompt=[5]), r"request 1: the prompt is \[5\], but must be a tuple"),  # type: ignore[arg-type]
        (dataclasses.replace(REQUEST, prompt=(5, 257)), "request 1 contains the token id 257, but the model's"),
        (dataclasses.replace(REQUEST, prompt=(-1,)), "request 1 contains the token id -1"),
        (dataclasses.replace(REQUEST, prompt=(0.5,)), "request 1: its tokens are"),  # type: ignore[arg-type]
        (dataclasses.replace(REQUEST, limit=0), "request 1: limit is 0, but must be a whole number from 1"),
        (dataclasses.replace(REQUEST, limit=2.5), "request 1: limit is 2.5"),  # type: ignore[arg-type]
        (dataclasses.replace(REQUEST, pause_at=-1), "request 1: pause_at is -1"),
        (dataclasses.replace(REQUEST, prompt_id=2**31), "request 1: prompt_id is 2147483648"),
        (dataclasses.replace(REQUEST, begun=None), "request 1: begun is a NoneType"),  # type: ignore[arg-type]
        ((5, 9), "request 1 is a tuple, but must be a Request"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_anything_runs(request_: Any, message: str, llama: Any) -> None:
    settings = DrawSettings(seed_of(KEY), jnp.float32(1.0), None, None, jnp.asarray([-1], jnp.int32))
    with pytest.raises(InputError, match=message):
        stream(llama.policy, take_weights(llama.policy, llama.params), [REQUEST, request_], settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": -1}, "slots is -1, but must be a whole number, at least 0"),
        ({"slots": 1.5}, "slots is 1.5"),
        ({"chunk": 0}, "chunk is 0, but must be a whole number, at least 1"),
        ({"requests": REQUEST}, "requests is a Request, but must be a list"),
        ({"settings": {}}, "settings is a dict, but must be the result of"),
        ({"weights": {}}, r"weights is a dict, but must be the result of take_weights\(policy, params\)"),
        ({"policy": "llama"}, "the policy is 'llama', but must be a Policy"),
    ],
)
def test_other_arguments_are_refused_too(changes: dict[str, Any], message: str, llama: Any) -> None:
    given: dict[str, Any] = {
        "policy": llama.policy, "weights": take_weights(llama.policy, llama.params), "requests": [REQUEST],
        "settings": DrawSettings(seed_of(KEY), jnp.float32(1.0), None, None, jnp.asarray([-1], jnp.int32)),
    }  # fmt: skip
    with pytest.raises(InputError, match=message):
        stream(**given | changes)
