"""Rewards: plain Python functions that score completions, and a runner that survives whatever they do.

Names are imported on first use, because a reward's process needs few of the modules and so starts faster.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.rewards.registry import get_reward, get_rewards, names
    from jaxrl_llm.rewards.verifiers import text_of
    from jaxrl_llm.rewards.workers.runner import Reward, Scores, close_rewards, require_columns, reward_digest, score

__all__ = [
    "Reward", "Scores", "close_rewards", "get_reward", "get_rewards", "names", "require_columns", "reward_digest",
    "score", "text_of",
]  # fmt: skip
_MODULES = {
    "registry": "get_reward get_rewards names",
    "verifiers": "text_of",
    "workers.runner": "Reward Scores close_rewards require_columns reward_digest score",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
