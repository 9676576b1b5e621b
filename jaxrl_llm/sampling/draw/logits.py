"""How to draw tokens, and drawing from all logits: with filters, hooks, soft tokens, or records of the best."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels import sample_logits
from jaxrl_kernels.sample.noise import OF_TOKENS, bits_at, gumbel, row_keys

from jaxrl_llm.core import soft_thinking
from jaxrl_llm.core.hooks import Context, first_state
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.filters import Filters, kept_tokens, support_floor
from jaxrl_llm.sampling.two_model_decode import of_both
from jaxrl_llm.utils.errors import InputError


class DrawSettings(NamedTuple):
    """How to draw tokens: arrays, so that their values can change without recompilation."""

    seed: Array  # uint32[]
    temperature: Array  # f32[]; 0 is greedy
    filters: Filters | None
    allowed: Array | None  # bool[V], the tokens that may be drawn; None: all
    stop_tokens: Array  # int32[E]; drawing one ends the row
    state: dict[str, Array] | None = None  # f32[] each, the numbers of the policy's hook; None: the first ones


class Drawn(NamedTuple):
    """One drawn token of each row."""

    token: Array  # int32[N]
    logp: Array  # f32[N], under the distribution that it was drawn from
    entropy: Array  # f32[N], of that distribution, in nats
    floor: Array  # f32[N], log-probability at or above which the filters kept tokens (-inf without), or `Hook.remember`
    untruncated_logp: Array  # f32[N], under the distribution before filters, `allowed`, and a hook that truncates
    experts: Array | None = None  # int[N, layers, k], of the token from whose state it was drawn; None: not recorded
    thoughts: Array | None = None  # f32[N, 3, K], records of soft tokens; None: of a policy that does not think so
    # f32[N, 3, K], ids of the K most probable tokens, the best first, their logp and untruncated_logp; None: no record
    ranked: Array | None = None

    @property
    def ranks(self) -> int:
        """How many of the most probable tokens are recorded at each place."""
        return 0 if self.ranked is None else self.ranked.shape[-1]


def draw_from_logits(
    policy: Policy, params: Params, hidden: Array, counters: Array, settings: DrawSettings, thinking: Array | None,
    ranked: int,
) -> Drawn:  # fmt: skip
    """`draw.draw` by way of the logits f32[N, V]."""
    N, hook = hidden.shape[0], policy.hook
    logits, *others = (  # [N, V]; columns beyond the vocabulary, and of ids that the tokenizer does not have, are -inf
        policy.without_unknown(policy.logits_at(*unembedding(policy, weights, states)))
        for weights, states in of_both(policy, params, hidden)
    )
    temperature = jnp.where(settings.temperature > 0, settings.temperature, 1.0)
    scaled, floor = logits / temperature, jnp.full(N, -jnp.inf)
    whole = scaled
    if hook is not None:
        numbers = jax.tree.map(jnp.float32, first_state(hook)) if settings.state is None else settings.state
        context = Context(others[0] / temperature if others else None)
        if hook.remember is not None and settings.filters is not None:
            raise InputError(f"the hook {hook.name} forbids tokens itself: leave out top_k, top_p and min_p")
        if hook.remember is not None:
            floor = hook.remember(scaled, numbers, context)
        scaled = hook.apply(scaled, numbers, context._replace(remembered=floor))
        whole = whole if hook.truncates else scaled
    permitted = jnp.ones((N, 1), bool)
    if settings.allowed is not None:
        permitted = jnp.pad(settings.allowed, (0, logits.shape[1] - settings.allowed.shape[0]))[None]
    scaled_permitted = jnp.where(permitted, scaled, -jnp.inf)
    if settings.filters is not None:
        kept = kept_tokens(scaled_permitted, settings.filters) & permitted
        floor, permitted = support_floor(scaled_permitted, kept), kept
    masked = jnp.where(permitted, scaled, -jnp.inf)
    token, logp, entropy = sample_logits(masked, counters, temperature=jnp.where(settings.temperature > 0, 1.0, 0.0))
    chosen = jnp.take_along_axis(whole, token[:, None], axis=1)[:, 0]
    drawn = Drawn(token, logp, entropy, floor, chosen - jax.nn.logsumexp(whole, axis=1))
    if ranked:
        drawn = drawn._replace(ranked=_most_probable(masked, whole, ranked))
    if thinking is None:
        return drawn
    if policy.thinking is None:
        raise InputError("the policy does not think softly: dataclasses.replace(policy, thinking=...)")
    soft = _soft(policy.thinking, scaled_permitted, counters, settings)
    drawn = drawn._replace(thoughts=soft_thinking.no_thoughts(policy.thinking, N))
    return jax.tree.map(partial(where_rows, thinking), soft, drawn)


def where_rows(which: Array, x: Array, y: Array) -> Array:
    """x [N, ...] in the rows `which`, bool[N], and y elsewhere."""
    return jnp.where(jnp.expand_dims(which, tuple(range(1, x.ndim))), x, y)


def _most_probable(masked: Array, whole: Array, count: int) -> Array:
    """See `Drawn.ranked`. masked, whole: logits [N, V], those drawn from and those before truncation."""
    scores, ids = jax.lax.top_k(masked, count)
    untruncated = jnp.take_along_axis(whole, ids, axis=1) - jax.nn.logsumexp(whole, axis=1, keepdims=True)
    logp = scores - jax.nn.logsumexp(masked, axis=1, keepdims=True)
    return jnp.stack([ids.astype(jnp.float32), logp, untruncated], axis=1)  # ids are exact: far below 2^24


def _soft(thinking: soft_thinking.SoftThinking, logits: Array, counters: Array, settings: DrawSettings) -> Drawn:
    """A soft token for each row from tempered logits [N, V], -inf where forbidden."""
    keys = row_keys(counters)

    def noise_at(ids: Array) -> Array:
        return jnp.where(settings.temperature > 0, gumbel(bits_at(keys, OF_TOKENS, ids)), 0.0)

    thoughts = soft_thinking.drawn_thoughts(thinking, logits, noise_at)
    kept, logp = thoughts[:, 0] >= 0, thoughts[:, 2]
    density = soft_thinking.log_density(thinking, logp, thoughts)
    entropy = soft_thinking.entropy_of_kept(logp, kept)
    floor = jnp.full(logits.shape[0], -jnp.inf)
    return Drawn(soft_thinking.heaviest(thoughts), density, entropy, floor, density, thoughts=thoughts)


def unembedding(policy: Policy, params: Params, hidden: Array) -> tuple[Array, Array]:
    """The unembedding [V, D], padded if `weights.take_weights` padded it, and hidden states [N, D] padded to match."""
    head = params["head"] if "head" in params else policy.unembedding(params)
    hidden = policy.head_states(params, hidden)
    missing = head.shape[1] - hidden.shape[1]
    return head, jnp.pad(hidden, ((0, 0), (0, missing))) if missing else hidden
