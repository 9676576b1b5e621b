import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.episodes import EPISODES
from jaxrl_llm.advantages.turns import TURNS, needs_turns, on_tokens, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Count, Fraction, NonNegative, NonNegativeInt, OpenFraction, Ours, Recalled
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, batch_part, chain, stateless_part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.records import PromptFacts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome
from jaxrl_llm.objectives import clip, importance_correction, policy_gradient, regularised, sequence_mean, span_ratio
from jaxrl_llm.replay.into_groups import none_above, swapped_successes
from jaxrl_llm.rollouts.agents.path import AgentSettings
from jaxrl_llm.rollouts.agents.program import agents_part, plays
from jaxrl_llm.rollouts.programs import Episode, Task, Tools
from jaxrl_llm.selection.rows import ranks_within

SHARE, LONGEST = "sampled_share", "longest_success"  # columns that the curriculum gives


@method(paper="arXiv 2509.23866", test="test_of_screens.py::test_dart_gui_is_the_loop_over_steps")
@run_needs(
    episode="steps of one episode as rows",
    first_turn="the order of the steps",
    fresh_prompts="a prompt of its own for each step; whole conversations are one row",
    state_key="how many steps there are",
    turns="episodes of several steps",
)
def dart_gui(
    kept: Recalled[float] = 0.8,
    success: Ours[float] = 0.5,
    stored: Ours[NonNegativeInt] = 1,
    solved: Recalled[float | None] = 0.6,
    least: Ours[Count] = 2,
    weight_cap: Code[float] = 1.0,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.1,
    clip_high: Code[NonNegative] = 0.28,
    kl_coefficient: Code[NonNegative] = 0.1,
) -> Algorithm:
    """Decoupled Agentic RL Training for GUI agents (DART).

    Steps of episodes have the outcome of the whole. Those of high entropy are trained on, with a ratio for each step
    and weights for the mismatch of sampler and trainer. With R the outcome of the step's episode, which counts once,

        A = (R - mean_g R) / (std_g R + epsilon)
        s = exp(1/|o| sum_t (logp - logp_old)) over the tokens of a step, with the gradient of each token's own logp
        w = min(pi_old / pi_behaviour, weight_cap) of each token
        loss = mean over rows of the mean over tokens of -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
               + kl_coefficient k3

    Only the share `kept` of a group's steps is trained on, those of the highest mean entropy. Where no episode of a
    task has R > success, one of its last `stored` successes of earlier steps joins the group, with the
    log-probabilities of the policy that sampled it, to which w is relative.

    Tasks that the policy solves get fewer samples and steps. With v the share of successes in the last group of a task,
    and G the size of a group, it has

        G min(1, (1 - v) / (1 - solved)) samples, rounded up, at least `least`,

    and at most as many steps as the longest success of that group had; all of them after a group without any. The
    record of tasks is part of the curriculum, which draws prompts in shuffled epochs, and of each checkpoint. solved
    None: all samples and steps, as a run needs that leaves groups to later steps.

    Rows are steps with a --rollout that returns `rollouts.agents.agent(ENVIRONMENT, fresh=True)`, whose
    observations are whole prompts, such as a window of the last screens in words. Episodes of --environment are rows,
    whose steps are averaged by their tokens. The released trainer has another filter of steps; the paper's shares and
    thresholds were not available, and how fast the number of samples falls is ours. `--max-staleness` stands for the
    paper's separate services.
    """
    ratio = span_ratio("turn", "old", gradient="token")
    objective = policy_gradient(ratio, clip(clip_low, clip_high), sequence_mean())
    transform = chain(
        needs_turns(fresh=True),
        group_relative(epsilon=epsilon, needs=EPISODES),
        importance_correction("token", "truncate", high=weight_cap),
        keep_uncertain_turns(kept),
    )
    return Algorithm(
        transform,
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        replay=swapped_successes(none_above(success), success, stored, "added"),
        rollout=None if solved is None else shortened(least),
        curriculum=None if solved is None else in_epochs(last_groups(success, solved)),
    )


@batch_part
def last_groups(facts: PromptFacts, success: float = 0.5, solved: OpenFraction = 0.6) -> Machine:
    """Tell rollouts how the last group of each prompt did, for `shortened`.

    Rows get the columns SHARE, min(1, (1 - v) / (1 - solved)) with v the share of episodes whose reward is above
    `success`, and LONGEST, the most turns of one of these; 1 and 0 before the first group, and without a success. The
    metric curriculum/share is the mean SHARE of all prompts.
    """

    start: State = {"share": np.ones(facts.size, np.float32), "longest": np.zeros(facts.size, np.int32)}

    def observe(state: State, outcome: Outcome) -> State:
        share, longest = state["share"].copy(), state["longest"].copy()
        for prompt, episodes in episodes_of(outcome.step).items():
            sizes = [turns for reward, turns in episodes if reward > success]
            share[prompt] = min(1.0, (1 - len(sizes) / len(episodes)) / (1 - solved))
            longest[prompt] = max(sizes, default=0)
        return {"share": share, "longest": longest}

    def columns(state: State, ids: np.ndarray) -> list[dict[str, Any]]:
        return [{SHARE: float(state["share"][i]), LONGEST: int(state["longest"][i])} for i in ids]

    return Machine(
        start, observe=observe, metrics=lambda state: {"share": float(np.mean(state["share"]))}, columns=columns
    )


def episodes_of(step: Step) -> dict[int, list[tuple[float, int]]]:
    """Of each prompt of a step, the reward and the number of turns of each episode that was sampled and scored."""
    batch = (step.sampled or step.scored).batch
    info, reward = batch.info or {}, np.asarray(batch.need("reward"), np.float64)
    begun = np.asarray(info.get("first_turn", np.zeros(len(reward))))
    ends = begun + np.asarray(batch.turn).max(axis=1) + 1
    names = zip(np.asarray(batch.group), np.asarray(info.get("episode", np.arange(len(reward)))), strict=True)
    found: dict[int, dict[Any, tuple[float, int]]] = {}
    for prompt, name, score, end in zip(np.asarray(batch.prompt_id), names, reward, ends, strict=True):
        if not np.isnan(score):
            episodes = found.setdefault(int(prompt), {})
            episodes[name] = float(score), max(episodes.get(name, (score, 0))[1], int(end))
    return {prompt: list(episodes.values()) for prompt, episodes in found.items()}


@agents_part("episodes of agents end after so many turns", "shortened({least})")
async def shortened(tools: Tools, task: Task, settings: AgentSettings, least: Count = 2) -> Sequence[Episode]:
    """The run's agents, with the share SHARE of a group's samples, at least `least`, and at most LONGEST turns.

    Both are columns of the prompt's row, as of `last_groups`; where they are not, all samples and turns.
    """
    samples = math.ceil(float(task.row.get(SHARE, 1.0)) * task.samples - 1e-4)
    fewer = replace(task, samples=min(max(samples, least), task.samples))
    turns = min(int(task.row.get(LONGEST, 0)) or settings.limits.turns, settings.limits.turns)
    return await plays(replace(settings, limits=replace(settings.limits, turns=turns)))(tools, fewer)


@stateless_part(TURNS | {"state_key"})
def keep_uncertain_turns(batch: Trajectories, share: Fraction = 0.8) -> Trajectories:
    """Keep the turns of the highest mean entropy, ceil(share n) of the n turns of a group; others get weight 0.

    The entropy is that of the weights before the update. Of equal turns the first are kept. Needs `turns` and
    `state_key`.
    """
    mask = turn_mask(batch)
    here = jax.nn.one_hot(turn_numbers(batch), mask.shape[1])  # 0 where no action is
    mean = jnp.einsum("nl,nlk->nk", batch.need("entropy"), here) / jnp.maximum(here.sum(axis=1), 1.0)
    keys = jnp.broadcast_to(batch.group[:, None], mask.shape).reshape(-1)
    first = jnp.arange(mask.size, dtype=jnp.float32)
    rank = ranks_within(keys, mean.reshape(-1), first, mask.reshape(-1)).reshape(mask.shape)
    (count,) = bucket_sums(keys, mask.reshape(-1).astype(jnp.float32))
    gone = mask & (rank >= jnp.ceil(share * count.reshape(mask.shape) - 1e-4))
    return batch.replace(weights=batch.loss_weights * (1.0 - on_tokens(gone.astype(jnp.float32), batch)))
