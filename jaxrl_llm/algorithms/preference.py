"""Losses that compare the samples of a prompt: preferred against rejected, right against wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from jaxrl_llm.algorithms.run_settings import one_reward_of, run_settings
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Estimator
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.penalties import hinged, kl
from jaxrl_llm.objectives.preference.pairs import discriminative, preference
from jaxrl_llm.utils.errors import is_off, require_choice

__all__ = ["drpo_decoupled_reward", "trpa"]


@run_settings(one_reward_of("tagged_levels", why="a reward of several levels, whose order its pairs are"))
def trpa(beta: float = 0.1, anisotropy: float = 2.5, trust: float = 0.001, best: float = 1.0) -> Algorithm:
    """Trust Region Preference Approximation (arXiv 2504.04524, 2025).

    No advantages: the reward ranks the samples of a prompt, and each pair with r_i > r_j is a preference. The paper's
    four levels, right, wrong, no answer found and bad format, are the rewards 1, 0.4, 0.2 and 0 of `--rewards
    tagged_levels`; only their order counts.

        loss = mean over pairs of -log sigmoid(c beta (h_i - h_j)) + trust mean_t k3

    with h the mean log-ratio to the reference, c = anisotropy where r_i >= best, else 1, and k3 = exp(d) - d - 1 with
    d = log pi_behaviour - log pi: the trust region around the behaviour policy (trust is lambda_tr; a token mean).
    Without any pair the first term is the mean over samples of -log sigmoid(h_i) where r_i >= best and
    -log sigmoid(-h_i) elsewhere. Pairs are formed among the rows of a gradient step.

    Defaults. Code: beta, anisotropy, trust. Ours: best.
    """
    check_number("beta", beta, above=0)
    objective = preference(beta, best, anisotropy)
    objective += trust * kl("behaviour", "k3")
    return Algorithm(chain(), objective)


@part
def brevity(longest: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: 1 - length / longest."""

    def brevity(batch: Trajectories) -> jax.Array:
        return 1 - batch.lengths / longest

    return brevity


def drpo_decoupled_reward(
    length_temperature: float = 0.1,
    temperature: float = 10.0,
    kl_limit: float = 1e-4,
    kl_coefficient: float = 1000.0,
    kl_estimator: Literal["kl", "low_var_kl"] = "kl",
    threshold: float = 0.5,
    max_length: float | None = None,
) -> Algorithm:
    """Decoupled Reward Policy Optimization (DRPO, arXiv 2510.04474, 2025).

    Length only reweights right answers (score above `threshold`) among each other; wrong ones share a single penalty:

        loss = -1/prompts sum_prompts [sum_i w_i s_i - tau log mean_j exp(s_j / tau)] + sg(beta max(kl - delta, 0)) kl

    s: mean log-probability of a sample; i right, j wrong; w = softmax over the right ones of (1 - length / max_length)
    / lambda, with lambda = length_temperature (smaller: shorter answers), tau = temperature. Prompts without both kinds
    contribute 0 but count. max_length: longest completion (None: the released script's 8192). beta = kl_coefficient,
    delta = kl_limit; kl is the token mean of log pi_behaviour - log pi (kl_estimator "kl") or of rho - 1 - log rho
    ("low_var_kl"), over the whole batch. The loss has the value of this formula; the released code uses a surrogate
    with the same gradient and another value.

    Defaults. Code: length_temperature, temperature, kl_limit, kl_coefficient, kl_estimator. Ours: threshold.
    Run: max_length.
    """
    check_number("length_temperature", length_temperature, above=0)
    check_number("temperature", temperature, above=0)
    require_choice("kl_estimator", kl_estimator, ("kl", "low_var_kl"))
    longest = 8192 if max_length is None else max_length

    objective = discriminative(brevity(longest), threshold, length_temperature, temperature)
    if not is_off(kl_coefficient):
        estimator: Estimator = "k1" if kl_estimator == "kl" else "k3"
        objective += hinged(kl("behaviour", estimator, reverse=True), kl_limit, kl_coefficient, "kl_guard")
    return Algorithm(chain(), objective)
