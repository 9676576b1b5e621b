"""Score function: objectives without a ratio, baselines, sets of samples and likelihoods."""

from jaxrl_llm.utils.lazy import names_of

__getattr__ = names_of("jaxrl_llm", "algorithms")  # of the module whose place it takes, for one release
