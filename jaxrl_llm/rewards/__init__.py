"""Rewards: plain Python functions that score completions, and the runner that nothing they do can stop."""

from jaxrl_llm.rewards.registry import get_reward, names
from jaxrl_llm.rewards.runner import Reward, Scores, require_columns, score

__all__ = ["Reward", "Scores", "get_reward", "names", "require_columns", "score"]
