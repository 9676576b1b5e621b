"""What a policy says of sampled tokens, under current weights or others: `policy_outputs`, and what it shall find."""

from jaxrl_llm.models.outputs.policy_outputs import policy_outputs, scatter
from jaxrl_llm.models.outputs.readings import MEASURES, distribution_at
from jaxrl_llm.models.outputs.wanted import DURING_UPDATE, NOTHING, Wanted, wanted_of, wanted_of_teacher

__all__ = [
    "DURING_UPDATE", "MEASURES", "NOTHING", "Wanted", "distribution_at", "policy_outputs", "scatter", "wanted_of",
    "wanted_of_teacher",
]  # fmt: skip
