"""`ModelConfig`: what the decoder must know to be one of the families of models (`models.families`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from jaxrl_llm.models.config.rope import Rope


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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder as data. Hashable, so that it can be a static argument of `jit`.

    Its fields describe every layer. Where layers differ in more than windows and rotations, `kinds` says in which
    fields, and `_of_kind` gives the configuration of one kind.
    """

    family: str  # one of `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert, where there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tie_embeddings: bool
    activation: str = "silu"
    ropes: tuple[Rope, ...] = (Rope(),)
    rope_of_layer: tuple[int, ...] = ()  # index into ropes, one a layer
    window_of_layer: tuple[int, ...] = ()  # tokens that a layer sees including the current one; 0 sees all
    attention_bias: bool = False  # biases of query, key and value projections
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False  # biases of the MLP's projections, those of experts too
    qk_norm: bool = False  # RMS norm of each query and key head
    post_norms: bool = False  # norms after attention and MLP too (Gemma)
    norm_offset: float = 0.0  # Gemma multiplies by 1 + weight
    final_norm: bool = True  # norm after the last layer
    embedding_scale: float = 1.0
    query_scale: float = 0.0  # of the attention logits
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0  # 0: none
    num_experts: int = 0
    experts_per_token: int = 0
    normalise_router: bool = True  # the chosen experts' weights sum to one
    max_positions: int = 0  # context length, tokens
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_tokens: int = 0  # ids that the tokenizer has: those from here on are never drawn; 0: all have a token
    kinds: tuple[LayerKind, ...] = ()  # () where all layers are of one kind
    kind_of_layer: tuple[int, ...] = ()  # index into kinds, one a layer
    pre_norms: bool = True  # norms before attention and MLP
    joint_qk_norm: bool = False  # RMS norm of all query heads together, and of all key heads (OLMo)
    value_norm: bool = False  # RMS norm of each value head, without a weight (Gemma 4)
    attention_sinks: bool = False  # a logit of each query head beside those of tokens, without a value (gpt-oss)
    sink_slots: int = 0  # learned keys and values of each key-value head that are of no token (`layers.sink_slots`)
    keys_as_values: bool = False  # values are the keys before norm and rotation (Gemma 4)
    keys_of: str = ""  # keys and values are those of the last layer before of the kind of this name (Gemma 4)
    interleaved_rotation: bool = False  # the model's files rotate neighbouring dimensions of a head
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream (Granite)
    logit_scale: float = 1.0  # of the logits, before the soft cap
    layer_scale: bool = False  # a number of each layer that multiplies its output; not trained (Gemma 4)
    layer_inputs: int = 0  # numbers of a token's own embedding in each layer (Gemma 4 E2B); 0: none
    glu_limit: float = 0.0  # gates and units of the MLP are clamped to it (gpt-oss); 0: they are not
    glu_slope: float = 1.0  # of the gate's sigmoid, where it is clamped
    router_sigmoid: bool = False  # scores of experts are sigmoids, not a softmax
    router_bias: bool = False
    router_correction: bool = False  # a number of each expert that is added to its score for the choice alone
    router_groups: int = 1  # experts are chosen among those of the best `router_chosen_groups` of so many groups
    router_chosen_groups: int = 1
    router_scale: float = 1.0  # of the chosen experts' weights
    router_norm: bool = False  # the router has a norm of its own, and a scale for each expert (Gemma 4)
    shared_size: int = 0  # inner units of the MLP that every token goes through beside its experts; 0: none
    shared_gate: bool = False  # that MLP's output is multiplied by a sigmoid of the token's own (Qwen)
    shared_apart: bool = False  # that MLP and the experts have norms of their own, before and after (Gemma 4)
    latent: Latent | None = None  # None: keys and values are projections of the token
    delta: DeltaRule | None = None  # in place of attention
    convolution: int = 0  # taps of a gated short convolution in place of attention; 0: none (LFM2)
    gated_attention: bool = False  # what a head gives is multiplied by a sigmoid of the token's own (Qwen3.5)
    score: ScoreHead | None = None  # None: a language model
    unmasking: Unmasking | None = None  # a masked-diffusion model, whose tokens see their whole row; None: a causal one

    @property
    def known_tokens(self) -> int:
        """Ids that may be drawn: those below this."""
        return self.num_tokens or self.vocab_size

    @property
    def unpadded(self) -> int | None:
        """The ids that may be drawn, if there are others; else None."""
        return self.num_tokens if 0 < self.num_tokens < self.vocab_size else None

    @property
    def carries(self) -> bool:
        """Whether a layer carries a state from token to token instead of attending to those before."""
        return self.delta is not None or self.convolution > 0

    @property
    def recurrent(self) -> bool:
        """Whether some layer does."""
        return any(kind.carries for kind in self.each_kind)

    @property
    def rotated_size(self) -> int:
        """Dimensions of a head that rotary embeddings turn."""
        return self.latent.rotated if self.latent else self.head_dim

    def heads_kept(self, absorbed: bool) -> tuple[int, int, int]:
        """Of the keys and values of a token: how many heads, and the sizes of a key and a value. absorbed: those of
        `layers.latent.latent_heads`."""
        if not self.latent:
            return self.num_kv_heads, self.head_dim, self.head_dim
        if absorbed:
            return 1, *(self.latent.rank + self.latent.rotated,) * 2
        return self.num_heads, self.head_dim, self.latent.value

    @property
    def each_kind(self) -> tuple[ModelConfig, ...]:
        """The configuration of each kind of layer, in the order of `kinds`; of the only one where there are none."""
        return tuple(_of_kind(self, number) for number in range(max(len(self.kinds), 1)))

    def of_layer(self, number: int) -> ModelConfig:
        """The configuration of one layer, from 0: the model's, with what is different in layers of its kind."""
        return _of_kind(self, self.kind_of_layer[number]) if self.kinds else self

    def layers_of(self, kind: int) -> tuple[int, ...]:
        """The numbers of the layers of a kind."""
        if not self.kinds:
            return tuple(range(self.num_layers))
        return tuple(number for number, each in enumerate(self.kind_of_layer) if each == kind)

    def first(self, layers: int) -> ModelConfig:
        """The model of the first layers only."""
        return dataclasses.replace(
            self, num_layers=layers, window_of_layer=self.window_of_layer[:layers],
            rope_of_layer=self.rope_of_layer[:layers], kind_of_layer=self.kind_of_layer[:layers],
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _of_kind(config: ModelConfig, number: int) -> ModelConfig:
    """The configuration of a kind of layer, of one kind only."""
    if not config.kinds:
        return config
    return dataclasses.replace(config, kinds=(), kind_of_layer=(), **dict(config.kinds[number].settings))
