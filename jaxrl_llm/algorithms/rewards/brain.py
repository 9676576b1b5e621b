import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Number, Ours, PositiveNumber
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Objective, Trajectories, chain, part
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import bucket_log_sum_exp, log_ratio_sum, scored_rows, sequence_log_ratios


@method(paper="arXiv 2402.02479", test="test_reward_composed.py::test_brain_worked_example_and_loop")
def brain(reward_temperature: Ours[float] = 1.0, scale: Ours[float] = 1.0) -> Algorithm:
    """Bayesian Reward-conditioned Amortized Inference (BRAIn).

    The policy learns the posterior of the reference given a good reward, p(y|x) exp(r/gamma), from the samples y_i of a
    prompt, drawn from q, the policy that sampled them:

        a = softmax_i(log p(y_i) + r_i/gamma - log q(y_i)),   b = softmax_i(scale (log pi(y_i) - log q(y_i)))
        loss = mean over prompts of -sum_i a_i log b_i

    with sums over the tokens of a sequence. The gradient is sum_i (b_i - a_i) grad log pi(y_i) (times scale): weighted
    samples minus a self-normalised baseline. gamma = reward_temperature; p the reference. Long sequences make the
    softmax peaky; a scale below 1 tempers the policy's. With two samples, q = p and a = (1, 0), the loss is DPO's with
    beta = scale. A prompt with one sample teaches nothing.
    """
    return Algorithm(chain(), tilted_targets(reward_temperature, scale))


def target_shares(score: Array, target: Array, known: Array, group: Array, scale: Number = 1.0) -> Array:
    """Each row's share f32[N] of the mean over prompts of -sum_i a_i log b_i.

    a = softmax(target) and b = softmax(scale score) over the known rows bool[N] of a prompt. The derivative with
    respect to the scores is scale (b - a) / prompts.

    >>> logp, log_p, r = jnp.array([-10.2, -10.8, -9.6]), jnp.array([-10.0, -11, -9.5]), jnp.array([1.0, 2, -1])
    >>> shares = target_shares(logp - log_p, r, r < 9, jnp.zeros(3, jnp.int32))
    >>> print(f"{jnp.sum(shares):.6f}")
    0.994433
    """
    a = jnp.where(known, jnp.exp(jnp.where(known, target - bucket_log_sum_exp(group, target, known), 0.0)), 0.0)
    log_b = scale * score - bucket_log_sum_exp(group, scale * score, known)
    (size,) = bucket_sums(group, known.astype(jnp.float32))
    return jnp.where(known, -a * log_b, 0.0) / jnp.maximum(jnp.sum(known / jnp.maximum(size, 1)), 1.0)


@part
def tilted_targets(temperature: PositiveNumber = 1.0, scale: PositiveNumber = 1.0) -> Objective:
    """Cross-entropy of the policy's weights b with those a of the reward-tilted reference, over a prompt's samples.

    a = softmax(log p(y)/q(y) + r / temperature), b = softmax(scale log pi(y)/q(y)), with p the reference and q the
    behaviour policy, probabilities of whole sequences; see `target_shares`.
    """

    def shares(s: Array, batch: Trajectories) -> Array:
        known = scored_rows(batch)
        target = sequence_log_ratios(batch.need("reference_logp"), batch) + jnp.nan_to_num(batch.scores) / temperature
        return target_shares(s, target, known, batch.group, scale)

    return coupled(log_ratio_sum, shares, "listwise", frozenset({"reference_logp"}))
