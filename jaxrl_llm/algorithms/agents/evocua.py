from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp

from jaxrl_llm.advantages.turns import needs_turns
from jaxrl_llm.algorithms.agents.agent_r import common_steps, segments_after, starts
from jaxrl_llm.algorithms.agents.r3l import from_pivot
from jaxrl_llm.algorithms.classic.sft import as_right
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part, stateless
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives import best_and_worst, imitation, pairwise, token_mean
from jaxrl_llm.objectives.preference.pairwise import RowPairs
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.fork import Searched, scored_paths
from jaxrl_llm.rollouts.agents.metrics import COUNTS
from jaxrl_llm.rollouts.agents.path import AgentSettings, converse
from jaxrl_llm.rollouts.agents.program import agents_part
from jaxrl_llm.rollouts.agents.restarts import PIVOT, Attempt, retried_from, trained_rows
from jaxrl_llm.rollouts.auxiliary_prompts import with_own_reward
from jaxrl_llm.rollouts.programs import Episode, Task, Tools

REFLECT = """The last action was a mistake, and the situation is not the one that was wanted. Say what went wrong, and \
take an action that sets it right."""


@method(paper="arXiv 2601.15876", test="test_evocua.py::test_pairs_are_those_of_a_loop_over_replies")
@run_needs(
    episode="rows of one episode",
    first_turn="the order of these rows",
    turns="episodes of several turns, which are compared step by step",
)
@beside("tasks", "the synthesis of tasks with programs that check them", "the run's prompts and environment")
@beside("vision", "screens as images", "a policy that sees")
def evocua(
    first: Ours[Count] = 2,
    low: Ours[Fraction] = 0.1,
    high: Ours[Fraction] = 0.9,
    success: Ours[float] = 0.5,
    preference: Ours[NonNegative] = 1.0,
    beta: Ours[Positive] = 0.1,
    round_updates: Ours[Count] = 100,
) -> Algorithm:
    """Learning from successes, and from the step at which a failure leaves one (EvoCUA).

    A task gets `first` episodes with the environment, and as long as the share of successes among them, those of a
    reward above `success`, is from `low` to `high`, twice as many, up to group_size. Successes are imitated, without
    the replies that left the state of the environment as it was. A failure is aligned with the success that begins with
    the most of its replies; t is the first step at which they differ. Pairs of steps in one context h:

        at t        chosen: the success's step               rejected: the failure's
        at t + 1    chosen: a reply that reflects and saves    rejected: the failure's step, which goes on blindly

    For the second the failure is played again from t + 1, in a copy of its environment, by the policy that is told of
    its mistake, and counts where that ends in a success; it is learnt without being told. With u the log-ratio of the
    step's tokens given h to the reference,

        loss = -sum over tokens of successes log pi / all tokens that are learnt
               + preference mean over pairs of -log sigmoid(beta (u_chosen - u_rejected))

    The reference becomes the policy after every round_updates updates. The paper has the two parts as stages, one after
    the other, and a model that writes corrected thoughts; here both are in every update, and the corrected step is that
    of the success. Its formulas and numbers were not read: the pairs are as we remember them, all defaults are ours.
    An episode of several rows, compacted or rendered anew, is imitated, but in no pair.
    """
    return Algorithm(
        chain(needs_turns(), from_pivot(), stateless(as_right)),
        imitation(of_episodes(), token_mean(), "nll") + preference * pairwise(beta=beta, pairs=step_pairs()),
        rollout=stepwise(first, low, high, success),
        reference=periodic_reset(round_updates),
    )


def is_of_pair(batch: Trajectories) -> Array:
    """bool[N]: rows of a pair of steps, whose info["part"] is above 0."""
    return batch.entry("part", 0) > 0


@part
def of_episodes() -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: 0 for rows of pairs of steps, else 1."""
    return lambda batch: 1.0 - is_of_pair(batch).astype(jnp.float32)


@batch_part
def step_pairs(batch: Trajectories) -> RowPairs:
    """The pairs of steps; whole episodes are in none."""
    found, own = best_and_worst()(batch), is_of_pair(batch)
    return found._replace(valid=found.valid & own[found.chosen] & own[found.rejected])


def grows(successes: int, tried: int, low: float, high: float) -> bool:
    """Whether a task is neither too hard nor too easy to be tried more often.

    >>> grows(0, 2, 0.1, 0.9), grows(1, 2, 0.1, 0.9), grows(2, 2, 0.1, 0.9)
    (False, True, False)
    """
    return low <= successes / tried <= high


def step_of(row: Episode, turn: int) -> Episode | None:
    """An episode up to and with one reply, which alone is learnt; None where there is none."""
    if (place := starts(row, turn)) is None:
        return None
    reply = list(segments_after(row, place))
    length = next((n for n, one in enumerate(reply) if not one.sampled), len(reply))
    before = (one._replace(sampled=False).elsewhere() for one in row.first(place).segments)
    return replace(row, segments=(*before, *reply[:length]), trained_prompt=None, turn_rewards=(), state_keys=(0,))


def without_turns(row: Episode, turns: Sequence[int]) -> Episode:
    """An episode in which some of its replies are not learnt."""
    segments, place, every = list(row.segments), 0, row.turns
    for n, one in enumerate(segments):
        if one.sampled and one.tokens.size and int(every[place]) in turns:
            segments[n] = one._replace(sampled=False)
        place += one.tokens.size
    kept = [turn for turn in range(int(every.max(initial=-1)) + 1) if turn not in turns]
    return replace(
        row, segments=tuple(segments), state_keys=tuple(row.state_keys[turn] for turn in kept),
        turn_rewards=tuple(row.turn_rewards[turn] for turn in kept) if row.turn_rewards else (),
    )  # fmt: skip


def paired_steps(good: Episode, bad: Episode, turn: int) -> list[Episode]:
    """The replies of two episodes in one context as a chosen and a rejected row; none where the contexts differ."""
    chosen, rejected = step_of(good, turn), step_of(bad, turn)
    if chosen is None or rejected is None or starts(good, turn) != starts(bad, turn):
        return []
    place = starts(good, turn) or 0
    if good.prompt != bad.prompt or good.first(place).tokens != bad.first(place).tokens:
        return []
    return [with_own_reward(chosen, 1.0, good), with_own_reward(rejected, 0.0, bad)]


@agents_part(
    "the episodes of agents are compared step by step", "step by step", {PIVOT}, least=lambda **_: 2,
    rows=lambda inner, samples, **_: inner.rows(samples) + 4 * samples,
)  # fmt: skip
async def stepwise(
    tools: Tools,
    task: Task,
    settings: AgentSettings,
    first: Count = 2,
    low: Fraction = 0.1,
    high: Fraction = 0.9,
    success: float = 0.5,
    reflect: str = REFLECT,
) -> list[Episode]:
    """The episodes of the run's agents, as many as their successes deserve, and pairs of steps; see `evocua`.

    reflect: what the policy is told after a mistake. Pairs are groups of their own, of the rewards 1 and 0. Provides
    pivot: 0 for rows that are learnt, the number of turns for failures. It goes around the run's agents; InputError
    around another rollout. Alone it is a group of which all is imitated.
    """

    G, told = task.samples, settings.turn_rewards
    wide = replace(task, samples=6 * G)  # from G on: second attempts, from 2 G on: rows of pairs

    async def tried(numbers: Sequence[int]) -> list[Searched]:
        return await scored_paths(await gather(*(converse(tools, wide, number, settings) for number in numbers)))

    async def saved(bad: Searched, turn: int, number: int) -> Episode | None:
        """A success from a turn of a failure on, whose policy was told of its mistake; without what it was told."""
        if turn >= len(bad.path.past):
            return None
        again = await retried_from(Attempt(bad.path), turn, number, reflect)
        if again is None:
            return None
        (one,) = await scored_paths([again.path])
        rows = trained_rows(again, one.end)
        return rows[0] if one.value > success and len(rows) == 1 else None

    found = await tried(range(min(first, G)))
    while len(found) < G and grows(sum(one.value > success for one in found), len(found), low, high):
        found += await tried(range(len(found), min(2 * len(found), G)))
    good = [one for one in found if one.value > success]
    bad = [one for one in found if one.value <= success]
    known = {**dict.fromkeys(COUNTS, 0.0), "off_prompt": 0.0, "guided": 0.0, PIVOT: 0.0}
    out = list[Episode]()
    for one in found:
        states = [*one.path.one.states, None]
        for row in finished(one.path.one, one.end, told):
            begin = int(float(row.info["first_turn"]))  # type: ignore[arg-type]
            count = int(row.turns.max(initial=-1)) + 1
            idle = [turn for turn in range(count) if states[begin + turn] == states[begin + turn + 1]]
            learnt = one.value > success
            row = without_turns(row, idle) if learnt and len(idle) < count else row
            pivot = 0.0 if learnt else float(len(one.path.one.states))
            out.append(row.with_info(**{**known, **row.info, PIVOT: pivot}).in_part(0))
    pairs = list[list[Episode]]()
    for n, one in enumerate(bad if good else []):
        best = max(good, key=lambda other: common_steps(other, one))
        turn = common_steps(best, one)
        if turn < 0:
            continue
        (row,), (right,) = finished(one.path.one, one.end, told), finished(best.path.one, best.end, told)
        pairs.append(paired_steps(right, row, turn))
        later = await saved(one, turn + 1, G + n)
        pairs.append([] if later is None else paired_steps(later, row, turn + 1))
    for number, pair in enumerate(filter(None, pairs)):
        for place, row in enumerate(pair):
            own = 2 * (G + number) + place
            marks = {**known, **row.info, "episode": float(own), "first_turn": 0.0, PIVOT: 0.0}
            out.append(replace(row, sample=own).with_info(**marks).in_part(1 + number))
    return out
