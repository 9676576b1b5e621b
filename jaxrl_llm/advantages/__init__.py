"""Credit assignment: what makes transforms, which turn the rewards of a batch into the advantages of its tokens.

The functions of arrays and batches that transforms compute with are in `jaxrl_llm.advantages.functional`.
"""

from jaxrl_llm.advantages.filters import drop_rows, drop_small_advantages, drop_uniform_groups
from jaxrl_llm.advantages.group import group_relative, on_actions
from jaxrl_llm.advantages.kl_rewards import adaptive_kl, kl_reward, stepwise_kl
from jaxrl_llm.advantages.multi_reward import check_credit, decoupled, variance_weighted
from jaxrl_llm.advantages.multipliers import revised, weigh_advantages
from jaxrl_llm.advantages.normalisation import normalised_values, running_reward_scaling
from jaxrl_llm.advantages.returns import (
    clip_advantages,
    discounted_returns,
    generalised_advantages,
    length_adaptive,
    whiten_advantages,
)
from jaxrl_llm.advantages.risk import bundled_risk
from jaxrl_llm.advantages.tokens import energy_weighted_baseline
from jaxrl_llm.advantages.trackers import tracked_baseline
from jaxrl_llm.advantages.trees.credit import shared_once
from jaxrl_llm.advantages.turns import (
    compared,
    needs_turns,
    of_episode,
    same_state,
    turn_advantages,
    turn_returns,
    where_given,
)
from jaxrl_llm.advantages.votes import vote

__all__ = [
    "adaptive_kl", "bundled_risk", "check_credit", "clip_advantages", "compared", "decoupled", "discounted_returns",
    "drop_rows", "drop_small_advantages", "drop_uniform_groups", "energy_weighted_baseline", "generalised_advantages",
    "group_relative", "kl_reward", "length_adaptive", "needs_turns", "normalised_values", "of_episode", "on_actions",
    "revised", "running_reward_scaling", "same_state", "shared_once", "stepwise_kl", "tracked_baseline",
    "turn_advantages", "turn_returns", "variance_weighted", "vote", "weigh_advantages", "where_given",
    "whiten_advantages",
]  # fmt: skip
