"""A reward model on its devices: sequences of token ids scored in batches of few sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket, pad_rows
from jaxrl_llm.distributed.mesh import on_rows
from jaxrl_llm.models import Policy
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.policy import Params
from jaxrl_llm.models.scores import token_scores
from jaxrl_llm.utils.threads import DISPATCH

BATCH_TOKENS = 2**14  # that a batch has for each shard of rows, padding included, if it has more than one row


class Scorer(NamedTuple):
    """A reward model on its devices."""

    model: Policy
    params: Params

    def scores(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores f32[N] of sequences of token ids; NaN for one that is longer than the model's context."""
        found = np.full(len(sequences), np.nan, np.float32)
        for places, scores in self._batches(sequences, Policy.scores):
            found[places] = scores[:, 0]
        return found

    def of_tokens(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray | None]:
        """Scores f32[len, labels] at the tokens of each sequence; None for one that is longer than the context."""
        found: list[np.ndarray | None] = [None] * len(sequences)
        for places, scores in self._batches(sequences, token_scores):
            for place, own in zip(places, scores, strict=True):
                found[place] = own[: len(sequences[place])]
        return found

    def _batches(
        self, sequences: Sequence[Sequence[int]], function: Callable[..., jax.Array]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """function(model, params, tokens, mask) of batches, each with the places of its sequences.

        They are of bucketed lengths and numbers of rows, so that few programs are compiled. What is longer than the
        model's context is in none.
        """
        context, of_length = self.model.config.max_positions, defaultdict[int, list[int]](list)
        for place, ids in enumerate(sequences):
            if not context or len(ids) <= context:
                of_length[bucket(len(ids), least=32, per_octave=1)].append(place)
        shards = row_shards(self.model.mesh)
        for length, places in sorted(of_length.items()):
            most = shards * max(BATCH_TOKENS // length, 1)
            for first in range(0, len(places), most):
                some = places[first : first + most]
                rows = shards * bucket(-(-len(some) // shards), least=1, per_octave=1)
                filled = [list(sequences[place]) for place in some] + [[0]] * (rows - len(some))
                arrays: Any = pad_rows(filled, length)
                with DISPATCH:  # programs of several devices must reach all of them in one order
                    if self.model.mesh is not None:
                        arrays = jax.device_put(arrays, on_rows(self.model.mesh))
                    found = function(self.model, self.params, *arrays)
                yield some, np.asarray(found)[: len(some)]
