import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, beside, judge_among_rewards, method, run_settings
from jaxrl_llm.core.annotations import Count, NonNegative, OfRun, Ours, Paper
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, counted, part, step_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.judges.comparisons import PairJudge, pair_judge, sampled_texts
from jaxrl_llm.rollouts.judges.judged import Judged, Judging, judged
from jaxrl_llm.rollouts.programs import Episode, Task, Tools
from jaxrl_llm.selection.rows import ranks_within, row_noise

Verdicts = Callable[[jax.Array, Trajectories], tuple[jax.Array, jax.Array]]  # -> A f32[N], reference bool[N]


def by_scores(step: jax.Array, batch: Trajectories) -> tuple[jax.Array, jax.Array]:
    """Advantages against a random member of each group by scores, and which rows are those members."""
    noise = row_noise(batch, step)
    scored = ~jnp.isnan(batch.scores)
    reference = scored & (ranks_within(batch.group, noise, noise, scored) == 0)
    return against_reference(batch.scores, batch.group, reference), reference


def by_judge(step: jax.Array, batch: Trajectories) -> tuple[jax.Array, jax.Array]:
    """The verdicts of `against_member`, and the rows that it chose, whose score is 0."""
    return jnp.sign(jnp.nan_to_num(batch.scores)), batch.scores == 0


@step_part
def against_random_member(
    step: jax.Array, batch: Trajectories, outlier: float, count_reference: bool, verdicts: Verdicts = by_scores
) -> Trajectories:
    """A function `(step, batch) -> batch` with the advantages and weights of `brpo`."""
    scored = ~jnp.isnan(batch.scores)
    A, reference = verdicts(step, batch)
    total, size = bucket_sums(batch.group, A, scored.astype(jnp.float32))
    keep = jnp.abs(total) <= outlier * size * (1 + 1e-6)
    keep &= ~reference | count_reference
    return batch.replace(
        advantages=jnp.where(batch.action_mask, A[:, None], 0.0), weights=batch.loss_weights * keep[:, None]
    )


@method(paper="arXiv 2506.00103", test="test_selecting.py::test_brpo_against_a_loop")
@beside("training", "the training of a judge that writes principles and critiques", "a run on its verdicts")
@run_settings(*judge_among_rewards())
def brpo(
    outlier: Paper[NonNegative] = 0.6,
    count_reference: Ours[bool] = True,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    judge: OfRun[str | None] = None,
    votes: Ours[Count] = 1,
) -> Algorithm:
    """Bootstrapped Relative Policy Optimization (Writing-Zero).

    A random member of each group is the reference. A judge compares every other member with it, and its verdict is the
    advantage, without normalisation: A_i = +1 if o_i beats the reference, else -1; A_ref = 0. Groups with
    |sum A| / G > outlier are dropped, because their reference was an outlier. The loss is PPO's clip (clip_low,
    clip_high), averaged over tokens; count_reference: whether the reference's tokens count in that average. The sources
    available to us give neither the average nor a KL term.

    judge: who compares, "policy", "reference", a URL or a model (docs/rewards.md). A response wins if all its votes say
    so, `votes` in each of the two orders; one tie or loss is a loss, and one that is missing leaves the response
    without a score. None compares the run's rewards; a tie is not a win.
    """
    loss = clipped_policy(clip_low, clip_high)
    if judge is None:
        return Algorithm(counted(against_random_member(outlier, count_reference)), loss)
    compared = judged(against_member(pair_judge(judge, samples=votes)))
    return Algorithm(counted(against_random_member(outlier, count_reference, by_judge)), loss, rollout=compared)


@part
def against_member(judge: PairJudge) -> Judging:
    """A random member of the group is the reference, with the score 0; others have 1 if all votes say so, else -1.

    NaN where a vote is missing and no other is against the response.
    """

    async def of_group(tools: Tools, task: Task, episodes: Sequence[Episode]) -> Judged:
        reference = int(tools.random("brpo").integers(len(episodes)))
        texts = sampled_texts(tools, episodes)
        others = [place for place in range(len(texts)) if place != reference]
        pairs = [(texts[place], texts[reference]) for place in others]
        found = await judge.compare(tools, problem_text(tools, task), task, pairs)
        scores = [0.0] * len(texts)
        for number, place in enumerate(others):
            first, second = found.each[number], found.each[len(others) + number]
            for_it = [*first, *(None if vote is None else 1 - vote for vote in second)]
            scores[place] = unanimous(for_it, 2 * judge.samples)
        return Judged(scores, found.metrics, example=found.example)

    return Judging(of_group, judge.by.reference)


def unanimous(votes: Sequence[float | None], wanted: int) -> float:
    """1 if as many votes as wanted are 1, -1 if one is below, else NaN.

    >>> unanimous([1.0, 1.0], 2), unanimous([1.0, 0.5], 2), unanimous([1.0, None], 2), unanimous([None, 0.0], 2)
    (1.0, -1.0, nan, -1.0)
    """
    known = [vote for vote in votes if vote is not None]
    if any(vote < 1 for vote in known):
        return -1.0
    return 1.0 if len(known) == wanted else math.nan


def against_reference(score: jax.Array, group: jax.Array, reference: jax.Array) -> jax.Array:
    """f32[N]: +1 where a row's score exceeds that of its group's reference, else -1; 0 for the reference itself.

    reference bool[N] marks one row of each group. Unscored rows (NaN), and groups without a reference, get 0
    (BRPO, 2506.00103).
    """
    opponent, present = bucket_sums(group, jnp.where(reference, score, 0.0), reference.astype(jnp.float32))
    verdict = jnp.where(score > opponent, 1.0, -1.0)
    return jnp.where(reference | jnp.isnan(score) | (present == 0), 0.0, verdict)
