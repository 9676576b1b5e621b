"""Conversations as tokens: chat templates, turns, and calls of tools."""

from jaxrl_llm.utils.lazy import names_of

__getattr__ = names_of(__name__, "encode")
