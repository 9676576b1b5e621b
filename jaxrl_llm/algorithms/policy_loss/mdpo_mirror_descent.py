from typing import Annotated

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_settings, several_steps
from jaxrl_llm.core.annotations import AtLeastOne, Estimator, NonNegative, Number, Positive, PositiveNumber, Range
from jaxrl_llm.core.arguments.hyperparameters import Code, OfRun, Ours
from jaxrl_llm.core.parts import Array, Transform, chain, counted, part
from jaxrl_llm.objectives import kl, policy_gradient, token_mean, token_ratio, unclipped


@method(paper="arXiv 2005.09814", test="test_trust_region.py::test_mdpo_by_loop_and_its_step_sizes")
@beside("off_policy", "the off-policy loss and the Tsallis divergence", "other objectives")
@run_settings(several_steps("several gradient steps on a batch: at the first its divergence has no gradient", 4))
def mdpo_mirror_descent(
    step_size: Code[Positive] = 1.0,
    total_steps: OfRun[AtLeastOne | None] = None,
    estimator: Ours[Estimator] = "k3",
    epsilon: Ours[NonNegative] = 1e-8,
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


def linear_step(k: Number, total: Number | None, first: Number = 1.0) -> Array:
    """first (1 - k / total) for iteration k = 0, 1, ..., at least first / total; `first` if total is None."""
    return jnp.asarray(first if total is None else first * (1 - jnp.minimum(k, total - 1) / total), jnp.float32)


@part
def mirror_step(total: Annotated[Number | None, Range(least=1)], first: PositiveNumber = 1.0) -> Transform:
    """Write the control "proximity", 1 / `linear_step`: the coefficient of the divergence from the last policy."""
    return counted(lambda k, batch: batch.with_controls(proximity=1 / linear_step(k.astype(jnp.float32), total, first)))
