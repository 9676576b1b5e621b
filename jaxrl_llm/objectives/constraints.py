"""A log barrier that keeps components of the reward above a share of what they were at the start."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, row_means
from jaxrl_llm.core.transform import Objective, Transform
from jaxrl_llm.objectives.preference.pairs import coupled
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.utils.errors import InputError, unknown

Number = float | jax.Array
_MOST = 16  # components


def barrier(slack: jax.Array, floor: Number = 1e-3) -> jax.Array:
    """log slack, continued below `floor` along its tangent, so that its derivative does not vanish there.

    >>> print([f"{x:.3f}" for x in barrier(jnp.array([1.0, 0.001, 0.0]))])
    ['0.000', '-6.908', '-7.908']
    """
    return jnp.log(jnp.maximum(slack, floor)) + jnp.minimum(slack - floor, 0.0) / floor


def constrained(batch: Trajectories, objective: str | None) -> dict[str, jax.Array]:
    """The components f32[N] other than the objective, by name, in alphabetical order; NaN where not scored."""
    rewards = batch.rewards or {"reward": batch.scores}
    if objective is not None and objective not in rewards:
        raise unknown("reward component", objective, rewards)
    unscored = jnp.isnan(batch.scores)
    return {
        name: jnp.where(unscored, jnp.nan, x).astype(jnp.float32)
        for name, x in sorted(rewards.items())
        if name != objective
    }


def _mean(values: jax.Array) -> jax.Array:
    """The mean of what is not NaN; 0 of nothing."""
    known = ~jnp.isnan(values)
    return jnp.sum(jnp.where(known, values, 0.0)) / jnp.maximum(jnp.sum(known), 1)


@part
def starting_means(objective: str | None = None) -> Transform:
    """Write each component's mean in the first batch, but the objective's, into controls["start/NAME"].

    For `log_barrier`. Components that are not scored in the first batch start at 0. Raises InputError for more than 16.
    """

    def init() -> Any:
        return {"means": jnp.zeros(_MOST), "seen": jnp.zeros((), bool)}

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        components = constrained(batch, objective)
        if len(components) > _MOST:
            raise InputError(f"the reward has {len(components)} components to constrain, but at most {_MOST} can be")
        now = jnp.zeros(_MOST).at[: len(components)].set(jnp.asarray([_mean(x) for x in components.values()]))
        means = jnp.where(state["seen"], state["means"], now)
        seen = state["seen"] | jnp.any(~jnp.isnan(batch.scores))
        start = {f"start/{name}": means[i] for i, name in enumerate(components)}
        return {"means": jnp.where(seen, means, 0.0), "seen": seen}, batch.with_controls(**start)

    return Transform(init, apply)


@part
def log_barrier(
    objective: str | None = None,
    share: Number = 0.9,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    floor: Number = 1e-3,
) -> Objective:
    """-mean_i `barrier`(c_i) over the components i but the objective, c_i = G_i(pi) - share G_i(pi_start).

    G_i(pi) = mean_n [s_n (r_ni - mean r_i)] + mean r_i, with s_n the mean of row n's clipped ratios to the behaviour
    policy: the component's mean under the policy, to first order, with its mean as baseline. G_i(pi_start):
    controls["start/NAME"], or the batch's own mean where there is none; see `starting_means`.
    """
    check_number("share", share, least=0)
    check_number("floor", floor, above=0)
    ratio_of = token_ratio()

    def score(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        rho = ratio_of(outputs, batch)
        return row_means(jnp.clip(rho, 1 - clip_low, 1 + clip_high), batch)

    def shares(s: jax.Array, batch: Trajectories) -> jax.Array:
        acts, terms = jnp.any(batch.loss_weights != 0, axis=1), []
        for name, component in constrained(batch, objective).items():
            r = jnp.where(acts, component, jnp.nan)
            mean, known = _mean(r), ~jnp.isnan(r)
            above = jnp.where(known, r - mean, 0.0)
            value = jnp.sum(s * above) / jnp.maximum(jnp.sum(known), 1) + mean
            start = (batch.controls or {}).get(f"start/{name}", mean)
            terms.append(barrier(value - share * start, floor))
        total = -sum(terms, jnp.zeros(())) / max(len(terms), 1)
        return jnp.full(s.shape, total / s.shape[0])

    return coupled(score, shares, "barrier")
