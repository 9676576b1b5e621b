import math
import re
from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, judge_among_rewards, method, run_settings
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, Number, OfRun, Ours, Paper
from jaxrl_llm.core.buckets import bucket_quantile
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.objectives import clipped_policy, constant
from jaxrl_llm.rewards.judges.questions import Grading
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.agents.conversation import Conversation
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, failed, observe
from jaxrl_llm.rollouts.agents.messages import lines_of
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, converse
from jaxrl_llm.rollouts.agents.program import graded, with_episodes
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.judges.answerers import Answerer, answerer
from jaxrl_llm.rollouts.judges.comparisons import counts, sampled_texts
from jaxrl_llm.rollouts.judges.judged import Criterion, Judged, Judging, judged, met_by
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, group
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2509.02208", test="test_group_relative.py::test_baichuan_m2_is_the_loop")
@beside("mid_training", "the mixed loss on medical texts before", "another run")
@beside("patient", "a model that plays patients", "the run's environment, such as `environments.patient.Patient`")
@run_settings(*judge_among_rewards())
def baichuan_m2(
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.28,
    length_bonus: Paper[NonNegative] = 4.0,
    quantile: Paper[Fraction] = 0.2,
    threshold: Ours[float] = 0.5,
    max_length: OfRun[Count | None] = None,
    slices: Ours[bool] = False,
    judge: OfRun[str | None] = None,
) -> Algorithm:
    """Baichuan-M2 (Scaling Medical Capability with Large Verifier System).

    GRPO without KL and standard deviation, summed over tokens and divided by a constant as in Dr. GRPO, with separate
    clip bounds, and a bonus for short answers once a group is good. With q the `quantile` of the group's rewards,

        R_i = r_i + [q > threshold and r_i >= q] length_bonus / sqrt(|o_i|),    A_i = R_i - mean_g R
        loss = -1/N sum_i 1/max_length sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    The paper prints length_bonus 4 and quantile 0.2 (interpolated linearly), but neither threshold nor clip_low,
    clip_high and max_length (None: the longest row of the batch). Lengths are in tokens.

    judge: a model that writes a rubric for each prompt, and then checks each response by it: a folder, a URL, "policy"
    or "reference" (docs/rewards.md). With m_k = 1 where criterion k of p_k points, a fault if p_k < 0, is met, else 0,

        r = min(1, max(0, sum_k p_k m_k / sum_k max(p_k, 0)))

    where merits and faults are asked about in different words. Without a judge, r is the run's reward.

    Its last stage, slices with --environment, trains on single replies within dialogues with a simulated patient: the
    policy has a dialogue with it, which is cut off before a random turn, and all samples of the group are replies to
    that, scored by the environment, whose rubric is of that moment, or by a rubric that the judge writes for the slice.
    `environments.patient.Patient` is such a patient. A slice is noise, and another turn is drawn, where somebody says
    twice the same in it, or the judge writes no rubric that can be read; of a dialogue without another one nothing is
    learnt. The paper's filter and prompts were not found: these are ours.
    """

    credit = chain(rescore(with_length_bonus(length_bonus, quantile, threshold)), group_relative("none"))
    rollout = sliced(judge) if slices else None if judge is None else judged(by_written_rubric(judge))
    return Algorithm(credit, clipped_policy(clip_low, clip_high, constant(max_length)), rollout=rollout)


@batch_part
def with_length_bonus(b: Trajectories, size: float, quantile: float, threshold: float) -> Array:
    """A function `batch -> f32[N]`: the scores plus their `gated_length_bonus`."""
    return b.scores + gated_length_bonus(b.scores, b.lengths, b.group, size, quantile, threshold)


def gated_length_bonus(
    reward: Array, lengths: Array, group: Array, size: Number, quantile: Number, threshold: Number
) -> Array:
    """size / sqrt(length) for the samples at or above the group's quantile q where q > threshold, else 0; f32[N]."""
    q = bucket_quantile(group, reward, quantile)
    return jnp.where((q > threshold) & (reward >= q), size / jnp.sqrt(jnp.maximum(lengths, 1.0)), 0.0)


WRITE = """Below is what was said to an assistant. Write a rubric for its next reply: what a good one does, and what \
would be a fault, as this moment asks for it.

{problem}

Write one criterion in each line, with its points first: from 1 to 10 for what a good reply does, from -1 to -10 for a \
fault. For example:
5: It asks how long the cough has lasted.
-3: It names a diagnosis before it knows enough."""
MERIT = """Check whether a reply does what a criterion says.

{problem}

Reply:
{response}

Criterion: {criterion}

Explain in a sentence. Then write [[yes]] or [[no]] in the last line."""
FAULT = """Check whether a reply has a fault. What is not clearly so is no fault.

{problem}

Reply:
{response}

Fault: {criterion}

Explain in a sentence. Then write [[yes]] if it has the fault, or [[no]], in the last line."""


class Rubric(NamedTuple):
    """What a reply should be, and what it is a reply to."""

    problem: str
    criteria: tuple[Criterion, ...]


def rubric_in(text: str) -> tuple[Criterion, ...]:
    """The criteria that a text lists, a line "POINTS: CRITERION" each, 1 to 10 or -1 to -10; none without a merit.

    >>> [(one.text, one.weight) for one in rubric_in("Rubric\\n- 5: It asks.\\n-3: It guesses.\\n40: Too much.")]
    [('It asks.', 5.0), ('It guesses.', -3.0)]
    >>> rubric_in("-3: It guesses.")
    ()
    """
    lines = re.findall(r"^\s*(?:[-*] +)?([+-]?\d{1,2})(?: points?)?: *(\S.*?)\s*$", text, flags=re.MULTILINE)
    found = tuple(Criterion(said, float(points)) for points, said in lines if 1 <= abs(int(points)) <= 10)
    return found if any(one.weight > 0 for one in found) else ()


async def marked_by(
    who: Answerer, tools: Tools, task: Task, rubric: Rubric, texts: Sequence[str], first: int
) -> Judged:
    """How well responses meet a rubric, 0 to 1, each criterion asked about by a question of its own; else no score."""
    if not rubric.criteria:
        return Judged([math.nan] * len(texts), counts(1, 1))

    def question(one: Criterion) -> Grading:
        return Grading(MERIT if one.weight > 0 else FAULT)

    return await met_by(who, question, tools, task, rubric.problem, rubric.criteria, texts, first=first)


async def written(who: Answerer, tools: Tools, task: Task, problem: str, first: int = 0) -> Rubric:
    """The rubric that somebody writes for a reply to what was said; without criteria where it cannot be read."""
    (said,) = await who.answers(tools, task, [WRITE.format(problem=problem)], 1, first)
    return Rubric(problem, rubric_in(said[0]) if said else ())


@part
def by_written_rubric(by: Answerer | str = "policy") -> Judging:
    """The score of a response is how well it meets a rubric that the judge writes for the prompt; see `baichuan_m2`.

    Responses to a prompt whose rubric cannot be read have no score.
    """
    who = answerer(by)

    async def of_group(tools: Tools, task: Task, episodes: Sequence[Episode]) -> Judged:
        rubric = await written(who, tools, task, problem_text(tools, task))
        return await marked_by(who, tools, task, rubric, sampled_texts(tools, episodes), 1)

    return Judging(of_group, who.reference)


def repeats(messages: Sequence[Message]) -> bool:
    """Whether one says in words what it said before; spaces and case do not count."""
    said = [(one["role"], " ".join(str(one.get("content") or "").lower().split())) for one in messages]
    return len(set(said)) < len(said)


@part
def sliced(judge: Answerer | str | None = None) -> Rollout:
    """Episodes of the run's agents of one reply each, to a dialogue that is cut off before a random turn.

    The policy first has a whole dialogue with the environment, which is not trained on. A turn of it is drawn, all
    equally likely, and the dialogue before it, with its replies and observations, is the prompt of the whole group.
    Each sample is one reply, which a copy of the environment as it was then hears. Its reward is that of this turn and
    the final one that the environment gives thereafter.

    judge: writes a rubric for what comes before the turn, by which each reply has the component `judge` of its reward.
    Turns before which somebody repeats itself, or whose rubric cannot be read, are drawn again; where none is left,
    replies have no verdict. Metrics: "judge/asked" and "judge/unparsed".

    It goes around the run's agents, and leaves other rollouts as they are, but for a judge of their prompts. Raises
    InputError for agents that compact their context.
    """
    who = None if judge is None else answerer(judge)

    async def ruled(tools: Tools, task: Task, whole: Path, turns: Sequence[int]) -> tuple[int, Rubric]:
        """The first of the turns that is no noise, and the rubric for it, without criteria where all are noise."""
        for asked, turn in enumerate(turns):
            before = [*whole.past[turn].one.asked, *whole.past[turn].one.said]
            if who is not None and not repeats(before):
                rubric = await written(who, tools, task, "\n\n".join(lines_of(before)), asked)
                if rubric.criteria:
                    return turn, rubric
        return turns[0], Rubric("", ())

    async def rows_of(
        tools: Tools, task: Task, found: Sequence[Conversation], rubric: Rubric, first: int, turn_rewards: bool
    ) -> list[Episode]:
        assert who is not None
        texts = [str(one.messages[-1].get("content") or "") for one in found]
        said = await marked_by(who, tools, task, rubric, texts, first)
        known = {name: x for name, x in said.metrics.items() if not math.isnan(x)}
        rows = await graded(tools, found, turn_rewards, [{JUDGE: score} for score in said.scores])
        return [row.with_info(**known) for of_one in rows for row in of_one]

    def around(inner: Rollout) -> Rollout:
        if inner.agent is None:
            return inner if who is None else judged(by_written_rubric(who), inner)

        async def play(tools: Tools, task: Task, settings: AgentSettings) -> Sequence[Episode]:
            whole = await converse(tools, task, task.samples, settings)
            turns, rubric = tools.random("slice").permutation(len(whole.past)).tolist(), Rubric("", ())
            if not whole.past:  # the environment cannot begin, which each sample then says
                paths = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
                found = [path.one for path in paths]
            else:
                turn, rubric = await ruled(tools, task, whole, turns)
                found = list(await gather(*(_reply(whole, turn, number) for number in range(task.samples))))
            if who is not None:
                return await rows_of(tools, task, found, rubric, len(turns), settings.turn_rewards)
            return [row for of_one in await graded(tools, found, settings.turn_rewards) for row in of_one]

        return with_episodes(
            inner, play, "dialogues of agents are cut into slices", "sliced", {JUDGE} if who else (),
            "dialogues that are cut into slices are not compacted: leave out compact", max_episodes=None,
            reference=inner.demands.reference or (who is not None and who.reference),
        )  # fmt: skip

    return replace(group(), wrap=around)


async def _reply(whole: Path, turn: int, number: int) -> Conversation:
    """One reply in the place of that of a turn; not scored where its environment cannot be copied."""
    path, task = whole.before(turn, number), whole.task
    context = Episode(path.one.rows[-1].tokens, task.prompt_id, number)
    path.seats = [Conversation([context], task.samples, path.one.messages, path.one.asked, said=path.one.said)]
    try:
        await path.copy_world()
    except EnvironmentFailed as error:
        failed(path.one, task, number, "to be copied, so that its reply is not scored", error)
        path.one.scored = False
        return path.one
    assert path.world is not None
    await path.draw()
    try:
        path.one.note(await observe(path.tools, path.world.step, path.reply, name=f"{number}/{turn}"))
    except (EnvironmentFailed, InputError) as error:
        failed(path.one, task, number, "in step, where its episode ends", error)
    await path.close()
    return path.one
