from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.turns import needs_turns, turn_mask
from jaxrl_llm.algorithms.agents.grpo_roc import entry_or_zeros
from jaxrl_llm.algorithms.method import Algorithm, beside, judge_among_rewards, method, run_needs, run_settings
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, OfRun, Ours
from jaxrl_llm.core.buckets import bucket_sums, joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.curriculum.compose import hard_buffer
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rewards.judges.questions import Grading
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.agents.environment_calls import tell_of_beginnings
from jaxrl_llm.rollouts.agents.messages import lines_of
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, converse
from jaxrl_llm.rollouts.agents.program import graded as with_rewards
from jaxrl_llm.rollouts.agents.program import with_episodes
from jaxrl_llm.rollouts.judges.answerers import Answerer, answerer
from jaxrl_llm.rollouts.judges.comparisons import mean_verdict
from jaxrl_llm.rollouts.judges.judged import ask_grades, counts, criteria_of, rubric_scores
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, group
from jaxrl_llm.utils.errors import InputError

CRITERIA = (
    "It is feasible in space and time: each leg begins where the one before it ends, and no two things overlap.",
    "It is complete: everything that was asked for is in it, within the limits that were set.",
)
DETAILS = """Check whether the answer to a request agrees with what a tool said.

{problem}

Answer:
{response}

The tool said:
{criterion}

Names, times, places and prices in the answer that come from this tool have to be as the tool said. What the tool said \
and the answer leaves out is no fault. Explain in a sentence. Then write [[yes]] if it agrees, or [[no]], in the last \
line."""


@batch_part
def verified(batch: Trajectories, threshold: float, combine: Literal["all", "mean"]) -> Array:
    """A function `batch -> f32[N]`: the score times whether all turns of its episode pass, or the share that does.

    A turn passes if its reward is at least the threshold. Without rewards of turns the score alone.
    """
    if batch.turn_rewards is None:
        return batch.scores
    mask = turn_mask(batch)
    passed = mask & ~(batch.turn_rewards < threshold)
    episode = entry_or_zeros(batch, "episode")
    number = jnp.arange(mask.shape[0]) if episode is None else episode.astype(jnp.int32)
    turns, good = (jnp.sum(x, axis=1).astype(jnp.float32) for x in (mask, passed))
    turns, good = bucket_sums(joint_key(batch.group, number), turns, good)
    share = good / jnp.maximum(turns, 1.0)
    return batch.scores * (jnp.where(good == turns, 1.0, 0.0) if combine == "all" else share)


@method(paper="arXiv 2509.21842", test="test_turn_shaped.py::test_deeptravel_by_hand")
@run_needs(turn_rewards="verdicts on turns", turns="episodes of several turns")
@beside("supervised", "supervised training on itineraries before", "another run")
@run_settings(*judge_among_rewards())
def deeptravel(
    threshold: Ours[float] = 0.0,
    combine: Ours[Literal["all", "mean"]] = "all",
    replay_share: Ours[Fraction] = 0.5,
    every: Ours[Count] = 4,
    failed_below: Ours[float] = 1e-6,
    most_stored: Ours[int] = 10_000,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
    judge: OfRun[str | None] = None,
    rubric: OfRun[str | None] = None,
) -> Algorithm:
    """Verified turns and a buffer of failed queries (DeepTravel; its abstract was read).

    A verifier of the whole answer comes first, and those of its turns count only where it passes:

        R = V_T prod_k V_k    (combine "mean": V_T mean_k V_k)

    V_T is the score. V_k = 1 if the reward of turn k is at least the threshold, else 0: a verifier gives a turn whose
    result the answer contradicts a reward below it. A query that failed in all its samples (mean R < failed_below) is
    kept, and asked again until it is solved: every so many steps replay_share times as many queries come from that
    buffer, of most_stored at most. What is replayed is the query, not old tokens. Then GRPO on R: advantages (epsilon)
    of whole episodes, PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens.

    judge: a model that is both verifiers: a folder, a URL, "policy" or "reference" (docs/rewards.md). It checks the
    last reply by two criteria, that it is feasible in space and time and that it is complete, or by those that the
    column `rubric` lists: V_T = 1 where all are met, else 0. Where V_T = 1 it checks the last reply against what each
    turn's tools said, and that turn has the reward 1, or -1 where they differ; other turns have 0. An episode of which
    a verdict cannot be read has no score. Without a judge, V_T is the run's reward, and V_k is of the environment's
    rewards of turns. The sandbox is tools that answer from a file (`environments.tools.kept`).

    The paper's defaults and its questions to the verifiers were not read: these are ours.
    """
    if rubric is not None and judge is None:
        raise InputError("rubric is a column of criteria for the judge: give judge too, or leave out rubric")
    score = verified(threshold, combine)
    steps = chain(needs_turns(), rescore(score, {"turn_rewards"}), group_relative(epsilon=epsilon))
    return Algorithm(
        steps, clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient),
        rollout=None if judge is None else judged_turns(judge, CRITERIA if rubric is None else rubric),
        curriculum=hard_buffer(replay_share, failed_below, most_stored, every, score),
    )  # fmt: skip


@part
def judged_turns(by: Answerer | str, criteria: Sequence[str] | str = CRITERIA) -> Rollout:
    """Episodes of the run's agents whose last reply is judged, first by itself and then against each turn.

    criteria: texts, or the name of a column of them; an episode that meets all has the component `judge` 1 of its
    reward, else 0. Its turns then have the rewards 1 and -1, where the last reply agrees with what they were answered
    and where it does not, and 0 without an answer; those of the environment are part of the component `environment`.
    An episode with a verdict that cannot be read has none. Metrics: "judge/asked" and "judge/unparsed".

    It goes around the run's agents. Raises InputError for other rollouts, and for agents that compact their context.
    """
    who = answerer(by) if isinstance(by, str) else by

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> Sequence[Episode]:
        games = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
        tell_of_beginnings([game.world for game in games if game.world is not None])
        whole, turns, notes = await verdicts_on(who, criteria, tools, task, games)
        found = [
            replace(game.one, final=game.one.component(turn_rewards=False), rewards=own)
            for game, own in zip(games, turns, strict=True)
        ]
        rows = await with_rewards(tools, found, turn_rewards=True, more=[{JUDGE: verdict} for verdict in whole])
        return [row.with_info(**notes) for of_one in rows for row in of_one]

    def around(inner: Rollout) -> Rollout:
        found = with_episodes(
            inner, play, "a judge of turns reads episodes of agents", "judged by turns", {JUDGE, "turn_rewards"},
            whole="a judge of turns reads conversations that are not compacted: leave out compact",
            reference=inner.demands.reference or who.reference,
        )  # fmt: skip
        return replace(found, columns=(*inner.columns, *([criteria] if isinstance(criteria, str) else [])))

    return replace(group(), wrap=around)


async def verdicts_on(
    who: Answerer, criteria: Sequence[str] | str, tools: Tools, task: Task, games: Sequence[Path]
) -> tuple[list[float], list[list[float]], dict[str, float]]:
    """Of each episode the verdict on the whole, NaN where one cannot be read, and rewards of its turns; metrics."""
    given = task.row.get(criteria) if isinstance(criteria, str) else criteria
    own = criteria_of(given, f"prompt {task.prompt_id}, {criteria}" if isinstance(criteria, str) else "the judge")
    asked = [
        (
            "\n\n".join(lines_of(game.one.asked)),
            next((str(one.get("content") or "") for one in game.one.said[::-1] if one["role"] == "assistant"), ""),
        )
        for game in games
    ]
    first = [(Grading(), *one, criterion.text) for one in asked for criterion in own]
    verdicts, _ = await ask_grades(who, tools, task, first, 1)
    marks = np.asarray([mean_verdict(one) for one in verdicts]).reshape(len(games), len(own))
    whole = rubric_scores(marks, [one.weight for one in own], every=True)
    answers = [answers_to(game) for game in games]
    places = [(n, turn) for n in np.flatnonzero(whole == 1) for turn, said in enumerate(answers[n]) if said]
    second = [(Grading(DETAILS), *asked[n], answers[n][turn]) for n, turn in places]
    more, _ = await ask_grades(who, tools, task, second, 1, len(first))
    rewards = [[0.0] * len(game.one.rewards) for game in games]
    for (n, turn), verdict in zip(places, map(mean_verdict, more), strict=True):
        rewards[n][turn] = 1.0 if verdict == 1 else -1.0
        whole[n] = np.nan if np.isnan(verdict) else whole[n]
    stated = [verdict is not None for some in (*verdicts, *more) for verdict in some]
    total = len(first) + len(second)
    return whole.tolist(), rewards, counts(total, total - sum(stated))


def answers_to(game: Path) -> list[str]:
    """What each reply of an episode was answered, as text; "" where it was not."""
    seen = [one.seen for one in (*game.past[1:], game)] if game.past else []
    return ["\n\n".join(lines_of([told for told in one.messages if told.get("content")])) for one in seen]
