"""Hooks of the sampler: drawn from and trained on alike, with and without a second policy, against plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import count_programs, quick_compiles

from jaxrl_llm import sample
from jaxrl_llm.algorithms.policy_loss.nlpo import lagged_nucleus
from jaxrl_llm.core.hooks import Context, Hook, State, first_state
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.models import hooked
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling import Completion, Request, Stats, completion_ids, stream, take_weights
from jaxrl_llm.sampling.decode import begin, decode
from jaxrl_llm.sampling.draw import DrawSettings, draw
from jaxrl_llm.sampling.filters import top_nsigma
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

KEY = jax.random.key(3)
PROMPTS = [[5, 9, 200, 31], [7, 1, 60, 61]]
HOW: dict[str, Any] = {"group_size": 4, "max_new_tokens": 8, "stop_token_ids": []}


def other_than(params: Any, scale: float = 0.4) -> Any:
    """Weights of the second policy."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    moved = [
        x + scale * jnp.std(x) * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def log_softmax(z: Any) -> np.ndarray:
    z = np.asarray(z, np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def nucleus_loop(z: np.ndarray, top_p: float, least: int) -> np.ndarray:
    """bool[V] by the definition of NLPO: sorted, cumulated, shifted."""
    q = np.exp(log_softmax(z))
    order = np.argsort(-q, kind="stable")
    remove = np.cumsum(q[order]) > top_p
    remove[: least - 1] = False
    remove[1:] = remove[:-1].copy()
    remove[0] = False
    allowed = np.zeros(len(q), bool)
    allowed[order[~remove]] = True
    return allowed


def nsigma_loop(z: np.ndarray, n: float) -> np.ndarray:
    z = np.asarray(z, np.float64)
    return z >= z.max() - n * np.sqrt(np.mean((z - z.mean()) ** 2))


def single(policy: Policy, params: Any, *args: Any) -> Any:
    return jax.jit(draw, static_argnums=0)(policy, params, *args)


def settings(temperature: float = 1.0) -> DrawSettings:
    return DrawSettings(jnp.uint32(3), jnp.float32(temperature), None, None, jnp.asarray([-1], jnp.int32))


def drawn(logits: np.ndarray, hook: Hook, others: np.ndarray | None = None, rows: int = 64) -> Any:
    """Tokens drawn from the same logits f32[V]."""
    V = logits.size
    policy = Policy(ModelConfig("llama", V, 1, 1, 1, 1, 1, 1, 1e-6, False, "silu"), hook=hook)
    params: dict[str, Any] = {"unembed": jnp.asarray(logits[:, None], jnp.float32)}
    width = 1
    if others is not None:
        params["other"], width = {"unembed": jnp.asarray(others[:, None], jnp.float32)}, 2
    zeros = jnp.zeros(rows)
    counters = jnp.stack([zeros + 3, zeros, zeros, jnp.arange(rows)], axis=1).astype(jnp.uint32)
    return single(policy, params, jnp.ones((rows, width)), counters, settings())


def test_worked_example_of_nlpo() -> None:
    """q = [0.5, 0.3, 0.15, 0.05], top_p 0.9: the last token is forbidden."""
    logits, q = np.array([1.0, 0.5, 2.0, 3.0]), np.array([0.5, 0.3, 0.15, 0.05])
    masked, raw = np.array([0.231224, 0.140244, 0.628532, 0]), np.array([0.085369, 0.051779, 0.232057, 0.630796])
    found = drawn(logits, lagged_nucleus(0.9), np.log(q))
    token = np.asarray(found.token)
    assert set(token.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(np.exp(found.logp), masked[token], rtol=1e-5)
    np.testing.assert_allclose(np.exp(found.untruncated_logp), raw[token], rtol=1e-5)
    np.testing.assert_allclose(found.entropy, -np.sum(masked[:3] * np.log(masked[:3])), rtol=1e-5)
    assert 3 in np.asarray(drawn(logits, lagged_nucleus(0.9, 4), np.log(q)).token), "four are kept"


@pytest.mark.parametrize("least", [1, 6])
def test_the_nucleus_is_its_loop(least: int) -> None:
    random = np.random.default_rng(0)
    hook = lagged_nucleus(0.7, least)
    z, others = (3 * random.normal(size=(20, 30)) for _ in range(2))
    context = Context(jnp.asarray(others, jnp.float32))
    assert hook.remember is not None
    floor = hook.remember(jnp.asarray(z, jnp.float32), {}, context)
    found = hook.apply(jnp.asarray(z, jnp.float32), {}, context._replace(remembered=floor))
    expected = np.array([nucleus_loop(row, 0.7, least) for row in others])
    np.testing.assert_array_equal(np.isfinite(found), expected)
    # In the update the drawn token is allowed, whatever rounding did to the logits.
    again = hook.apply(jnp.asarray(z), {}, context._replace(remembered=floor, token=jnp.full(20, 29)))
    np.testing.assert_array_equal(np.isfinite(again), expected | (np.arange(30) == 29))


def test_top_nsigma_is_its_loop() -> None:
    logits = 2 * np.random.default_rng(1).normal(size=40)
    allowed = nsigma_loop(logits, 1.5)
    found = drawn(logits, top_nsigma(1.5), rows=256)
    token = np.asarray(found.token)
    assert allowed[token].all()
    expected = log_softmax(np.where(allowed, logits, -1e9))
    np.testing.assert_allclose(found.logp, expected[token], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.untruncated_logp, log_softmax(logits)[token], rtol=1e-4, atol=1e-5)


def sampled(model: Any, hook: Hook | None, other: Any = None, **how: Any) -> Any:
    params = model.params if other is None else {**model.params, "other": other}
    with quick_compiles():
        return sample(replace(model.policy, hook=hook), params, PROMPTS, KEY, **{**HOW, **how})


@pytest.mark.parametrize("family", ["llama_tied", "gemma2"])
@pytest.mark.heavy
def test_with_the_policy_itself_as_its_copy_it_is_top_p(vectors: Any, family: str) -> None:
    model = vectors(family)
    expected = sampled(model, None, top_p=0.8)
    found = sampled(model, lagged_nucleus(0.8), model.params)
    assert completion_ids(found) == completion_ids(expected)
    for name in ("behaviour_logp", "untruncated_logp", "entropy", "support_floor"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5)


def masked_loop(policy: Policy, params: Any, other: Any, batch: Any, allow: Any) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of the actions, from the logits of whole sequences."""
    tokens, action = np.asarray(batch.tokens), np.asarray(batch.action_mask)
    logits, others = (np.asarray(policy.logits(p, batch.tokens, batch.token_mask)) for p in (params, other))
    logp, entropy = np.zeros(action.shape), np.zeros(action.shape)
    for i, t in np.argwhere(action):
        allowed = allow(others[i, t - 1])
        assert allowed[tokens[i, t]], "only tokens of the nucleus are drawn"
        p = log_softmax(np.where(allowed, logits[i, t - 1].astype(np.float64), -1e9))
        logp[i, t], entropy[i, t] = p[tokens[i, t]], -np.sum(np.exp(p[allowed]) * p[allowed])
    return logp, entropy


@pytest.mark.heavy
def test_lagged_nucleus_in_the_engine_and_in_the_update(vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of the definition is sampled from and trained on; the ratio before the first step is 1."""
    monkeypatch.setattr(hooked, "BLOCK", 5)  # which divides nothing
    model = vectors("llama")
    hook, other = lagged_nucleus(0.6, 2), other_than(model.params)
    policy, params = replace(model.policy, hook=hook), {**model.params, "other": other}
    batch = sampled(model, hook, other)
    logp, entropy = masked_loop(model.policy, model.params, other, batch, lambda z: nucleus_loop(z, 0.6, 2))
    np.testing.assert_allclose(batch.behaviour_logp, logp, atol=2e-5)
    np.testing.assert_allclose(batch.entropy, entropy, atol=2e-4)
    assert np.abs(np.asarray(batch.behaviour_logp) - np.asarray(batch.untruncated_logp)).max() > 0.1
    packing = shared_prompts(batch, group_size=4, prompt_length=4, completion_length=8)
    with quick_compiles():
        for packed in (None, packing):
            outputs = jax.jit(policy_outputs, static_argnums=0)(policy, params, batch, packed)
            np.testing.assert_allclose(outputs.logp, logp, atol=2e-5)
            np.testing.assert_allclose(outputs.entropy, entropy, atol=2e-4)
        plain = provide(policy, frozenset({"old_logp", "reference_logp"}), params, model.params, batch)
    np.testing.assert_allclose(np.exp(plain.old_logp - batch.behaviour_logp), 1, atol=5e-5)
    # The reference does not go through the mask: it is the policy itself here.
    np.testing.assert_allclose(plain.reference_logp, batch.untruncated_logp, atol=2e-5)


@pytest.mark.heavy
def test_its_gradient_is_that_of_the_masked_policy(vectors: Any) -> None:
    """Against the plain formula on [N, L, V] logits; the second policy is constant."""
    model = vectors("llama")
    hook, other = lagged_nucleus(0.6, 2), other_than(model.params)
    policy, batch = replace(model.policy, hook=hook), sampled(model, hook, other)

    def through_hook(params: Any, other: Any) -> jax.Array:
        outputs = policy_outputs(policy, {**params, "other": other}, batch)
        return jnp.sum(outputs.logp + 0.3 * outputs.entropy)

    def plain(params: Any) -> jax.Array:
        logits, others = (model.policy.logits(p, batch.tokens, batch.token_mask)[:, :-1] for p in (params, other))
        allowed = jax.nn.log_softmax(others) >= batch.support_floor[:, 1:, None]
        logp = jax.nn.log_softmax(jnp.where(allowed, logits, -1e30))
        chosen = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], axis=2)[..., 0]
        entropy = -jnp.sum(jnp.where(allowed, jnp.exp(logp) * logp, 0.0), axis=2)
        return jnp.sum(jnp.where(batch.action_mask[:, 1:], chosen + 0.3 * entropy, 0.0))

    with quick_compiles():
        found, of_other = jax.jit(jax.grad(through_hook, (0, 1)))(model.params, other)
        expected = jax.jit(jax.grad(plain))(model.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), found, expected)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(of_other))


@pytest.mark.heavy
def test_hooks_of_one_policy_in_the_update(vectors: Any) -> None:
    """A mask of its own, and a bias with a number of the rows, with filters after it."""
    model = vectors("llama")

    def lift(logits: jax.Array, state: State, context: Context) -> jax.Array:
        return logits + jnp.reshape(state["lift"], (-1, 1)) * (jnp.arange(logits.shape[1]) % 2)

    lifted = Hook(lift, "lift", (("lift", 1.5),))
    for hook, how in ((top_nsigma(1.5), {}), (lifted, {"top_p": 0.7, "temperature": 0.8})):
        batch, without = sampled(model, hook, **how), sampled(model, None, **how)
        assert completion_ids(batch) != completion_ids(without)
        with quick_compiles():
            run = jax.jit(policy_outputs, static_argnums=0)
            outputs = run(replace(model.policy, hook=hook), model.params, batch)
            plain = run(model.policy, model.params, batch.replace(support_floor=None))
        np.testing.assert_allclose(outputs.logp, batch.behaviour_logp, atol=3e-5)
        np.testing.assert_allclose(outputs.entropy, batch.entropy, atol=3e-4)
        assert np.abs(np.asarray(outputs.logp - plain.logp)).max() > 0.05, hook.name


def completed(policy: Policy, params: Any, requests: list[Request], **how: Any) -> dict[int, Completion]:
    with quick_compiles():
        given = settings_of(policy, KEY, stop_token_ids=[-1])
        found = stream(policy, take_weights(policy, params), requests, given, **how)
        return {one.index: one for one in found}


def same(found: Completion, expected: Completion) -> None:
    assert found.tokens.token.tolist() == expected.tokens.token.tolist()
    for name in ("logp", "entropy", "floor", "untruncated_logp"):
        np.testing.assert_allclose(getattr(found.tokens, name), getattr(expected.tokens, name), atol=2e-4)


@pytest.mark.heavy
def test_the_engine_does_for_both_what_it_does_for_one(vectors: Any) -> None:
    """Rows that take free slots, go on from a pause, are requeued, restored, and decode by speculation."""
    model = vectors("gemma2")  # whose layers have windows
    policy = replace(model.policy, hook=lagged_nucleus(0.6, 2))
    params = {**model.params, "other": other_than(model.params)}
    requests = [Request(tuple(PROMPTS[i % 2]), 30 if i == 3 else 4 + i % 3, i % 2, i) for i in range(8)]
    expected = completed(policy, params, requests)
    for index, one in completed(policy, params, requests, slots=3).items():
        same(one, expected[index])
    known = Drafts()
    for _ in range(2):
        stats = Stats()
        drafted = completed(policy, params, requests, speculative_tokens=3, drafts=known, stats=stats)
        for index, one in drafted.items():
            same(one, expected[index])
    assert stats.accepted > 5
    begun = [replace(requests[3], begun=expected[3].tokens.first(11))]
    same(completed(policy, params, begun)[0], expected[3])


@pytest.mark.heavy
def test_one_program_for_all_steps(vectors: Any) -> None:
    """Neither other weights, of either policy, nor other numbers of a hook compile again."""
    model = vectors("llama")
    policy = replace(model.policy, hook=lagged_nucleus(0.9, 2))
    programs = count_programs(decode, begin)
    requests = [Request(tuple(PROMPTS[0]), 5, 0, i) for i in range(4)]
    found = []
    for scale in (0.1, 0.5):
        params = {**model.params, "other": other_than(model.params, scale)}
        found.append(completed(policy, params, requests)[0].tokens.logp.tolist())
    assert found[0] != found[1]
    assert programs() == [1, 1]

    def lift(logits: jax.Array, state: State, context: Context) -> jax.Array:
        return logits * state["by"]

    hook = Hook(lift, "scale", (("by", 1.0),))
    policy, programs, found = replace(model.policy, hook=hook), count_programs(decode, begin), []
    for controls in ({}, {"by": 2.0}):
        given = settings_of(policy, KEY, stop_token_ids=[-1])
        given = given._replace(state=jax.tree.map(jnp.float32, first_state(hook, controls)))
        with quick_compiles():
            drawn = list(stream(policy, take_weights(policy, model.params), requests, given))
        found.append(drawn[0].tokens.logp.tolist())
    assert found[0] != found[1]
    assert programs() == [1, 1]


@pytest.mark.heavy
def test_what_cannot_be_is_refused(vectors: Any) -> None:
    model = vectors("llama")
    with pytest.raises(InputError, match="forbids tokens itself: leave out top_k, top_p and min_p"):
        sampled(model, top_nsigma(1.0), top_p=0.9)
    with pytest.raises(InputError, match="other"):
        sampled(model, lagged_nucleus(0.9))
    with pytest.raises(InputError, match="either factor or remember"):
        Hook(lambda z, s, c: z, factor=lambda e, s: e, remember=lambda z, s, c: z[:, 0])
    for make, wrong in ((lagged_nucleus, {"top_p": 0.0}), (lagged_nucleus, {"min_keep": 0}), (top_nsigma, {"n": 0.0})):
        with pytest.raises(InputError):
            make(**wrong)  # type: ignore[operator]
    assert not lagged_nucleus().lasting
    assert top_nsigma().lasting
    mixed = Hook(lambda z, s, c: (z + c.other) / 2, "mixed", other=periodic_reset(1))
    batch = sampled(model, mixed, other_than(model.params))
    policy, params = replace(model.policy, hook=mixed), {**model.params, "other": other_than(model.params)}
    np.testing.assert_allclose(policy_outputs(policy, params, batch).logp, batch.behaviour_logp, atol=3e-5)
    with pytest.raises(InputError, match="reference_logp is not defined: the hook mixed"):
        provide(policy, frozenset({"reference_logp"}), params, model.params, batch)
