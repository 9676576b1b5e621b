"""Embeddings of a run's prompts by its policy, as it is before training, for curricula that read them."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.curriculum.embedded import EMBEDDING, FromEmbeddings
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.hosts import to_numpy
from jaxrl_llm.distributed.mesh import to_device, to_mesh
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.scores import pooled_states
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.source import OfRows
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.starting import phase

TOKENS = 16_384  # of a batch of prompts, about


def with_embeddings(config: TrainConfig, parts: RunParts, params: Params, curriculum: OfRows | None) -> OfRows | None:
    """What makes the run's curriculum; where the method's reads embeddings, from rows that have them.

    params: the initial ones, from which a resumed run computes the same embeddings again. curriculum: instead of the
    method's, returned as it is. On several hosts all must call this. InputError for prompts that are read as they are
    drawn.
    """
    make = parts.algorithm.prompts
    if curriculum is not None or not isinstance(make, FromEmbeddings):
        return curriculum
    if not isinstance(parts.prompts.rows, list | tuple):
        raise InputError(
            "the curriculum reads an embedding of every prompt, but prompts are read as they are drawn: use fewer "
            "prompts, or a file that is loaded as a whole"
        )
    with phase("embed the prompts"):
        table = prompt_embeddings(parts, combine(parts.frozen, without_critic(params)), make.pieces)
    return lambda rows: make([{**row, EMBEDDING: own} for row, own in zip(rows, table, strict=True)], config.seed)


def prompt_embeddings(parts: RunParts, params: Params, pieces: int) -> np.ndarray:
    """f32[P, pieces, D]: `pooled_states` of the run's prompts."""
    prompts, shards = parts.prompts, row_shards(parts.mesh)
    sizes = np.array([len(ids) for ids in prompts.ids])
    order = np.argsort(sizes, kind="stable")
    table, first = np.zeros((len(sizes), pieces, parts.policy.config.hidden_size), np.float32), 0
    while first < len(order):
        length = _length(int(sizes[order[min(first + _rows(int(sizes[order[first]]), shards), len(order)) - 1]]))
        rows = _rows(length, shards)
        chosen = order[first : first + rows]
        tokens, real = _padded(prompts, chosen, rows, length)
        found = _pooled(parts.policy, params, *to_mesh((tokens, real), parts.mesh), pieces)
        table[chosen] = np.asarray(to_numpy(found, parts.mesh))[: len(chosen)]
        first += rows
    return table


@compiled(static_argnames=("policy", "pieces"))
def _pooled(policy: Policy, params: Params, tokens: jax.Array, real: jax.Array, pieces: int) -> jax.Array:
    return pooled_states(policy, to_device(params), tokens, real, pieces)


def _length(size: int) -> int:
    """Of a batch whose longest prompt has `size` tokens: few lengths, so that few programs are compiled."""
    return bucket(size, 16, 1)


def _rows(length: int, shards: int) -> int:
    """How many prompts of this length a batch has: a multiple of `shards`."""
    return max(TOKENS // _length(length) // shards, 1) * shards


def _padded(prompts: PromptSet, chosen: np.ndarray, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 and bool[rows, length]: the prompts' tokens, and which are real. Rows beyond them repeat prompts."""
    tokens, real = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, place in enumerate(np.resize(chosen, rows).tolist()):
        ids = prompts.ids[place]
        tokens[row, : len(ids)], real[row, : len(ids)] = ids, True
    return tokens, real
