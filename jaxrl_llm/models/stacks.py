"""How the layers of a model lie in its parameters, and in which order they run.

The layers of a kind are stacked: {"layers": {name: [n, ...]}}, or {"layers": {kind: {name: [n, ...]}}} where a model
has several kinds. Unrolled, they are a tuple of dictionaries, in order. Stacked layers are scanned in blocks, each a
pattern of kinds that repeats, so that compile time does not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.models.policy import Params, Policy


class Block(NamedTuple):
    """Some layers that follow each other: a pattern of kinds, several times."""

    pattern: tuple[int, ...]
    repeats: int
    start: int  # number of the first layer

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.start, self.start + len(self.pattern) * self.repeats)


@lru_cache(maxsize=256)
def blocks(kinds: tuple[int, ...]) -> tuple[Block, ...]:
    """The blocks of layers of these kinds, with the fewest layers in all patterns together: these are compiled.

    >>> [(block.pattern, block.repeats) for block in blocks((0, 0, 1, 0, 0, 1, 0, 1, 0, 1))]
    [((0, 0, 1), 2), ((0, 1), 2)]
    """
    n = len(kinds)
    best: list[tuple[int, int, tuple[Block, ...]]] = [(0, 0, ())]  # layers compiled, blocks and these, of the first i
    for end in range(1, n + 1):
        options = []
        for length in range(1, end + 1):
            pattern, start = kinds[end - length : end], end - length
            while start >= 0 and kinds[start : start + length] == pattern:
                cost, count, before = best[start]
                options.append((cost + length, count + 1, (*before, Block(pattern, (end - start) // length, start))))
                start -= length
        best.append(min(options, key=lambda option: option[:2]))
    return best[n][2]


def blocks_of(config: ModelConfig) -> tuple[Block, ...]:
    """The blocks of a model."""
    return blocks(config.kind_of_layer) if config.kinds else (Block((0,), config.num_layers, 0),)


def of_kind(layers: Any, config: ModelConfig, kind: int) -> Any:
    """The stacked weights of a kind, or anything that lies as they do."""
    return layers[config.kinds[kind].name] if config.kinds else layers


def make_kinds(make: Callable[[int], Any], config: ModelConfig) -> Any:
    """What a function of the number of a kind makes, as stacked weights lie."""
    return {kind.name: make(number) for number, kind in enumerate(config.kinds)} if config.kinds else make(0)


def map_kinds(function: Callable[..., Any], layers: Any, *others: Any) -> Any:
    """A function of the stacked weights of each kind, or of each layer of a tuple, and of others that lie as they do;
    its results lie so too."""
    if isinstance(layers, tuple):
        return tuple(map(function, layers, *others))
    if not any(isinstance(entry, dict) for entry in layers.values()):
        return function(layers, *others)
    return {name: function(own, *(other[name] for other in others)) for name, own in layers.items()}


def place_of(config: ModelConfig, layer: int) -> int:
    """The index of a layer among those of its kind."""
    return config.layers_of(config.kind_of_layer[layer]).index(layer) if config.kinds else layer


def layer_of(layers: Any, config: ModelConfig, number: int) -> Any:
    """One layer's weights out of stacked ones."""
    kind, place = config.kind_of_layer[number] if config.kinds else 0, place_of(config, number)
    return jax.tree.map(lambda x: x[place], of_kind(layers, config, kind))


def unstack(params: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The same parameters with one dict a layer. Inside jit this copies the weights once."""
    layers = params["layers"]
    if isinstance(layers, tuple):
        return params
    return {**params, "layers": tuple(layer_of(layers, config, number) for number in range(config.num_layers))}


def first_layers(params: dict[str, Any], config: ModelConfig, count: int) -> dict[str, Any]:
    """The parameters of the model of the first layers, `config.first(count)`."""
    layers = params["layers"]
    if isinstance(layers, tuple):
        return {**params, "layers": layers[:count]}

    def first(kind: int) -> Any:
        kept = sum(number < count for number in config.layers_of(kind))
        return jax.tree.map(lambda x: x[:kept], of_kind(layers, config, kind))

    return {**params, "layers": make_kinds(first, config)}


def stacked_layers(params: Any, config: ModelConfig) -> Any:
    """The same parameters with the layers of each kind stacked."""
    layers = params["layers"]
    if not isinstance(layers, tuple):
        return params

    def stacked(kind: int) -> Params:
        return jax.tree.map(lambda *x: jnp.stack(x), *(layers[number] for number in config.layers_of(kind)))

    return {**params, "layers": make_kinds(stacked, config)}


def inner_policy(policy: Policy, params: Params, layer: int) -> tuple[Policy, Params]:
    """The policy that unembeds the hidden state after `layer` layers as it is, without the last norm.

    Raises InputError where the model has no such layer.
    """
    if not 1 <= layer <= policy.config.num_layers:
        raise InputError(f"internal_logp: layer is {layer}, but the model has layers 1 to {policy.config.num_layers}")
    config = dataclasses.replace(policy.config.first(layer), final_norm=False)
    return dataclasses.replace(policy, config=config), first_layers(params, policy.config, layer)
