"""The engine: whoever shares the slots, each request gets what sampling it alone gives, paused and resumed too."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import count_programs, quick_compiles
from jaxrl_kernels.sample import sample_logits

from jaxrl_llm import sample
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.decode import decode
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.prefill import prefill
from jaxrl_llm.sampling.requests import Completion, Request, Tokens
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import compiles, count_compiles

KEY = jax.random.key(5)
NEVER = -1
LENGTHS = (3, 60, 9, 20)  # of the prompts, which are padded to 64 or 32; windows are 8 tokens
PROMPTS = [tuple(np.random.default_rng(n).integers(0, 256, n).tolist()) for n in LENGTHS]
# Groups of three, two, one and one; limits that differ by 40 times, up to five windows.
REQUESTS = [
    Request(PROMPTS[0], 40, 11, 0), Request(PROMPTS[0], 5, 11, 1), Request(PROMPTS[0], 17, 11, 2),
    Request(PROMPTS[1], 30, 3, 0), Request(PROMPTS[1], 2, 3, 1),
    Request(PROMPTS[2], 1, 7, 0), Request(PROMPTS[3], 33, 4, 0),
]  # fmt: skip
ROWS, LONGEST = 8, 104  # of the plain computation
redraw = jax.jit(sample_logits)


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles() -> Iterator[None]:
    """Many programs, each soon run."""
    with quick_compiles():
        yield


def settings_of(temperature: float = 1.0, ends: Sequence[int] = (NEVER, NEVER), key: jax.Array = KEY) -> DrawSettings:
    return DrawSettings(seed_of(key), jnp.float32(temperature), None, None, jnp.asarray(ends, jnp.int32))


def rollout(
    model: Any, requests: Sequence[Request], slots: int = 3, *, params: Any = None, settings: Any = None, **others: Any
) -> list[Completion]:
    """All completions, in the order of the requests; each comes once."""
    weights = take_weights(model.policy, model.params if params is None else params)
    settings = settings_of() if settings is None else settings
    found = sorted(stream(model.policy, weights, requests, settings, slots=slots, **others), key=lambda c: c.index)
    assert [completion.index for completion in found] == list(range(len(requests)))
    return found


def plain_logits(model: Any, requests: Sequence[Request], found: Sequence[Completion], params: Any) -> jax.Array:
    """f32[ROWS, LONGEST, V] of whole sequences, prompts and completions, without any cache."""
    tokens = np.zeros((ROWS, LONGEST), np.int32)
    for row, completion in enumerate(found):
        ids = [*requests[completion.index].prompt, *completion.tokens.token.tolist()]
        tokens[row, : len(ids)] = ids
    return model.policy.logits(params, tokens)


def drawn_plainly(
    model: Any, requests: Sequence[Request], found: Sequence[Completion], params: Any = None, temperature: float = 1.0
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Token, logp and entropy that each position of each request has, given the tokens before it: from the logits of
    whole sequences without any cache, and the noise of the request's own counters. Equal tokens at every position are,
    one after the other, the tokens of sampling a request alone."""
    logits = plain_logits(model, requests, found, model.params if params is None else params) / temperature
    own = np.zeros((ROWS, LONGEST, 4), np.uint32)
    for row, completion in enumerate(found):
        asked = requests[completion.index]
        own[row, :, 0], own[row, :, 1], own[row, :, 2] = int(settings_of().seed), asked.prompt_id, asked.sample
        own[row, :, 3] = np.maximum(np.arange(LONGEST) - len(asked.prompt) + 1, 0)
    drawn = redraw(logits.reshape(-1, logits.shape[-1]), jnp.asarray(own.reshape(-1, 4)))
    out = []
    for row, completion in enumerate(found):
        first = len(requests[completion.index].prompt) - 1
        part = slice(first, first + completion.tokens.size)
        out.append(tuple(np.asarray(x).reshape(ROWS, LONGEST)[row, part] for x in drawn))
    return out  # type: ignore[return-value]


def assert_as_alone(model: Any, requests: Sequence[Request], found: Sequence[Completion], **others: Any) -> None:
    for completion, (token, logp, entropy) in zip(found, drawn_plainly(model, requests, found, **others), strict=True):
        assert completion.tokens.token.tolist() == token.tolist()
        np.testing.assert_allclose(completion.tokens.logp, logp, atol=5e-5)
        np.testing.assert_allclose(completion.tokens.entropy, entropy, atol=5e-5)


def same_tokens(a: Sequence[Completion], b: Sequence[Completion]) -> bool:
    return [c.tokens.token.tolist() for c in a] == [c.tokens.token.tolist() for c in b]


@pytest.fixture(scope="module")
def gemma2(vectors: Any) -> Any:
    return vectors("gemma2")


@pytest.fixture(scope="module")
def llama(vectors: Any) -> Any:
    return vectors("llama")


@pytest.fixture(scope="module")
def whole(gemma2: Any) -> list[Completion]:
    """The requests through three slots, without a pause."""
    return rollout(gemma2, REQUESTS)


CASES = [("gemma2", 3)]
MORE = [
    ("gemma2", 1),
    ("llama", 2),
    ("gemma2", 2),
    ("gemma2", 5),
    ("gemma2", 0),
    ("gemma3", 3),
    ("qwen3_moe", 2),
    ("qwen3_moe", 0),
]
CASES += [pytest.param(*case, marks=pytest.mark.heavy) for case in MORE]


@pytest.mark.parametrize("family, slots", CASES)
def test_each_request_is_sampled_as_alone(family: str, slots: int, vectors: Any) -> None:
    # This gemma3 repeats its last token unless it is hot.
    model, temperature, stats = vectors(family), 4.0 if family == "gemma3" else 1.0, Stats()
    found = rollout(model, REQUESTS, slots, settings=settings_of(temperature), stats=stats)
    assert_as_alone(model, REQUESTS, found, temperature=temperature)
    for asked, completion in zip(REQUESTS, found, strict=True):
        assert completion.tokens.size == asked.limit == completion.limit
        assert completion.truncated
        assert not completion.ended
        assert not completion.unfinished
        np.testing.assert_array_equal(completion.tokens.untruncated_logp, completion.tokens.logp)
        assert (completion.tokens.floor == -np.inf).all()
        assert (completion.tokens.policy_step == 0).all()
    assert len({tuple(c.tokens.token[:5].tolist()) for c in found}) == len(REQUESTS)
    # The passes and steps that it takes: each prompt once; first tokens come out of the prompts.
    limits = [asked.limit for asked in REQUESTS]
    assert (stats.prompts, stats.prompt_tokens) == (len(PROMPTS), sum(LENGTHS))
    assert (stats.tokens, stats.live) == (sum(limits), sum(limits) - len(limits))
    assert stats.rows == (slots or len(REQUESTS))
    assert stats.steps == (sum(limits) - len(limits) if slots == 1 else stats.steps)
    assert stats.steps >= max(limits) - 1


@pytest.mark.parametrize("order", [[6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 4, 1]])
def test_the_order_of_requests(order: list[int], gemma2: Any, whole: Any) -> None:
    found = rollout(gemma2, [REQUESTS[i] for i in order])
    assert same_tokens(found, [whole[i] for i in order])


def test_group_size_and_limits(gemma2: Any, whole: Any) -> None:
    """More samples of a prompt, fewer of another, and lower limits: what is left is the beginning of the same."""
    others = [Request(PROMPTS[0], 9 + i, 11, i) for i in range(6)]
    requests = [*others, dataclasses.replace(REQUESTS[3], limit=40), dataclasses.replace(REQUESTS[6], limit=4)]
    found = rollout(gemma2, requests)
    for new, old, size in ((0, 0, 9), (1, 1, 5), (2, 2, 11), (6, 3, 30), (7, 6, 4)):
        assert found[new].tokens.token[:size].tolist() == whole[old].tokens.token[:size].tolist()
    assert [c.tokens.size for c in found] == [9, 10, 11, 12, 13, 14, 40, 4]
    assert_as_alone(gemma2, requests, found)


def test_one_request_alone(gemma2: Any, whole: Any) -> None:
    (found,) = rollout(gemma2, [REQUESTS[6]], slots=0)
    assert found.tokens.token.tolist() == whole[6].tokens.token.tolist()
    np.testing.assert_allclose(found.tokens.logp, whole[6].tokens.logp, atol=5e-5)


def test_stop_tokens_free_a_row(gemma2: Any, whole: Any) -> None:
    """A row that is freed early changes no other one; an end is no truncation, even as the first or last token."""
    ends = (int(whole[0].tokens.token[6]), int(whole[3].tokens.token[0]))
    found, stats = [], Stats()
    found = rollout(gemma2, REQUESTS, settings=settings_of(ends=ends), stats=stats)
    assert found[3].tokens.size == 1
    assert found[0].tokens.size <= 7
    for completion, without in zip(found, whole, strict=True):
        hits = np.flatnonzero(np.isin(without.tokens.token, ends))
        size = hits[0] + 1 if hits.size else without.tokens.size
        assert completion.tokens.token.tolist() == without.tokens.token[:size].tolist()
        assert completion.ended == bool(hits.size)
        assert completion.truncated != completion.ended
    assert stats.tokens == sum(c.tokens.size for c in found)


def test_cut_and_watch(gemma2: Any, whole: Any) -> None:
    """Both see all tokens so far every few steps; a cut completion is shortened to what it says."""
    seen: list[tuple[int, list[int]]] = []
    found = rollout(
        gemma2, REQUESTS, chunk=4, watch=lambda index, tokens: seen.append((index, tokens.tolist())),
        cut=lambda tokens: 6 if tokens.size >= 6 else None,
    )  # fmt: skip
    for completion, without in zip(found, whole, strict=True):
        size = min(without.tokens.size, 6)
        assert completion.tokens.token.tolist() == without.tokens.token[:size].tolist()
        assert completion.ended == (without.tokens.size >= 6)
    assert {index for index, _ in seen} == set(range(len(REQUESTS)))
    for index, tokens in seen:
        assert tokens == whole[index].tokens.token[: len(tokens)].tolist()
        assert 1 <= len(tokens) <= 6 + 4


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_log_probabilities_are_recomputed(family: str, vectors: Any) -> None:
    model = vectors(family)
    found = rollout(model, REQUESTS, 2 if family == "llama" else 3, settings=settings_of(0.7))
    of = zip(REQUESTS, found, [0, 0, 0, 1, 1, 2, 3], strict=True)
    rows = [BatchRow(asked.prompt, done.tokens, done.truncated, asked.prompt_id, group) for asked, done, group in of]
    batch = assemble(rows, 0.7, False)
    outputs = jax.jit(policy_outputs, static_argnums=0)(model.policy, model.params, batch)
    action = np.asarray(batch.action_mask)
    assert action.sum() == sum(asked.limit for asked in REQUESTS)
    assert np.abs(outputs.logp - batch.behaviour_logp)[action].max() < 1e-4
    assert np.abs(outputs.entropy - batch.entropy)[action].max() < 1e-4


@pytest.mark.heavy
def test_filtered_log_probabilities_are_recomputed(vectors: Any) -> None:
    model = vectors("gemma3")
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "stop_token_ids": [NEVER]}
    prompts = [list(prompt) for prompt in PROMPTS]
    batch = sample(model.policy, model.params, prompts, KEY, group_size=2, max_new_tokens=20, slots=3, **settings)
    outputs = jax.jit(policy_outputs, static_argnums=0)(model.policy, model.params, batch)
    action = np.asarray(batch.action_mask)
    assert action.sum() == 8 * 20
    assert np.abs(outputs.logp - batch.behaviour_logp)[action].max() < 1e-4
    assert np.abs(outputs.entropy - batch.entropy)[action].max() < 1e-4
    assert (np.asarray(batch.untruncated_logp) < np.asarray(batch.behaviour_logp))[action].any()


def paused(requests: Sequence[Request], at: int) -> list[Request]:
    return [dataclasses.replace(asked, pause_at=at) for asked in requests]


def resumed(requests: Sequence[Request], found: Sequence[Completion], at: int | None = None) -> list[Request]:
    """Unfinished requests, to go on from their tokens."""
    return [
        dataclasses.replace(requests[c.index], begun=c.tokens, pause_at=at) for c in found if c.unfinished
    ]  # fmt: skip


def joined(first: Sequence[Completion], later: Sequence[Completion]) -> list[Tokens]:
    """The tokens of all requests: of those that were unfinished at first, the later ones."""
    rest = iter(later)
    return [next(rest).tokens if completion.unfinished else completion.tokens for completion in first]


@pytest.mark.heavy
@pytest.mark.parametrize("at", [1, 5, 12])
def test_a_paused_rollout_goes_on(at: int, gemma2: Any, whole: Any) -> None:
    """From a token, from less than a window, and from more; through three slots for seven requests, twice."""
    first = rollout(gemma2, paused(REQUESTS, at))
    for completion, asked in zip(first, REQUESTS, strict=True):
        assert completion.tokens.size == min(at, asked.limit)
        assert completion.unfinished == (asked.limit > at)
    stats = Stats()
    second = resumed(REQUESTS, first)
    later = rollout(gemma2, second, stats=stats, policy_step=1)
    assert stats.tokens == sum(asked.limit - at for asked in second)
    for tokens, without in zip(joined(first, later), whole, strict=True):
        assert tokens.token.tolist() == without.tokens.token.tolist()
        np.testing.assert_allclose(tokens.logp, without.tokens.logp, atol=5e-5)
        np.testing.assert_allclose(tokens.entropy, without.tokens.entropy, atol=5e-5)
        assert tokens.policy_step.tolist() == [0] * min(at, tokens.size) + [1] * max(tokens.size - at, 0)


def test_two_pauses(gemma2: Any, whole: Any) -> None:
    first = rollout(gemma2, paused(REQUESTS, 5))
    again = resumed(REQUESTS, first, at=14)
    second = rollout(gemma2, again, policy_step=1)
    third = rollout(gemma2, resumed(again, second), policy_step=2)
    ends = [
        Completion(c.index, tokens, c.ended, c.limit) for c, tokens in zip(second, joined(second, third), strict=True)
    ]
    found = joined(first, ends)
    for tokens, without in zip(found, whole, strict=True):
        assert tokens.token.tolist() == without.tokens.token.tolist()
        assert tokens.policy_step.tolist() == ([0] * 5 + [1] * 9 + [2] * 40)[: tokens.size]


def test_other_weights_go_on_from_the_same_tokens(gemma2: Any, whole: Any) -> None:
    """What was sampled stays; what follows is of the new weights, as if they had seen all tokens themselves."""
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.03 * random.normal(size=x.shape).astype(np.float32), gemma2.params)
    first = rollout(gemma2, paused(REQUESTS, 12))
    requests = resumed(REQUESTS, first)
    later = rollout(gemma2, requests, params=params, policy_step=1)
    plainly = drawn_plainly(gemma2, requests, later, params=params)
    for completion, asked, (token, logp, entropy) in zip(later, requests, plainly, strict=True):
        kept, new = completion.tokens.first(12), slice(12, None)
        for name in Tokens._fields:
            np.testing.assert_array_equal(getattr(kept, name), getattr(asked.begun, name))
        assert completion.tokens.token[new].tolist() == token[new].tolist()
        np.testing.assert_allclose(completion.tokens.logp[new], logp[new], atol=5e-5)
        np.testing.assert_allclose(completion.tokens.entropy[new], entropy[new], atol=5e-5)
        assert completion.tokens.policy_step.tolist() == [0] * 12 + [1] * (asked.limit - 12)
    # The weights do differ: some tokens and all log-probabilities do.
    assert not same_tokens(later, [whole[i] for i, asked in enumerate(REQUESTS) if asked.limit > 12])


@pytest.mark.heavy
def test_a_store_of_eight_bits(gemma2: Any) -> None:
    """Paused and resumed too: log-probabilities are those of the model but for the rounding of keys and values."""
    first = rollout(gemma2, paused(REQUESTS, 12), cache_dtype=jnp.int8)
    requests = resumed(REQUESTS, first)
    found = rollout(gemma2, requests, cache_dtype=jnp.int8)
    logits = plain_logits(gemma2, requests, found, gemma2.params)
    logp = np.asarray(jax.nn.log_softmax(logits))
    error = []
    for row, completion in enumerate(found):
        start, token = len(requests[row].prompt) - 1, completion.tokens.token
        exact = logp[row, np.arange(start, start + token.size), token]
        error.append(np.abs(completion.tokens.logp - exact).max())
    assert 1e-4 < max(error) < 0.2


@pytest.mark.parametrize("begun", [False, True])
def test_enough_stops_the_rest(begun: bool, gemma2: Any, whole: Any) -> None:
    """Each request comes once: finished ones first, the others with their tokens so far, or those begun before."""
    requests, had = list(REQUESTS), [0] * len(REQUESTS)
    if begun:
        first = rollout(gemma2, paused(REQUESTS, 12))
        requests = [dataclasses.replace(asked, begun=c.tokens) if c.unfinished else asked
                    for asked, c in zip(REQUESTS, first, strict=True)]  # fmt: skip
        had = [asked.begun.size for asked in requests]
    order: list[Completion] = []

    def enough(completion: Completion) -> bool:
        order.append(completion)
        return len(order) >= 2

    stats = Stats()
    found = rollout(gemma2, requests, enough=enough, stats=stats)
    assert [c.index for c in found if not c.unfinished] == sorted(c.index for c in order)
    assert 2 <= len(order) < len(requests)
    for completion, without, size in zip(found, whole, had, strict=True):
        assert completion.tokens.token.tolist() == without.tokens.token[: completion.tokens.size].tolist()
        assert completion.tokens.size >= size
    waiting = [i for i, c in enumerate(found) if c.unfinished and c.tokens.size == had[i]]
    running = [i for i, c in enumerate(found) if c.unfinished and c.tokens.size > had[i]]
    assert waiting
    assert running
    assert stats.tokens == sum(c.tokens.size for c in found) - sum(had)
    # They go on from there to the same ends.
    later = rollout(gemma2, resumed(requests, found))
    for tokens, without in zip(joined(found, later), whole, strict=True):
        assert tokens.token.tolist() == without.tokens.token.tolist()


@pytest.mark.parametrize("pause", [None, 5])
def test_nothing_is_left_to_draw(pause: int | None, gemma2: Any, whole: Any) -> None:
    """Begun tokens that reach the limit, or the pause, come back as they are."""
    at = 40 if pause is None else pause
    requests = [
        dataclasses.replace(asked, begun=c.tokens.first(at), pause_at=pause)
        for asked, c in zip(REQUESTS, whole, strict=True)
    ]
    found = rollout(gemma2, requests)
    assert [c.tokens.size for c in found] == [asked.begun.size for asked in requests]
    assert [c.unfinished for c in found] == [asked.begun.size < asked.limit for asked in requests]


def test_no_requests(gemma2: Any) -> None:
    assert rollout(gemma2, []) == []


def makespan(work: list[int], rows: int) -> tuple[int, int]:
    """Steps when each free row takes the next of the list, in all and while some wait."""
    free_at = [0] * rows
    last_start = 0
    for length in work:
        start = heapq.heappop(free_at)
        last_start = start
        heapq.heappush(free_at, start + length)
    return max(free_at), last_start


def long_tailed(count: int, group: int = 1) -> list[Request]:
    """Limits from 2 to 32 tokens, most of them short."""
    random = np.random.default_rng(2)
    limits = np.clip(np.exp(random.normal(1.6, 0.9, size=count)), 2, 32).astype(int)
    limits[:2] = 2, 32
    return [Request((1 + i // group, 7), int(limit), i // group, i % group) for i, limit in enumerate(limits)]


@pytest.mark.heavy
def test_no_row_idles_while_requests_wait(llama: Any) -> None:
    """Eight rows: the loop is left at every end, so there is no idle row-step, and the steps are those of a list."""
    requests, stats = long_tailed(48), Stats()
    found = rollout(llama, requests, 8, stats=stats)
    assert stats.busy_live == 8 * stats.busy_steps
    work = [asked.limit - 1 for asked in requests]
    assert (stats.steps, stats.busy_steps) == makespan(work, 8)
    assert stats.live == sum(work)
    assert [c.tokens.size for c in found] == [asked.limit for asked in requests]
    # Static batches of eight would take each as long as its longest.
    static = sum(max(work[i : i + 8]) for i in range(0, 48, 8))
    assert stats.steps < 0.7 * static


@pytest.mark.heavy
def test_groups_keep_rows_busy(llama: Any) -> None:
    requests, stats = long_tailed(48, group=4), Stats()
    rollout(llama, requests, 8, stats=stats)
    assert stats.prompts == 12
    assert stats.busy_live == 8 * stats.busy_steps


@pytest.mark.heavy
def test_one_row_in_thirty_two_may_wait(llama: Any) -> None:
    """64 rows: the loop is left when two are done, so at most one waits in any step."""
    # One row ends after its third token, and then two with each token: the first is idle for a step.
    requests, stats = [Request((1, i, 7), 3 + (i + 1) // 2, i) for i in range(55)], Stats()
    requests += [Request((1, i, 7), 32, i) for i in range(55, 160)]
    rollout(llama, requests, 64, stats=stats)
    assert stats.busy_steps > 30
    assert 63 * stats.busy_steps <= stats.busy_live < 64 * stats.busy_steps
    assert stats.busy_occupancy >= 0.95


@pytest.mark.heavy
def test_one_program_however_many_refills(llama: Any) -> None:
    """Two widths of prompts, 48 ends; then other lengths, prompts and temperatures of the same buckets."""
    programs = count_programs(decode, prefill)
    requests = [*long_tailed(47), Request(tuple(range(1, 61)), 9, 50, 0)]
    rollout(llama, requests, 8)
    decodes, prefills = programs()
    assert decodes == 1
    assert 1 <= prefills <= 4  # two for each width
    count_compiles()
    before = compiles()[0]
    others = [Request(tuple(range(2, 60)), 32, 0, 0), *(Request((5, i), 3 + i % 28, i, 0) for i in range(40))]
    stats = Stats()
    rollout(llama, others, 8, settings=settings_of(0.5), stats=stats)
    assert programs() == [1, prefills]
    assert compiles()[0] - before == stats.compiles <= 3  # no program of the model; small ones of other sizes


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_new_tokens": 128}, "context is 128: shorten the prompt or lower max_new_tokens"),
        ({"prompts": [[1] * 129]}, "context is 128"),
        ({"allowed": []}, "allowed allows no token"),
        ({"allowed": np.zeros(257, bool)}, "allowed allows no token"),
        ({"allowed": np.ones(256, bool)}, r"bool\[257\], found bool\[256\]"),
        ({"allowed": [3, 257]}, "allowed contains 257"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"prompts": [[3], []]}, "empty prompt"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_bad_input_is_refused_before_anything_compiles(settings: dict[str, Any], message: str, llama: Any) -> None:
    given = {"prompts": [[1, 2, 3]], "max_new_tokens": 5} | settings
    prompts = given.pop("prompts")
    jax.clear_caches()
    count_compiles()
    before = compiles()[0]
    with pytest.raises(InputError, match=message):
        sample(llama.policy, llama.params, prompts, KEY, **given)
    assert compiles()[0] == before
