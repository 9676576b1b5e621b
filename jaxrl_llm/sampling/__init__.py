"""Rollouts: prompts in, Trajectories with their behaviour log-probabilities out.

`sample` is for people and the loop; the engine below it is `stream`, which completes `Request`s over slots and yields
`Completion`s as they end.
"""

from jaxrl_llm.sampling.draw import Settings
from jaxrl_llm.sampling.requests import Completion, Request, Stats, Tokens
from jaxrl_llm.sampling.sampler import completion_ids, completion_texts, requests_of, sample
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights

__all__ = [
    "Completion",
    "Request",
    "Settings",
    "Stats",
    "Tokens",
    "completion_ids",
    "completion_texts",
    "requests_of",
    "sample",
    "stream",
    "take_weights",
]
