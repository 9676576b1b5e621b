from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, NonNegative, NonNegativeNumber, Number, Positive, PositiveNumber
from jaxrl_llm.core.arguments.hyperparameters import Code, Ours
from jaxrl_llm.core.parts import Objective, PolicyOutputs, Trajectories, Transform, batch_part, chain, part, row_means
from jaxrl_llm.objectives import average_by_name, clipped_policy, coupled, token_ratio
from jaxrl_llm.rewards.transforms import component_of, rescore
from jaxrl_llm.utils.errors import InputError, unknown


@method(paper="arXiv 2410.02236", year=2025, test="test_reward_composed.py::test_c_morl_is_the_loop")
def c_morl(
    component: Ours[str | None] = None,
    share: Code[float] = 0.9,
    sharpness: Code[Positive] = 20.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    average: Ours[AverageName] = "token",
) -> Algorithm:
    """C-MORL (Multi-Objective RL through Efficient Discovery of Pareto Front).

    The extension of a policy on the front: raise one component of the reward, l = `component`, while no other falls
    below a share of its mean under the policy that the run starts from, by an interior-point method:

        loss = -mean min(rho A_l, clip(rho, 1 - clip_low, 1 + clip_high) A_l) - 1/sharpness mean_{i != l} log c_i
        c_i = G_i(pi) - share G_i(pi_start)

    A_l: the component, standardised in its group. component None: the combined reward, with each component as a
    constraint. G_i: the mean of component i, to first order in the policy, see `barrier`; it must be
    above 0 at the start to constrain anything. Below 0.001 the logarithm goes on along its tangent. average: of the
    first term, see `average_by_name`.

    The released code has c_i = (clip(rho) - share) mean r_i for each step, and stops at 0.001. Then log c_i is log mean
    r_i plus a function of rho alone, whose gradient has the expectation 0 on policy: the rewards would not matter, and
    a violated constraint would have no gradient. So c_i is here derived from the problem that it is to solve.

    A run extends one policy, the one that --model names. The whole method is the command jaxrl front
    (`training.front.grow_front`): policies for fixed weights of the rewards, by `grpo`; the set of those that no other
    dominates; and in rounds, extensions of those with the largest crowding distance by this method, for every
    component. It compares the last policies of runs, one after another, where the paper keeps a buffer of all policies
    on the way and extends in parallel.
    """
    objective = clipped_policy(clip_low, clip_high, average_by_name(average))
    objective += (1 / sharpness) * log_barrier(component, share, clip_low, clip_high)
    credit = chain(starting_means(component), rescore(reward_component(component)), group_relative())
    return Algorithm(credit, objective)


_MOST = 16  # components


def _mean(values: jax.Array) -> jax.Array:
    """The mean of what is not NaN; 0 of nothing."""
    known = ~jnp.isnan(values)
    return jnp.sum(jnp.where(known, values, 0.0)) / jnp.maximum(jnp.sum(known), 1)


@part
def starting_means(objective: str | None = None) -> Transform:
    """Write each component's mean in the first batch, but the objective's, into controls["start/NAME"].

    For `log_barrier`. Components that are not scored in the first batch start at 0. Raises InputError for more than 16.
    """

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        components = constrained(batch, objective)
        if len(components) > _MOST:
            raise InputError(f"the reward has {len(components)} components to constrain, but at most {_MOST} can be")
        now = jnp.zeros(_MOST).at[: len(components)].set(jnp.asarray([_mean(x) for x in components.values()]))
        means = jnp.where(state["seen"], state["means"], now)
        seen = state["seen"] | jnp.any(~jnp.isnan(batch.scores))
        start = {f"start/{name}": means[i] for i, name in enumerate(components)}
        return {"means": jnp.where(seen, means, 0.0), "seen": seen}, batch.with_controls(**start)

    return Transform(lambda: {"means": jnp.zeros(_MOST), "seen": jnp.zeros((), bool)}, apply)


def barrier(slack: jax.Array, floor: Number = 1e-3) -> jax.Array:
    """log slack, continued below `floor` along its tangent, so that its derivative does not vanish there.

    >>> print([f"{x:.3f}" for x in barrier(jnp.array([1.0, 0.001, 0.0]))])
    ['0.000', '-6.908', '-7.908']
    """
    return jnp.log(jnp.maximum(slack, floor)) + jnp.minimum(slack - floor, 0.0) / floor


@part
def log_barrier(
    objective: str | None = None,
    share: NonNegativeNumber = 0.9,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    floor: PositiveNumber = 1e-3,
) -> Objective:
    """-mean_i `barrier`(c_i) over the components i but the objective, c_i = G_i(pi) - share G_i(pi_start).

    G_i(pi) = mean_n [s_n (r_ni - mean r_i)] + mean r_i, with s_n the mean of row n's clipped ratios to the behaviour
    policy: the component's mean under the policy, to first order, with its mean as baseline. G_i(pi_start):
    controls["start/NAME"], or the batch's own mean where there is none; see `starting_means`.
    """
    ratio_of = token_ratio()

    def score(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return row_means(jnp.clip(ratio_of(outputs, batch), 1 - clip_low, 1 + clip_high), batch)

    def shares(s: jax.Array, batch: Trajectories) -> jax.Array:
        acts, terms = jnp.any(batch.loss_weights != 0, axis=1), []
        for name, component in constrained(batch, objective).items():
            r = jnp.where(acts, component, jnp.nan)
            mean, known = _mean(r), ~jnp.isnan(r)
            value = jnp.sum(s * jnp.where(known, r - mean, 0.0)) / jnp.maximum(jnp.sum(known), 1) + mean
            start = (batch.controls or {}).get(f"start/{name}", mean)
            terms.append(barrier(value - share * start, floor))
        total = -sum(terms, jnp.zeros(())) / max(len(terms), 1)
        return jnp.full(s.shape, total / s.shape[0])

    return coupled(score, shares, "barrier")


@batch_part
def reward_component(batch: Trajectories, name: str | None) -> jax.Array:
    """A function `batch -> f32[N]`: one component of the reward, or the combined one for None."""
    return batch.scores if name is None else component_of(batch, name)


def constrained(batch: Trajectories, objective: str | None) -> dict[str, jax.Array]:
    """The components f32[N] other than the objective, by name, in alphabetical order; NaN where not scored."""
    rewards = batch.rewards or {"reward": batch.scores}
    if objective is not None and objective not in rewards:
        raise unknown("reward component", objective, rewards)
    unscored = jnp.isnan(batch.scores)
    values = {name: jnp.where(unscored, jnp.nan, x).astype(jnp.float32) for name, x in sorted(rewards.items())}
    return {name: x for name, x in values.items() if name != objective}
