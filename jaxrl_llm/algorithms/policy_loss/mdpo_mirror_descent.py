"""Mirror Descent Policy Optimization (MDPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.returns import whiten_advantages
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.run_settings import run_settings, several_steps
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Estimator
from jaxrl_llm.core.hyperparameters import CODE, OURS, RUN, AtLeastOne, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import kl, policy_gradient, token_mean, token_ratio, unclipped
from jaxrl_llm.objectives.anchors import mirror_step


@method(
    paper="arXiv 2005.09814",
    year=2020,
    test="test_trust_region.py::test_mdpo_by_loop_and_its_step_sizes",
    beside={"off_policy": ("the off-policy loss and the Tsallis divergence", "other objectives")},
)
@run_settings(several_steps("several gradient steps on a batch: at the first its divergence has no gradient", 4))
def mdpo_mirror_descent(
    step_size: Annotated[float, CODE] = 1.0,
    total_steps: Annotated[AtLeastOne | None, RUN] = None,
    estimator: Annotated[Estimator, OURS] = "k3",
    epsilon: Annotated[NonNegative, OURS] = 1e-8,
) -> Algorithm:
    """Mirror Descent Policy Optimization (MDPO).

    Several gradient steps per batch on the policy gradient with an explicit KL to the policy of the batch, no clip:

        loss = token mean of -rho A + (1/t_k) KL(pi || pi_k),  t_k = step_size (1 - k / total_steps), k = 0, 1, ...

    The KL is estimated from the samples of pi_k and differentiated through rho, by the estimator "k3",
    rho log rho - rho + 1, or "k1", rho log rho. They agree in expectation, but the gradient of k1 at pi_k is that of
    log pi: zero-mean noise, 1/t_k times the gradient for an advantage of 1. total_steps: iterations of the run; None:
    t_k is step_size. In place of the paper's critic, A is the reward minus the group's mean, standardised over the
    batch with epsilon under the root. t_0 is step_size; the released code starts one step higher, at 1 + 1/K.
    """
    proximity = "proximity" * kl("behaviour", estimator, sampled="behaviour")
    transform = chain(group_relative("none"), whiten_advantages(epsilon=epsilon), mirror_step(total_steps, step_size))
    return Algorithm(transform, policy_gradient(token_ratio(), unclipped(), token_mean()) + proximity)
