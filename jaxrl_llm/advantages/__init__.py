"""Credit assignment: from rewards to the advantage of each token."""

from jaxrl_llm.advantages.difficulty import weigh_advantages
from jaxrl_llm.advantages.group import (
    above_baseline,
    bucket_best,
    bucket_quantile,
    drop_small_advantages,
    drop_uniform_groups,
    group_advantage,
    group_relative,
    mixed_groups,
    on_actions,
    standardised,
    uniform_groups,
)
from jaxrl_llm.advantages.multi_reward import check_credit, decoupled, variance_weighted
from jaxrl_llm.advantages.multipliers import entropy_scaled, revised, standard_scores
from jaxrl_llm.advantages.normalisation import normalised_values, running_reward_scaling, whiten
from jaxrl_llm.advantages.returns import (
    adaptive_kl,
    clip_advantages,
    discounted_returns,
    gae,
    generalised_advantages,
    kl_reward,
    length_adaptive,
    reward_to_go,
    terminal_rewards,
    whiten_advantages,
)
from jaxrl_llm.advantages.risk import bundled_risk
from jaxrl_llm.advantages.schedules import fade, ramp
from jaxrl_llm.advantages.sets import best_of_sets_advantage, diverse_sets_advantage
from jaxrl_llm.advantages.token_baselines import energy_weighted_baseline
from jaxrl_llm.advantages.trackers import tracked_baseline
from jaxrl_llm.advantages.votes import vote
from jaxrl_llm.trajectory import bucket_moments, bucket_sums

__all__ = [
    "above_baseline",
    "adaptive_kl",
    "best_of_sets_advantage",
    "bucket_best",
    "bucket_moments",
    "bucket_quantile",
    "bucket_sums",
    "bundled_risk",
    "check_credit",
    "clip_advantages",
    "decoupled",
    "discounted_returns",
    "diverse_sets_advantage",
    "drop_small_advantages",
    "drop_uniform_groups",
    "energy_weighted_baseline",
    "entropy_scaled",
    "fade",
    "gae",
    "generalised_advantages",
    "group_advantage",
    "group_relative",
    "kl_reward",
    "length_adaptive",
    "mixed_groups",
    "normalised_values",
    "on_actions",
    "ramp",
    "revised",
    "reward_to_go",
    "running_reward_scaling",
    "standard_scores",
    "standardised",
    "terminal_rewards",
    "tracked_baseline",
    "uniform_groups",
    "variance_weighted",
    "vote",
    "weigh_advantages",
    "whiten",
    "whiten_advantages",
]
