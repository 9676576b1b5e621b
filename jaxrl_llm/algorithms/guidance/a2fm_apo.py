"""Adaptive Policy Optimization over modes (APO, A2FM).

The tag of some samples is given: it is conditioned on and masked out of the loss, but belongs to the reply, so that
reward functions read it. The others write one.
"""

from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, NonNegativeInt, Ours, Paper
from jaxrl_llm.core.parts import part
from jaxrl_llm.rollouts.agents.conversation import Conversation, finished
from jaxrl_llm.rollouts.agents.path import AgentSettings, begun, played
from jaxrl_llm.rollouts.agents.program import ends_of, with_episodes
from jaxrl_llm.rollouts.guidance.prefixes import continued
from jaxrl_llm.rollouts.programs import Demands, Episode, Rollout, Task, Tools
from jaxrl_llm.utils.errors import InputError, shown


@method(paper="arXiv 2510.12838", test="test_prefixed.py::test_apo_worked_example")
@beside("routing", "the first stage, supervised training of the modes", "training before the run")
def a2fm_apo(
    tags: Ours[str] = "<instant>,<reasoning>",
    forced: Code[int] = 2,
    alpha: Paper[NonNegative] = 2.0,
    easy: Code[float] = 0.5,
    by: Code[Literal["first", "all"]] = "first",
    agentic: Ours[str] = "<agentic>",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """Adaptive Policy Optimization over modes (APO, A2FM).

    The policy first writes the tag of a mode, such as to answer at once or to reason. A group has `forced` samples of
    each mode, whose tag is given and masked out of the loss, and free ones, which write the tag. With r_acc the score
    of the response, r_fmt = 1 if it begins with exactly one of the `tags`, else 0, and p the success rate of the forced
    samples (score > 0.5), of the first tag's mode (by "first") or of all (by "all"),

        R = r_acc r_fmt r_adaptive,    r_adaptive = 1 - p^alpha for a free sample in another mode than the first,
                                       if the question is easy: p >= easy; else 1
        A = (R - mean)/(std + 1e-6)    over the whole group, population std

    and GRPO's clipped loss (clip_low, clip_high; kl_coefficient times k3) on the policy's own tokens. Which forced
    samples define p, and when a question is easy, is an open point of the description; the figure of the released
    repository counts those of the instant mode, and calls 1/2 easy. Its rewards of 0.8 are illustrative: the formula
    gives 0.75.

    The first tag is the cheapest mode. The group has group_size samples, more than forced times the number of modes.
    Runs with --tools or --environment have one mode more, of the tag `agentic`, and their samples are episodes, whose
    first reply has the tag. Observations are masked. The templates of the modes were not available to us: here an
    episode whose first reply has one tag has r_fmt = 1 if it goes on after that reply, as after a call of a tool, in
    the agentic mode and in no other. The supervised stage before, which teaches the policy the tags, is not included.
    """
    plain = grpo(clip_low, clip_high, kl_coefficient, ddof=0)
    return replace(plain, rollout=tagged(tags, forced, alpha, easy, by, agentic=agentic))


def mode_of(text: str, tags: Sequence[str]) -> int:
    """The index of the tag with which a response begins, white space aside; -1 if there is none, or another follows."""
    text = text.lstrip()
    for mode, tag in enumerate(tags):
        if text.startswith(tag):
            return -1 if any(other in text[len(tag) :] for other in tags) else mode
    return -1


def adaptive_factors(
    right: Sequence[float], modes: Sequence[int], forced: Sequence[bool], alpha: float, easy: float, by: str
) -> list[float]:
    """1 - p^alpha for free samples that chose another mode than the first (0) on an easy question, else 1.

    p is the mean of `right` over the forced samples, of mode 0 (by "first") or of all modes ("all"), and the question
    is easy where p >= easy.

    >>> adaptive_factors([1, 0, 1, 1], [0, 0, 1, 0], [True, True, False, False], 2.0, 0.5, "first")
    [1.0, 1.0, 0.75, 1.0]
    """
    places = [i for i, is_so in enumerate(forced) if is_so and (by == "all" or modes[i] == 0)]
    p = float(np.mean([right[i] for i in places])) if places else 0.0
    lower = [p >= easy and not is_so and mode > 0 for mode, is_so in zip(modes, forced, strict=True)]
    return [1.0 - p**alpha if is_lower else 1.0 for is_lower in lower]


@part
def tagged(
    tags: str = "<instant>,<reasoning>",
    forced: NonNegativeInt = 2,
    alpha: NonNegative = 2.0,
    easy: Fraction = 0.5,
    by: Literal["first", "all"] = "first",
    success: float = 0.5,
    agentic: str = "<agentic>",
) -> Rollout:
    """Groups of `forced` samples for each mode, which begin with its given tag, and free ones, which write a tag.

    tags: of the modes, the cheapest first, separated by commas. The reward of a response is multiplied by 1 if it
    begins with exactly one tag (`mode_of`), else 0, and by `adaptive_factors` of (reward > success), with alpha, easy
    and by. Reward functions read the tag too. Adds info "mode" (-1: none), "prefix" (given tokens, above 0 for forced
    samples) and "adaptive" (the factor). Free samples are those of the group beyond forced x modes; there must be one.

    agentic: the tag of one more mode in runs with tools or an environment, whose episodes the samples then are. An
    episode has this form if its first reply begins with exactly one tag, and it goes on after that reply in the agentic
    mode, and in no other.

    Raises InputError for fewer than two tags.
    """
    names = [name for tag in tags.split(",") if (name := tag.strip())]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise InputError(f"tags is {shown(tags)}, but must be at least two different tags, separated by commas")
    modes = [*names, agentic.strip()]
    if not modes[-1] or modes[-1] in names:
        raise InputError(f"agentic is {shown(agentic)}, but must be a tag that is not among {shown(tags)}")

    def factors(scores: Sequence[float], found: Sequence[int], is_forced: Sequence[bool]) -> list[float]:
        return adaptive_factors([float(score > success) for score in scores], found, is_forced, alpha, easy, by)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        given = _given(tools, task, names, forced, task.limit)
        episodes = await continued(tools, task, [[] if ids is None else ids[1] for ids in given])
        texts = [tools.decode(episode.own.token.tolist()) for episode in episodes]
        found = [mode_of(text, names) if ids is None else ids[0] for text, ids in zip(texts, given, strict=True)]
        worth = factors([episode.score for episode in episodes], found, [ids is not None for ids in given])
        proper = [mode_of(text, names) == mode >= 0 for text, mode in zip(texts, found, strict=True)]
        return [
            replace(e, reward=None if e.reward is None else e.reward * is_proper * factor).with_info(
                mode=float(mode), adaptive=factor
            )
            for e, mode, factor, is_proper in zip(episodes, found, worth, proper, strict=True)
        ]

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> list[Episode]:
        given = _given(tools, task, modes, forced, settings.limits.turn_tokens or task.limit)

        async def one_of(number: int, ids: Sequence[int]) -> Conversation:
            path = await begun(tools, task, number, settings)
            if not path.over:
                await path.draw(ids)
                await path.hear()
            return (await played(path)).one

        found = await gather(*(one_of(number, ids[1] if ids else ()) for number, ids in enumerate(given)))
        ends = await ends_of(tools, [_with_tag(one) for one in found], settings.turn_rewards)
        firsts = [(one.rows[0].own.token, np.flatnonzero(one.rows[0].turns == 0)) for one in found]
        texts = [tools.decode(own[: places[-1] + 1].tolist() if places.size else []) for own, places in firsts]
        chosen = [ids[0] if ids else mode_of(text, modes) for ids, text in zip(given, texts, strict=True)]
        worth = factors([end.score for end in ends], chosen, [ids is not None for ids in given])
        out = []
        for one, end, text, mode, factor, ids in zip(found, ends, texts, chosen, worth, given, strict=True):
            assert end.reward is not None
            with_tools = mode == len(modes) - 1
            proper = mode_of(text, modes) == mode >= 0 and (one.replies > 1) == with_tools
            rows = finished(one, replace(end, reward=end.reward * proper * factor), settings.turn_rewards)
            prefix = float(len(ids[1])) if ids else 0.0
            out += [
                row.with_info(mode=float(mode), adaptive=factor, prefix=0.0 if place else prefix)
                for place, row in enumerate(rows)
            ]
        return out

    def around(inner: Rollout) -> Rollout:
        least = max(inner.demands.min_samples, len(modes) * int(forced) + 1)
        name = f"tagged({','.join(modes)})"
        return with_episodes(inner, play, "the agentic mode is of agents", name, min_samples=least)

    return Rollout(program, f"tagged({tags})", wrap=around, demands=Demands(min_samples=len(names) * int(forced) + 1))


def _given(
    tools: Tools, task: Task, modes: Sequence[str], forced: int, limit: int
) -> list[tuple[int, list[int]] | None]:
    """For each sample its mode and the mode's tokens, or None for a free one. InputError for a tag beyond the limit."""
    ids = [tools.encode(tag) for tag in modes]
    if (longest := max(map(len, ids))) >= limit:
        raise InputError(f"a tag has {longest} tokens, but a response only {limit}: raise max_new_tokens")
    order = [(mode, ids[mode]) for mode in range(len(modes)) for _ in range(forced)][: task.samples]
    return [*order, *[None] * (task.samples - len(order))]


def _with_tag(one: Conversation) -> Conversation:
    """The conversation with what its only row begins with as if it was sampled, so that reward functions see it."""
    first, *others = one.rows
    if others or not first.segments or first.segments[0].sampled:
        return one
    begin, *rest = first.segments
    return replace(one, rows=[replace(first, segments=(begin._replace(sampled=True), *rest))])
