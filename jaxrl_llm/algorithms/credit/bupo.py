import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AboveOne, AverageOver, Code, Count, NonNegative, Paper
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.parts import Array, PolicyOutputs, Trajectories, chain, control, counted, part, step_part
from jaxrl_llm.objectives import Ratio, clip, policy_gradient, sequence_mean, token_mean, token_ratio


@step_part
def internal_phase(step: Array, batch: Trajectories, internal_steps: float) -> Trajectories:
    """A function `(step, batch) -> batch`: the control "internal" is 1 in the first steps, then 0."""
    return batch.with_controls(internal=(step < internal_steps).astype(jnp.float32))


@part
def internal_ratio(layer: int) -> Ratio:
    """The ratio of the policy of a layer where the control "internal" is above 0, else `token_ratio()`."""

    def ratio(outputs: PolicyOutputs, batch: Trajectories) -> Array:
        inner = log_ratio((outputs.extras or {})["internal_logp"], batch.need("internal_logp"), batch.loss_weights != 0)
        return jnp.where(control(batch, "internal") > 0, jnp.exp(inner), token_ratio()(outputs, batch))

    return Ratio(ratio, frozenset({f"internal_logp:{layer}"}))


@method(paper="arXiv 2512.19673", test="test_token_credit.py::test_bupo_against_a_loop")
@presets(paper={"average": "sequence", "dual_clip": None}, code={"average": "token", "dual_clip": 10.0})
def bupo(
    layer: Paper[Count] = 6,
    internal_steps: Paper[NonNegative] = 30,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    dual_clip: Paper[AboveOne | None] = None,
    average: Paper[AverageOver] = "sequence",
) -> Algorithm:
    """Bottom-up Policy Optimization (BuPO).

    For the first internal_steps steps the clipped GRPO loss is applied to the policy that unembeds the hidden state
    after `layer` (counted from 1, no final norm), pi^l = softmax(H^l E_u^T), later to the model's output:

        rho = pi^l(a) / pi^l_old(a) while step <= internal_steps, else pi(a) / pi_old(a)
        loss = -mean min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A = (r - mean_g) / std_g

    Rollouts are sampled from the full model; rho^l only limits the step. The paper averages per sequence (eq. 9); its
    script (preset "code") has average "token" and dual_clip 10, which bounds the loss of bad actions by 10 |A|. The
    paper's internal_steps is 30 of 300, its layer 6 for Qwen3-4B and 8B: the last one whose feed-forward block raises
    the entropy of the unembedded distribution.
    """
    mean = sequence_mean() if average == "sequence" else token_mean()
    objective = policy_gradient(internal_ratio(layer), clip(clip_low, clip_high, dual_clip), mean)
    return Algorithm(chain(group_relative(), counted(internal_phase(internal_steps))), objective)
