"""What hyper-parameters may be, by name: names mean the same in every method of the catalogue."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.errors import require

AT_LEAST_0 = (
    "advantage_strength", "alpha", "anisotropy", "beta", "bonus", "clip_high", "clip_low", "clip_strength",
    "coefficient", "control_weight", "decay", "drop", "entropy_coefficient", "entropy_floor", "entropy_target",
    "entropy_weight", "epsilon", "eta", "extreme", "gain", "hold", "imitation_coefficient", "internal_steps",
    "intra_coefficient", "kappa", "kl_coefficient", "kl_horizon", "kl_limit", "length_bonus", "multiplier_rate",
    "next_scale", "novelty_coefficient", "penalty_scale", "power", "strength", "tail_weight", "target_entropy", "trust",
    "value_coefficient",
)  # fmt: skip
FRACTIONS = (
    "budget_share", "end", "least", "low_step", "partial", "quantile", "quantile_rate", "rate", "sigma", "start",
    "tokens_first", "tokens_last",
)  # fmt: skip
COUNTS = ("every", "k", "max_length", "prompts", "rounds", "set_size", "total_steps")
RANGES: dict[str, dict[str, float]] = {
    **{name: {"least": 0} for name in AT_LEAST_0},
    **{name: {"least": 0, "most": 1} for name in FRACTIONS},
    **{name: {"least": 1} for name in COUNTS},
    **{name: {"above": 0} for name in ("hot", "cold", "high_step", "learning_rate", "power", "temperature")},
    "ddof": {"least": 0, "most": 1},
}


def check(method: str, name: str, value: Any) -> None:
    """InputError, naming method and hyper-parameter, for a number that is out of its range or not a number."""
    if value is not None:
        require(f"{method}: {name}", value, **(RANGES.get(name) or {"most": math.inf}))
