import logging
import re
from asyncio import gather
from dataclasses import dataclass, field, replace
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.episodes import EPISODES, one_row_each
from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.advantages.turns import needs_turns
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours, Paper
from jaxrl_llm.core.buckets import bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, chain, part, stateless_part
from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.objectives import clip, policy_gradient, regularised, sequence_mean, token_ratio
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, in_copy
from jaxrl_llm.rollouts.agents.messages import merged
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, begun, converse
from jaxrl_llm.rollouts.agents.plans import items_in
from jaxrl_llm.rollouts.agents.program import ends_of, with_episodes
from jaxrl_llm.rollouts.episode import given, with_reply
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, group, marked
from jaxrl_llm.utils.errors import InputError

logger = logging.getLogger("jaxrl_llm.rollouts")
REFINED = "refined"
REFINE = """This is not said in the task. Your reply, and the actions that you plan, were tried out in a copy of the \
environment:

{states}

Write the reply again with this knowledge, as if you had foreseen it, and do not mention that it was tried out."""
Revealed = Literal["removed", "kept"]


@method(paper="arXiv 2510.09577", test="test_dyna_grpo.py::test_dyna_grpo_worked_example_and_loop")
@run_needs(
    episode="rows of one episode",
    first_turn="the order of these rows",
    turns="episodes of several turns, whose replies are tried out in copies of the environment",
)
def dyna_grpo(
    depth: Paper[int] = 5,
    policy_steps: Ours[int] = 1,
    simulation_steps: Ours[int] = 1,
    revealed: Ours[Revealed] = "removed",
    success: Ours[float] = 0.0,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
) -> Algorithm:
    """Dyna-GRPO, the second stage of Dyna-Mind.

    Phases of training steps alternate. In policy_steps steps it is GRPO on whole episodes. In the next simulation_steps
    each group has as many refined episodes beside its G ordinary ones: the policy replies with an action and, between
    <plan> and </plan>, those that it plans after it; the first `depth` of them are tried out in a copy of the
    environment; it sees what followed, replies again, and the episode goes on with that
    (`simulating`). Refined replies alone are trained on, with

        A_i = 1 if R_i > success and R_i > max(mean R of the ordinary, mean R of the refined episodes), else 0

    in GRPO's objective: the clipped ratio (clip_low, clip_high), averaged over the tokens of each row and then over
    rows, and kl_coefficient k3. revealed: whether refined replies are trained on in the episode as it went on, without
    the states that they were told ("removed", so that the policy learns to foresee them; the ratio is to the weights
    before the update), or with these in their prompt ("kept"). What we read of the paper does not say which. Rewards
    are the environment's to give: the paper's are 10 for a success, 0 for a failure, -0.1 for each step before.

    The first stage, supervised training on replies that were written from searches, is `resim`: a run begins with its
    export. A policy that writes no plans has simulations of one action.
    """
    ratio = token_ratio("old" if revealed == "removed" else "behaviour")
    objective = policy_gradient(ratio, clip(clip_low, clip_high), sequence_mean())
    return Algorithm(
        chain(needs_turns(), policy_or_simulation(success, epsilon)),
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=simulating(depth, policy_steps, simulation_steps, revealed),
    )


def refined_successes(scores: Array, group: Array, refined: Array, counted: Array, success: float = 0.0) -> Array:
    """A = 1 for refined episodes with R > success and R > max(mean of the others, mean of the refined), else 0, f32[N]
    (Dyna-GRPO, 2510.09577).

    Means are over the group's scores, f32[N], that are counted, bool[N], where there are any. NaN means not scored.

    >>> R, refined = jnp.array([10.0, 0, 0, 10, 10, 9.5, 0, 10]), jnp.arange(8) > 3
    >>> refined_successes(R, jnp.zeros(8, int), refined, jnp.ones(8, bool))[4:].tolist()
    [1.0, 1.0, 0.0, 1.0]
    """
    known = [bucket_moments(group, jnp.where(counted & kind, scores, jnp.nan)) for kind in (refined, ~refined)]
    lowest = [jnp.where(count > 0, mean, -jnp.inf) for count, mean, _ in known]
    return (refined & (scores > success) & (scores > jnp.maximum(*lowest))).astype(jnp.float32)


@stateless_part({"refined", *EPISODES})
def policy_or_simulation(batch: Trajectories, success: float = 0.0, epsilon: NonNegative = 1e-6) -> Trajectories:
    """Groups with refined episodes, info["refined"] 1: `refined_successes` on these, whose others are not trained on.
    All other groups: (R - mean) / (std + epsilon) over their rows, as GRPO has it.

    An episode of several rows counts once in the means of groups with refined episodes.
    """
    A = group_advantage(batch.scores, batch.group, epsilon=epsilon)
    marks = (batch.info or {}).get("refined")
    if marks is None:
        return batch.replace(advantages=A[:, None] * batch.action_mask)
    refined = jnp.nan_to_num(marks) > 0
    simulated = bucket_sums(batch.group, refined.astype(jnp.float32))[0] > 0
    own = refined_successes(batch.scores, batch.group, refined, one_row_each(batch), success)
    return batch.replace(
        advantages=jnp.where(simulated, own, A)[:, None] * batch.action_mask,
        weights=jnp.where((simulated & ~refined)[:, None], 0.0, batch.loss_weights),
    )


@dataclass
class Refined:
    """An episode of refined replies, and each of these under the prompt that it was sampled under."""

    path: Path
    replies: list[Episode] = field(default_factory=list)
    told: bool = False
    """Whether one of them was sampled with what a simulation saw."""


async def refine(path: Path, depth: int, ask: str, numbers: tuple[int, int]) -> tuple[Episode, bool]:
    """The episode's last row with its next reply, which is the refined one, and was sampled after the other and `ask`.

    numbers: of the two samples. The first reply stays where it cannot be simulated, or there is no room for another.
    Also returns whether it is a refined one.
    """
    one, chat, tools = path.one, path.chat, path.tools
    assert chat is not None
    assert path.world is not None
    row, room = one.rows[-1], one.room(path.task, path.settings.limits)
    draft = await tools.sample(row, number=numbers[0], limit=room)
    name = f"{path.number}/{path.turn}/simulated"
    try:
        text = tools.decode(draft.last)
        actions = [chat.reading.text(action) for action in (text, *planned_actions(text, depth - 1))]
        seen = await in_copy(tools, path.world, actions, name)
    except EnvironmentFailed as error:
        logger.warning("prompt %d: %s; a reply of sample %d is not refined", row.prompt_id, error, path.number)
        seen = []
    states = list[str]()
    for n, state in enumerate(seen, start=1):
        said = "\n".join(str(message.get("content", "")) for message in state.messages)
        states.append(f"After action {n}: {said}" + " The episode is over." * (state.done or state.truncated))
    told: list[Message] = [{"role": "user", "content": ask.format(states="\n".join(states))}]
    if not seen or draft.truncated:
        return draft, False
    delta = chat.bridge(told, draft.last[-1] if draft.last else None)
    if delta is None:
        messages = merged([*one.messages, chat.reading(draft.last).message, *told])
        longer = Episode(tuple(chat.begin(messages)), row.prompt_id, numbers[1])
    else:
        longer = draft + given(delta)
    if not tools.fits(longer.tokens):
        return draft, False
    return await tools.sample(longer, number=numbers[1], limit=room), True


async def refined_episode(
    tools: Tools, task: Task, number: int, settings: AgentSettings, depth: int, ask: str
) -> Refined:
    """One episode, each of whose replies is refined. Its samples have numbers of their own."""
    path = await begun(tools, task, number, settings)
    out = Refined(path)
    while not path.over:
        first = task.samples // 2 + number + 2 * path.turn * task.samples  # see `simulating`
        asked, told = await refine(path, depth, ask, (first, first + task.samples))
        out.told |= told
        last = asked.segments[-1]
        reply = last._replace(before=None, tokens=last.tokens._replace(experts=None))
        prompt = asked.tokens[: len(asked.tokens) - last.tokens.size]
        out.replies.append(replace(asked, prompt=prompt, segments=(reply,), sample=first))
        path.take(with_reply(path.one.rows[-1], asked))
        await path.hear()
    await path.close()
    return out


def rows_of(refined: Refined, end: Episode, revealed: Revealed) -> list[Episode]:
    """The rows of a refined episode that are trained on, with its reward."""
    rows = finished(refined.path.one, end, refined.path.settings.turn_rewards)
    if revealed == "removed" or not refined.replies:
        return [row.with_info(off_prompt=float(refined.told), refined=1.0) for row in rows]
    first = rows[0]
    return [
        replace(reply, state_keys=(), turn_rewards=())
        .scored(first.reward or 0.0, first.rewards, first.entries)
        .with_info(**{**first.info, "first_turn": float(turn), "off_prompt": 0.0, REFINED: 1.0})
        for turn, reply in enumerate(refined.replies)
    ]


def planned_actions(text: str, most: int) -> list[str]:
    """The actions that a reply plans after its own: the lines between <plan> and </plan>, at most so many.

    >>> planned_actions("Go left. <plan>open the door\\n\\n2. go in</plan>", 4)
    ['open the door', 'go in']
    """
    found = re.search(r"<plan>(.*?)</plan>", text, re.DOTALL)
    return items_in(found[1] if found else "")[: max(most, 0)]


@part
def simulating(
    depth: Count = 5,
    policy_steps: NonNegativeInt = 1,
    simulation_steps: NonNegativeInt = 1,
    revealed: Revealed = "removed",
    ask: str = REFINE,
) -> Rollout:
    """The episodes of the run's agents, and in some steps as many whose replies are refined (Dyna-GRPO, 2510.09577).

    After each `policy_steps` training steps with ordinary groups there are `simulation_steps` with both kinds. In an
    episode of the second kind the policy replies; the reply, and then the lines between its <plan> and </plan>, each as
    a reply, `depth` actions in all, are tried out in a copy of the environment; the policy is told what followed
    (`ask`, with {states}), and replies again. The episode goes on with that reply in place of the first.

    revealed: refined replies are trained on in the episode as it went on, without the first replies and the states
    ("removed"), or each under the prompt that it was sampled under, as a row of its own ("kept").

    Provides refined, 1 for rows of refined replies, 0 for others. It goes around the run's agents; InputError around
    another rollout. Alone it is a group without refined replies.
    """
    if policy_steps + simulation_steps == 0:
        raise InputError("policy_steps and simulation_steps are 0: one of the phases needs a step")

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> list[Episode]:
        G = task.samples
        wide = replace(task, samples=4 * G)  # rows have numbers below 2 G, those of refined replies the others, mod 4 G
        plain = [path.one for path in await gather(*(converse(tools, wide, n, settings) for n in range(G)))]
        refined = list[Refined]()
        if tools.first_step % (policy_steps + simulation_steps) >= policy_steps:
            refined = list(await gather(*(refined_episode(tools, wide, G + n, settings, depth, ask) for n in range(G))))
        ends = await ends_of(tools, [*plain, *(one.path.one for one in refined)], settings.turn_rewards)
        out = [
            row.with_info(off_prompt=0.0, refined=0.0)
            for one, end in zip(plain, ends[:G], strict=True)
            for row in finished(one, end, settings.turn_rewards)
        ]
        for one, end in zip(refined, ends[G:], strict=True):
            out += rows_of(one, end, revealed)
        return out

    def around(inner: Rollout) -> Rollout:
        turns = inner.agent.limits.turns if inner.agent is not None and revealed == "kept" else 1
        return with_episodes(
            inner, play, "the replies of agents are simulated", "simulating", {REFINED},
            variable_size=True, max_episodes=lambda samples: (1 + turns) * inner.rows(samples),
        )  # fmt: skip

    return replace(marked(group(), refined=0.0), wrap=around)
