"""Weights in the sampler's layout: taken from parameters, and of which adapters alone change."""

from jaxrl_llm.sampling.weights.take import Weights, apart_from, take_weights

__all__ = ["Weights", "apart_from", "take_weights"]
