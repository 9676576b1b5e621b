from typing import Literal

from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import BelowHalf, Code, Fraction, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import chosen_likelihood, loss_named, on_policy_weights, pairwise, shared_length
from jaxrl_llm.objectives.preference.losses import PairLoss
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected

DivergenceName = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@method(paper="arXiv 2305.18290", test="test_offline_preferences.py::test_dpo_by_loop")
@run_settings(*given_responses(2))
def dpo(
    loss: Paper[str | PairLoss] = "sigmoid",
    beta: Paper[Positive] = 0.1,
    label_smoothing: Code[BelowHalf | None] = None,
    f_divergence: Paper[DivergenceName] = "reverse_kl",
    likelihood: Ours[NonNegative] = 0.0,
    beyond: Ours[Fraction] = 1.0,
    on_policy: Ours[bool] = False,
) -> Algorithm:
    """Direct Preference Optimization (DPO), with any loss on pairs.

    The columns chosen and rejected of a row are two responses to its prompt. With u the log-ratio of a whole response
    to the reference, its loss is

        loss = mean over pairs of -log sigmoid(beta (u_chosen - u_rejected)) + likelihood nll

    loss: another of `objectives.preference.losses`, by its name in TRL or as a function (Pairs, beta) -> f[P].
    label_smoothing: None is the loss's own. f_divergence: whose scores take the place of u (2309.16240). nll: nats
    a token of the chosen responses (RPO; others are mixed by `objectives.weighted_losses`, as in `mpo`). beyond: weight
    of tokens beyond the length of a pair's shorter response (LD-DPO, 0.5). on_policy: weigh pairs by how probable they
    are under the policy (WPO).
    """
    chosen = loss_named(loss, label_smoothing, f_divergence) if isinstance(loss, str) else loss
    objective = pairwise(chosen, beta) + likelihood * chosen_likelihood()
    before = [*([shared_length(beyond)] if beyond != 1 else []), *([on_policy_weights()] if on_policy else [])]
    return Algorithm(chain(*before), objective, rollout=chosen_and_rejected())
