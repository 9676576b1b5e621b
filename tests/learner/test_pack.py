"""Packing: every action sees exactly the tokens before it in its row, wherever they lie, and each shared token once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.packing import _share, fewest_places, first_fit, pack_rows
from jaxrl_llm.learner.prefix_trie import Member, PrefixTrie, TokenRows, subtrees
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import Packing


def rows_of(
    sequences: list[list[int]], prompts: list[int], group: list[int], skip: Any = None, left: int = 0
) -> TokenRows:
    """Sequences after `left` places of padding; their tokens from the prompt's end on are actions, but for `skip`."""
    N, L = len(sequences), max(map(len, sequences)) + left + 1
    tokens, real, action = np.zeros((N, L), np.int32), np.zeros((N, L), bool), np.zeros((N, L), bool)
    for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        tokens[row, left : left + len(sequence)] = sequence
        real[row, left : left + len(sequence)] = True
        action[row, left + prompt : left + len(sequence)] = True
    if skip is not None:
        action &= ~skip(N, L)
    return TokenRows(tokens, real, action, np.array(group))


def seen_by(packing: Packing, tokens: np.ndarray, state: int) -> list[int]:
    """The tokens that the state at a place comes from, in the order of their positions, by the rule of the mask."""
    (R0, W0), flat = packing.prefixes.source.shape, tokens.reshape(-1)
    if state < R0 * W0:
        level, line, place = packing.prefixes, state // W0, state % W0
        parts = [(packing.prefixes, line)]
    else:
        R1, W1 = packing.suffixes.source.shape
        level, line, place = packing.suffixes, (state - R0 * W0) // W1, (state - R0 * W0) % W1
        parent = line // (R1 // R0) if packing.parent is None else packing.parent[line]
        parts = [(packing.prefixes, parent), (packing.suffixes, line)]
    number, found = level.enter[line, place], []
    assert number > 0, "a state comes from a token"
    for keys, row in parts:
        for key in range(keys.source.shape[1]):
            if keys.enter[row, key] <= number < keys.leave[row, key]:
                found.append((int(keys.position[row, key]), int(flat[keys.source[row, key]])))
    assert sorted(p for p, _ in found) == list(range(len(found))), "positions count the tokens of the path"
    return [token for _, token in sorted(found)]


def device_of(packing: Packing, state: int, devices: int, columns: int) -> int:
    """Where a state is, if rows are cut into `devices` parts and each row's tokens into `columns`."""
    for level in packing.levels:
        rows, width = level.source.shape
        if state < rows * width:
            return state // width * devices // rows * columns + state % width * columns // width
        state -= rows * width
    raise AssertionError("no state")


def check(rows: TokenRows, slices: list[np.ndarray], devices: int = 1, columns: int = 1) -> list[Packing]:
    """Every action of every slice is there once, where its state is, and sees what stands before it in its row."""
    packed = pack_rows(rows, slices, devices, columns)
    out = []
    for index, chosen in enumerate(slices):
        packing = jax.tree.map(lambda x, i=index: x[i], packed)
        here, n = rows.of(chosen), len(chosen)
        listed = packing.row < n
        found = set(zip(packing.row[listed].tolist(), packing.column[listed].tolist(), strict=True))
        assert len(found) == listed.sum()
        assert found == set(zip(*(x.tolist() for x in np.nonzero(here.action_mask)), strict=True))
        device = np.repeat(np.arange(devices * columns), len(packing.state) // (devices * columns))
        assert [device_of(packing, int(state), devices, columns) for state in packing.state] == device.tolist()
        for row, column, state in zip(*(x[listed] for x in (packing.row, packing.column, packing.state)), strict=True):
            before = here.token_mask[row] & (np.arange(here.tokens.shape[1]) < column)
            assert seen_by(packing, here.tokens, int(state)) == here.tokens[row, before].tolist()
        out.append(packing)
    return out


def size(packing: Packing) -> int:
    """Tokens that go through the model."""
    return sum(int((level.enter > 0).sum()) for level in packing.levels)


@st.composite
def batches(draw: Any) -> tuple[TokenRows, int]:
    """Ragged groups of rows that fork at random places, with environment tokens, empty rows and left padding."""
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    sequences, prompts, group = [], [], []
    for number in range(draw(st.integers(1, 3))):
        prompt = random.integers(1, 5, draw(st.integers(1, 12))).tolist()
        begun = [prompt]
        for _ in range(draw(st.integers(1, 5))):
            # Continue a part of an earlier row of the group, at least its prompt.
            parent = begun[random.integers(len(begun))]
            keep = int(random.integers(len(prompt), len(parent) + 1))
            begun.append(parent[:keep] + random.integers(1, 5, random.integers(0, 30)).tolist())
        sequences += begun[1:]
        prompts += [len(prompt)] * (len(begun) - 1)
        group += [number] * (len(begun) - 1)
    share = draw(st.sampled_from([0.0, 0.4]))
    left = draw(st.integers(0, 3))
    return rows_of(sequences, prompts, group, lambda *shape: random.random(shape) < share, left), len(sequences)


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([1, 2]), st.sampled_from([1, 3]))
def test_every_action_sees_its_own_past(made: tuple[TokenRows, int], devices: int, columns: int) -> None:
    rows, N = made
    check(rows, [np.arange(N)], devices, columns)
    if N % 2 == 0:
        check(rows, [np.arange(0, N, 2), np.arange(1, N, 2)], devices, columns)


def test_a_prompt_is_there_once() -> None:
    """10 tokens of a prompt, and of 4 completions of 5 tokens all but the last, which nothing follows."""
    prompt = list(range(1, 11))
    sequences = [[*prompt, 20 + i, 30, 31, 32, 33] for i in range(4)]
    (packing,) = check(rows_of(sequences, [10] * 4, [0] * 4), [np.arange(4)])
    assert size(packing) == 10 + 4 * 4
    (alone,) = check(rows_of(sequences, [10] * 4, [0, 1, 2, 3]), [np.arange(4)])
    assert size(alone) == 4 * 14
    assert alone.suffixes is None


def test_a_tree_is_there_once() -> None:
    """Two completions share 40 tokens after the prompt, a third none: 6 + 40 + 2 x 3 + 15."""
    prompt, trunk = list(range(1, 7)), list(range(70, 110))
    sequences = [prompt + trunk + [40, 41, 42, 43], prompt + trunk + [50, 51, 52, 53], prompt + list(range(60, 76))]
    (packing,) = check(rows_of(sequences, [6] * 3, [0] * 3), [np.arange(3)])
    assert size(packing) == 6 + 40 + 2 * 3 + 15


def test_rows_without_actions_take_no_place() -> None:
    rows = rows_of([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], [4, 2], [0, 1])
    (packing,) = check(rows, [np.arange(2)])
    assert size(packing) == 5
    empty = rows._replace(action_mask=np.zeros_like(rows.action_mask))
    (packing,) = check(empty, [np.arange(2)])
    assert size(packing) == 0


def test_short_rows_lie_side_by_side() -> None:
    """64 completions of 7 tokens and one of 70 need two or three rows' worth of places, not 65."""
    random = np.random.default_rng(0)
    sequences = [[1, 2, 3, *random.integers(4, 99, 8).tolist()] for _ in range(64)] + [[1, 2, 3, *[7] * 71]]
    (packing,) = check(rows_of(sequences, [3] * 65, [0] * 65), [np.arange(65)])
    used = 64 * 7 + 70
    assert packing.suffixes.source.size < 1.3 * used


def test_suffixes_stand_with_their_prefixes_on_a_mesh() -> None:
    """Over two devices the rows of both levels halve evenly, and no suffix continues a prefix of the other half."""
    random = np.random.default_rng(1)
    sequences, group = [], []
    for number in range(4):
        for _ in range(3):
            sequences.append([*[number + 1] * 9, *random.integers(9, 99, random.integers(2, 20)).tolist()])
            group.append(number)
    (packing,) = check(rows_of(sequences, [9] * 12, group), [np.arange(12)], devices=2)
    assert packing.parent is None
    assert packing.prefixes.source.shape[0] % 2 == packing.suffixes.source.shape[0] % 2 == packing.row.shape[0] % 2 == 0


def test_the_longest_go_first() -> None:
    """7 and 3 fill a row of 10, 6 and 4 another; a piece of another key has its own."""
    rows, offsets, keys = first_fit([3, 7, 4, 6, 1], 10, [0, 0, 0, 0, 1])
    assert rows.tolist() == [0, 0, 1, 1, 2]
    assert offsets.tolist() == [7, 0, 6, 0, 0]
    assert keys == [0, 0, 1]


def test_packed_rows_take_the_fewest_places() -> None:
    """Packed rows fit the longest piece, unless longer ones save a tenth of the places; a tree may need them."""

    def of(sizes: list[int]) -> tuple[list[int], list[int]]:
        return sizes, [0] * len(sizes)

    assert fewest_places(400, lambda _: [of([400, 400, 400])], (1, 2), 8) == (512, 3)
    assert fewest_places(300, lambda _: [of([300] * 6), of([300] * 4)], (1, 2), 8) == (384, 6)
    assert fewest_places(340, lambda _: [of([340, *[220] * 6])], (1, 2), 8) == (768, 3)
    assert fewest_places(340, lambda _: [([340, *[220] * 6], list(range(7)))], (1, 2), 8) == (384, 7)
    assert fewest_places(400, lambda width: [of([1000] if width >= 1000 else [400] * 5)], (1, 2, 4), 8) == (1024, 1)


def test_small_slices_have_few_sizes() -> None:
    """Packed rows of 16 places: one for each row of the slice, up to 512 places."""
    for sizes in ([5, 5, 5], [14, 2, 9]):
        assert fewest_places(14, lambda _, sizes=sizes: [(sizes, [0] * 3)], (1,), 3) == (16, 3)
    assert fewest_places(16, lambda _: [([2] * 100, [0] * 100)], (1,), 100) == (16, 32)


def test_completions_that_get_shorter_share_a_program() -> None:
    """Sizes change with a factor of 1.5 or 2, not with each batch: an update would be compiled for each."""
    random, found = np.random.default_rng(0), []
    for mean in np.linspace(15, 10, 12):
        sizes = np.clip(random.normal(mean, 2, 64), 4, 16).astype(int).tolist()
        found.append(fewest_places(17, lambda _, sizes=sizes: [(sizes, [0] * 64)], (1, 2, 4), 64))
    assert set(found) <= {(24, 64), (24, 48), (24, 32)}, "two sizes to the octave"


def test_places_for_actions_are_of_a_short_list() -> None:
    assert [_share(count, 64) for count in (64, 33, 32, 17, 9, 2)] == [64, 64, 32, 32, 16, 8]
    assert _share(65, 64) == 128
    assert _share(200, 64) == 256


def test_parts_of_rows_are_multiples_where_a_kernel_needs_it() -> None:
    rows = rows_of([[1, 2, 3, *range(10, 40 + 9 * row)] for row in range(6)], [3] * 6, [0] * 6)
    packing = pack_rows(rows, [np.arange(6)], 1, 2, multiple=128)
    assert [level.source.shape[-1] % 256 for level in packing.levels] == [0, 0]
    assert size(packing) < 6 * 256, "short completions still lie side by side"


def test_trees_that_do_not_fit_are_cut_where_they_share_least() -> None:
    members = [Member(row, np.arange(40), np.array([39]), np.array([38])) for row in range(4)]
    trie = PrefixTrie(members, 0, np.array([0, 30, 10, 30]))
    assert list(subtrees(trie, 100)) == [(0, 4)]
    assert list(subtrees(trie, 80)) == [(0, 2), (2, 4)]
    assert list(subtrees(trie, 45)) == [(i, i + 1) for i in range(4)]


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(["gemma2", "qwen3_moe"], ["gemma2"]))
@pytest.mark.parametrize("devices, kernel", [(1, False), (2, False), (1, True), (2, True)])
def test_outputs_and_gradients_are_those_of_whole_rows(
    family: str, devices: int, kernel: bool, vectors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees longer than a sliding window, two groups, other temperatures, forced tokens between."""
    random, model = np.random.default_rng(3), vectors(family)
    sequences, prompts = [], []
    for number in range(2):
        prompt, trunk = random.integers(1, 256, 5 + number), random.integers(1, 256, 12)
        for fork in (0, 12, 10, 0):
            tail = random.integers(1, 256, random.integers(3, 20))
            sequences.append(np.concatenate([prompt, trunk[:fork], tail]).tolist())
            prompts.append(5 + number)
    rows = rows_of(sequences, prompts, [0] * 4 + [1] * 4, lambda *shape: random.random(shape) < 0.2)
    N, L = rows.tokens.shape
    batch = Trajectories(
        tokens=jnp.asarray(rows.tokens), token_mask=jnp.asarray(rows.token_mask),
        action_mask=jnp.asarray(rows.action_mask), behaviour_logp=jnp.zeros((N, L)),
        policy_step=jnp.zeros((N, L), jnp.int32), turn=jnp.zeros((N, L), jnp.int32), group=jnp.asarray(rows.group),
        prompt_id=jnp.asarray(rows.group), truncated=jnp.zeros(N, bool),
        temperature=jnp.asarray(random.uniform(0.7, 1.3, N), jnp.float32),
    )  # fmt: skip
    packing = jax.tree.map(lambda x: jnp.asarray(x[0]), pack_rows(rows, [np.arange(N)], devices))
    weights = jnp.asarray(random.normal(size=(2, N, L)), jnp.float32)

    def loss(params: Any, packing: Packing | None) -> tuple[jax.Array, Any]:
        outputs = policy_outputs(model.policy, params, batch, packing)
        return jnp.sum(weights[0] * outputs.logp + weights[1] * outputs.entropy), outputs

    grad_fn = jax.jit(jax.grad(loss, has_aux=True))
    expected, plain = grad_fn(model.params, None)
    for module in ("packed_states", "placement"):
        monkeypatch.setattr(f"jaxrl_llm.models.{module}.takes_kernels", lambda mesh: kernel)
    found, outputs = grad_fn(model.params, packing)
    np.testing.assert_allclose(outputs.logp, plain.logp, atol=2e-5)
    np.testing.assert_allclose(outputs.entropy, plain.entropy, atol=2e-5)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max()))
