import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, RunSetting, beside, method, run_needs, run_settings
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Trajectories, batch_part, counted, step_part
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives.preference.pairwise import RowPairs, pairwise
from jaxrl_llm.selection.rows import ranks_within, row_noise

STEP = 2.0**-24  # of the uniform noise, which is kept within one of 0 and 1, so that its normal quantile is finite


@method(paper="arXiv 2504.16438", test="test_client_votes.py::test_popri_by_loop_and_worked_example")
@run_needs(votes="what each client says of a sample")
@beside(
    "privacy",
    "the account of the privacy that all rounds spend, and noise that nobody can draw again",
    "an accountant of the subsampled Gaussian mechanism",
)
@run_settings(
    RunSetting(
        "group_size", lambda given: 2 * given["rank"] + 2,
        lambda config, given: config.group_size > given["rank"] + 1, "a rank between the best and the worst sample",
    )
)  # fmt: skip
def popri(
    rank: Code[Count] = 4, noise: Code[NonNegative] = 19.3, beta: Code[Positive] = 0.01, reset: Ours[Count | None] = 1
) -> Algorithm:
    """Policy Optimization for Private Data (POPri).

    Clients keep their texts, and say of each sample how close it is to them. Of the M samples of a step, v_c f[M] the
    votes of client c, the sum of the cosines of a sample's embedding and those of the client's texts,

        z_c = (v_c - mean v_c) / std v_c,   z_c <- z_c / max(1, |z_c|)     so that a client changes a sum by 1 at most
        score = (sum over the C clients of z_c + noise N(0, 1)) / C

    Of each prompt's samples the one with the largest score is the chosen and that of rank `rank`, from 0, the rejected
    response of `dpo` with its beta: a middle one, not the worst. Where fewer are scored it is the last of them.

    A step is a round: with --prompts-per-step and --minibatches as the paper's 1,800 and 24 pairs, and the reference is
    the policy after every `reset` updates (None: the initial one). A reward function gives the votes as the entry
    "votes", a list with a number for each client. noise 19.3 is the paper's for 72,000 clients, at epsilon 1. The noise
    here is drawn from the sample's tokens and the step, so that runs can be repeated: it hides nothing.
    """
    return Algorithm(
        counted(scored_by_clients(noise), {"votes"}), pairwise(beta=beta, pairs=first_and_ranked(rank)),
        reference=None if reset is None else periodic_reset(reset),
    )  # fmt: skip


def clipped_votes(votes: jax.Array, rows: jax.Array) -> jax.Array:
    """z f32[N, C] of votes f32[N, C], over the rows bool[N]; 0 for other rows, and for a client without a preference.

    >>> v = jnp.array([[0.9, 0.2], [0.5, 0.8], [0.1, 0.5]])
    >>> print(clipped_votes(v, jnp.ones(3, bool))[:, 0].round(3))
    [ 0.707  0.    -0.707]
    """
    count, inside = jnp.maximum(jnp.sum(rows), 1), rows[:, None]
    centred = jnp.where(inside, votes - jnp.sum(jnp.where(inside, votes, 0.0), axis=0) / count, 0.0)
    std = jnp.sqrt(jnp.sum(centred**2, axis=0) / count)
    size = jnp.max(jnp.where(inside, jnp.abs(votes), 0.0), axis=0)
    z = jnp.where(std > 1e-6 * size, centred / jnp.where(std > 0, std, 1.0), 0.0)
    return z / jnp.maximum(jnp.linalg.norm(z, axis=0), 1.0)


@step_part
def scored_by_clients(step: jax.Array, batch: Trajectories, noise: NonNegative = 19.3) -> Trajectories:
    """A function `(step, batch) -> batch`: the reward is the noisy mean of `clipped_votes` of info["votes"] f32[N, C].

    Without votes the reward is the vote of one client. Rows without a vote have no score.
    """
    votes = (batch.info or {}).get("votes", batch.scores[:, None])
    rows = ~jnp.isnan(batch.scores) & ~jnp.any(jnp.isnan(votes), axis=1)
    drawn = jax.scipy.special.ndtri(jnp.clip(row_noise(batch, step), STEP, 1 - STEP))
    score = (jnp.sum(clipped_votes(votes, rows), axis=1) + noise * drawn) / votes.shape[1]
    return batch.replace(reward=jnp.where(rows, score, jnp.nan))


@batch_part
def first_and_ranked(batch: Trajectories, rank: Count = 4) -> RowPairs:
    """Of each group the row with the highest reward, and that of rank `rank` or the last that is scored; P = N."""
    reward, rows = batch.scores, jnp.arange(batch.tokens.shape[0])
    known = ~jnp.isnan(reward)
    place = ranks_within(batch.group, jnp.nan_to_num(reward), row_noise(batch, 0), known)
    mates = (batch.group[:, None] == batch.group) & known[:, None] & known
    wanted = jnp.minimum(rank, jnp.sum(mates, axis=1) - 1)
    other = jnp.argmax(mates & (place == wanted[:, None]), axis=1)
    return RowPairs(rows, other, known & (place == 0) & (wanted > 0) & (reward > reward[other]))
