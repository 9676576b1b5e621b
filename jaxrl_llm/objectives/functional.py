"""Losses as functions of arrays: values of surrogates, weights of tokens, estimators of a divergence.

Nothing here makes a part; what does is in `jaxrl_llm.objectives`. The code is in the modules by subject.
"""

from jaxrl_llm.core.log_ratios import k1, k2, k3
from jaxrl_llm.objectives.distillation.divergences import generalised_jsd, top_k_divergence
from jaxrl_llm.objectives.distillation.sampled_tokens import (
    iw_opd_advantage,
    minillm_advantage,
    sparse_top_1_divergence,
)
from jaxrl_llm.objectives.off_policy import divergence_weight, importance_weight
from jaxrl_llm.objectives.penalties import exact_kl
from jaxrl_llm.objectives.preference.by_name import pair_loss
from jaxrl_llm.objectives.preference.reward_models import (
    bradley_terry_loss,
    class_loss,
    multilabel_loss,
    regression_loss,
)
from jaxrl_llm.objectives.preference.verdicts import bco_loss, kto_loss
from jaxrl_llm.objectives.surrogates import clipped_value, gradient_preserving_value, soft_gated_value
from jaxrl_llm.objectives.weights import gamma_weight

__all__ = [
    "bco_loss", "bradley_terry_loss", "class_loss", "clipped_value", "divergence_weight", "exact_kl", "gamma_weight",
    "generalised_jsd", "gradient_preserving_value", "importance_weight", "iw_opd_advantage", "k1", "k2", "k3",
    "kto_loss", "minillm_advantage", "multilabel_loss", "pair_loss", "regression_loss", "soft_gated_value",
    "sparse_top_1_divergence", "top_k_divergence",
]  # fmt: skip
