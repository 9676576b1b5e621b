"""Credit assignment: from rewards to the advantage of each token."""

from jaxrl_llm.advantages.group import drop_uniform_groups, group_advantage, group_relative, on_actions, uniform_groups
from jaxrl_llm.grouping import bucket_moments, bucket_sums

__all__ = [
    "bucket_moments",
    "bucket_sums",
    "drop_uniform_groups",
    "group_advantage",
    "group_relative",
    "on_actions",
    "uniform_groups",
]
