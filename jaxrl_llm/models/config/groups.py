"""Groups of settings of a model, each one field of `ModelConfig`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Latent(NamedTuple):
    """Attention to compressed keys and values (DeepSeek-V2, 2405.04434): its sizes, in numbers a token."""

    query_rank: int  # of compressed queries; 0 where they are not compressed
    rank: int  # of what keys and values are made from
    plain: int  # of a head's queries and keys that are not rotated
    rotated: int  # of those that are; the keys' part is one for all heads
    value: int  # of a head's values


class DeltaRule(NamedTuple):
    """Heads of the gated delta rule (`layers.delta`): their numbers and sizes."""

    keys: int  # heads of queries and keys, each of which serves as many heads of values
    values: int
    key: int  # numbers of a key
    value: int
    taps: int  # of the convolution before it


class ScoreHead(NamedTuple):
    """Scores of sequences in place of logits of tokens: a reward model, or another classifier."""

    labels: tuple[str, ...]  # names of the scores, one or more
    pad_token_id: int | None  # the score is that of a row's last token that has another id; None: of its last token
    step_separator: str | None = None  # of a process reward model: what follows each step, scored at its last token


class Unmasking(NamedTuple):
    """How a masked-diffusion model writes (LLaDA, 2502.09992): blocks one after another, each from masks to tokens."""

    mask_token: int  # stands in the place of a token that is not known
    block: int = 32  # places of a block, which is whole even where the text ends within it
    at_a_time: int = 2  # tokens of a block that are drawn in each forward pass, those of which the model is surest


class LayerKind(NamedTuple):
    """Layers of a model that have the same weights and compute the same, but for windows and rotations."""

    name: str  # of their parameters' entry in "layers"
    settings: tuple[tuple[str, Any], ...] = ()  # fields of `ModelConfig` in which these layers differ
