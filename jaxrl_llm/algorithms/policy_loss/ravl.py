import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import whiten_advantages
from jaxrl_llm.advantages.returns import (
    at_last_action,
    explained_variance,
    gae,
    head_mean,
    last_actions,
    needed_values,
    scored_actions,
    terminal_rewards,
)
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AtLeastTwo, Code, Fraction, FractionNumber, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Array, PolicyOutputs, Trajectories, part, totals_of
from jaxrl_llm.core.reference import exponential_average
from jaxrl_llm.core.transform import Objective, Transform, chain, stateless
from jaxrl_llm.objectives import clipped_policy, coupled, value_loss
from jaxrl_llm.objectives.values import needed_output


@method(paper="arXiv 2402.12527", test="test_ravl.py::test_it_is_the_loop")
@beside(
    "control",
    "SAC on rollouts of a learned model of the world, from offline data",
    "a model of the world, and actions that are vectors",
)
def ravl(
    heads: Code[AtLeastTwo] = 10,
    diversity: Code[NonNegative] = 1.0,
    rate: Ours[Fraction] = 0.05,
    gamma: Ours[Fraction] = 1.0,
    lam: Ours[Fraction] = 0.95,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = None,
    value_coefficient: Ours[NonNegative] = 1.0,
    whiten: Ours[bool] = True,
) -> Algorithm:
    """Reach-Aware Value Learning (RAVL).

    Where rollouts are cut at a length, the states at the cut are bootstrapped from but never trained: the edge of
    reach, where a critic may say anything, and its errors go back into all values before. The remedy is an ensemble of
    N = `heads` values V_i, which agree where they are trained and differ where they are not, and its minimum at the
    edge. For a response of n tokens, with r the rewards (the score on the last) and V the mean of the ensemble,

        delta_t = r_t + gamma V_{t+1} - V_t,    V_{n+1} = min_i Vbar_i(s_n) where the length limit cut it, else 0
        A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t
        L_critic = value_coefficient (1/2 mean over tokens and heads of (V_i - R)^2 + diversity L_div)
        L_div = mean over i != j of cos(D_i, D_j)

    Vbar is a target critic: target <- (1 - rate) target + rate critic after each update. The state s_n before the last
    token of a response that was cut stands for that after it, and no head is trained there. Heads start at random.

    The paper's diversity term has g_i = d Q_i / d a, normalised, and sum_{i != j} g_i . g_j / (N - 1). A token is no
    vector, and its effect is on the state h that a head reads: for heads V_i = w_i . h + b_i the gradient is w_i, the
    term N times the mean of cos(w_i, w_j), and that of the sum over heads is N times what is above. A loss here sees
    values and no weights. D_i is what head i says that the token before the cut changed, V_i(s_n) - V_i(s_{n-1}) of
    each such response of the batch: w_i . (h_n - h_{n-1}), so that cos(D_i, D_j) is that of the weights in the metric
    of the steps over the edge, sum (h_n - h_{n-1})(h_n - h_{n-1})'. It is cos(w_i, w_j) where these have no preferred
    direction, and asks for nothing where heads are trained, as the correlation of all values would. With fewer than two
    responses that were cut it has no gradient.

    The policy's loss is that of `ppo` (clip_low, clip_high, whiten) without a penalty; value_clip as there. The paper
    is of control: its actor maximises min_i Q_i of a replayed state's new action, and every target has the minimum, as
    each of its targets is one step from a state. Here that is where a limit cut the response.
    """
    critic = value_loss(value_clip, heads=heads) + diversity * edge_diversity(heads)
    credit = edge_advantages(heads, gamma, lam)
    return Algorithm(
        chain(credit, whiten_advantages()) if whiten else credit,
        clipped_policy(clip_low, clip_high) + value_coefficient * critic,
        target=exponential_average(1 - rate),
    )


@part
def edge_advantages(heads: AtLeastTwo = 10, gamma: FractionNumber = 1.0, lam: FractionNumber = 0.95) -> Transform:
    """Generalised advantages with the mean of the ensemble, bootstrapped from its minimum where a limit cut a row.

    Both returns and advantages are 0 on rows without a score. info["value_weights"] f32[N, L], the weights of
    `value_loss`, are 0 on the last action of rows that were cut; their sum is the number of rows with an action. Writes
    the control "explained_variance". The minimum is of the target critic.
    """

    def apply(batch: Trajectories) -> Trajectories:
        V, lowest = head_mean(batch.need("values")), jnp.min(batch.need("target_values"), axis=-1)
        mask = scored_actions(batch)
        edge = jnp.where(batch.truncated, at_last_action(lowest, batch), 0.0)
        A, R = gae(terminal_rewards(batch), V, mask, gamma, lam, bootstrap=edge)
        trained = jnp.where(last_actions(batch) & batch.truncated[:, None], 0.0, jnp.where(mask, batch.loss_weights, 0))
        total, rows = jnp.sum(trained), totals_of(batch.replace(totals=None))["rows"]
        weights = jnp.where(total > 0, trained * rows / jnp.where(total > 0, total, 1.0), 0.0)
        return (
            batch.replace(advantages=A, returns=R)
            .with_info(value_weights=weights)
            .with_controls(explained_variance=explained_variance(V, R, trained > 0))
        )

    return stateless(apply, needed_values(heads) | {f"target_values:{heads}"})


def steps_over_the_edge(values: Array, batch: Trajectories) -> Array:
    """f32[N, H]: V_i(s_n) - V_i(s_{n-1}), values f32[N, L, H], of rows that were cut and have a score; 0 of others."""
    mask = scored_actions(batch) & (batch.loss_weights != 0) & batch.truncated[:, None] & (batch.lengths > 1)[:, None]
    back = batch.lengths[:, None] - batch.action_index  # 1 at the last action
    sign = jnp.where(mask, jnp.where(back == 1, 1.0, jnp.where(back == 2, -1.0, 0.0)), 0.0)
    return jnp.sum(jnp.where(sign[..., None] != 0, values, 0.0) * sign[..., None], axis=1)


def mean_cosine(D: Array, epsilon: float = 1e-12) -> Array:
    """f32[]: mean over i != j of cos(D_i, D_j), columns of f32[M, H]; 0 of columns that are 0.

    >>> round(float(mean_cosine(jnp.array([[1.0, 1.0], [0.0, 1.0]]))), 4)
    0.7071
    """
    H = D.shape[1]
    unit = D * jax.lax.rsqrt(jnp.sum(D**2, axis=0) + epsilon)
    return (jnp.sum(jnp.sum(unit, axis=1) ** 2) - jnp.sum(unit**2)) / (H * (H - 1))


@part
def edge_diversity(heads: AtLeastTwo = 10) -> Objective:
    """`mean_cosine` of `steps_over_the_edge`, of all rows of the batch; metric "value/cosine"."""

    def score(outputs: PolicyOutputs, batch: Trajectories) -> Array:
        return steps_over_the_edge(needed_output(outputs, "values", "the diversity"), batch)

    return coupled(
        score, lambda D, batch: jnp.full(D.shape[0], mean_cosine(D) / D.shape[0]), "value/cosine", needed_values(heads)
    )
