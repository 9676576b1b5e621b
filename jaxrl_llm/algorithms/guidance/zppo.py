import jax.numpy as jnp

from jaxrl_llm.advantages.group import TOLERANCE
from jaxrl_llm.advantages.normalisation import moments
from jaxrl_llm.advantages.trackers import DEFAULT_PROMPTS
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AboveOne, Fraction, NonNegative, Ours, Paper
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, State, Trajectories, Transform, chain, part, stateless_part
from jaxrl_llm.core.trajectory import without_rows
from jaxrl_llm.curriculum.compose import hard_buffer
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.guidance.candidates import with_candidates


@method(paper="arXiv 2606.18216", test="test_prefixed.py::test_zppo_worked_example_and_loop")
def zppo(
    column: Ours[str] = "teacher",
    threshold: Paper[float] = 0.5,
    teachers: Paper[int] = 4,
    words: Paper[int] = 512,
    rewriter: Ours[str | None] = None,
    replay_share: Paper[Fraction] = 0.25,
    second_share: Paper[float] = 0.25,
    most_stored: Paper[int] = 10_000,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    dual_clip: Paper[AboveOne | None] = 10.0,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Zone of Proximal Policy Optimization (ZPPO).

    A frozen teacher answers in the prompts of hard problems, and every trained token is the policy's. A problem x whose
    samples have a mean reward rbar_x < threshold gets groups of further prompts:

        BCQ    a right response of the teacher and a wrong sample, shuffled: one is right, one is wrong
        NCQ    all wrong samples, and the distinct answers that they state

    BCQ needs a right one among `teachers` responses. Of these groups a step keeps second_share times the number of new
    problems, in ascending order of rbar_x, BCQ before NCQ. With S the groups whose rewards differ,

        A'_i = r_i - mean_g,    A_i = (A'_i - mu_S)/(sigma_S + epsilon) in S, else 0

    with moments over all rows of S, and the loss is a token mean of the clipped surrogate (clip_low, clip_high,
    dual_clip), without KL. Problems with rbar_x < threshold enter a buffer of most_stored problems, first in, first
    out, and leave it when rbar_x >= threshold; replay_share times as many problems as new ones are drawn from it.

    Rollout: the row's `column` has the teacher's responses, a text or a list of texts: the teacher is frozen, so it
    may answer before the run. Candidates are rewritten in at most `words` tokens, by `rewriter` (FILE.py:FUNCTION of
    problem and solution, a call of the teacher, as in the paper) or, with None, by the policy. Groups beyond the bound
    are sampled and left out, because which are kept is known only when all problems are answered.
    """
    return Algorithm(
        chain(at_most_parts(second_share, replay_share, threshold, most_stored), informative_relative(epsilon)),
        clipped_policy(clip_low, clip_high, dual=dual_clip),
        curriculum=hard_buffer(replay_share, threshold, most_stored),
        rollout=with_candidates(column, threshold, teachers, words, rewriter),
    )


@stateless_part()
def informative_relative(batch: Trajectories, epsilon: NonNegative = 1e-6) -> Trajectories:
    """Advantages (r - mean_g - mu)/(sigma + epsilon) in groups whose rewards differ, 0 in the others.

    mu (0 but for rounding) and sigma, of the population, are moments of r - mean_g over the rows of these groups. Rows
    without a score have 0.
    """
    _, mean, deviation = bucket_moments(batch.group, batch.scores, 0)
    informative = ~jnp.isnan(batch.scores) & (deviation > TOLERANCE)
    centred = jnp.where(informative, batch.scores - mean, 0.0)
    mu, variance = moments(centred, informative, 0)
    advantage = jnp.where(informative, (centred - mu) / (jnp.sqrt(variance) + epsilon), 0.0)
    return batch.replace(advantages=advantage[:, None] * batch.action_mask)


def superfluous_parts(batch: Trajectories, share: float, replayed: Array | float = 0.0) -> Array:
    """bool[N]: rows of second prompts beyond `share` times the number of new plain groups, rounded down.

    replayed: how many of the plain groups are no new problems. Groups (info["part"] above 0) are kept in ascending
    order of info["solved"], then of their part, then of their number. Without info["part"] no row is of a second
    prompt.
    """
    info, N = batch.info or {}, batch.group.shape[0]
    if "part" not in info or "solved" not in info:
        return jnp.zeros(N, bool)
    real = jnp.any(batch.action_mask, axis=1)
    second = real & (info["part"] > 0)
    # One row for each group: its first with an action.
    place = jnp.arange(N)
    earlier = (batch.group[:, None] == batch.group[None]) & real[None] & (place[None] < place[:, None])
    first = real & ~jnp.any(earlier, axis=1)
    limit = jnp.floor(share * (jnp.sum(first & ~second) - replayed) + 1e-6)
    order = jnp.lexsort((batch.group, info["part"], info["solved"], ~(first & second)))
    rank = jnp.zeros(N, jnp.int32).at[order].set(jnp.arange(N, dtype=jnp.int32))
    beyond = first & second & (rank >= limit)
    return second & jnp.any((batch.group[:, None] == batch.group[None]) & beyond[None], axis=1)


@part
def at_most_parts(
    share: NonNegative, replay_share: NonNegative = 0.0, threshold: float = 0.5, most: int = 10_000
) -> Transform:
    """Leave out the rows that are `superfluous_parts`, with the replayed problems of `hard_buffer`.

    These are as many as that draws, replay_share times the new ones, or all that its buffer has: the problems whose
    mean reward, info["solved"], was last below the threshold, at most `most`. The state says which problems are.
    """

    def apply(failed: Array, batch: Trajectories) -> tuple[State, Trajectories]:
        info, real = batch.info or {}, jnp.any(batch.action_mask, axis=1)
        if "part" not in info or "solved" not in info:
            return failed, batch
        index = jnp.mod(batch.prompt_id, failed.shape[0])
        asked = real & (info["part"] <= 0)
        places = jnp.where(asked, index, failed.shape[0])
        problems = jnp.sum(jnp.zeros(failed.shape, bool).at[places].set(True, mode="drop"))
        stored = jnp.minimum(jnp.sum(failed), most)
        drawn = jnp.minimum(jnp.floor(problems * replay_share / (1 + replay_share) + 0.5), stored)
        out = superfluous_parts(batch, share, drawn)
        known = jnp.where(asked & ~jnp.isnan(info["solved"]), index, failed.shape[0])
        return failed.at[known].set(info["solved"] < threshold, mode="drop"), without_rows(batch, out)

    return Transform(lambda facts: jnp.zeros(facts.prompts or DEFAULT_PROMPTS, bool), apply)
