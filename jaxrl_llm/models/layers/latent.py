"""Attention to compressed keys and values (DeepSeek-V2, 2405.04434, section 2.1); sizes are those of `attention`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Heads, Layer, project_heads
from jaxrl_llm.models.layers.parts import Rotations, rms_norm, rotate
from jaxrl_llm.models.layers.projections import project, with_adapter
from jaxrl_llm.models.placement import ANYWHERE, Placement

Array = jax.Array
LATENT_EPSILON = 1e-6  # of the norms of compressed queries, keys and values, whatever the model's is


def latent_heads(
    y: Array, layer: Layer, config: ModelConfig, rotations: Rotations, rope: Any, placement: Placement = ANYWHERE,
    absorbed: bool = False,
) -> Heads:  # fmt: skip
    """The heads of attention to compressed keys and values.

    A token has one vector c of `rank` numbers and one rotated key r for all heads. A head's key is [c U, r] and its
    value c V. absorbed: since q . (c U) = (q U') . c, the one key [c, r] serves all heads, with queries [q U', r_q]. It
    is their value too: `latent_values` makes a sum of values of the sum of c that heads then get. In decoding only c
    and r are kept, and nothing is made of them for each head.
    """
    latent = config.latent
    assert latent is not None
    x, name = y, "query"
    if latent.query_rank:
        x = project(y, layer["query_in"], layer, "query_in", "query_in" in placement.joined)
        x, name = rms_norm(x, layer["query_in_norm"], LATENT_EPSILON), "query_out"
    q = project_heads(x, layer, name, placement)
    plain, q_turned = jnp.split(q, [latent.plain], axis=-1)
    compressed = project(y, layer["latent"], layer, "latent", "latent" in placement.joined)
    c, k_turned = jnp.split(compressed, [latent.rank], axis=-1)
    c = rms_norm(c, layer["latent_norm"], LATENT_EPSILON)
    cos, sin = rotations.cos[rope], rotations.sin[rope]
    q_turned, k_turned = rotate(q_turned, cos, sin), rotate(k_turned[:, :, None], cos, sin)
    if rotations.growth is not None:
        grown = rotations.growth[rope][..., None, None].astype(q.dtype)
        plain, q_turned = plain * grown, q_turned * grown
    if absorbed:
        plain = jnp.einsum("nlhp,rhp->nlhr", plain, with_adapter(layer, "key_out").astype(plain.dtype))
        kept = jnp.concatenate([c[:, :, None], k_turned], -1)
        return Heads(jnp.concatenate([plain, q_turned], -1), kept, kept)
    keys, values = (project_heads(c, layer, each, placement) for each in ("key_out", "value_out"))
    k_turned = jnp.broadcast_to(k_turned, (*keys.shape[:3], latent.rotated))
    return Heads(jnp.concatenate([plain, q_turned], -1), jnp.concatenate([keys, k_turned], -1), values)


def latent_values(y: Array, layer: Layer) -> Array:
    """Sums of keys that are compressed [N, L, H, rank + rotated] -> those of values [N, L, H, g]."""
    out = with_adapter(layer, "value_out").astype(y.dtype)
    return jnp.einsum("nlhr,rhv->nlhv", y[..., : out.shape[0]], out)
