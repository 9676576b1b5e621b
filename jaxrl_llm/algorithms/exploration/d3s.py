import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.schedules import ramp
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AtLeastOne, Fraction, NonNegative, OfRun, Ours, Share
from jaxrl_llm.core.parts import Array, Trajectories, chain, step_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.selection.rows import keep_weighted, max_variance_subset, row_noise, share_up, token_noise, top_tokens


@step_part
def most_varied_rows(step: Array, batch: Trajectories, rows_first: float, rows_last: float, steps: float) -> Array:
    """A function `(step, batch) -> bool[N]`: the share of rows of maximal variance, see `d3s`."""
    scored = ~jnp.isnan(batch.scores)
    A = jnp.max(jnp.where(batch.action_mask, batch.need("advantages"), -jnp.inf), axis=1)
    number = share_up(jnp.sum(scored), ramp(step, steps, rows_first, rows_last))
    return max_variance_subset(A, scored, number, row_noise(batch, step))


@step_part
def highest_scored_tokens(
    step: Array, batch: Trajectories, tokens_first: float, tokens_last: float, steps: float
) -> Array:
    """A function `(step, batch) -> bool[N, L]`: the share of tokens of largest |A| H, see `d3s`."""
    score = jnp.abs(batch.need("advantages")) * batch.need("entropy")
    share = ramp(step, steps, tokens_first, tokens_last)
    return top_tokens(score, batch.loss_weights > 0, share, token_noise(batch, step), "batch")


@method(paper="arXiv 2509.22115", test="test_selecting.py::test_d3s_against_a_loop")
def d3s(
    rows_first: Ours[Share] = 0.25,
    rows_last: Ours[Share] = 0.75,
    tokens_first: Ours[Fraction] = 0.2,
    tokens_last: Ours[Fraction] = 0.8,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    total_steps: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Dynamic Dual-Level Down-Sampling (D3S).

    Computes GRPO's advantages, keeps the subset of rows of the whole batch whose advantages have maximal variance, then
    the tokens of these rows with the largest |A| H, H the entropy of the sampling policy:

        S = argmax over |S| = n of Var(A_i, i in S);  the ceil(K * tokens of S) tokens of largest |A_i| H_it

    The share of scored rows n / N is interpolated linearly from rows_first to rows_last over total_steps (100 where
    None), K from tokens_first to tokens_last. The loss is PPO's clip (clip_low, clip_high), averaged over the kept
    tokens; advantages are not normalised again. The sources available to us print no values. Ties are broken at random
    (summaries of the paper: by index).
    """
    steps = 100 if total_steps is None else total_steps
    varied = keep_weighted(most_varied_rows(rows_first, rows_last, steps))
    scored = keep_weighted(highest_scored_tokens(tokens_first, tokens_last, steps))
    return Algorithm(chain(group_relative(), varied, scored), clipped_policy(clip_low, clip_high))
