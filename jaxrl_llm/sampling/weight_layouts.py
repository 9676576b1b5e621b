"""How the sampler stores its weights on a device: padding, rounding, and the layout in the memory of TPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxrl_llm.models.placement import AnyMesh
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.quantised import is_rounded

LANE = 128  # lanes of a TPU's tile; devices split the vocabulary at multiples of it
TO_HEADS = ("query", "key", "value")  # [D, heads, h]


class LoopOptions(NamedTuple):
    """How `loop_params` stores weights; static."""

    vocab_shards: int = 1  # slices of the vocabulary; if there are several, each is a multiple of LANE tokens
    # Pad the rows of the unembedding to a multiple of LANE numbers. XLA for TPUs stores a matrix with other rows
    # transposed, so that the loop, which both embeds and draws tokens, would begin with copies of it.
    pad_lanes: bool = False
    wide_head: bool = False  # the unembedding in the activations' dtype, for CPUs, which would convert it at each step
    rounding: str | None = None  # projections of layers are `Quantised`
    inputs_last: bool = False  # on a mesh, projections to heads lie as TPUs multiply by them, see `with_inputs_last`

    def padding(self, policy: Policy) -> tuple[int, int]:
        """How many rows, and how many numbers in each row, the unembedding is padded by."""
        rows = -policy.config.vocab_size % (self.vocab_shards * LANE) if self.vocab_shards > 1 else 0
        return rows, -policy.config.hidden_size % LANE if self.pad_lanes else 0

    def own_head(self, policy: Policy) -> bool:
        """Whether the loop has an unembedding of its own, "head"."""
        widens = self.wide_head and jnp.dtype(policy.activation_dtype) != jnp.dtype(policy.dtype)
        return any(self.padding(policy)) or widens


PLAIN = LoopOptions()


def options_for(device: jax.Device | None, mesh: AnyMesh | None = None, rounding: str | None = None) -> LoopOptions:
    """The options for a device, None is the default one, or for a mesh of such."""
    platform = jax.default_backend() if device is None else device.platform
    shards = 1 if mesh is None else mesh.shape.get("tensor", 1)
    several = mesh is not None and mesh.size > 1
    return LoopOptions(shards, platform == "tpu", platform == "cpu", rounding, platform == "tpu" and several)


def with_inputs_last(places: dict[str, Any]) -> dict[str, Any]:
    """Shardings of the arrays of a layer, with a layout for projections to heads: their D inputs innermost.

    Products on TPUs read these projections as matrices [heads h, D]. In the layout that XLA gives an array [D, heads,
    h] each program would begin with a copy: of a prompt's prefill that takes up to a tenth, and in the decode loop the
    memory of all these projections again. Shapes and values are the same.
    """

    def lay(place: Any) -> Any:
        if is_rounded(place):  # the values, or levels
            return place._replace(**{place._fields[0]: lay(place[0])})
        return Format(Layout(major_to_minor=(1, 2, 0)), place)

    return places | {name: lay(places[name]) for name in TO_HEADS}
