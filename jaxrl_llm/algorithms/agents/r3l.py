from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.episodes import EPISODES, one_row_each
from jaxrl_llm.advantages.turns import needs_turns
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.algorithm import turn_in_episode
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.buckets import bucket_best, bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, chain, stateless_part
from jaxrl_llm.objectives import kl, log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.agents.metrics import COUNTS
from jaxrl_llm.rollouts.agents.path import AgentSettings
from jaxrl_llm.rollouts.agents.program import agents_part, ends_of
from jaxrl_llm.rollouts.agents.restarts import (
    PIVOT,
    Attempt,
    Reflection,
    attempt_transcript,
    attempted,
    reflection_in,
    retried_from,
    trained_rows,
)
from jaxrl_llm.rollouts.auxiliary_prompts import with_own_reward
from jaxrl_llm.rollouts.programs import Episode, Task, Tools
from jaxrl_llm.utils.errors import is_off


@method(paper="arXiv 2601.03715", test="test_agent_retries.py::test_r3l_worked_example_and_loop")
@run_needs(
    episode="rows of one episode",
    first_turn="the order of these rows",
    turns="episodes of several turns, which are tried again from one of them",
)
@beside("queue", "the queue of earlier experiences", "a store of retries")
@beside("steps", "the variant that retries step by step", "retries of single steps")
def r3l(
    alpha: Paper[NonNegative] = 3.0,
    full_reward: Code[float] = 1.0,
    baseline: Code[Literal["mean", "log_mean_exp"]] = "mean",
    temperature: Code[Positive] = 1.0,
    kl_coefficient: Ours[NonNegative] = 0.0,
    reflection_tokens: Code[int] = 4096,
) -> Algorithm:
    """Reflect-then-Retry Reinforcement Learning (R3L).

    Of a group's episodes with an environment half are ordinary. The policy reflects on each of these, in at most
    reflection_tokens tokens, names the step p that should have been another one, and makes a suggestion; then the
    episode is replayed up to p, in a fresh environment, and goes on with the suggestion in its context
    (`reflecting`). It is trained on without the suggestion. Both the episode and its retry are
    trained on from p on alone, where they differ. With b the mean of the group's rewards (0 in a group of one; baseline
    "log_mean_exp": temperature log mean exp(r / temperature))

        A_i = 1 if r_i >= full_reward,    alpha (r_i - b) if r_i >= b,    r_i - b otherwise
        loss = -1/(1 + temperature) mean_t A log pi + kl_coefficient mean_t k2

    over the tokens that are trained on: no ratio and no clip. A retry that reaches full_reward, with more reward or
    fewer replies than before, adds the reflection and the retry with its suggestion; so does a reflection that rightly
    finds nothing to improve. Each is a group of its own with the reward full_reward, which imitates it. A reflection
    that cannot be read, or finds nothing, costs the group no sample: an episode of its own takes the retry's place.

    The words of reflection and suggestion are ours, the latter before the observation of step p. Not included: the
    variant in which each turn is a sample of its own, and the released code's queue of experiences of earlier steps.
    """
    objective = policy_gradient(token_ratio(), log_probability(), token_mean()) / (1 + temperature)
    if not is_off(kl_coefficient):
        objective += kl_coefficient * kl(estimator="k2")
    return Algorithm(
        chain(needs_turns(), amplified(alpha, full_reward, baseline, temperature), from_pivot()),
        objective,
        rollout=reflecting(full_reward, reflection_tokens),
    )


@stateless_part({"pivot", *EPISODES})
def from_pivot(batch: Trajectories) -> Trajectories:
    """Train on the turns of an episode from info["pivot"] f32[N] on alone: the weights of those before become 0."""
    pivot = (batch.info or {}).get("pivot")
    if pivot is None:
        return batch
    before = turn_in_episode(batch) < jnp.nan_to_num(pivot)[:, None]
    return batch.replace(weights=jnp.where(before, 0.0, batch.loss_weights))


def amplified_advantages(
    scores: Array,
    group: Array,
    counted: Array,
    alpha: float | Array = 3.0,
    full_reward: float | Array = 1.0,
    temperature: float | Array | None = None,
) -> Array:
    """Advantages in which good samples weigh more, f32[N] (R3L, arXiv 2601.03715).

        A_i = 1 if r_i >= full_reward,    alpha (r_i - b) if r_i >= b,    r_i - b otherwise

    b is the mean of the group's scores that are counted, bool[N], or with a temperature tau log mean exp(r / tau); 0 in
    a group of one. NaN means not scored, and gets 0.

    >>> amplified_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4, int), jnp.ones(4, bool)).tolist()
    [1.0, -0.25, -0.25, -0.25]
    """
    known = jnp.where(counted, scores, jnp.nan)
    count, b, _ = bucket_moments(group, known)
    if temperature is not None:
        top = bucket_best(group, known)
        (total,) = bucket_sums(group, jnp.where(jnp.isnan(known), 0.0, jnp.exp((known - top) / temperature)))
        b = top + temperature * jnp.log(jnp.maximum(total, 1e-30) / jnp.maximum(count, 1))
    above = scores - jnp.where(count > 1, b, 0.0)
    A = jnp.where(scores >= full_reward, 1.0, jnp.where(above >= 0, alpha * above, above))
    return jnp.where(jnp.isnan(scores), 0.0, A)


@stateless_part(EPISODES)
def amplified(
    batch: Trajectories,
    alpha: NonNegative = 3.0,
    full_reward: float = 1.0,
    baseline: Literal["mean", "log_mean_exp"] = "mean",
    temperature: Positive = 1.0,
) -> Trajectories:
    """Write `amplified_advantages` on all actions of a row. An episode of several rows counts once in its group.

    temperature: of the baseline "log_mean_exp". InputError for another baseline.
    """
    tau = temperature if baseline == "log_mean_exp" else None
    A = amplified_advantages(batch.scores, batch.group, one_row_each(batch), alpha, full_reward, tau)
    return batch.replace(advantages=A[:, None] * batch.action_mask)


REFLECT = """Below is an attempt at a task, step by step. Judge it. If it could have gone better, find the first step \
that should have been another one, and say in a few sentences what to do differently from there on.

{attempt}

Answer with a JSON object and nothing else:
{{"outcome": "perfect", "improvable" or "failed", "step": NUMBER OF THAT STEP, "suggestion": "WHAT TO DO INSTEAD"}}"""
GUIDANCE = "An earlier attempt did not go well from here on. Advice for this one: {suggestion}"


@agents_part(
    "the episodes of agents are retried from a turn", "retried", {PIVOT},
    rows=lambda inner, samples, **_: inner.rows(2 * samples),
)  # fmt: skip
async def reflecting(
    tools: Tools,
    task: Task,
    settings: AgentSettings,
    full_reward: float = 1.0,
    reflection_tokens: Count | None = 4096,
    reflect: str = REFLECT,
    guidance: str = GUIDANCE,
    read: Callable[[str, int], Reflection | None] = reflection_in,
) -> list[Episode]:
    """The episodes of the run's agents, of which half are the others again, from where these went wrong (R3L).

    On each episode of the first half the policy reflects, in at most `reflection_tokens` tokens (None: as many as a
    completion has): it answers `reflect`, with the episode in place of {attempt}, and `read` finds in its answer,
    knowing the number of steps, whether it was perfect, or from which step to go on otherwise and how. Then the episode
    begins with the same replies, and goes on from that step with `guidance`, with {suggestion}, in its context. It is
    trained on without the guidance. Where there is nothing to read, the episode was perfect, or its environment cannot
    be copied, an episode of its own takes its place.

    A retry with at least `full_reward`, and more reward or fewer replies than before, adds the reflection and the retry
    with the guidance, each a group of its own with the reward `full_reward`; so does a reflection that rightly says
    perfect.

    Provides pivot, the turns of an episode before its retry begins, also for the episode that was retried. The
    metrics rollout/guided and rollout/reflected are the shares of retries, and of reflections that could be read. It
    goes around the run's agents; InputError around another rollout. Alone it is a group without retries.
    """

    async def reflected(number: int, first: Attempt, end: Episode) -> Episode | None:
        if not first.replies or end.reward is None or end.reward != end.reward:
            return None
        prompt = tools.prompt(reflect.format(attempt=attempt_transcript(first, end.reward)))
        if not tools.fits(prompt):
            return None
        return await tools.sample(prompt, number=number, limit=reflection_tokens)

    G, half = task.samples, task.samples // 2
    wide = replace(task, samples=2 * G)  # numbers from G on are those of reflections
    firsts = await gather(*(attempted(tools, wide, number, settings) for number in range(G - half)))
    ends = await ends_of(tools, [first.path.one for first in firsts], settings.turn_rewards)
    said = await gather(*(reflected(G + n, firsts[n], ends[n]) for n in range(half)))
    found = [
        None if one is None else read(tools.decode(one.last), len(firsts[n].replies)) for n, one in enumerate(said)
    ]

    async def second(n: int) -> Attempt:
        first, reflection = firsts[n], found[n]
        number = G - half + n
        first.reflected = reflection is not None
        if reflection is not None and not reflection.perfect:
            text = guidance.format(suggestion=reflection.suggestion)
            if (again := await retried_from(first, reflection.step, number, text)) is not None:
                first.pivot = again.pivot
                return again
        return await attempted(tools, wide, number, settings)

    seconds = await gather(*map(second, range(half)))
    later = await ends_of(tools, [again.path.one for again in seconds], settings.turn_rewards)
    rows = [
        row for one, end in zip([*firsts, *seconds], [*ends, *later], strict=True) for row in trained_rows(one, end)
    ]
    out = [row.in_part(0) for row in rows]

    def add(number: int, more: Sequence[Episode]) -> None:
        known = {"off_prompt": 0.0, "guided": 0.0, PIVOT: 0.0, **dict.fromkeys(COUNTS, 0.0)}
        out.extend(
            with_own_reward(row.with_info(**{**known, **row.info}), full_reward, rows[0]).in_part(number)
            for row in more
        )

    for n, (reflection, answer) in enumerate(zip(found, said, strict=True)):
        r1, r2 = ends[n].reward or 0.0, later[n].reward or 0.0
        fewer = seconds[n].path.one.replies < firsts[n].path.one.replies
        better = seconds[n].guided is not None and r2 >= full_reward and (r2 > r1 or fewer)
        right = reflection is not None and reflection.perfect and r1 >= full_reward
        if answer is not None and (better or right):
            add(2 * n + 1, [answer])
        if better:
            add(2 * n + 2, trained_rows(seconds[n], later[n], told=True))
    return out
