from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import generalised_advantages, kl_reward, whiten_advantages
from jaxrl_llm.advantages.returns import needed_values
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, Transform, chain, part, stateless_part
from jaxrl_llm.core.reference import another
from jaxrl_llm.objectives import clipped_policy, value_loss
from jaxrl_llm.rollouts.guidance.prefixes import REFERENCE, two_policies
from jaxrl_llm.utils.errors import InputError, is_off, shown


@method(paper="arXiv 2306.11816", test="test_guide_and_learner.py::test_rlgf_by_loop")
def rlgf(
    begins: Code[Literal["guide", "learner", "learner_first", "either"]] = "guide",
    column: Ours[str] = "guide",
    guide: Ours[str | None] = None,
    guide_model: Ours[str | None] = None,
    share: Paper[float] = 0.8,
    learner_steps: Code[int] = 20,
    guide_often: Paper[Fraction] = 0.8,
    seed: Ours[int] = 0,
    kl_coefficient: Ours[NonNegative] = 0.05,
    gamma: Code[float] = 1.0,
    lam: Code[float] = 0.95,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
) -> Algorithm:
    """RL with guided feedback (RLGF, Learning to Generate Better Than Your LLM).

    A response of n tokens is drawn from one policy; with probability `share` its first h tokens are kept, h uniform
    from 1 to n - 1, else h = 0; and the other policy writes the rest. One of the two is a guide, of which only samples
    are needed. begins says who writes the first h tokens:

        guide            PPO++: the guide brings the learner to good states. Losses of policy and critic on the
                         learner's tokens t >= h
        learner          AggreVaTeD: the policy loss is on the learner's tokens t < h, the value loss on the guide's,
                         t >= h, so that the critic estimates the guide's value, which the learner improves on
        learner_first    D2LOLS: AggreVaTeD for learner_steps iterations, then PPO++
        either           LOLS: each iteration PPO++ with probability guide_often, else AggreVaTeD, drawn from `seed`
                         and the step. PPO++ reads and trains the learner's critic, AggreVaTeD the guide's

    The score of the whole response is the reward of the last token, and each action's reward gets
    -kl_coefficient (logp_old - logp_ref); A is from GAE (gamma, lam) over the row's actions, R = A + V, and A then
    whitened. With means over the tokens that a loss sees,

        loss = -mean min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    The two critics of LOLS are two heads of one critic, in place of two models: V and V_old are of the learner's head
    in rows that the learner completes, of the guide's head in those that the guide completes, so that no head is
    trained on the other's returns. In the other three the critic has one head.

    guide "reference": the reference policy of the run is the guide, in the paper's experiments the model before the
    run; it is drawn from as the learner is. guide_model: name or folder of another model of the same shapes that is the
    reference, and so the guide, instead; the penalty is then the divergence from it, too. Else, where the guide begins,
    its samples come from the row's `column`, a text or a list of texts: a guide does not learn, so it may answer before
    the run. Where it completes, `guide` is FILE.py:FUNCTION of the problem and the response so far, which returns the
    rest. The sampling of such a guide (the paper: top-p 0.92, top-k 50) is its own.
    """
    if guide_model is not None and guide != REFERENCE:
        raise InputError(f"guide_model is given, but guide is {shown(guide)}: give guide reference")
    two = begins == "either"
    transform = chain(
        *([] if is_off(kl_coefficient) else [kl_reward(kl_coefficient, of="old")]),
        of_own_head(generalised_advantages(gamma, lam)) if two else generalised_advantages(gamma, lam),
        whiten_advantages(),
        split_at_switch(),
    )
    objective = clipped_policy(clip_low, clip_high)
    values = value_loss(value_clip)
    objective += value_coefficient * (value_loss_of_own_head(values) if two else values)
    rollout = two_policies(begins, column, guide, share, learner_steps, guide_often, seed)
    reference = None if guide_model is None else another(guide_model)
    return Algorithm(transform, objective, rollout=rollout, reference=reference)


HEADS = 2  # the learner's value, and the guide's


def own_head(values: jax.Array, batch: Trajectories) -> jax.Array:
    """Of values f32[N, L, 2], the head f32[N, L] of who completed each row: 0 the learner, 1 the guide.

    info["switch"] says who, see `split_at_switch`; without it all rows are the learner's.
    """
    switch = (batch.info or {}).get("switch")
    return values[..., 0] if switch is None else jnp.where((switch >= 0)[:, None], values[..., 1], values[..., 0])


@part
def of_own_head(inner: Transform) -> Transform:
    """A transform of one critic's values, which reads of two heads each row's own (`own_head`)."""

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        both = batch.need("values")
        state, found = inner.apply(state, batch.replace(values=own_head(both, batch)))
        return state, found.replace(values=both)

    return replace(inner, apply=apply, needs=inner.needs - needed_values() | needed_values(HEADS))


@part
def value_loss_of_own_head(inner: Objective) -> Objective:
    """A loss of one critic's values, which reads and trains of two heads each row's own (`own_head`)."""

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        extras = outputs.extras or {}
        if "values" in extras:
            outputs = outputs.replace(extras={**extras, "values": own_head(extras["values"], batch)})
        return inner.function(outputs, batch.replace(values=own_head(batch.need("values"), batch)))

    return replace(inner, function=objective, needs=inner.needs - needed_values() | needed_values(HEADS))


@stateless_part()
def split_at_switch(batch: Trajectories) -> Trajectories:
    """Train the policy on its own tokens, and the critic on those after the switch.

    info["switch"] f32[N]: the number of a row's first actions that the policy wrote, another policy the rest; below 0,
    or NaN where a rollout failed: all actions are the policy's, and train both. Without it nothing changes. The weights
    of the other policy's tokens become 0, and info["value_weights"] is such that the value loss is a mean over the
    critic's tokens.
    """
    switch = (batch.info or {}).get("switch")
    if switch is None:
        return batch
    weights, every = batch.loss_weights, ~(switch >= 0)[:, None]
    own = every | (batch.action_index < switch[:, None])
    valued = jnp.where(jnp.isnan(batch.scores)[:, None], 0.0, weights) * (every | ~own)
    rows = jnp.sum(jnp.any(batch.action_mask, axis=1))
    total = jnp.sum(valued)
    valued = valued * rows / jnp.where(total > 0, total, 1.0)
    return batch.replace(weights=weights * own).with_info(value_weights=valued)
