"""A weight of a policy: its logical axes, its initialiser, and its names in other formats."""

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from jaxrl_llm.models.config import ModelConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]
STACKED = ("layers", "experts")  # leading axes: other formats have a tensor for each index of them
# Initialisers. Identity: of a norm, which multiplies by 1 with the offset that norms of the model have; plain: without.
NORMAL, IDENTITY, PLAIN, ZEROS = "normal", "identity", "plain", "zeros"


class Weight(NamedTuple):
    """One weight of a policy, of all layers and experts."""

    name: str  # in the parameters, or, with an axis of layers, in their entry "layers"
    axes: tuple[str, ...]
    initialiser: str
    huggingface: str  # {layer} and {expert} stand for their numbers
    gguf: str
    inputs: int = 0  # of a projection: how many axes, after those stacked, are its inputs; 0 for all others
    rotated: bool = False  # makes heads to which rotary embeddings are applied
    when: Callable[[ModelConfig], object] = lambda config: True  # the models, or kinds of layers, that have it
    kind: str = ""  # of the layers that have it, where a model has several kinds
    layers: tuple[int, ...] = ()  # their numbers, in the order of the axis of layers
    shape: Shape = ()  # in a model

    @property
    def path(self) -> Path:
        """Where it is in the parameters."""
        if "layers" not in self.axes:
            return (self.name,)
        return ("layers", self.kind, self.name) if self.kind else ("layers", self.name)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The leading axes of layers and experts."""
        return tuple(takewhile(STACKED.__contains__, self.axes))
