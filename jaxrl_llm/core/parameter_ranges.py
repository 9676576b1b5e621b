"""Valid ranges of hyper-parameters by name; a name has the same range in every method of the catalogue."""

from __future__ import annotations

from typing import Any

AT_LEAST_0 = (
    "advantage_strength", "alpha", "anisotropy", "batch_epsilon", "beta", "bonus", "call_reward", "clip_high",
    "clip_low", "clip_strength", "coefficient", "control_weight", "decay", "drop", "entropy_coefficient",
    "entropy_floor", "entropy_target", "entropy_weight", "epsilon", "eta", "extreme", "fade", "fade_tail", "gain",
    "hold",
    "imitation_coefficient", "internal_steps", "intra_coefficient", "kappa", "kl_coefficient", "kl_limit",
    "length_bonus", "multiplier_rate", "next_scale", "novelty_coefficient", "penalty_scale", "power", "recent",
    "replay_age", "replay_groups", "replay_prompts", "replay_rows", "replay_weight", "reservoir",
    "reward_coefficient", "spread", "stored", "strength", "surplus", "switch", "tail_weight", "target_entropy", "trust",
    "value_coefficient",
)  # fmt: skip
FRACTIONS = (
    "budget_share", "end", "least", "least_kept", "low_step", "most_kept", "partial", "quantile", "quantile_rate",
    "replay_share", "rate", "sigma", "solved", "start", "varied", "tokens_first", "tokens_last",
)  # fmt: skip
ABOVE_0 = (
    "call_steps", "hot", "cold", "fade_power", "high_step", "kl_horizon", "learning_rate", "power", "temperature",
    "warm_up",
)  # fmt: skip
COUNTS = ("baselines", "every", "k", "max_length", "prompts", "rounds", "set_size", "total_steps")
RANGES: dict[str, dict[str, Any]] = {
    **{name: {"least": 0} for name in AT_LEAST_0},
    **{name: {"least": 0, "most": 1} for name in FRACTIONS},
    **{name: {"least": 1, "most": 2**31 - 1} for name in COUNTS},
    **{name: {"above": 0} for name in ABOVE_0},
    "ddof": {"least": 0, "most": 1},
}
