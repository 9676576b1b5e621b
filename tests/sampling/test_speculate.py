"""Speculation: it changes no token, for all families, filters, caches and meshes; and the drafts themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import with_devices
from conftest import FAMILIES, FEW, KINDS, MODES, quick_compiles
from heavy import few
from hypothesis import given, settings

from jaxrl_llm import sample
from jaxrl_llm.sampling import Completion, Request, Stats, stream, take_weights
from jaxrl_llm.sampling.capacity import size_for
from jaxrl_llm.sampling.draw import Drawn
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.speculative.verify import LEAST_MATCH, LONGEST_MATCH, Tail, drafts
from jaxrl_llm.utils.errors import InputError

VECTORS = Path(__file__).parents[1] / "vectors"
PROMPTS = ((3, 5, 7, 9, 11, 2, 4, 8), (3, 5, 9, 1, 2))
SHORT, LONG, K = 4, 40, 3


def asked(count: int = 8) -> list[Request]:
    """Two groups, of which one completion each is long: at most 2 of 16 rows live at the end."""
    return [
        Request(prompt, LONG if number == 5 else SHORT + number % 3, prompt_id, number)
        for prompt_id, prompt in enumerate(PROMPTS)
        for number in range(count)
    ]


def completed(
    model: Any, requests: list[Request], mode: dict[str, Any] | None = None, seed: int = 0, mesh: Any = None, **how: Any
) -> dict[int, Completion]:
    """The completions, by index; none ends by itself."""
    drawn = settings_of(model.policy, jax.random.key(seed), **(mode or {}), stop_token_ids=[-1])
    with quick_compiles():
        weights = take_weights(model.policy, model.params, mesh)
        return {c.index: c for c in stream(model.policy, weights, requests, drawn, **how)}


def check_same(found: dict[int, Completion], expected: dict[int, Completion], tolerance: float = 2e-4) -> None:
    """The same tokens, with the same numbers to rounding."""
    assert found.keys() == expected.keys()
    for index, completion in expected.items():
        other = found[index]
        assert other.tokens.token.tolist() == completion.tokens.token.tolist()
        for name in ("logp", "entropy", "untruncated_logp", "policy_step"):
            np.testing.assert_allclose(
                getattr(other.tokens, name), getattr(completion.tokens, name), rtol=0, atol=tolerance
            )
        assert (other.ended, other.limit) == (completion.ended, completion.limit)


@pytest.mark.parametrize("mode", few(list(MODES), ["together"]))
@pytest.mark.parametrize("family", few((*FAMILIES, *KINDS), FEW))
def test_no_token_changes(vectors: Any, family: str, mode: str) -> None:
    """In a first epoch, and in a second, whose drafts are right: a pass then draws several tokens."""
    model, known = vectors(family), Drafts()
    expected = completed(model, asked(), MODES[mode])
    for epoch in range(2):
        stats = Stats()
        found = completed(model, asked(), MODES[mode], speculative_tokens=K, drafts=known, stats=stats)
        check_same(found, expected)
        assert stats.accepted <= stats.drafted
        assert stats.tokens == sum(c.tokens.size for c in found.values())
        if epoch:
            assert stats.accepted > LONG / 2
            assert stats.steps < LONG * 0.8
    assert {len(texts) for texts in known.of.values()} == {16}


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_completions(vectors: Any, family: str) -> None:
    """Over the families: 1,008 completions, of which all but the shortest are drafted from those of a run before."""
    model, known = vectors(family), Drafts()
    total = 0
    for seed in range(7):
        expected = completed(model, asked(), {"temperature": 0.8}, seed)
        for completion in expected.values():
            known.add(completion.index // 8, completion.tokens.token)
        check_same(completed(model, asked(), {"temperature": 0.8}, seed, speculative_tokens=K, drafts=known), expected)
        total += len(expected)
    assert total == 112


@pytest.mark.parametrize("cache_dtype", ["int8", "bfloat16"])
@pytest.mark.heavy
def test_caches_of_other_dtypes(vectors: Any, cache_dtype: str) -> None:
    """Keys and values are rounded when they are written, as in the decode loop."""
    model, known = vectors("gemma2"), Drafts()
    expected = completed(model, asked(), cache_dtype=cache_dtype)
    for _ in range(2):
        found = completed(model, asked(), speculative_tokens=K, drafts=known, cache_dtype=cache_dtype)
        check_same(found, expected, 1e-2)


@pytest.mark.heavy
def test_useless_drafts_are_soon_given_up(vectors: Any) -> None:
    """Texts that agree with no continuation: after a few passes only longer matches would be tried."""
    model = vectors("llama")
    expected = completed(model, asked(), {"temperature": 2.0})
    wrong = Drafts({0: [np.repeat(expected[5].tokens.token, 2)], 1: [np.repeat(expected[13].tokens.token, 2)]})
    stats = Stats()
    found = completed(model, asked(), {"temperature": 2.0}, speculative_tokens=K, drafts=wrong, stats=stats)
    check_same(found, expected)
    assert stats.drafted < 8 * K


@pytest.mark.heavy
def test_stop_tokens_and_strings_end_a_completion_within_a_draft(vectors: Any) -> None:
    """A stop token among accepted drafts is the last token; a `cut` ends at its place."""
    model = vectors("llama")
    plain = completed(model, asked())
    token = int(plain[5].tokens.token[30])
    first = plain[5].tokens.token.tolist().index(token)
    known = Drafts({0: [plain[5].tokens.token], 1: [plain[13].tokens.token]})
    drawn = settings_of(model.policy, jax.random.key(0), stop_token_ids=[token])

    def cut(tokens: Any) -> int | None:
        return 21 if len(tokens) >= 21 else None

    with quick_compiles():
        weights = take_weights(model.policy, model.params)
        found = {
            c.index: c
            for c in stream(model.policy, weights, asked(), drawn, speculative_tokens=K, drafts=known, cut=cut, chunk=2)
        }
    ends = min(first + 1, 21)
    assert found[5].ended
    assert found[5].tokens.token.tolist() == plain[5].tokens.token[:ends].tolist()


@pytest.mark.heavy
def test_requests_that_come_during_speculation(vectors: Any) -> None:
    """The rows leave the tail with their tokens, for a request that fits and for one for which the engine grows."""
    model = vectors("gemma2")
    requests = asked()
    later = [Request(PROMPTS[0], 12, 0, 20), Request((*PROMPTS[1], *range(40)), 70, 7, 0)]
    expected = completed(model, [*requests, *later])
    drawn = settings_of(model.policy, jax.random.key(0), stop_token_ids=[-1])
    with quick_compiles():
        engine = Engine(
            model.policy, take_weights(model.policy, model.params), drawn, size_for(requests), speculative_tokens=K
        )
        for request in requests:
            engine.submit(request)
        found: dict[int, Completion] = {}
        waiting, left = list(later), 0
        while engine.busy:
            found |= {c.index: c for c in engine.step(4)}
            if engine.tail is not None and waiting:
                engine.submit(waiting.pop(0))
                engine.advance(1)
                left += engine.tail is None
    assert not waiting
    assert left == 2
    assert engine.tail is None
    check_same(found, expected)


def test_withdrawn_requests_keep_their_tokens(vectors: Any) -> None:
    """Enough completions end the decoding while some are drafted: what they have can be continued."""
    model = vectors("llama")
    expected = completed(model, asked())
    count = 0

    def enough(_: Completion) -> bool:
        nonlocal count
        count += 1
        return count == 14

    part = completed(model, asked(), speculative_tokens=K, enough=enough, chunk=4)
    assert 0 < part[5].tokens.size < LONG
    again = [
        Request(r.prompt, r.limit, r.prompt_id, r.sample, part[i].tokens)
        for i, r in enumerate(asked())
    ]  # fmt: skip
    check_same(completed(model, again, speculative_tokens=K), expected)


ON_MESHES = """
import sys
import jax
from jaxrl_llm import load_policy
from jaxrl_llm.distributed import fully_sharded, mesh_of
from jaxrl_llm.sampling import Drafts, Request, Stats, stream, take_weights
from jaxrl_llm.sampling.sampler import settings_of

policy, params, _ = load_policy(sys.argv[1])
asked = [
    Request((3, 5, 7, 9, 11, 2, 4, 8)[: 8 - prompt], 40 if sample == 5 else 4 + sample % 3, prompt, sample)
    for prompt in range(4) for sample in range(8)
]
drawn = settings_of(policy, jax.random.key(0), stop_token_ids=[-1])
expected, known = None, Drafts()
for text in ("", "data=2,tensor=2", "data=4"):
    mesh = mesh_of(text) if text else None
    placed = jax.device_put(params, fully_sharded(params, policy.config, mesh)) if text else params
    for width in (0, 3):
        stats, weights = Stats(), take_weights(policy, placed, mesh)
        found = {c.index: c.tokens.token.tolist() for c in stream(
            policy, weights, asked, drawn, stats=stats, speculative_tokens=width, drafts=known if width else None
        )}
        expected = expected or found
        assert found == expected, text
        assert not width or stats.accepted > 10 or not text, stats
print("SAME")
"""


@pytest.mark.heavy
def test_on_meshes() -> None:
    """Rows over devices, and heads over devices: the tail has at least a row for each shard."""
    done = subprocess.run(
        [sys.executable, "-c", ON_MESHES, str(VECTORS / "llama")], env=os.environ | {"XLA_FLAGS": with_devices(4)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "SAME" in done.stdout, done.stderr[-3000:]


def slow_draft(text: list[int], sources: list[int], misses: int, most: int) -> list[int]:
    """What followed the longest, then latest, match of the last tokens."""
    corpus = sources + text
    best, end = 0, None
    for e in range(len(corpus) - 1):
        length = 0
        while (
            length < LONGEST_MATCH
            and length <= e
            and length < len(text)
            and corpus[e - length] >= 0
            and corpus[e - length] == text[len(text) - 1 - length]
        ):
            length += 1
        if length >= max(best, 1):
            best, end = length, e
    if end is None or best < LEAST_MATCH + 2 * misses:
        return []
    out: list[int] = []
    for token in corpus[end + 1 : end + 1 + most]:
        if token < 0:
            break
        out.append(token)
    return out


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(-1, 2), min_size=12, max_size=12),
    st.integers(0, 4),
)
def test_drafts_against_a_loop(text: list[int], sources: list[int], misses: int) -> None:
    """Few different tokens, so that there are many matches, also across the sources' end."""
    tokens = jnp.asarray([text + [-1] * (24 - len(text))], jnp.int32)
    tail = Tail((), tokens, Drawn(*[jnp.zeros((1, 1))] * 5), jnp.asarray([misses], jnp.int32))
    found = jax.jit(drafts, static_argnums=3)(tail, jnp.asarray([len(text) - 1]), jnp.asarray([sources], jnp.int32), 5)
    expected = slow_draft(text, sources, misses, 5)
    assert np.asarray(found.tokens)[0, : int(found.number[0])].tolist() == expected


def test_sources_of_drafts() -> None:
    """The latest texts that fit, each with a mark behind it; the oldest texts and prompts are dropped."""
    known = Drafts({1: [[1, 2], [3]]}, texts=2, tokens=4)
    assert known.source(1, 8).tolist() == [-1, -1, -1, 1, 2, -1, 3, -1]
    assert known.source(1, 4).tolist() == [-1, -1, 3, -1]
    assert known.source(1, 5, [np.asarray([7, 8], np.int32)]).tolist() == [3, -1, 7, 8, -1]
    more = known.with_added([(1, [4])])
    assert [text.tolist() for text in more.of[1]] == [[3], [4]]
    assert [text.tolist() for text in known.of[1]] == [[1, 2], [3]]
    more = more.with_added([(2, [5, 6]), (1, [6]), (3, [7])])
    assert list(more.of) == [1, 3]
    assert more.size == 3


def test_drafts_in_a_checkpoint() -> None:
    """What is saved is what is loaded, in its order, also nothing."""
    known = Drafts({5: [[1, 2], []], 3: [[4]]})
    again = Drafts.from_arrays(known.to_arrays())
    assert list(again.of) == [5, 3]
    assert [[text.tolist() for text in again.of[i]] for i in again.of] == [[[1, 2], []], [[4]]]
    assert again.size == known.size == 3
    assert not Drafts.from_arrays(Drafts().to_arrays()).of
    assert not Drafts.from_arrays({}).of


def test_sample_with_speculation(vectors: Any) -> None:
    """The argument of `sample`, and its errors."""
    model = vectors("llama")
    with quick_compiles():
        plain, fast = (
            sample(
                model.policy, model.params, list(PROMPTS), jax.random.key(0), group_size=8, max_new_tokens=16,
                stop_token_ids=list(range(20)), speculative_tokens=k,
            )
            for k in (0, K)
        )  # fmt: skip
    assert plain.tokens.tolist() == fast.tokens.tolist()
    for wrong in (-1, 65, 1.5, True):
        with pytest.raises(InputError, match="speculative_tokens"):
            sample(model.policy, model.params, list(PROMPTS), jax.random.key(0), speculative_tokens=wrong)  # type: ignore[arg-type]
