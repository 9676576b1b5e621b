import logging
import math
import re
from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrl_llm.advantages.turns import needs_turns
from jaxrl_llm.algorithms.agents.r3l import from_pivot
from jaxrl_llm.algorithms.classic.sft import as_right
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import AtLeastTwo, Count, NonNegative, Ours, Recalled
from jaxrl_llm.core.parts import chain, stateless
from jaxrl_llm.objectives import imitation, token_mean
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.fork import Searched, searched
from jaxrl_llm.rollouts.agents.messages import lines_of
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path
from jaxrl_llm.rollouts.agents.program import agents_part
from jaxrl_llm.rollouts.agents.restarts import PIVOT
from jaxrl_llm.rollouts.auxiliary_prompts import with_own_reward
from jaxrl_llm.rollouts.episode import Segment, given
from jaxrl_llm.rollouts.programs import Episode, Task, Tools
from jaxrl_llm.utils.errors import InputError, shown

logger = logging.getLogger("jaxrl_llm.rollouts")
REVISED = "refined"
JUDGE = """Below is an attempt at a task up to its last action, with what followed from it.

{history}

Judge the last action alone. Reply with one word: good if it brings the task nearer to its goal, bad if it is a \
mistake, uncertain if that cannot be said yet."""
THOUGHTS = (
    "I made a mistake here. I should take another way.", "That was wrong, and I have to correct it.",
    "This does not lead to the goal. I change my plan.", "My last steps were not right. I begin again from there.",
    "I see that I went astray, so I go back.", "That action was an error. I try something else.",
    "I misread the situation and need a new approach.", "This will not work. Let me revise what I do.",
    "I have noticed my mistake and will do better now.", "Something went wrong. I think about it once more.",
)  # fmt: skip
ANSWER = "OK."


@method(paper="arXiv 2501.11425", test="test_agent_r.py::test_agent_r_splices_as_a_loop_over_replies")
@run_needs(
    episode="rows of one episode",
    first_turn="the order of these rows",
    turns="episodes of several turns, which are cut at one of them",
)
@beside("chat", "general conversations among the texts", "rows of a data set beside episodes")
def agent_r(
    alphas: Recalled[str] = "0.5,0.7,0.95",
    beta: Recalled[NonNegative] = 0.2,
    alpha_steps: Ours[Count] = 100,
    width: Ours[AtLeastTwo] = 4,
    exploration: Ours[NonNegative] = 1.4,
    pairs: Ours[Count] = 4,
    judge_tokens: Ours[Count] = 64,
    wait: Ours[str] = "Action: wait",
) -> Algorithm:
    """Learning to turn around in the middle of a bad episode (Agent-R).

    Supervised learning on episodes that the policy itself found. A group of episodes with an environment is a tree
    (Monte Carlo tree search): each next one leaves it, with a reply of its own, at the state that UCB finds,

        argmax over children of mean value + exploration sqrt(ln n_parent / n_child)

    where fewer than `width` replies were tried, and is played to its end, whose reward is its value v. Of these
    episodes pairs of a good g and a bad b are made, v_g > alpha and v_g - v_b > beta. The policy judges the actions of
    b one by one, in at most judge_tokens tokens, each with the task and all that happened up to it: good, uncertain or
    bad. t is the first that it calls bad, or the last one if it calls none so. A revision row is

        b_1 .. b_t  |  a thought that revises, and `wait`  |  "OK."  |  the steps of g after those that it shares with b
        no loss        loss                                   no loss    loss on the replies

    Rows of episodes with v > alpha are learnt too, all replies of them; other episodes are not. The loss is -log pi, a
    mean over all these tokens of a step. alpha rises, alphas one after another, each for alpha_steps training steps.

    The paper has three rounds of collecting with a fixed policy and training; here each training step collects with the
    policy as it is, so that a round is alpha_steps steps. Its last alpha is 1, as we remember it, which no reward up to
    1 exceeds: here 0.95. It makes all pairs; here each bad episode, up to `pairs` of them from the worst on, is paired
    with the best good one, of equal ones that with the most common steps. An action that is called bad among the steps
    that both share is followed by g's steps from there on. wait: an action without effect in the words of the
    environment, which never sees it. The thoughts and the words of the judge's question are ours. A row is of one
    conversation, so that episodes whose context was compacted or rendered anew are learnt, but in no pair.

    The episodes of a group are played one after the other, but for the first `width`, as each begins where the values
    of those before say. `rollout/refined` is the share of revision rows.
    """
    return Algorithm(
        chain(needs_turns(), from_pivot(), stateless(as_right)),
        imitation(average=token_mean(), metric="nll"),
        rollout=revising(levels_of(alphas), beta, alpha_steps, width, exploration, pairs, judge_tokens, wait),
    )


def levels_of(alphas: str) -> tuple[float, ...]:
    """The numbers that a text lists, separated by commas. InputError for another text.

    >>> levels_of("0.5, 1")
    (0.5, 1.0)
    """
    try:
        found = tuple(float(one) for one in alphas.split(","))
        if all(map(math.isfinite, found)):
            return found
    except (AttributeError, ValueError):
        pass
    raise InputError(f"alphas is {shown(alphas)}, but must be numbers separated by commas, such as 0.5,0.7")


def verdict_in(text: str) -> str:
    """What a judgement says last: good, uncertain or bad; uncertain where it says none of them.

    >>> verdict_in("It is not good. Bad."), verdict_in("who knows")
    ('bad', 'uncertain')
    """
    found = re.findall(r"\b(good|uncertain|bad)\b", text.lower())
    return found[-1] if found else "uncertain"


def paired(
    values: Sequence[float], shared: Sequence[Sequence[int]], alpha: float, beta: float, most: int
) -> list[tuple[int, int]]:
    """(good, bad) numbers of episodes with v_good > alpha and v_good - v_bad > beta, see `agent_r`.

    values: NaN is in no pair. shared: [good][bad], how many steps two episodes begin with together; below 0 where they
    can be no pair.

    >>> paired([1.0, 0.0, 0.9, 0.8], [[0] * 4] * 4, 0.5, 0.15, 2)
    [(0, 1), (0, 3)]
    """
    out = list[tuple[int, int]]()
    for bad in sorted((n for n, v in enumerate(values) if v == v), key=lambda n: values[n]):
        fitting = [n for n, v in enumerate(values) if v > alpha and v - values[bad] > beta and shared[n][bad] >= 0]
        if fitting and len(out) < most:
            out.append((max(fitting, key=lambda n: (values[n], shared[n][bad])), bad))
    return out


@agents_part(
    "the episodes of agents become a search tree", "revised", {PIVOT}, least=lambda **_: 2,
    rows=lambda inner, samples, pairs, **_: inner.rows(samples) + min(pairs, samples - 1),
)  # fmt: skip
async def revising(
    tools: Tools, task: Task, settings: AgentSettings, alphas: Sequence[float] = (0.5,), beta: NonNegative = 0.2,
    alpha_steps: Count = 100, width: Count = 4, exploration: NonNegative = 1.4, pairs: Count = 4,
    judge_tokens: Count | None = 64, wait: str = "Action: wait", judge: str = JUDGE,
) -> list[Episode]:  # fmt: skip
    """The episodes of the run's agents as a search tree, and rows that go from a bad one over into a good one.

    See `agent_r`. judge: the question about an action, with what happened up to it in place of {history}. Revision rows
    are a group of their own, with the reward of the good episode and info["refined"] 1. Provides pivot: 0 for rows that
    are learnt, the number of turns for episodes that are not. It goes around the run's agents; InputError around
    another rollout. Alone it is a group without revisions.
    """

    async def bad_from(path: Path, number: int) -> int:
        """Steps up to and with the first that the policy calls bad; all where it calls none so.

        number: of the sample of the first judgement; each has one of its own.
        """
        steps = len(path.past)
        for step in range(1, steps + 1):
            prompt = tools.prompt(judge.format(history=history_of(tools, path, step)))
            if not tools.fits(prompt):
                return steps
            answer = await tools.sample(prompt, number=number + step - 1, limit=judge_tokens)
            if verdict_in(tools.decode(answer.last)) == "bad":
                return step
        return steps

    G, turns = task.samples, settings.limits.turns
    wide = replace(task, samples=G * (1 + turns))  # numbers from G on are those of judgements
    found, _ = await searched(tools, wide, settings, G, width, exploration)
    alpha = alphas[min(tools.first_step // alpha_steps, len(alphas) - 1)]
    shared = [[common_steps(good, bad) for bad in found] for good in found]
    chosen = paired([one.value for one in found], shared, alpha, beta, pairs)
    cuts = await gather(*(bad_from(found[bad].path, G + bad * turns) for _, bad in chosen))
    known = {"off_prompt": 0.0, REVISED: 0.0}
    rows = list[Episode]()
    for one in found:
        pivot = 0.0 if one.value > alpha else float(len(one.path.one.states))
        of_one = finished(one.path.one, one.end, settings.turn_rewards)
        rows += [row.with_info(**{**known, **row.info, PIVOT: pivot}).in_part(0) for row in of_one]
    for (good, bad), cut in zip(chosen, cuts, strict=True):
        thought = THOUGHTS[int(tools.random(f"thought {bad}").integers(len(THOUGHTS)))]
        text = f"{thought}\n{wait}"
        row = spliced(tools, found[good], found[bad], cut, min(shared[good][bad], cut), text, settings.turn_rewards)
        if row is not None and tools.fits(row.tokens):
            number = G + bad * turns
            rows.append(replace(row, sample=number).with_info(episode=float(number)).in_part(1))
    return rows


def history_of(tools: Tools, path: Path, steps: int) -> str:
    """What an episode of a single row was asked, replied and told in its first steps, a message on each line.

    Replies are as the policy wrote them, with calls of tools.
    """
    (row,), turn, told = path.one.rows, 0, [*path.one.asked]
    for one in path.past[steps].one.said if steps < len(path.past) else path.one.said:
        if one["role"] == "assistant":
            one, turn = {**one, "content": tools.decode(row.own.token[row.turns == turn].tolist())}, turn + 1
        told.append(one)
    return "\n".join(lines_of(told))


def common_steps(one: Searched, other: Searched) -> int:
    """How many replies two episodes begin with together; -1 where one of them is not a single row, or there is none."""
    first, second = (x.path.one.rows for x in (one, other))
    if len(first) > 1 or len(second) > 1 or not one.path.past or not other.path.past:
        return -1
    replies = [
        [row.own.token[row.turns == turn].tolist() for turn in range(row.turns.max() + 1)] for (row,) in (first, second)
    ]
    same = [a == b for a, b in zip(*replies, strict=False)]
    return same.index(False) if False in same else len(same)


def spliced(
    tools: Tools, good: Searched, bad: Searched, cut: int, shared: int, text: str, turn_rewards: bool = False
) -> Episode | None:
    """The first `cut` steps of the bad episode as given, `text` as a reply, and the good one's after `shared` steps.

    None where the chat template does not append what is between, or the good episode has no step after these.
    """
    chat, seen = bad.path.chat, bad.path.seen
    (row,), (end,) = bad.path.one.rows, finished(good.path.one, good.end, turn_rewards)
    if chat is None or shared > end.turns.max():
        return None
    place = starts(row, cut)
    before = row.first(row.size if place is None else place)
    if place is None and before.segments[-1].sampled:  # nothing follows its last reply
        delta = chat.bridge(list(seen.messages) or [{"role": "user", "content": ANSWER}], row.last[-1])
        if delta is None:
            return None
        before = before + given(delta)
    ends = [ids for ids in (row.last[-1:], end.last[-1:]) if ids and ids[0] in chat.stops]
    stop = ends[0][0] if ends else tools.tokenizer.eos_token_id
    revision = given([*tools.encode(text), stop], tools.step)._replace(sampled=True)
    answer = chat.bridge([{"role": "user", "content": ANSWER}], stop)
    place = starts(end, shared)
    if answer is None or place is None:
        return None
    segments = (
        *(one._replace(sampled=False).elsewhere() for one in before.segments), revision, given(answer),
        *(one.elsewhere() for one in segments_after(end, place)),
    )  # fmt: skip
    turns = tuple(end.turn_rewards[shared:])
    return with_own_reward(
        replace(
            end, prompt=row.prompt, trained_prompt=None, segments=segments, turn_rewards=(0.0, *turns) if turns else (),
            state_keys=(0, *end.state_keys[shared:]),
        ),
        good.end.score,
        end,
    ).with_info(**{**end.info, "off_prompt": 1.0, REVISED: 1.0, PIVOT: 0.0})  # fmt: skip


def starts(row: Episode, turn: int) -> int | None:
    """The place of the first token of a reply; None where there is no such reply."""
    places = np.flatnonzero(row.turns == turn)
    return int(places[0]) if places.size else None


def segments_after(row: Episode, count: int) -> list[Segment]:
    """The segments of an episode after its first `count` tokens."""
    kept = list[Segment]()
    for segment in row.segments:
        if segment.tokens.size > count:
            kept.append(segment._replace(tokens=segment.tokens.after(max(count, 0)), before=None))
        count -= segment.tokens.size
    return kept
