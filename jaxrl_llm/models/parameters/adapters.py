"""Which weights can have low-rank adapters, and what the matrices of an adapter are."""

from __future__ import annotations

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters.shapes import weights
from jaxrl_llm.models.parameters.table import TABLE
from jaxrl_llm.models.parameters.weight import Path, Weight

LORA_IN, LORA_OUT, LORA_SCALE = "_lora_in", "_lora_out", "lora_scale"
LORA_FACTORS = "lora_factors"  # of several adapters side by side, see `models.by_row`


def adapted_weights(config: ModelConfig) -> dict[Path, Weight]:
    """The weights of a model that can have adapters, by path: projections of its layers and of their experts, and the
    matrices of embeddings, unless these are tied, so that an adapter of one could not be merged."""
    return {
        path: weight for path, weight in weights(config).items()
        if _is_adapted(weight) and ("layers" in weight.axes or not config.tie_embeddings)
    }  # fmt: skip


def _is_adapted(weight: Weight) -> bool:
    excluded = {"experts", "one", "taps"} & {*weight.axes[len(weight.stacked) :]}
    in_layers = bool(weight.inputs) and "layers" in weight.axes and not excluded
    return in_layers or weight.axes == ("vocabulary", "hidden")


def adapted_by_default(weight: Weight) -> bool:
    """Whether a weight that can have an adapter has one where no targets are named: experts and embeddings have not."""
    return weight.stacked == ("layers",)


def adapter_axes(weight: Weight) -> dict[str, tuple[str, ...]]:
    """Name -> axes of the two matrices of a weight's adapter, [inputs, rank] and [rank, outputs].

    The inputs of an embedding are tokens; the outputs of the unembedding, whose rows are tokens, are.
    """
    axes = weight.axes[::-1] if weight.name == "unembed" else weight.axes
    start = len(weight.stacked)
    end = start + (weight.inputs or 1)
    return {
        weight.name + LORA_IN: (*axes[:end], "rank"),
        weight.name + LORA_OUT: (*axes[:start], "rank", *axes[end:]),
    }


ADAPTED = {weight.name: weight for weight in TABLE if _is_adapted(weight)}
