"""Credit as functions of arrays: baselines, moments, returns, schedules; and of batches, such as `mixed_groups`.

Nothing here makes a transform; what does is in `jaxrl_llm.advantages`. The code is in the modules by subject.
"""

from jaxrl_llm.advantages.filters import mixed_groups, uniform_groups
from jaxrl_llm.advantages.group import above_baseline, group_advantage, standardised
from jaxrl_llm.advantages.multi_reward import decoupled_advantage, variance_weighted_advantage
from jaxrl_llm.advantages.multipliers import entropy_scaled, standard_scores
from jaxrl_llm.advantages.normalisation import whiten
from jaxrl_llm.advantages.returns import gae, reward_to_go, terminal_rewards
from jaxrl_llm.advantages.schedules import fade, ramp
from jaxrl_llm.advantages.sets import best_of_sets_advantage, diverse_sets_advantage
from jaxrl_llm.advantages.tokens import extended_gae, token_baseline
from jaxrl_llm.advantages.votes import majority
from jaxrl_llm.core.buckets import bucket_best, bucket_moments, bucket_quantile, bucket_sums

__all__ = [
    "above_baseline", "best_of_sets_advantage", "bucket_best", "bucket_moments", "bucket_quantile", "bucket_sums",
    "decoupled_advantage", "diverse_sets_advantage", "entropy_scaled", "extended_gae", "fade", "gae", "group_advantage",
    "majority", "mixed_groups", "ramp", "reward_to_go", "standard_scores", "standardised", "terminal_rewards",
    "token_baseline", "uniform_groups", "variance_weighted_advantage", "whiten",
]  # fmt: skip
