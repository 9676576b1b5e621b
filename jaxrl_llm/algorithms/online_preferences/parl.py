import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import NonNegative, Ours, Positive
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.log_ratios import log_ratio_sums, source
from jaxrl_llm.core.parts import Array, Objective, PolicyOutputs, Trajectories, part, stateless_part
from jaxrl_llm.objectives import clipped_policy, coupled
from jaxrl_llm.objectives.preference.pairs import bucket_log_sum_exp
from jaxrl_llm.objectives.values import COPY, needed_output


@method(
    paper="arXiv 2308.02585",
    test="test_parl.py::test_the_reward_model_s_gradient_is_that_of_the_implicit_function_theorem",
)
@beside(
    "hessian",
    "the policy's dependence through the Hessian by its own parameters; here it is that of a policy which can "
    "be any distribution",
    "products with the inverse Hessian of the policy",
)
def parl(
    beta: Ours[Positive] = 0.1,
    temperature: Ours[Positive] = 1.0,
    reward_coefficient: Ours[NonNegative] = 1.0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """Policy Alignment in Reinforcement Learning as a bilevel problem (PARL).

    A reward model r_nu learns beside the policy from preferences between the policy's own samples, and the policy
    learns from r_nu alone. A change of r_nu also changes which samples will be compared, which the usual loop leaves
    out of the reward's gradient:

        upper:  min_nu G(nu) = E_{y, y' ~ pi*_nu} l(y, y'),   l = -log sigmoid(r_nu(y) - r_nu(y')) of the better y
        lower:  pi*_nu = argmax_pi E_pi r_nu - temperature KL(pi || pi_old)
        dG/dnu = E[dl/dnu] + E[l (d log pi*_nu(y) / dnu + d log pi*_nu(y') / dnu)]

    The lower problem is a step from the policy pi_old of this update. Over all distributions its answer is known,
    pi*_nu = pi_old exp(r_nu / temperature) / Z, and with it the implicit function theorem's
    d log pi*_nu(y) = (d r_nu(y) - E_{pi*} d r_nu) / temperature, without a Hessian. Samples y_i of pi_old stand for
    pi*_nu by their weights, and the gradient goes through these:

        w_i = n exp(r_i / temperature) / sum of exp(r_j / temperature) over the n samples of the group
        L_nu = reward_coefficient / P sum over the P pairs of w_i w_j l(y_i, y_j)
        A_i = r_i - mean of r over the group,  in PPO's clip (clip_low, clip_high) with kl_coefficient k3

    With a large temperature w = 1, the usual loop of reward model and policy. Pairs are samples of a prompt of which
    one has the higher reward of the run, which takes the place of the person who judges.

    r_nu(y) = beta sum_t log pi_nu(y_t) / pi_reference(y_t), as in `dpo`, is a sum of rewards of states and actions like
    the paper's. pi_nu is a copy of the policy that learns beside it (the memory of a second model that is trained;
    --optimizer.critic-learning-rate is its learning rate) and starts as the reference, so that r_nu is 0 at first.

    We know the paper's equations from notes alone. Its policy has parameters theta, which are at an optimum, and
    dtheta*/dnu has the inverse of their Hessian; steps of `temperature` from the current policy, over all
    distributions, are ours.
    """
    policy = clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(implicit_advantages(beta), policy + reward_coefficient * responsive_preference(beta, temperature))


NEEDS = frozenset({"implicit_logp", "reference_logp"})


@stateless_part(NEEDS)
def implicit_advantages(batch: Trajectories, beta: Positive = 0.1) -> Trajectories:
    """A = r less its group's mean, r the reward model before the update; 0 on rows without a score."""
    r = beta * log_ratio_sums(batch.need("implicit_logp"), source(batch, "reference"), batch)
    A = above_baseline(jnp.where(jnp.isnan(batch.scores), jnp.nan, r), batch.group)
    return batch.replace(advantages=jnp.where(batch.action_mask, A[:, None], 0.0))


def responsive_shares(r: Array, score: Array, group: Array, temperature: float = 1.0) -> Array:
    """Each row's share f32[N] of the mean over pairs of w_i w_j softplus(r_j - r_i), in those where it is the better.

    r f32[N]: the reward model's. score f32[N]: the preferences', NaN: none. w: see `parl`.

    >>> r, score, one = jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]), jnp.zeros(2, jnp.int32)
    >>> [f"{responsive_shares(r, score, one, temperature)[0]:.4f}" for temperature in (1e9, 1.0)]
    ['0.3133', '0.2464']
    """
    known = ~jnp.isnan(score)
    tilted = r / temperature
    (size,) = bucket_sums(group, known.astype(r.dtype))
    w = size * jnp.exp(jnp.where(known, tilted - bucket_log_sum_exp(group, tilted, known), -jnp.inf))
    better = (group[:, None] == group) & (score[:, None] > score)
    losses = jnp.where(better, w[:, None] * w * jax.nn.softplus(r - r[:, None]), 0.0)
    return jnp.sum(losses, axis=1) / jnp.maximum(jnp.sum(better), 1)


@part
def responsive_preference(beta: Positive = 0.1, temperature: Positive = 1.0) -> Objective:
    """`responsive_shares` of the reward model, which alone has a gradient. Metric: "reward_model"."""

    def rewards(outputs: PolicyOutputs, batch: Trajectories) -> Array:
        logp = needed_output(outputs, "implicit_logp", "the loss of an implicit reward model", COPY)
        return beta * log_ratio_sums(logp, source(batch, "reference"), batch)

    def shares(r: Array, batch: Trajectories) -> Array:
        return responsive_shares(r, batch.scores, batch.group, temperature)

    return coupled(rewards, shares, "reward_model", NEEDS)
