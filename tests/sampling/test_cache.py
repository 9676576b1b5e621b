"""Cascade attention over the prompt store and the ring, against a plain softmax over all tokens that are seen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxrl_kernels.decode_attention import PartialAttention, merge, partial_attention, visible_own, visible_prompt

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Weighing
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import plan
from jaxrl_llm.sampling.kv_cache import (
    LayerCache,
    PrefixSlots,
    cascade_attention,
    columns,
    each,
    empty,
    merge_sinks,
    pack,
)
from jaxrl_llm.sampling.prefill import empty_prefix_cache

K, R, h = 2, 3, 8  # key-value heads, query heads of each, head size
attend = jax.jit(cascade_attention, static_argnums=10)
see_prompt = jax.jit(visible_prompt, static_argnums=(2, 3))
see_own = jax.jit(visible_own, static_argnums=(2, 3))


@jax.jit
def write(cache: LayerCache, k: jax.Array, v: jax.Array, column: jax.Array) -> LayerCache:
    """The cache with one token of each row, k and v [N, 1, K, h], in a column."""

    def put(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, column, axis)

    return each(put, cache, pack(k, v, cache.keys.dtype))


def config_of(window: int = 0, softcap: float = 0.0, layers: int = 1) -> ModelConfig:
    return ModelConfig(
        "llama", 10, 16, 16, layers, K * R, K, h, 1e-6, False,
        window_of_layer=(window,) * layers, query_scale=0.3, attention_softcap=softcap,
    )  # fmt: skip


class Story:
    """Rows that began at different steps behind prompts of different lengths, and every key and value of theirs."""

    def __init__(self, prompts: list[int], slot_of: list[int], own: list[int], seed: int = 0) -> None:
        """prompts: lengths; slot_of: the prompt of each row; own: own tokens of each row, the newest included."""
        random = np.random.default_rng(seed)

        def vectors(count: int) -> tuple[np.ndarray, np.ndarray]:
            k, v = random.normal(size=(2, count, K, h)).astype(np.float32) * 1.5
            return k, v

        self.prompts, self.slot_of, self.own = prompts, slot_of, own
        self.prompt_kv = [vectors(length) for length in prompts]
        self.own_kv = [vectors(length) for length in own]
        self.q = random.normal(size=(len(own), K * R, h)).astype(np.float32)

    def store(self, width: int, window: int, dtype: Any) -> LayerCache:
        """The prompts as a prefill leaves them: the last `window` tokens only, garbage where there is no token."""
        S = min(width, window) if window else width
        k, v = np.random.default_rng(99).normal(size=(2, len(self.prompts), S, K, h)).astype(np.float32) * 50
        for slot, (keys, values) in enumerate(self.prompt_kv):
            kept = min(S, len(keys))
            k[slot, :kept], v[slot, :kept] = keys[len(keys) - kept :], values[len(values) - kept :]
        return pack(jnp.asarray(k), jnp.asarray(v), dtype)

    def ring(self, size: int, step: int, dtype: Any) -> tuple[LayerCache, jax.Array, jax.Array]:
        """The ring before a step, written a column a step, and the step's keys and values [B, 1, K, h].

        Rows were somebody else's before.
        """
        B, first = len(self.own), max(0, step + 1 - 2 * size)
        ring = pack(jnp.full((B, size, K, h), 70.0), jnp.full((B, size, K, h), -70.0), dtype)
        for at in range(first, step + 1):
            k, v = np.full((2, B, 1, K, h), 30.0, np.float32)
            for row, (keys, values) in enumerate(self.own_kv):
                token = at - (step - self.own[row] + 1)
                if token >= 0:
                    k[row, 0], v[row, 0] = keys[token], values[token]
            if at < step:
                ring = write(ring, jnp.asarray(k), jnp.asarray(v), jnp.int32(at % size))
        return ring, jnp.asarray(k), jnp.asarray(v)

    def found(
        self, width: int, size: int, step: int, window: int = 0, softcap: float = 0.0, dtype: Any = jnp.float32,
        prefix_slots: PrefixSlots | None = None,
    ) -> np.ndarray:  # fmt: skip
        """[B, H, h] by the cache. size: of the ring."""
        count = np.asarray(self.own) - 1
        length = np.asarray(self.prompts)
        position = length[self.slot_of] + count
        before, k, v = self.ring(size, step, dtype)
        out, after = attend(
            jnp.asarray(self.q[:, None]), k, v, before, self.store(width, window, dtype), prefix_slots,
            *(jnp.asarray(x, jnp.int32) for x in (count, length, position, step)), Weighing(window, 0.3, softcap),
        )  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, after, write(before, k, v, jnp.int32(step % size)))
        return np.asarray(out)[:, 0]

    def expected(self, window: int = 0, softcap: float = 0.0) -> np.ndarray:
        """[B, H, h] by a loop over rows and heads in float64."""
        out = np.zeros((len(self.own), K * R, h))
        for row, slot in enumerate(self.slot_of):
            k, v = (np.concatenate(pair).astype(np.float64)
                    for pair in zip(self.prompt_kv[slot], self.own_kv[row], strict=True))  # fmt: skip
            if window:
                k, v = k[-window:], v[-window:]
            for head in range(K * R):
                logits = k[:, head // R] @ self.q[row, head] * 0.3
                if softcap:
                    logits = softcap * np.tanh(logits / softcap)
                p = np.exp(logits - logits.max())
                out[row, head] = p / p.sum() @ v[:, head // R]
        return out


# Windows: none, below all, between, as long as a ring, above all. Six rows behind three prompts.
@pytest.mark.parametrize("window", few([0, 1, 3, 6, 7, 12, 40], [0, 7]))
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_cascade_attention(window: int, softcap: float) -> None:
    story = Story([11, 2, 5], [0, 0, 1, 1, 2, 2], [1, 6, 4, 2, 6, 1])
    size = min(7, window) if window else 7
    found = story.found(12, size, step=20, window=window, softcap=softcap)
    np.testing.assert_allclose(found, story.expected(window, softcap), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("step", [5, 6, 7, 13, 14, 500])
@pytest.mark.parametrize("window", [0, 4])
def test_the_ring_before_and_after_it_wrapped(step: int, window: int) -> None:
    story = Story([3, 9], [0, 1], [6, 3])
    found = story.found(9, 4 if window else 6, step, window)
    np.testing.assert_allclose(found, story.expected(window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_ring_longer_than_the_window(window: int) -> None:
    story = Story([11, 2, 5], [0, 1, 2], [1, 6, 4])
    np.testing.assert_allclose(story.found(12, 7, 20, window), story.expected(window), rtol=2e-5, atol=2e-5)


def test_a_full_ring() -> None:
    """As many own tokens as columns, of all rows; the oldest column is still its own."""
    story = Story([4], [0, 0], [8, 8])
    np.testing.assert_allclose(story.found(4, 8, 29), story.expected(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [0, 5])
def test_lanes_by_index(window: int) -> None:
    """Rows are in any prefix slots, some of which are empty; each row attends to its own prompt."""
    story = Story([11, 2, 5], [2, 0, 0, 1, 2], [1, 6, 4, 2, 3])
    place = [7, 1, 2, 3, 6]  # prefix slot of each row; 3 prefix slots for each prompt slot
    row_in = np.asarray([3, 1, 2, 3, 0, 4, 4, 0, 1])  # 0, 4, 5, 8 are empty: any row
    prefix_slots = PrefixSlots(jnp.asarray(place, jnp.int32), jnp.asarray(row_in, jnp.int32))
    found = story.found(12, 5 if window else 8, 20, window, prefix_slots=prefix_slots)
    np.testing.assert_allclose(found, story.expected(window), rtol=2e-5, atol=2e-5)
    # What fills an empty prefix slot makes no difference, to the bit.
    other = PrefixSlots(prefix_slots.of_row, jnp.asarray(np.where(np.isin(np.arange(9), place), row_in, 2), jnp.int32))
    np.testing.assert_array_equal(story.found(12, 5 if window else 8, 20, window, prefix_slots=other), found)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    own=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    step=st.integers(5, 60),
    window=st.sampled_from([0, 3, 9]),
    seed=st.integers(0, 1000),
)
def test_any_lengths_at_any_step(lengths: list[int], own: list[int], step: int, window: int, seed: int) -> None:
    story = Story(lengths, [0, 0, 1, 1, 2, 2], own, seed)
    size = min(6, window) if window else 6
    found = story.found(12, size, step, window)
    np.testing.assert_allclose(found, story.expected(window), rtol=3e-5, atol=3e-5)


def random_part(seed: int, seen: Any) -> tuple[PartialAttention, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    S = len(seen)
    q, k, v = (random.normal(size=shape).astype(np.float32) for shape in ((1, K, 1, R, h), (1, S, K, h), (1, S, K, h)))
    cache = pack(jnp.asarray(k), jnp.asarray(v), jnp.float32)
    visible = jnp.asarray(seen)[None, None]
    return partial_attention(jnp.asarray(q), cache.keys, cache.values, visible, None, None, 0.3, 0.0), k, v


def test_an_empty_part_counts_nothing() -> None:
    """Nothing seen in one part: the other's attention alone; in both, which only empty rows have: no NaN."""
    whole, _, v = random_part(0, [True, True])
    nothing, _, _ = random_part(1, [False, False, False])
    alone = np.asarray(whole.acc / whole.l[..., None])
    for pair in ((whole, nothing), (nothing, whole)):
        np.testing.assert_allclose(merge(*pair), alone, rtol=1e-6)
    assert np.isfinite(np.asarray(merge(nothing, nothing))).all()
    one, _, v = random_part(2, [False, True, False])
    np.testing.assert_allclose(merge(one, nothing)[0, :, 0, 0], v[0, 1], rtol=1e-6)


def test_parts_of_very_different_size_merge_without_overflow() -> None:
    part, _, _ = random_part(3, [True] * 4)
    far = part._replace(m=part.m + 500.0)
    np.testing.assert_allclose(merge(far, part), far.acc / far.l[..., None], rtol=1e-6)
    np.testing.assert_allclose(merge(part, far), far.acc / far.l[..., None], rtol=1e-6)


def unpacked(cache: LayerCache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [N, S, K, h] as attention takes them, float64."""
    k = np.asarray(cache.keys.astype(jnp.float32), np.float64).transpose(0, 3, 1, 2)
    v = np.asarray(cache.values.astype(jnp.float32), np.float64).transpose(0, 2, 1, 3)
    if cache.key_scale is None or cache.value_scale is None:
        return k, v
    scales = (np.asarray(x, np.float64).transpose(0, 2, 1)[..., None] for x in (cache.key_scale, cache.value_scale))
    key_scale, value_scale = scales
    return k * key_scale, v * value_scale


@pytest.mark.parametrize("spread", [1e-20, 1e-3, 1.0, 1e4])
def test_rounding_of_stored_vectors(spread: float) -> None:
    random = np.random.default_rng(0)
    k, v = random.normal(size=(2, 3, 5, K, h)).astype(np.float32) * spread
    v[0, 0, 0] = 0.0
    exact = unpacked(pack(jnp.asarray(k), jnp.asarray(v), jnp.float32))
    half = unpacked(pack(jnp.asarray(k), jnp.asarray(v), jnp.bfloat16))
    eight = pack(jnp.asarray(k), jnp.asarray(v), jnp.int8)
    assert eight.keys.dtype == eight.values.dtype == jnp.int8
    for given_x, a, b, c in zip((k, v), exact, half, unpacked(eight), strict=True):
        np.testing.assert_array_equal(a, given_x)
        # Eight bits of significand: relative error of at most half a unit in the last place.
        assert (np.abs(b - given_x) <= 2.0**-8 * np.abs(given_x)).all()
        scale = np.abs(given_x).max(axis=-1, keepdims=True) / 127
        error = np.abs(c - given_x)
        assert (error <= scale / 2 * (1 + 1e-5)).all()
        assert error.max() > scale.max() / 100  # it does round
    assert not np.asarray(eight.values)[0, 0, 0].any()  # the vector of zeros stays one
    assert np.isfinite(np.asarray(eight.value_scale)).all()


def bound_of(story: Story, window: int, of: Any) -> np.ndarray:
    """[B, H]: how far attention may move when each key moves by at most of(key) and each value by at most of(value).

    Logits move by at most d = max |q|_1 x 0.3 x of(key), so weights by a factor within exp(2 d), and the result by at
    most (exp(2 d) - 1) max |v| + max of(value).
    """
    out = np.zeros((len(story.own), K * R))
    for row, slot in enumerate(story.slot_of):
        k, v = (np.concatenate(p) for p in zip(story.prompt_kv[slot], story.own_kv[row], strict=True))
        if window:
            k, v = k[-window:], v[-window:]
        for head in range(K * R):
            keys, values = k[:, head // R], v[:, head // R]
            logit = 0.3 * np.abs(story.q[row, head]).sum() * of(keys).max()
            out[row, head] = np.expm1(2 * logit) * np.abs(values).max() + of(values).max()
    return out


@pytest.mark.heavy
@pytest.mark.parametrize("dtype, of", [
    (jnp.bfloat16, lambda x: 2.0**-8 * np.abs(x)),
    (jnp.int8, lambda x: np.broadcast_to(np.abs(x).max(axis=-1, keepdims=True) / 254, x.shape)),
])  # fmt: skip
@pytest.mark.parametrize("window", [0, 4])
def test_attention_over_rounded_stores(dtype: Any, of: Any, window: int) -> None:
    story = Story([11, 2, 5], [0, 0, 1, 1, 2, 2], [1, 6, 4, 2, 6, 1])
    found = story.found(12, 4 if window else 7, 20, window, dtype=dtype)
    error = np.abs(found - story.expected(window)).max(axis=-1)
    bound = bound_of(story, window, of)
    assert (error <= bound + 1e-5).all()
    assert (bound < 0.6).all()  # values are some 1.5 in size: the bound says something
    assert error.max() > 1e-4


def test_int8_attention_is_that_of_the_rounded_vectors() -> None:
    """Scales multiply logits and weights instead of vectors: the same numbers as a loop over the rounded vectors."""
    story = Story([6, 3], [0, 1], [4, 2])
    found = story.found(6, 5, 9, dtype=jnp.int8)
    assert np.abs(found - story.expected()).max() > 1e-4

    def rounded(x: np.ndarray) -> np.ndarray:
        scale = np.abs(x).max(axis=-1, keepdims=True) / 127
        return np.round(x / scale) * scale

    for kvs in (story.prompt_kv, story.own_kv):
        kvs[:] = [(rounded(k), rounded(v)) for k, v in kvs]
    np.testing.assert_allclose(found, story.expected(), rtol=2e-5, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(
    length=st.lists(st.integers(0, 15), min_size=4, max_size=4),
    gaps=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    width=st.sampled_from([1, 7, 15]),
    window=st.sampled_from([0, 1, 4, 15, 18]),
)
def test_visible_columns_of_a_prompt(length: list[int], gaps: list[int], width: int, window: int) -> None:
    """The store has `width` columns, or the window's where that is less, of a prompt's end."""
    S = min(width, window) if window else width
    length = [min(n, width) for n in length]  # 0: a prompt slot that was never filled
    position = np.asarray(length)[:, None] + np.asarray(gaps)
    args = jnp.asarray(length, jnp.int32), jnp.asarray(position, jnp.int32)
    found = np.asarray(see_prompt(*args, S, window))
    expected = np.zeros((len(length), 3, S), bool)
    for p, n in enumerate(length):
        kept = list(range(n))[-S:]
        for w in range(3):
            for column, at in enumerate(kept):
                expected[p, w, column] = not window or position[p, w] - at < window
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


@settings(max_examples=100, deadline=None)
@given(
    count=st.lists(st.integers(0, 11), min_size=4, max_size=4),
    step=st.integers(0, 100),
    most=st.sampled_from([1, 5, 12]),
    window=st.sampled_from([0, 1, 3, 12, 14]),
)
def test_visible_columns_of_the_ring(count: list[int], step: int, most: int, window: int) -> None:
    """Simulated: at every step a column is overwritten by whoever has the row."""
    S = most  # longer than the window too
    count = [min(n, most - 1, step) for n in count]
    found = np.asarray(see_own(jnp.asarray(count, jnp.int32), jnp.int32(step), S, window))
    expected = np.zeros((len(count), 1, S), bool)
    for row, n in enumerate(count):
        holds: dict[int, int | None] = {}
        for at in range(step + 1):
            own = at - (step - n)  # index of the own token of that step; negative: of the row's last owner
            holds[at % S] = own if own >= 0 else None
        for column, own in holds.items():
            expected[row, 0, column] = own is not None and (not window or n - own < window)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_writing_one_column_leaves_the_others(dtype: Any) -> None:
    random = np.random.default_rng(0)
    k, v = random.normal(size=(2, 2, 5, K, h)).astype(np.float32)
    cache = pack(jnp.asarray(k), jnp.asarray(v), dtype)
    new = random.normal(size=(2, 2, 1, K, h)).astype(np.float32)
    story = Story([4], [0, 0], [5, 2])
    _, ring = attend(
        jnp.asarray(story.q[:, None]), jnp.asarray(new[0]), jnp.asarray(new[1]), cache, story.store(4, 0, dtype), None,
        *(jnp.asarray(x, jnp.int32) for x in ([4, 1], [4], [8, 5], 13)), Weighing(0, 0.3, 0.0),
    )  # fmt: skip
    after = unpacked(ring)
    packed = jax.jit(pack, static_argnums=2)  # as in `attend`: one by one, operations may round otherwise
    written = unpacked(packed(jnp.asarray(new[0]), jnp.asarray(new[1]), dtype))
    for was, one, now in zip(unpacked(cache), written, after, strict=True):
        np.testing.assert_array_equal(np.delete(now, 3, axis=1), np.delete(was, 3, axis=1))
        np.testing.assert_array_equal(now[:, 3:4], one)


def test_sinks_take_their_share() -> None:
    """A sink is one more logit, of a token without a value: the results shrink by its part of the weights."""
    random = np.random.default_rng(5)
    logits, values, sink = random.normal(size=(2, 6)), random.normal(size=(2, 6, 4)), np.array([0.3, -40.0])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    parts = (np.einsum("ns,nsh->nh", weights, values), logits.max(axis=1), weights.sum(axis=1))
    found = merge_sinks(PartialAttention(*(jnp.asarray(x, jnp.float32) for x in parts)), jnp.asarray(sink))
    whole = np.exp(logits) / (np.exp(logits).sum(axis=1) + np.exp(sink))[:, None]
    np.testing.assert_allclose(found.acc / found.l[:, None], np.einsum("ns,nsh->nh", whole, values), rtol=1e-5)


def test_columns_and_bytes() -> None:
    """A layer with a window holds no more than its window, and int8 a byte a number and a scale a vector."""
    config = ModelConfig("llama", 10, 16, 16, 3, K * R, K, h, 1e-6, False, window_of_layer=(0, 4, 50))
    assert [columns(config, layer, 20) for layer in range(3)] == [20, 4, 20]
    for dtype, number, scale in ((jnp.float32, 4, 0), (jnp.bfloat16, 2, 0), (jnp.int8, 1, 4)):
        store = empty(config, 6, 20, dtype)
        vectors = 2 * 6 * K * (20 + 4 + 20)
        assert sum(x.nbytes for x in jax.tree.leaves(store)) == vectors * (h * number + scale)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(store)]
        assert len(set(pointers)) == len(pointers)  # each is donated: none is used twice


def test_bytes_of_the_prompt_store_do_not_depend_on_the_group_size() -> None:
    policy = Policy(config_of(layers=2))
    found = set()
    for group in (1, 2, 16):
        prompts = [number // group for number in range(4 * group)]
        store = empty_prefix_cache(policy, plan(prompts, 0).prompts, 40, jnp.float32)
        assert store.length.shape == (4,)
        found.add(sum(x.nbytes for x in jax.tree.leaves(store.layers)))
    assert found == {4 * 40 * 2 * 2 * K * h * 4}  # prompts, tokens, layers, keys and values, heads, sizes, bytes
