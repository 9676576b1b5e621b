"""Weights that are sent to another program: those that the sampler would take here, each byte once, layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import KINDS

from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.models import lora
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.sent import ADAPTERS, Arriving, Inlet, Outlet, Part, receiver, send_adapters, send_all
from jaxrl_llm.utils.errors import InputError


class Sent:
    """A sender and a receiver in this process, through JAX's transfer server."""

    def __init__(self, policy: Any, params: Any, weight_dtype: str | None = None) -> None:
        self.of = receiver(policy, jax.eval_shape(lambda: params), data_mesh(jax.devices()[:1]), weight_dtype)
        self.outlet = Outlet("127.0.0.1")
        self.arriving = Arriving(self.of, Inlet(self.outlet.address, "127.0.0.1", jax.devices()[0]).pull)
        self.parts, self.bytes, self.held = list[Part](), list[int](), list[int]()

    def part(self, which: Part, arrays: Any) -> None:
        self.held.append(sum(x.nbytes for x in jax.live_arrays()))
        offer = self.outlet.offer(arrays)
        self.parts.append(which)
        self.bytes.append(offer.bytes)
        self.arriving.add(which, offer)


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("family", ["llama_tied", *KINDS])
def test_they_are_those_that_a_sampler_takes(family: str, vectors: Any) -> None:
    model = vectors(family)
    policy = dataclasses.replace(model.policy, dtype=jnp.bfloat16, activations="float32")
    sent = Sent(policy, model.params)
    send_all(policy, model.params, sent.of.options, sent.part)
    weights, wanted = sent.arriving.weights(None), take_weights(policy, model.params).loop
    assert_same(weights.loop, wanted)
    assert sent.parts == [None, *range(policy.config.num_layers)]
    assert weights.moved_bytes == sum(sent.bytes) == sum(x.nbytes for x in jax.tree.leaves(wanted))


@pytest.mark.parametrize("rounding", ["int8", "float8"])
def test_they_are_rounded_before_they_are_sent(rounding: str, vectors: Any) -> None:
    model = vectors("llama")
    sent = Sent(model.policy, model.params, rounding)
    send_all(model.policy, model.params, sent.of.options, sent.part)
    assert_same(sent.arriving.weights(None).loop, take_weights(model.policy, model.params, weight_dtype=rounding).loop)
    assert sum(sent.bytes[1:]) < 0.5 * sum(x.nbytes for x in jax.tree.leaves(model.params["layers"]))


def test_no_more_than_a_layer_is_there_twice(vectors: Any) -> None:
    """Beside what has arrived, which is the receiver's, no more than the part at hand."""
    model = vectors("llama")
    policy = dataclasses.replace(model.policy, dtype=jnp.bfloat16)
    sent = Sent(policy, model.params)
    before = sum(x.nbytes for x in jax.live_arrays())
    send_all(policy, model.params, sent.of.options, sent.part)
    arrived = np.cumsum([0, *sent.bytes[:-1]])
    for held, there, own in zip(sent.held, arrived, sent.bytes, strict=True):
        assert held - before - there <= own + max(sent.bytes[1:])


def test_of_adapters_these_alone_are_sent(vectors: Any) -> None:
    model = vectors("llama_tied")
    policy, base = model.policy, model.params
    base, _ = lora.split(lora.scaled(combine(base, lora.init(jax.random.key(0), policy.config, 4)), 4, 8.0))
    first, later = (lora.init(jax.random.key(seed), policy.config, 4) for seed in (1, 2))
    later = jax.tree.map(lambda x: x + 0.5, later)
    sent = Sent(policy, combine(base, first))
    send_all(policy, combine(base, first), sent.of.options, sent.part)
    weights = sent.arriving.weights(None)
    del sent.parts[:], sent.bytes[:]
    assert send_adapters(combine(base, later), sent.part)
    found = sent.arriving.weights(weights)
    assert_same(found.loop, take_weights(policy, combine(base, later)).loop)
    assert sent.parts == [ADAPTERS]
    assert found.moved_bytes == sum(x.nbytes for x in jax.tree.leaves(later))
    assert not send_adapters(base, sent.part), "there are none"


def test_two_policies_are_refused(vectors: Any) -> None:
    model = vectors("llama_tied")
    sent = Sent(model.policy, model.params)
    with pytest.raises(InputError, match="have the weights of one policy, but this method trains two"):
        send_all(model.policy, {**model.params, "other": model.params}, sent.of.options, sent.part)
