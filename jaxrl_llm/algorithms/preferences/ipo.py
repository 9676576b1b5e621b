"""Identity Preference Optimization (IPO)."""

from __future__ import annotations

from typing import Annotated

import jax

from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.run_settings import given_responses, run_settings
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Number
from jaxrl_llm.core.hyperparameters import CODE
from jaxrl_llm.core.ranges import Positive
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.preference.losses import Pairs
from jaxrl_llm.objectives.preference.losses import ipo as loss_of_pairs
from jaxrl_llm.objectives.preference.pairwise import pairwise
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected


@method(paper="arXiv 2310.12036", year=2023, test="test_offline_preferences.py::test_ipo_by_loop")
@run_settings(*given_responses(2))
def ipo(
    beta: Annotated[Positive, CODE] = 0.1,
    per_token: Annotated[bool, CODE] = True,
) -> Algorithm:
    """Identity Preference Optimization (IPO).

    The columns chosen and rejected of a row are two responses to its prompt. With u the log-ratio of a whole response
    to the reference and n its number of tokens,

        loss = mean over pairs of (u_chosen/n_chosen - u_rejected/n_rejected - 1/(2 beta))^2

    per_token: false leaves n out, as the paper prints it; beta is its tau. TRL divides.
    """

    def of_sums(pairs: Pairs, beta: Number) -> jax.Array:
        return loss_of_pairs(pairs._replace(chosen_length=1.0, rejected_length=1.0), beta)

    return Algorithm(chain(), pairwise(loss_of_pairs if per_token else of_sums, beta), rollout=chosen_and_rejected())
