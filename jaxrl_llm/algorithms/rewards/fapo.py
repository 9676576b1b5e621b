from typing import Annotated, Any

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import AboveOne, AtLeastOne, Code, Fraction, NonNegative, OfRun, Ours, Paper, Range
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rewards import transforms as rewards
from jaxrl_llm.rewards.judges.questions import NONE, first_error_in, question, steps_in
from jaxrl_llm.rewards.transforms import overlong_penalty
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.judges.answerers import Answerer, answerer
from jaxrl_llm.rollouts.judges.comparisons import counts, sampled_texts
from jaxrl_llm.rollouts.pairs import score_missing
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, altered, group
from jaxrl_llm.utils.errors import is_off


@method(paper="arXiv 2510.22543", test="test_shaped_reward.py::test_fapo_against_a_loop")
@run_needs(sound="a judge's verdict whether a step is wrong")
def fapo(
    penalty: Paper[Annotated[float, Range(least=0, most=2)]] = 1.0,
    success: Ours[float] = 0.5,
    overlong_share: Code[Fraction] = 0.5,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
    dual_clip: Code[AboveOne] = 10.0,
    epsilon: Code[NonNegative] = 1e-6,
    max_length: OfRun[AtLeastOne | None] = None,
    judge: OfRun[str | None] = None,
) -> Algorithm:
    """Flawed-Aware Policy Optimization (FAPO).

    A correct answer with a flawed derivation gets less reward than one with a sound one: r = 1 if correct (reward >
    success) and sound, 1 - penalty if correct and flawed, -1 if wrong. With penalty 1 the advantage of flawed answers
    is positive while wrong answers outnumber sound ones and negative afterwards, without a schedule. As in DAPO, a
    length penalty falls linearly from 0 to -1 over the last overlong_share of max_length (8192 where None). The loss is
    DAPO's too: with A = (r - mean_g) / (std_g + epsilon), a token mean of
    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), at most dual_clip |A| where A < 0, without KL.

    Flawed rows are info["flawed"] bool[N]; without it, those whose component "sound" (give it weight 0 in the sum) is
    at most 0.5; without both, none.

    judge: a model that looks for the first wrong step of each correct answer, whose paragraphs are its steps: a folder,
    a URL, "policy" or "reference" (docs/rewards.md); an answer without a step counts as sound. It is trained by a run
    of its own (`--algorithm grpo --rewards first_error`) on rows with the columns `steps` and `first_error`, e, -1
    where no step is wrong, and prompts of `rewards.judges.questions.question`: with e' the step that it names, of S,

        r = 1 - |e' - e| / S if both are steps,   1 if e = e' = -1,   else -1
    """
    longest: Any = 8192.0 if max_length is None else max_length
    steps = [rewards.rescore(graded_by_soundness(success, penalty), {"sound"})]
    if not is_off(overlong_share):
        steps.append(rewards.rescore(with_overlong_penalty(longest, overlong_share)))
    objective = clipped_policy(clip_low, clip_high, dual=dual_clip)
    rollout = None if judge is None else with_first_errors(judge, success)
    return Algorithm(chain(*steps, group_relative(epsilon=epsilon)), objective, rollout=rollout)


@part
def with_first_errors(by: Answerer | str, success: float = 0.5, rollout: Rollout | None = None) -> Rollout:
    """A rollout, `group` by default, whose episodes have info["flawed"]: 1 where a judge finds a wrong step.

    Episodes with a score of at most `success` are not judged. Metrics: "judge/asked" and "judge/unparsed".
    """
    who, inner = answerer(by), rollout or group()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes = await score_missing(tools, await inner.program(tools, task))
        right = [place for place, one in enumerate(episodes) if one.score > success]
        steps = [steps_in(text) for text in sampled_texts(tools, [episodes[place] for place in right])]
        problem, answer = problem_text(tools, task), str(task.row.get("answer", ""))
        said = await who.once_each(tools, task, [question(problem, answer, one) for one in steps], 1)
        found = [first_error_in(texts[0], len(one)) if texts else None for texts, one in zip(said, steps, strict=True)]
        flawed = {place for place, step in zip(right, found, strict=True) if step not in (None, NONE)}
        notes = {name: x for name, x in counts(len(found), found.count(None)).items() if x == x}
        return [one.with_info(flawed=float(place in flawed), **notes) for place, one in enumerate(episodes)]

    return altered(
        inner, program, "with judged steps", {"sound"}, wrap=lambda other: with_first_errors(by, success, other),
        at_once=False, reference=inner.demands.reference or who.reference,
    )  # fmt: skip


@batch_part
def graded_by_soundness(b: Trajectories, success: float, penalty: float) -> Array:
    """A function `batch -> f32[N]`: the rewards of `fapo` before its length penalty."""
    return graded(b.scores > success, flawed_rows(b), penalty)


@batch_part
def with_overlong_penalty(b: Trajectories, longest: Any, share: Any) -> Array:
    """A function `batch -> f32[N]`: the scores plus `overlong_penalty` over the last share of the longest row."""
    buffer: Any = jnp.maximum(share * longest, 1e-6)
    return b.scores + overlong_penalty(b.lengths, longest, buffer)


def graded(correct: Array, flawed: Array, penalty: float | Array = 1.0) -> Array:
    """+1 for correct, 1 - penalty for correct with a flawed derivation, -1 for wrong; f32[N] (FAPO, 2510.22543)."""
    return jnp.where(correct, 1.0 - penalty * flawed, -1.0)


def flawed_rows(batch: Trajectories) -> Array:
    """bool[N]: info "flawed" if present, else component "sound" <= 0.5 if present (NaN counts as sound), else False."""
    if (flawed := (batch.info or {}).get("flawed")) is not None:
        return flawed.astype(bool)
    sound = (batch.rewards or {}).get("sound")
    return jnp.zeros(batch.group.shape, bool) if sound is None else sound <= 0.5
