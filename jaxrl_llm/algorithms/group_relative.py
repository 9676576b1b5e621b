"""GRPO and its closest variants: the baseline is the mean of the prompt's samples, the loss is PPO's clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import (
    bucket_quantile,
    drop_rows,
    group_relative,
    mixed_groups,
    truncated_rows,
    uniform_groups,
)
from jaxrl_llm.advantages.multi_reward import mixed_by, uniform_by
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.choices import AverageName, Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments
from jaxrl_llm.core.transform import Transform, chain, stateless
from jaxrl_llm.objectives.averaging.averages import average_by_name, constant, token_mean
from jaxrl_llm.objectives.averaging.token_groups import actions_after, first_actions, token_groups
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.agents.single_turns import sliced
from jaxrl_llm.utils.errors import require_choice

__all__ = ["baichuan_m2", "bnpo", "dapo", "degrpo", "dr_grpo", "grpo"]


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
    entropy_coefficient: float = 0.0,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    average: AverageName = "sequence",
    dual_clip: float | None = None,
    group_of_one: Literal["zero", "reward"] = "zero",
    max_length: int | None = None,
) -> Algorithm:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, 2024).

    A_i = (r_i - mean_g) / (std_g + epsilon), on every token of sample i of group g, and with rho the token's ratio

        loss = -1/G sum_i 1/|o_i| sum_t [min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - beta k3]

    averaged over the groups, k3 = exp(-l) - 1 + l with l = logp - logp_ref, beta = kl_coefficient (paper: 0.04; at 0 no
    reference policy is loaded). entropy_coefficient >= 0: entropy bonus. scale "none" does not divide by the standard
    deviation. The paper does not say which standard deviation; verl, TRL and Tunix use ddof 1, with epsilon 1e-6 (TRL:
    1e-4). Nor does it print the clip range.

    Where implementations differ from the paper: average, see `objectives.averaging.averages.average_by_name`: the
    paper's "sequence"; "token" in verl and TRL today; "prompt"; "sum"; "constant", by max_length; "slice". dual_clip c
    > 1 bounds the loss of bad actions by c |A| (verl: 3). group_of_one: the advantage of the only sample of a group,
    "zero" (TRL) or its "reward" (verl).

    Defaults. Paper: kl_coefficient, entropy_coefficient, scale, average, dual_clip. Code: clip_low, clip_high, ddof,
    epsilon, group_of_one. Run: max_length.
    """
    mean = average_by_name(average, max_length)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), mean)
    require_choice("group_of_one", group_of_one, ("zero", "reward"))
    credit = group_relative(scale, ddof=ddof, epsilon=epsilon)
    return Algorithm(
        transform=credit if group_of_one == "zero" else chain(credit, reward_of_singles()),
        objective=regularised(objective, mean, kl_coefficient=kl_coefficient, entropy_coefficient=entropy_coefficient),
    )


@part
def reward_of_singles() -> Transform:
    """Set the advantage of the only scored sample of a group to its reward."""

    def apply(batch: Trajectories) -> Trajectories:
        count, _, _ = bucket_moments(batch.group, batch.scores)
        single = (count == 1) & ~jnp.isnan(batch.scores)
        reward = jnp.where(single, batch.scores, 0.0)[:, None] * batch.action_mask
        return batch.replace(advantages=jnp.where(single[:, None], reward, batch.need("advantages")))

    return stateless(apply)


def dr_grpo(clip_low: float = 0.2, clip_high: float = 0.2, max_length: int | None = None) -> Algorithm:
    """GRPO Done Right (Understanding R1-Zero-Like Training, arXiv 2503.20783, 2025).

    GRPO without its two biases: A_i = r_i - mean_g is not divided by the standard deviation, and the sum over a
    sequence of tokens is divided by a constant instead of by its length:

        loss = -1/N sum_i 1/max_length sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    max_length: the generation budget (None: the paper's 3000). No KL. Older code divided the sum over the batch by the
    length alone, or used the width of the padded batch. G / (G - 1) times A would be RLOO's; the learning rate absorbs
    it.

    Defaults. Paper: clip_low, clip_high. Run: max_length.
    """
    mean = constant(3000 if max_length is None else max_length)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), mean)
    return Algorithm(group_relative("none"), objective)


def bnpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-4,
) -> Algorithm:
    """Local-batch token mean (TRL's loss type "bnpo"; the name is of Beta Normalization, arXiv 2506.02864, 2025).

    GRPO with token losses averaged over the tokens of each micro-batch, then over micro-batches. With one sequence per
    micro-batch that is GRPO's average, with a single micro-batch DAPO's: the result depends on how the batch is split,
    so it is for comparison only. The paper of that name normalises rewards by a Beta distribution, which is not done
    here. clip_low, clip_high, kl_coefficient, scale, ddof and epsilon as in grpo, with TRL's values.

    Defaults. Code: clip_low, clip_high, kl_coefficient, scale, ddof, epsilon.
    """
    return grpo(
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coefficient=kl_coefficient,
        scale=scale,
        ddof=ddof,
        epsilon=epsilon,
        average="slice",
    )


@presets(paper={"average": "prompt"}, code={"average": "token", "dual_clip": 10.0})
def dapo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dynamic_sampling: bool = True,
    rounds: int = 10,
    accuracy: str | None = None,
    overlong_buffer: int | None = None,
    max_length: int | None = None,
    overlong_filter: bool = False,
    average: AverageName = "token",
    dual_clip: float | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Decoupled Clip and Dynamic Sampling Policy Optimization (DAPO, arXiv 2503.14476, 2025).

    GRPO without KL and with four changes:
    1. clip-higher: min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with clip_high > clip_low;
    2. dynamic_sampling: prompts are sampled, for up to `rounds` batches, until enough groups are neither all right nor
       all wrong; the other groups are dropped. Decided by the component `accuracy`, or by the combined reward before
       the penalty of 4, which would make equally right answers differ;
    3. token mean: the sum over all tokens of the batch / their number;
    4. soft overlong penalty: 0 up to max_length - overlong_buffer tokens, then falling linearly to -1 at max_length,
       added to the reward; off unless both are given (paper: 4096 of 20480; the run fills in max_length).
    overlong_filter (ablated in the paper): truncated samples leave the loss, but not the statistics of their group.

    average: the paper's formula divides by the tokens of a prompt's group, then averages over prompts ("prompt"); its
    code, like all others, divides by those of the whole batch ("token", the default). dual_clip: 10 in the authors'
    recipe, not in the paper. preset "paper" or "code" sets both. A = (r - mean) / (std + epsilon) with ddof. The
    paper's rewards are -1 and 1.

    Defaults. Paper: clip_low, clip_high, dynamic_sampling, overlong_filter, dual_clip. Code: rounds, average, ddof,
    epsilon. Ours: accuracy, overlong_buffer. Run: max_length.
    """
    check_number("rounds", rounds, least=1)
    uniform, mixed = (uniform_groups, mixed_groups) if accuracy is None else (uniform_by(accuracy), mixed_by(accuracy))
    steps = [drop_rows(uniform)] if dynamic_sampling else []
    if overlong_buffer is not None and max_length is not None:
        steps.append(soft_overlong_penalty(max_length, overlong_buffer))
    steps.append(group_relative(ddof=ddof, epsilon=epsilon))
    if overlong_filter:
        steps.append(drop_rows(truncated_rows))
    mean = average_by_name(average, max_length)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), mean)
    resample = DynamicSampling(mixed, rounds) if dynamic_sampling else None
    return Algorithm(chain(*steps), objective, curriculum=resample)


def baichuan_m2(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    length_bonus: float = 4.0,
    quantile: float = 0.2,
    threshold: float = 0.5,
    max_length: int | None = None,
    slices: bool = False,
) -> Algorithm:
    """Baichuan-M2 (Scaling Medical Capability with Large Verifier System, arXiv 2509.02208, 2025).

    GRPO without KL and standard deviation, summed over tokens and divided by a constant as in Dr. GRPO, with separate
    clip bounds, and a bonus for short answers once a group is good. With q the `quantile` of the group's rewards,

        R_i = r_i + [q > threshold and r_i >= q] length_bonus / sqrt(|o_i|),    A_i = R_i - mean_g R
        loss = -1/N sum_i 1/max_length sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    The paper prints length_bonus 4 and quantile 0.2 (interpolated linearly), but neither threshold nor clip_low,
    clip_high and max_length (None: the longest row of the batch). Lengths are in tokens.

    Its last stage, slices with --environment, trains on single replies within dialogues with a simulated patient: the
    policy has a dialogue with it, which is cut off before a random turn, and all samples of the group are replies to
    that, scored by the environment, whose rubric is of that moment. `environments.patient.Patient` is such a patient.
    The generator of rubrics, the judge that reads them, and the filter of noisy slices are the environment's.

    Defaults. Paper: length_bonus, quantile. Ours: clip_low, clip_high, threshold, slices. Run: max_length.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), constant(max_length))

    credit = chain(rescore(with_length_bonus(length_bonus, quantile, threshold)), group_relative("none"))
    return Algorithm(credit, objective, rollout=sliced() if slices else None)


@part
def with_length_bonus(size: float, quantile: float, threshold: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the scores plus their `gated_length_bonus`."""
    return lambda b: b.scores + gated_length_bonus(b.scores, b.lengths, b.group, size, quantile, threshold)


def gated_length_bonus(
    reward: jax.Array,
    lengths: jax.Array,
    group: jax.Array,
    size: float | jax.Array,
    quantile: float | jax.Array,
    threshold: float | jax.Array,
) -> jax.Array:
    """size / sqrt(length) for the samples at or above the group's quantile q where q > threshold, else 0; f32[N]."""
    q = bucket_quantile(group, reward, quantile)
    return jnp.where((q > threshold) & (reward >= q), size / jnp.sqrt(jnp.maximum(lengths, 1.0)), 0.0)


def degrpo(
    control_weight: float = 0.001,
    control_tokens: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    entropy_coefficient: float = 0.001,
    average: Literal["sequence", "token"] = "sequence",
) -> Algorithm:
    """Decoupled GRPO (Thinkless: LLM Learns When to Think, arXiv 2505.13379, 2025).

    The first actions, a control tag that chooses how to answer, have a separate weight, so that its weight does not
    depend on the answer's length. With l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), A_i = r_i - mean_g
    and alpha = control_weight,

        loss = mean_i [alpha l_i0 + 1/T_i sum_{t=1..T_i} l_it] + kl_coefficient mean k3 - entropy_coefficient mean H

    with l_i0 the mean over the control_tokens tokens of the tag: 1 where the tags were added to the tokenizer, in a run
    as many as the longer of <short> and <think> has in its tokenizer. T_i are the actions after them; the last two
    means are over all tokens. average "token": the answers' tokens are averaged over the batch instead of by sequence,
    as in the authors' code. The method requires a policy that was trained on both control tokens, and rewards that
    prefer short right answers: `--rewards 'by_mode(number_match)'` gives the paper's 1 for <short>, 0.5 for <think>,
    and -1 for wrong answers and without either.

    Defaults. Code: control_weight, clip_low, clip_high, kl_coefficient, entropy_coefficient. Ours: average,
    control_tokens.
    """
    groups = {
        "control": (control_weight, first_actions(control_tokens)),
        "answer": (1.0, actions_after(control_tokens)),
    }
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_groups(groups, over=average))
    objective = regularised(
        objective, token_mean(), kl_coefficient=kl_coefficient, entropy_coefficient=entropy_coefficient
    )
    return Algorithm(group_relative("none"), objective)
