from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, RunSetting, exactly, method, run_settings
from jaxrl_llm.core.annotations import (
    AtLeastOne,
    Estimator,
    Fraction,
    FractionNumber,
    NonNegative,
    NonNegativeInt,
    NonNegativeNumber,
    Number,
    Range,
    Source,
    ZeroOrOne,
)
from jaxrl_llm.core.arguments.hyperparameters import Ours, Paper
from jaxrl_llm.core.log_ratios import log_ratio, needed, source
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, chain, counted_part, part
from jaxrl_llm.core.reference import Params, ReferenceRule
from jaxrl_llm.objectives import Average, clip, entropy, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.averages import Mean
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.replay.base import times_as_many, whole_groups

PASSES = (
    RunSetting(
        "epochs",
        lambda given: 2 if given["switch"] else 1,
        lambda config, given: (config.epochs > 1) == (given["switch"] > 0),
        "more than one pass over a batch before its switch, if there is one",
    ),
    exactly("epochs_until", lambda given: given["switch"], "one pass over a batch from its switch on"),
)


@method(paper="arXiv 2507.06892", test="test_trust_region.py::test_remix_by_loop")
@run_settings(*PASSES)
def remix(
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.001,
    entropy_coefficient: Ours[NonNegative] = 0.0,
    hold: Paper[NonNegative] = 50,
    every: Paper[AtLeastOne] = 10,
    drop: Paper[NonNegative] = 0.1,
    least: Paper[Fraction] = 0.5,
    past_share: Paper[Annotated[float, Range(least=0, below=1)]] = 0.4,
    replay_age: Paper[NonNegativeInt] = 2,
    switch: Paper[NonNegativeInt] = 50,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Reincarnating Mix-policy Proximal Policy Gradient (ReMix).

    Batches of the first steps mix rollouts of the last few policies with fresh ones. c = pi_old / pi_behaviour centres
    the clip, and there are two anchors, the reference and the policy before the last update:

        loss = -token mean of min(rho A, clip(rho, c - clip_low, c + clip_high) A) - entropy_coefficient H
               + kl_coefficient [lambda k3(pi, reference) + (1 - lambda) k3(pi, previous)]
        lambda(t) = max(1 - drop ceil(max(t - hold, 0) / every), least)  in iteration t = 1, 2, ...

    rho is relative to the behaviour policy; c = 1 for fresh rollouts. A is GRPO's, with ddof and epsilon. At first
    `previous` has the initial weights; it is a further copy of what learns. The sources available to us print no
    coefficients, estimator or clip range.

    The first `switch` iterations: past_share of the groups of a batch come from the last replay_age steps, whole, each
    at most once; they join the fresh ones. Groups with equal rewards are not replayed. There are two passes over a
    batch, or more (--epochs). After them (the paper: 50 or 100) all groups are fresh and seen once, so that the loss is
    PPO's clipped one, and the reference is no longer the initial policy but that of the switch. lambda goes on by its
    schedule, which the paper does not restart.
    """
    objective = policy_gradient(token_ratio(), centred_clip(clip_low, clip_high), token_mean(), needs={"old_logp"})
    objective += kl_coefficient * mixed_anchor("k3") - entropy_coefficient * entropy()
    ratio = times_as_many(past_share / (1 - past_share))
    replay = whole_groups(**ratio, max_age=replay_age, until=switch) if past_share else None
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), mix_anchors(hold, every, drop, least))
    return Algorithm(transform, objective, replay=replay, reference=reset_at(switch))


@part
def reset_at(step: NonNegativeInt) -> ReferenceRule:
    """The initial policy up to update number `step`, then the policy that this update gave (2507.06892).

    Raises InputError unless step is a whole number, at least 0.
    """

    def update(reference: Params, params: Params, updates: jax.Array) -> Params:
        return jax.tree.map(lambda old, new: jnp.where(updates == step, new, old), reference, params)

    return ReferenceRule(update=update)


@part
def centred_clip(
    low: FractionNumber = 0.2,
    high: NonNegativeNumber | None = None,
    of: Source = "old",
    over: Source = "behaviour",
) -> Surrogate:
    """min(rho A, clip(rho, c - low, c + high) A) with c = pi_of / pi_over of the token (2507.06892).

    rho is against `over`, the policy that drew the token; the trust region is centred on `of`. c = 1 where the two are
    equal. high defaults to low. The objective's `needs` must include the batch field of `of`.
    """
    high = low if high is None else high
    for name in (of, over):
        needed(name)  # InputError for another name

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        c = jnp.exp(log_ratio(source(batch, of), source(batch, over), batch.loss_weights != 0))
        value, metrics = clip(1 - c + low, c + high - 1)(ratio, outputs, batch)  # type: ignore[arg-type]
        return value, {**metrics, "clip/centre": c}

    return surrogate


def stepwise_decay(
    t: Number, hold: Number = 50, every: Number = 10, drop: Number = 0.1, least: Number = 0.5
) -> jax.Array:
    """max(1 - drop ceil(max(t - hold, 0) / every), least): 1 for `hold` iterations, then down in steps."""
    return jnp.maximum(1 - drop * jnp.ceil(jnp.maximum(t - hold, 0) / every), least)


@counted_part()
def mix_anchors(
    step: jax.Array, batch: Trajectories, hold: Number = 50, every: Number = 10, drop: Number = 0.1, least: Number = 0.5
) -> Trajectories:
    """Controls "reference_share", `stepwise_decay` of iteration t = 1, 2, ..., and "previous_share", the rest."""
    share = stepwise_decay(step.astype(jnp.float32) + 1, hold, every, drop, least)
    return batch.with_controls(reference_share=share, previous_share=1 - share)


@part
def mixed_anchor(estimator: Estimator = "k3", average: Average | Mean | None = None) -> Objective:
    """share KL(pi || reference) + (1 - share) KL(pi || previous), with the shares of `mix_anchors`."""
    near_reference = kl("reference", estimator, average, metric="kl/reference")
    near_previous = kl("previous", estimator, average, metric="kl/previous")
    return "reference_share" * near_reference + "previous_share" * near_previous
