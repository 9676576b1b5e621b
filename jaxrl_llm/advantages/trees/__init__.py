"""Credit in trees of completions."""

from jaxrl_llm.utils.lazy import names_of

__getattr__ = names_of(__name__, "credit")
