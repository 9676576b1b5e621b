"""The sampler: prompts in, Trajectories with behaviour log-probabilities out.

`sample` is the high-level entry point. `stream` below it decodes `Request`s in slots and yields `Completion`s as they
end.
"""

from jaxrl_llm.sampling.batch import completion_ids, completion_texts
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.requests import Completion, Request, Tokens
from jaxrl_llm.sampling.sampler import requests_of, sample
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights

__all__ = [
    "Completion", "Drafts", "DrawSettings", "Request", "Stats", "Tokens", "completion_ids", "completion_texts",
    "requests_of", "sample", "stream", "take_weights",
]  # fmt: skip
