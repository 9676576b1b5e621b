"""A policy: pure functions over a pytree of weights, bound to the configuration that they need."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.soft_thinking import SoftThinking
from jaxrl_llm.models import decoder
from jaxrl_llm.models.checks import check_key, check_params, check_tokens
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.checks import with_slots
from jaxrl_llm.models.forward import Cache, forward
from jaxrl_llm.models.kinds import number, require_kind, shown
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.layers.projections import linear, scaled_low_rank
from jaxrl_llm.models.parameters import Params, combine, parameter_shapes, put, weights
from jaxrl_llm.models.parameters.weight import IDENTITY, PLAIN, ZEROS
from jaxrl_llm.utils.errors import InputError


class Head(NamedTuple):
    """What is static of how a model makes logits of states and its unembedding."""

    softcap: float = 0.0
    tokens: int | None = None  # those that its tokenizer has; None: all


@dataclass(frozen=True, repr=False)
class Policy:
    """A language model as functions: `forward` to hidden states, and the unembedding that turns them into logits.

    Hashable (a static argument of `jit`); the weights are always an argument, never inside.
    """

    config: ModelConfig
    dtype: Any = jnp.float32  # of weights and states in the computation; parameters may be kept in another
    remat: decoder.Remat = True  # recompute layers in the backward pass instead of keeping their activations
    critic: Any = None  # a models.critic.Critic, whose weights are params["critic"]
    mesh: Mesh | None = None  # of the training, with the axes of models.mesh_axes
    activations: Any = None  # dtype of states, if it is not that of weights
    rounding: str | None = None  # such as "int8": compute with projections rounded to it (models.quantised)
    hook: Hook | None = None  # what tokens are drawn through; with `other`, the second policy is params["other"]
    population: Population | None = None  # whose members rows are, in sampling, and in an update by evolution
    thinking: SoftThinking | None = None  # how rows think before they answer
    teacher: Head | None = None  # whose unembedding params["teacher"] has, of a divergence from it
    tokenizer: Any = field(default=None, compare=False, repr=False)  # for prompts given as text

    def __repr__(self) -> str:
        """Family, size and what is not as usual, in one line."""
        config, dtype = self.config, jnp.dtype(self.dtype).name
        count = sum(math.prod(weight.shape) for weight in weights(config).values())
        size = f"{count:,} parameters in {config.num_layers} layers, {config.vocab_size:,} tokens"
        names = ("remat", "critic", "mesh", "activations", "rounding", "hook", "population", "thinking")
        own = {name: getattr(self, name) for name in names}
        own |= {"activations": jnp.dtype(self.activation_dtype).name, "hook": self.hook and self.hook.name}
        usual = {"remat": True, "activations": dtype}
        others = [f", {name}={value}" for name, value in own.items() if value != usual.get(name)]
        return f"Policy({config.family}: {size}, {dtype}{''.join(others)})"

    @property
    def activation_dtype(self) -> Any:
        """Dtype of hidden states, queries, keys and values."""
        return self.dtype if self.activations is None else self.activations

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        cache: Cache | None = None,
        *,
        remat: decoder.Remat = False,
    ) -> tuple[jax.Array, Any]:
        """Hidden states [N, L, D] and the cache; see `models.forward.forward`."""
        return forward(params, self.config, tokens, positions, segments, cache, remat=remat, **self._precision())

    def run(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: decoder.Attend,
        memory: Any = None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Hidden states [N, L, D] and the layers' memory, with attention as a function; see `decoder.run`."""
        return decoder.run(params, self.config, tokens, positions, attend, memory, **self._precision(), **options)

    def _precision(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "activations": self.activations, "rounding": self.rounding}

    def unembedding(self, params: Params) -> jax.Array:
        """The matrix [V, D] whose product with a hidden state gives its logits; with an adapter [V, D + r], of
        `head_states`. InputError for a reward model."""
        if self.config.score:
            raise InputError("this is a reward model, which has no logits of tokens: use model.scores")
        own = params["embed" if self.config.tie_embeddings else "unembed"].astype(self.dtype)
        if "unembed_lora_out" not in params:
            return own
        return jnp.concatenate([own, params["unembed_lora_out"].T.astype(self.dtype)], axis=1)

    def head_states(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] as the unembedding multiplies them: scaled where logits are, and beside them what an
        adapter reads of them."""
        scale = self.config.logit_scale
        hidden = hidden if scale == 1 else hidden * jnp.asarray(scale, hidden.dtype)
        if "unembed_lora_in" not in params:
            return hidden
        low_rank = scaled_low_rank(linear(hidden, params["unembed_lora_in"].astype(self.dtype)), params)
        return jnp.concatenate([hidden, low_rank.astype(hidden.dtype)], axis=-1)

    def logits_of(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V] of hidden states [..., D], soft cap included. Only for few positions at a time."""
        return self.logits_at(self.unembedding(params), self.head_states(params, hidden))

    @jax.named_scope("head")
    def logits_at(self, head: jax.Array, states: jax.Array) -> jax.Array:
        """`logits_of`, by the unembedding [V, D] and the states [..., D] that it multiplies."""
        out = jnp.einsum("...d,vd->...v", states, head, preferred_element_type=accumulation_dtype(self.dtype))
        cap = self.config.logit_softcap
        return cap * jnp.tanh(out / cap) if cap else out

    def without_unknown(self, logits: jax.Array) -> jax.Array:
        """The logits [..., V or more], -inf for ids that the tokenizer does not have, and for columns of padding."""
        known, columns = self.config.known_tokens, logits.shape[-1]
        return jnp.where(jnp.arange(columns) < known, logits, -jnp.inf) if known < columns else logits

    def logits(self, params: Params, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Logits f32[N, L, V] of whole sequences, for tests and small inputs only: it builds N x L x V numbers.

        Ids that the tokenizer does not have keep the logits that the model gives them, though they are never drawn.
        tokens int32[N, L]; mask bool[N, L] is true on real tokens; padding may stand on either side. InputError for
        other shapes and types, tokens that are not in the vocabulary, and parameters of another model.
        """
        check_params(self, params)
        check_tokens(tokens, mask, self.config.vocab_size)
        tokens = jnp.asarray(tokens, jnp.int32)
        real = jnp.ones_like(tokens) if mask is None else jnp.asarray(mask).astype(jnp.int32)
        return _logits(self, params, tokens, real)

    def scores(self, params: Params, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Scores f32[N, labels] of whole sequences by a reward model; see `models.scores.sequence_scores`."""
        from jaxrl_llm.models.scores import sequence_scores

        return sequence_scores(self, params, tokens, mask)


@jax.jit(static_argnums=0)
def _logits(policy: Policy, params: Params, tokens: jax.Array, real: jax.Array) -> jax.Array:
    hidden, _ = policy.forward(params, tokens, positions_of(real), real)
    return policy.logits_of(params, hidden)


def positions_of(mask: jax.Array) -> jax.Array:
    """int32[N, L]: the number of real tokens before each one (padding counts none, on whichever side it is)."""
    return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=1) - 1, 0)


def init_params(key: jax.Array, config: ModelConfig, dtype: Any = jnp.float32, scale: float = 0.02) -> Params:
    """Random parameters: normal with standard deviation `scale`; norms are the identity and biases zero.

    key: one random key; dtype: of floats. InputError for arguments of other types.
    """
    check_key(key)
    if not isinstance(config, ModelConfig):
        raise InputError(f"the model's configuration is {shown(config)}, but must be a ModelConfig")
    try:
        floats = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except Exception:  # numpy has several for what is no dtype
        floats = False
    if not floats:
        raise InputError(f"the dtype of parameters is {shown(dtype)}, but must be of floats, such as float32")
    if not isinstance(scale, jax.Array):
        require_kind("the scale of parameters", scale, number(least=0))

    out = Params()
    fills = {IDENTITY: 1.0 - config.norm_offset, PLAIN: 1.0, ZEROS: 0.0}
    for place, (path, weight) in enumerate(weights(config).items()):
        if weight.initialiser in fills:
            put(out, path, jnp.full(weight.shape, fills[weight.initialiser], dtype))
        else:
            put(out, path, (scale * jax.random.normal(jax.random.fold_in(key, place), weight.shape)).astype(dtype))
    return out


def parameter_count(params: Params) -> int:
    """How many numbers the parameters are."""
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def with_sink_slots(policy: Policy, params: Params, slots: int) -> tuple[Policy, Params]:
    """The policy and its parameters with so many sink slots in each key-value head of each layer, all 0; see
    `layers.sink_slots`. 0 leaves both as they are.

    params: as `load_policy` gives them; they are not changed. With slots the model is another one from the start, since
    they take a share of attention's weights. Published formats have no place for them: `save_policy` refuses.

    Raises InputError for a model that has slots, or compressed keys and values (MLA), and for other parameters.
    """
    config = with_slots(policy.config, slots)
    if config == policy.config:
        return policy, params
    check_params(policy, params)
    if isinstance(params["layers"], tuple):
        raise InputError("sink slots are added to layers that are stacked: give the parameters as load_policy does")
    old, dtype = parameter_shapes(policy.config), jax.tree.leaves(params["embed"])[0].dtype
    new: Params = {}
    for path, shape in parameter_shapes(config).items():
        if path not in old:
            put(new, path, jnp.zeros(shape, dtype))
    return dataclasses.replace(policy, config=config), combine(params, new)


class ParameterTable(NamedTuple):
    """A row for each array: its path, shape, data type, number of parameters and bytes; prints as a table."""

    rows: tuple[tuple[str, tuple[int, ...], str, int, int], ...]

    @property
    def parameters(self) -> int:
        """The parameters of all arrays."""
        return sum(row[3] for row in self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of all arrays, on all devices together where they are sharded."""
        return sum(row[4] for row in self.rows)

    def __repr__(self) -> str:
        shown = [(name, str(shape), dtype, f"{n:,}", f"{size / 1e6:,.1f}") for name, shape, dtype, n, size in self.rows]
        shown.append(("all", "", "", f"{self.parameters:,}", f"{self.bytes / 1e6:,.1f}"))
        rows = [("array", "shape", "dtype", "parameters", "MB"), *shown]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        aligned = [
            [cell.ljust(width) if column < 3 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)]
            for pairs in (zip(row, widths, strict=True) for row in rows)
        ]
        return "\n".join("  ".join(row).rstrip() for row in aligned)


def parameter_table(params: Any) -> ParameterTable:
    """A table of the arrays of a pytree: of parameters, gradients, moments, or their `jax.ShapeDtypeStruct`s.

    >>> parameter_table({"embed": jax.ShapeDtypeStruct((1000, 64), "float32")})
    array  shape       dtype    parameters   MB
    embed  (1000, 64)  float32      64,000  0.3
    all                             64,000  0.3
    """
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, count = jax.tree_util.keystr(path, simple=True, separator="/"), math.prod(leaf.shape)
        rows.append((name, tuple(leaf.shape), str(leaf.dtype), count, count * leaf.dtype.itemsize))
    return ParameterTable(tuple(rows))
