"""Selection: which rows and tokens count, by rule or by chance."""

from jaxrl_llm.selection.noise import row_noise, token_noise

__all__ = ["row_noise", "token_noise"]
