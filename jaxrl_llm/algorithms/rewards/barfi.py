from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline, group_relative
from jaxrl_llm.advantages.multi_reward import component, components
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AverageName, Count, Fraction, NonNegative, OfRun, Ours, Scale
from jaxrl_llm.core.log_ratios import log_ratio, needed, source
from jaxrl_llm.core.parts import Array, Metrics, PolicyOutputs, Trajectories, Transform, chain, objective_part, part
from jaxrl_llm.objectives import average_by_name, token_mean
from jaxrl_llm.utils.errors import InputError


@method(
    paper="arXiv 2310.19007",
    test="test_barfi.py::test_slopes_are_inner_products_of_gradients_by_a_policy_s_own_parameters",
)
@beside("network", "weights that depend on state and action, of a network", "a reward network beside the critic")
@beside(
    "implicit",
    "the hyper-gradient by the inverse Hessian of a policy that has converged; here after one step",
    "products with the Hessian of the policy",
)
@beside("discount", "a discount that is learnt too, with its penalty", "advantages with a discount")
def barfi(
    component: Ours[str | None] = None,
    weights: Ours[str] = "",
    rate: Ours[NonNegative] = 0.1,
    inner_updates: Ours[Count] = 1,
    smoothing: Ours[Fraction] = 0.5,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
    scale: Ours[Scale] = "none",
    average: Ours[AverageName] = "token",
    adam_beta1: OfRun[Fraction | None] = None,
) -> Algorithm:
    """Behavior Alignment Reward Function (BARFI).

    Learn how much of each component r_k of the reward to blend, so that the policy that learns from the blend raises
    the primary reward r_p: the component named, or the run's combined reward where there is no name.

        inner:  theta' = theta + P sum_k phi_k grad J_k(theta)
        outer:  g_k = d J_p(theta') / d phi_k = <grad J_p(theta'), P grad J_k(theta)>,  phi_k <- phi_k + rate g_k / |g|

    J_k is the loss's average of A_k log pi, A_k the component less its group's mean, and P what the optimiser makes of
    a gradient, such as the learning rates of Adam. phi begins as `weights`, a text such as "correct=1,format=0.5" where
    components that it does not name have 1, and keeps its length; a component may get a weight below 0.

    An inner product of gradients is the change of one loss in the direction of the other. After inner_updates updates
    by the blend one update is by r_p alone. Its direction is P grad J_p, and the log-probabilities of the next batch,
    before and after it, have all components' changes in that direction without another gradient:

        c_k = average of A_k (log pi_after - log pi_before) = <grad J_k(theta'), P grad J_p(theta)>

    to first order in the step, with the two gradients from different batches, so that what they share by chance does
    not count. The two are an update apart as in the outer gradient, in the other order, which is the same to that
    order. Adam's step has earlier gradients too, by the momentum b = adam_beta1 (0.9 where None). With c of all
    updates n, and Adam's correction of its start,

        g_k = (s_n - b s_{n-1}) / (1 - b),    s_n = (1 - b^n) c_k,n

    g is averaged over outer updates with decay `smoothing`. It is exact for one gradient step on each batch, without
    kl_coefficient, weight decay, or clipped ratios, and scale "none"; with more, a direction near it.

    The loss is GRPO's (clip_low, clip_high, kl_coefficient, scale, average). The paper is of control: a network blends
    the primary reward with a designer's at each state, and the inner policy converges before an outer step. What is
    here are scalar weights, and outer steps of first order. Its equations were known to us from notes only.
    """
    loss = grpo(clip_low, clip_high, kl_coefficient, average=average)
    momentum = 0.9 if adam_beta1 is None else adam_beta1
    blend = aligned_blend(component, weights, rate, inner_updates, smoothing, momentum, average)
    return Algorithm(chain(blend, group_relative(scale)), loss.objective + told_blend())


MOST = 16  # components
BLEND = "blend/"  # before names of components, in controls and metrics


def stepped(weights: Array, slopes: Array, rate: float | Array) -> Array:
    """weights + rate slopes / |slopes|, at the length of the weights; f32[K]. Slopes of 0 change nothing.

    >>> print([f"{x:.3f}" for x in stepped(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0]), 1.0)])
    ['2.572', '4.287']
    """
    size = jnp.sqrt(jnp.sum(slopes**2))
    moved = weights + rate * jnp.where(size > 0, slopes / jnp.where(size > 0, size, 1.0), 0.0)
    length = jnp.sqrt(jnp.sum(moved**2))
    return jnp.where(length > 0, moved * jnp.sqrt(jnp.sum(weights**2)) / jnp.where(length > 0, length, 1.0), weights)


def changes_by_component(values: Array, batch: Trajectories, average: AverageName = "token") -> Array:
    """c f32[K]: what the last update changed in each component's loss, to first order. values f32[N, K], NaN: none."""
    moved = log_ratio(source(batch, "old"), source(batch, "previous"), batch.action_mask)
    mean = average_by_name(average)

    def change(component: Array) -> Array:
        return mean(above_baseline(component, batch.group)[:, None] * moved, batch)

    return jax.vmap(change, in_axes=1)(values)


@part
def aligned_blend(
    primary: str | None = None,
    weights: str = "",
    rate: NonNegative = 0.1,
    inner_updates: Count = 1,
    smoothing: Fraction = 0.5,
    momentum: Fraction = 0.9,
    average: AverageName = "token",
) -> Transform:
    """Replace the reward by the blend of its components, and in every (inner_updates + 1)-th update by the primary one.

    Learns the blend as `barfi` says, after each update by the primary reward. Writes controls["blend/NAME"]. A batch
    without a scored row changes nothing. Raises InputError for more than 16 components.
    """
    every = inner_updates + 1

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        values, given = components(batch, weights)
        goal = batch.scores if primary is None else component(batch, primary)
        K, n, known = values.shape[1], state["updates"], jnp.any(~jnp.isnan(batch.scores))
        if K > MOST:
            raise InputError(f"the reward has {K} components to blend, but at most {MOST} can be")
        phi, slopes, before = (state[name][:K] for name in ("weights", "slopes", "before"))
        phi = jnp.where(n == 0, given, phi)
        now = (1 - momentum**n) * changes_by_component(values, batch, average)
        found = (now - momentum * before) / (1 - momentum)
        measured = (n > 0) & (n % every == 0) & known
        slopes = jnp.where(measured, smoothing * slopes + (1 - smoothing) * found, slopes)
        phi = jnp.where(measured, stepped(phi, slopes, rate), phi)
        blend = jnp.sum(jnp.where(jnp.isnan(values), 0.0, values) * phi, axis=1)
        reward = jnp.where((n + 1) % every == 0, goal, blend)
        kept = {"weights": phi, "slopes": slopes, "before": jnp.where(known, now, before)}
        after = {name: jnp.zeros(MOST).at[:K].set(x) for name, x in kept.items()}
        names = sorted(batch.rewards or {"reward": batch.scores})
        return {"updates": n + 1, **after}, batch.replace(
            reward=jnp.where(jnp.isnan(batch.scores), jnp.nan, reward)
        ).with_controls(**{BLEND + name: phi[i] for i, name in enumerate(names)})

    def init() -> Any:
        return {"updates": jnp.int32(0), **dict.fromkeys(("weights", "slopes", "before"), jnp.zeros(MOST))}

    return Transform(init, apply, needed("old") | needed("previous"))


@objective_part()
def told_blend(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
    """No loss; metrics "blend/NAME", the weights of components that `aligned_blend` wrote."""
    zero = jnp.zeros(batch.tokens.shape)
    told = {name: x for name, x in (batch.controls or {}).items() if name.startswith(BLEND)}
    return jnp.float32(0), {name: token_mean()(zero + x, batch) for name, x in told.items()}
