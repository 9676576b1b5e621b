"""Losses composed of independent parts: what makes ratios, surrogates, averages and penalties.

The functions of arrays that parts compute with are in `jaxrl_llm.objectives.functional`.
"""

from jaxrl_llm.objectives.averages import (
    Average,
    average_by_name,
    averaged,
    constant,
    count_tokens,
    mean_by,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    slice_token_mean,
    token_groups,
    token_mean,
)
from jaxrl_llm.objectives.distillation.teachers import distillation, towards_teacher
from jaxrl_llm.objectives.off_policy import divergence_rejection, importance_correction, scale_by_info
from jaxrl_llm.objectives.penalties import (
    entropy,
    entropy_corridor,
    entropy_target,
    imitation,
    kl,
    likelihood_preserving,
    ratio_variance,
    right_answers,
)
from jaxrl_llm.objectives.policy_gradient import clipped_policy, policy_gradient, regularised
from jaxrl_llm.objectives.preference.by_name import loss_named
from jaxrl_llm.objectives.preference.losses import weighted_losses
from jaxrl_llm.objectives.preference.pairs import coupled, discriminative, preference
from jaxrl_llm.objectives.preference.pairwise import (
    all_pairs,
    best_and_worst,
    chosen_likelihood,
    on_policy_weights,
    pairwise,
    shared_length,
)
from jaxrl_llm.objectives.preference.verdicts import mismatched_kl, verdicts
from jaxrl_llm.objectives.ratios import Ratio, sequence_ratio, span_ratio, token_ratio
from jaxrl_llm.objectives.row_averages import by_rows
from jaxrl_llm.objectives.surrogates import (
    clip,
    geometric_clip,
    gradient_preserving_clip,
    log_probability,
    soft_gate,
    token_clip,
    unclipped,
)
from jaxrl_llm.objectives.values import head_value_loss, huber, value_loss
from jaxrl_llm.objectives.weights import by_sign, capped, clipped, gamma, product, within, within_divergence

__all__ = [
    "Average", "Ratio", "all_pairs", "average_by_name", "averaged", "best_and_worst", "by_rows", "by_sign", "capped",
    "chosen_likelihood", "clip", "clipped", "clipped_policy", "constant", "count_tokens", "coupled", "discriminative",
    "distillation", "divergence_rejection", "entropy", "entropy_corridor", "entropy_target", "gamma", "geometric_clip",
    "gradient_preserving_clip", "head_value_loss", "huber", "imitation", "importance_correction", "kl",
    "likelihood_preserving", "log_probability", "loss_named", "mean_by", "mismatched_kl", "on_policy_weights",
    "pairwise", "policy_gradient", "preference", "product", "prompt_mean", "ratio_variance", "regularised",
    "right_answers", "scale_by_info", "sequence_mean", "sequence_ratio", "sequence_sum", "shared_length",
    "slice_token_mean", "soft_gate", "span_ratio", "token_clip", "token_groups", "token_mean", "token_ratio",
    "towards_teacher", "unclipped", "value_loss", "verdicts", "weighted_losses", "within", "within_divergence",
]  # fmt: skip
