"""The last rows of an engine on the host: how they enter speculation, and the texts that each drafts from."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.decode import RingCache
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.kv_cache import PrefixCache
from jaxrl_llm.sampling.requests import Request, Tokens, as_tokens
from jaxrl_llm.sampling.rows import RowState, marked_done
from jaxrl_llm.sampling.scheduler import Assignment
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.speculative.verify import Tail, TailCounts, rows_at, tail_of, verify
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.weights import Weights

TAIL_SHARE = 8  # speculation begins once one row in this many is decoding
SOURCE_TEXTS = 16  # completions of the greatest length that a row can draft from
COLUMNS = 128  # numbers of columns are multiples of it, as accelerators tile them


def most_rows(size: Size, mesh: Mesh | None) -> int:
    """The most rows that decode by speculation in an engine of this size: a multiple of the shards of rows."""
    return _rounded(max(size.shape.rows // TAIL_SHARE, 1), row_shards(mesh, SAMPLED_ROWS), down=True)


def _rounded(rows: int, shards: int, down: bool = False) -> int:
    """A power of two times the shards, at least (with `down` at most, unless that is none) this many rows."""
    each = max(rows // shards if down else -(-rows // shards), 1)
    return shards << (each.bit_length() - 1 if down else (each - 1).bit_length())


def tail_columns(size: Size, width: int) -> int:
    """Columns of the tail of an engine of this size, for drafts of `width` tokens."""
    return -(-(size.width + size.tokens + width + 1) // COLUMNS) * COLUMNS


def source_length(size: Size) -> int:
    """Tokens of the texts that each row drafts from."""
    return SOURCE_TEXTS * size.tokens


class TailRows:
    """The rows of an engine that still decode. Each pass draws one or more tokens of each (`verify.verify`).

    `requests` are those of the rows, with all tokens so far in `begun`.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        settings: DrawSettings,
        size: Size,
        width: int,
        requests: Mapping[int, Request],
        placed: Sequence[Assignment],
        caches: tuple[PrefixCache, RingCache],
        state: RowState,
    ) -> None:
        """width: the most drafted tokens. requests: by number; placed: those that decode.

        caches, state: of the engine; its rows are copied.
        """
        requests = {place.row: requests[place.request] for place in placed}
        slot = {place.row: place.prefix_slot // size.shape.slots_per_prompt for place in placed}
        self.policy, self.weights, self.settings, self.width = policy, weights, settings, width
        self.requests, self.rows = dict(requests), list(requests)
        self.length = source_length(size)
        self.shards = row_shards(weights.mesh, SAMPLED_ROWS)
        rows = np.asarray(self.rows, np.int32)[self._index(list(range(len(self.rows))))]
        self.state = jax.tree.map(lambda x: np.array(x)[rows], state)
        self.state = marked_done(self.state, slice(len(self.rows), None))  # repetitions, which are not decoded
        tokens = np.full((len(rows), tail_columns(size, width)), -1, np.int32)
        for i, row in enumerate(rows.tolist()):
            text = [*requests[row].prompt, *requests[row].begun.token.tolist()]
            tokens[i, : len(text)] = text
        slots = np.asarray([slot[row] for row in rows.tolist()], np.int32)
        self.tail: Tail = weights.spread(tail_of(*caches, rows, slots, np.asarray(self.state.own), tokens))

    def _index(self, which: list[int]) -> np.ndarray:
        """int32[R]: these rows, repeated until their number is a power of two times the shards."""
        return np.resize(np.asarray(which, np.int32), _rounded(len(which), self.shards))

    def advance(self, chunk: int, drafts: Drafts, stats: Stats) -> np.ndarray:
        """At most `chunk` passes. Returns the rows of the engine that are done."""
        self._shrink()
        sources = self._sources(drafts)
        state, sources = self.weights.spread((jax.tree.map(jnp.asarray, self.state), jnp.asarray(sources)))
        self.tail, *found = verify(
            self.policy, self.weights.loop, self.tail, state, sources, self.settings, jnp.int32(chunk), width=self.width
        )
        counts: TailCounts
        self.state, counts = self.weights.fetched(tuple(found))
        stats.steps, stats.live = stats.steps + int(counts.steps), stats.live + int(counts.live)
        stats.tokens += int(counts.tokens)
        stats.drafted, stats.accepted = stats.drafted + int(counts.drafted), stats.accepted + int(counts.accepted)
        return np.asarray(self.rows)[np.asarray(self.state.done)[: len(self.rows)]]

    def _shrink(self) -> None:
        """Drop rows that are done, once a quarter of the rows suffices."""
        live = [i for i in range(len(self.rows)) if not np.asarray(self.state.done)[i]]
        index = self._index(live)
        if 4 * len(index) > len(np.asarray(self.state.done)):
            return
        self.rows = [self.rows[i] for i in live]
        self.state = jax.tree.map(lambda x: np.array(x)[index], self.state)
        self.state = marked_done(self.state, slice(len(live), None))
        self.tail = self.weights.spread(rows_at(self.tail, index))

    def _sources(self, drafts: Drafts) -> np.ndarray:
        """int32[R, M]: completions of the prompt of each row, and what its other rows have so far."""
        texts = {row: tokens.token for row, tokens in self.drawn(self.rows, 0).items()}
        ids = {row: self.requests[row].prompt_id for row in self.rows}
        out = np.full((len(np.asarray(self.state.done)), self.length), -1, np.int32)
        for i, row in enumerate(self.rows):
            others = [texts[other] for other in self.rows if other != row and ids[other] == ids[row]]
            out[i] = drafts.source(ids[row], self.length, others)
        return out

    def drawn(self, rows: Sequence[int], policy_step: int) -> dict[int, Tokens]:
        """All tokens of some rows of the engine."""
        drawn = jax.tree.map(np.asarray, self.weights.fetched(self.tail.drawn))
        out = {}
        for row in rows:
            i, begun = self.rows.index(row), self.requests[row].begun
            end = int(np.asarray(self.state.own)[i]) + 1
            of_row = jax.tree.map(lambda x: x[i : i + 1, :end], drawn)  # noqa: B023
            out[row] = begun.followed_by(as_tokens(of_row, 0, end - begun.size, policy_step))
        return out
