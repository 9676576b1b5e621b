"""Exploration: votes instead of labels, novelty, confidence and diversity."""

from jaxrl_llm.utils.lazy import names_of

__getattr__ = names_of("jaxrl_llm", "algorithms")  # of the module whose place it takes, for one release
