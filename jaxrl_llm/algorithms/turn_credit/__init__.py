"""Credit: by turn, of episodes of several turns."""

from jaxrl_llm.utils.lazy import names_of

__getattr__ = names_of("jaxrl_llm", "algorithms")  # of the module whose place it takes, for one release
