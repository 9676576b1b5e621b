import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Number, Paper, Positive, Scale, Source
from jaxrl_llm.core.log_ratios import log_ratio, needed
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives import Average, averaged
from jaxrl_llm.objectives.averages import Mean, as_average
from jaxrl_llm.objectives.ratios import log_ratio_to


@method(paper="arXiv 2509.24981", test="test_regression_methods.py::test_rover_by_loop_with_other_tokens_between")
def rover(
    ratio_scale: Paper[Positive] = 1.0,
    next_scale: Paper[NonNegative] = 1.0,
    scale: Paper[Scale] = "none",
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Random Policy Valuation (ROVER).

    With binary rewards at the end, acting greedily on the value of the uniform policy is optimal. The log-ratio is
    interpreted as that value and trained by one-step regression with a uniform backup:

        Q_t = rho_T (log pi - log pi_behaviour),  V_t = mean over the vocabulary of the same
        loss = token mean of (Q_t - sg(r_c + next_scale V_next(t)))^2,  r_c = r - mean_g

    rho_T = ratio_scale; V_next(t) is V at the row's next action, 0 after the last. scale "std" divides r_c by the
    group's standard deviation plus epsilon (the mathematics script). No clip, no KL. Groups of equal rewards still
    contribute. On-policy the first gradient is twice that of REINFORCE with the group's mean as baseline.
    """
    return Algorithm(group_relative(scale, epsilon=epsilon), random_policy_regression(ratio_scale, next_scale))


def next_action_value(values: jax.Array, mask: jax.Array) -> jax.Array:
    """values f32[N, L] at the next masked position of the row, f32[N, L]; 0 after the last one and outside the mask."""
    L = values.shape[1]
    position = jnp.where(mask, jnp.arange(L), L)
    after = jnp.pad(jax.lax.cummin(position, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=L)
    found = jnp.take_along_axis(jnp.where(mask, values, 0.0), jnp.minimum(after, L - 1), axis=1)
    return jnp.where(mask & (after < L), found, 0.0)


def bellman_target(reward: jax.Array, next_values: jax.Array, scale: Number = 1.0) -> jax.Array:
    """r + scale V_next under stop-gradient; elementwise."""
    return jax.lax.stop_gradient(reward + scale * next_values)


@part
def random_policy_regression(
    scale: Number = 1.0, next_scale: Number = 1.0, against: Source = "behaviour", average: Average | Mean | None = None
) -> Objective:
    """Mean of (Q - sg(r + next_scale V_next))^2 with Q = scale (logp - logp_old).

    The log-ratio is interpreted as the Q-value of the uniform policy, whose state value V is the mean of Q over the
    vocabulary (ROVER, 2509.24981). V_next is the V of the row's next action, 0 after the last. r: the advantages.
    Needs "mean_logp". Metrics: "q/mean", "q/error".
    """
    mean = as_average(average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        counts = batch.loss_weights != 0
        Q = scale * log_ratio_to(outputs, batch, against)
        now = (outputs.extras or {}).get("mean_logp", jnp.zeros_like(outputs.logp))
        V = scale * log_ratio(now, batch.need("mean_logp"), batch.action_mask)
        reward = jnp.where(counts, batch.need("advantages"), 0.0)
        error = mean((Q - bellman_target(reward, next_action_value(V, batch.action_mask), next_scale)) ** 2, batch)
        return error, {"q/mean": mean(Q, batch), "q/error": error}

    return averaged(objective, mean, needed(against) | {"mean_logp"})
