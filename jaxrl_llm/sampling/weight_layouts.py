"""How the sampler's weights lie in the memory of TPUs."""

from __future__ import annotations

from typing import Any

from jax.experimental.layout import Format, Layout

from jaxrl_llm.models.quantised import Quantised

TO_HEADS = ("query", "key", "value")  # [D, heads, h]


def inputs_last(places: dict[str, Any]) -> dict[str, Any]:
    """Shardings of the arrays of a layer, with a layout for projections to heads: their D inputs innermost.

    Products on TPUs read these projections as matrices [heads h, D]. In the layout that XLA gives an array [D, heads,
    h] each program would begin with a copy: of a prompt's prefill that takes up to a tenth, and in the decode loop the
    memory of all these projections again. Shapes and values are the same.
    """

    def lay(place: Any) -> Any:
        if isinstance(place, Quantised):
            return place._replace(values=lay(place.values))
        return Format(Layout(major_to_minor=(1, 2, 0)), place)

    return places | {name: lay(places[name]) for name in TO_HEADS}
