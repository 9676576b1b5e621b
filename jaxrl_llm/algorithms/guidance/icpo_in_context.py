import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AboveOne, Code, Count, NonNegative, OfRun, Ours, Paper
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, counted, part, step_part
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.surrogates import guided, guided_rows
from jaxrl_llm.rewards.transforms import leave_out
from jaxrl_llm.rollouts.guidance.prompted import in_context
from jaxrl_llm.rollouts.guidance.repair import Succeeds


@batch_part
def unsuccessful_guidance(b: Trajectories, threshold: float) -> Array:
    """A function `batch -> bool[N]`: guided rows with a score below the threshold."""
    return guided_rows(b) & ~(b.scores >= threshold)


@step_part
def with_fading_bonus(
    step: Array, b: Trajectories, threshold: float, bonus: float, total_steps: int | None
) -> Trajectories:
    """A function `(step, batch) -> batch`: the bonus of `icpo_in_context` on the scores of guided rows."""
    left = jnp.maximum(1 - step / (400 if total_steps is None else total_steps), 0.0)
    return b.replace(reward=b.scores + jnp.where(guided_rows(b) & (b.scores >= threshold), bonus * left, 0.0))


@method(paper="arXiv 2510.26519", test="test_guided.py::test_icpo_against_a_loop")
def icpo_in_context(
    threshold: Paper[float] = 1.0,
    reject: Paper[bool] = True,
    bonus: Paper[NonNegative] = 1.0,
    shape: Paper[float] = 0.1,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    dual_clip: Code[AboveOne] = 3.0,
    kl_coefficient: Code[NonNegative] = 0.001,
    epsilon: Code[NonNegative] = 1e-6,
    guided_samples: Paper[int] = 1,
    column: Ours[str] = "examples",
    total_steps: OfRun[Count | None] = None,
) -> Algorithm:
    """In-Context Steered Policy Optimization (Think Outside the Policy).

    guided_samples of a group (one of eight) are drawn with a worked example in the prompt, and trained on under the
    plain prompt. The examples are those of a column of the data set, a text or a list of which each such sample gets a
    random one (paper: one of another data set's); prompts without one are sampled as in GRPO. To the reward of those
    with at least `threshold` the method adds bonus (1 - step/total_steps) (total_steps None: the paper's 400); the
    other guided samples are replaced by plain ones (reject False, as in the released code, keeps them without a bonus).
    A = (r - mean_g)/(std_g + epsilon) over both kinds, and the loss is one token mean of

        -A p/(p + shape) on guided tokens, p = pi(a) under the plain prompt, without ratio and clip
        PPO's clipped surrogate on the others (clip_low, clip_high, dual_clip)

    plus kl_coefficient times k3. The paper writes r > threshold, but with rewards of 0 and 1 and its threshold of 1
    this must mean r >= threshold.
    """
    filters = [leave_out(unsuccessful_guidance(threshold))] if reject else []
    fading = counted(with_fading_bonus(threshold, bonus, total_steps), {"guided"})
    surrogate = guided(clip(clip_low, clip_high, dual_clip), shape)
    objective = policy_gradient(token_ratio(), surrogate, token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3")
    rollout = in_context(column, guided_samples, reaches(threshold) if reject else None)
    return Algorithm(chain(*filters, fading, group_relative(epsilon=epsilon)), objective, rollout=rollout)


@part
def reaches(threshold: float) -> Succeeds:
    """A function of a scored episode: whether its reward is at least the threshold."""
    return lambda episode: episode.score >= threshold
