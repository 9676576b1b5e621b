"""Credit of turns and episodes. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.advantages.turns.turns import (
        above_buckets,
        acted_turns,
        compared,
        episode_returns,
        mean_over_equal,
        nested_states,
        of_episode,
        on_tokens,
        random_groups,
        returns_of_turns,
        rewards_of_turns,
        same_group,
        same_state,
        same_turn,
        sums_of_turns,
        turn_advantages,
        turn_count,
        turn_mask,
        turn_numbers,
        turn_returns,
        turns_of_scored,
    )

__all__ = [
    "above_buckets",
    "acted_turns",
    "compared",
    "episode_returns",
    "mean_over_equal",
    "nested_states",
    "of_episode",
    "on_tokens",
    "random_groups",
    "returns_of_turns",
    "rewards_of_turns",
    "same_group",
    "same_state",
    "same_turn",
    "sums_of_turns",
    "turn_advantages",
    "turn_count",
    "turn_mask",
    "turn_numbers",
    "turn_returns",
    "turns_of_scored",
]
_MODULES = {
    "above_buckets": "turns",
    "acted_turns": "turns",
    "compared": "turns",
    "episode_returns": "turns",
    "mean_over_equal": "turns",
    "nested_states": "turns",
    "of_episode": "turns",
    "on_tokens": "turns",
    "random_groups": "turns",
    "returns_of_turns": "turns",
    "rewards_of_turns": "turns",
    "same_group": "turns",
    "same_state": "turns",
    "same_turn": "turns",
    "sums_of_turns": "turns",
    "turn_advantages": "turns",
    "turn_count": "turns",
    "turn_mask": "turns",
    "turn_numbers": "turns",
    "turn_returns": "turns",
    "turns_of_scored": "turns",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
