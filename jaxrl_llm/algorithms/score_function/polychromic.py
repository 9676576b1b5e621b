from asyncio import gather
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import generalised_advantages, on_actions
from jaxrl_llm.advantages.sets import Diversity, diverse_sets_advantage
from jaxrl_llm.advantages.votes import answer_keys
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Count, Fraction, NonNegative, NonNegativeInt, Ours, Paper
from jaxrl_llm.core.buckets import joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, stateless_part
from jaxrl_llm.objectives import clipped_policy, kl, token_mean, value_loss
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, converse, played
from jaxrl_llm.rollouts.agents.program import agents_part, ends_of
from jaxrl_llm.rollouts.programs import Episode, Task, Tools


@batch_part
def diverse_sets_credit(batch: Trajectories, set_size: int, diversity: Diversity) -> Array:
    """A function `batch -> f32[N]`: the advantages of `polychromic`."""
    return diverse_sets_advantage(batch.scores, answer_keys(batch), batch.group, set_size, diversity)


@stateless_part({"vine", "answer_key"})
def vine_credit(batch: Trajectories, set_size: int, diversity: Diversity) -> Trajectories:
    """Of vines, the advantages of `polychromic` among those of the same state; others stay as they are.

    info["vine"] f32[N, L] says which actions these are, see `vines`; what a vine took over has weight 0.
    """
    marks = jnp.where(batch.action_mask, jnp.nan_to_num(batch.need("vine")), 0.0)
    state = jnp.max(jnp.maximum(marks, 0.0), axis=1)
    scores = jnp.where(state > 0, batch.scores, jnp.nan)
    keys = joint_key(batch.group, state.astype(jnp.int32))
    found = diverse_sets_advantage(scores, answer_keys(batch), keys, set_size, diversity)
    advantages = jnp.where(marks > 0, found[:, None], batch.need("advantages"))
    return batch.replace(advantages=advantages, weights=jnp.where(marks < 0, 0.0, batch.loss_weights))


@method(paper="arXiv 2509.25424", test="test_sets.py::test_polychromic_vines_are_the_loop_over_sets_of_a_state")
@run_needs(answer_key="diversity of answers; without it whole completions are compared")
def polychromic(
    set_size: Paper[Count] = 4,
    diversity: Paper[Diversity] = "share",
    states: Ours[NonNegativeInt] = 0,
    window: Ours[Count | None] = None,
    gamma: Ours[Fraction] = 1.0,
    lam: Ours[Fraction] = 0.95,
    value_coefficient: Ours[NonNegative] = 0.5,
    kl_coefficient: Code[NonNegative] = 0.005,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
) -> Algorithm:
    """Polychromic Objectives for Reinforcement Learning (Poly-PPO).

    The reward is that of a set of n samples of a state, its mean reward times its diversity, shared by its members:

        f(S) = mean_S r * d(S),    A_i = mean of f over the sets with i - mean of f over all sets

    over all sets of n = set_size samples, in closed form (the paper samples sets). diversity: "share", d is the number
    of distinct answers / n; "share_or_zero", the same but 0 where all members agree, as in replications; "zero_based",
    (distinct - 1) / (n - 1). Answers are compared by info["answer_key"] int32[N], or, without it, by their tokens. With
    rho the token's ratio and l = log rho, the loss is

        mean over tokens of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient (rho - 1 - l)

    whose last term estimates the paper's KL(behaviour || pi) without bias. The paper's coefficient and average are not
    known to us; replications use 0.005 to 0.1. Rewards such as number_match give the answers. With a single turn the
    prompt is the only state, and its group are the samples (states 0).

    states: how many of the states that an episode visited the group goes back to (the paper: 2, with 8 vines from each,
    a group of 17). In episodes with an environment one sample of the group is an episode, and the others are vines:
    they begin in copies of it at random turns of that episode, the same number at each. A_i of sets of vines from the
    same state is on their actions, those of the first `window` turns (None: all); all other actions have advantages
    from GAE (gamma, lam) with a critic, whose loss value_coefficient times half the squared error joins. What a vine
    took over is trained on in the episode alone.
    """
    average = token_mean()
    objective = clipped_policy(clip_low, clip_high, average)
    objective += kl_coefficient * kl(to="behaviour", estimator="k3", average=average, reverse=True)
    if not states:
        return Algorithm(on_actions(diverse_sets_credit(set_size, diversity), {"answer_key"}), objective)
    transform = chain(generalised_advantages(gamma, lam), vine_credit(set_size, diversity))
    return Algorithm(transform, objective + value_coefficient * value_loss(), rollout=vines(states, window))


@agents_part(
    "the episodes of agents have vines", "vines({states})", provides={"vine"},
    whole="episodes with vines are not compacted: leave out compact and context_tokens",
    least=lambda states, **_: 1 + 2 * states,
)  # fmt: skip
async def vines(
    tools: Tools, task: Task, settings: AgentSettings, states: Count = 2, window: Count | None = None
) -> list[Episode]:
    """Of `task.samples` samples of the run's agents one is an episode, and the others go on from turns of it.

    The turns are `states` different ones, drawn at random, all where it has no more; as many vines begin at each, up to
    one. A vine has a copy of the environment as it was then. Where there can be none it is an episode of its own.
    info["vine"] says of an action that it is one of a vine's first `window` turns (None: all), by the number of its
    state from 1; -1 where the vine took it over, else 0. Provides vine. It goes around the run's agents; InputError
    around another rollout, and for conversations that are compacted.
    """
    first = await converse(tools, task, 0, settings)
    turns = np.sort(tools.random("states").permutation(len(first.past))[:states]).tolist()

    async def vine(number: int) -> tuple[Path, int | None]:
        place = (number - 1) % len(turns) if turns else None
        if place is not None and await (path := first.before(turns[place], number)).has_copy():
            return await played(path), place
        return await converse(tools, task, number, settings), None

    found = [(first, None), *await gather(*map(vine, range(1, task.samples)))]
    ends = await ends_of(tools, [path.one for path, _ in found], settings.turn_rewards)
    return [
        row.with_info(vine=marks(row, None if place is None else turns[place], place, window))
        for (path, place), end in zip(found, ends, strict=True)
        for row in finished(path.one, end, settings.turn_rewards)
    ]


def marks(row: Episode, begin: int | None, place: int | None, window: int | None) -> list[float]:
    """info["vine"] of a row whose vine began at turn `begin` of the state `place`; both None of another episode."""
    if begin is None or place is None:
        return [0.0] * len(row.turns)
    first: Any = row.info["first_turn"]
    turn = row.turns + int(first)
    end = np.inf if window is None else begin + window
    found = np.where(turn < begin, -1.0, np.where(turn < end, place + 1.0, 0.0))
    return np.where(row.turns < 0, 0.0, found).tolist()
