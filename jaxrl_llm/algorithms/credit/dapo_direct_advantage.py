"""Direct Advantage Policy Optimization (not the DAPO of decoupled clips)."""

from __future__ import annotations

from asyncio import gather
from typing import Annotated

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.filters import drop_rows
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.run_settings import run_settings, several_steps
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.choices import PositiveNumber
from jaxrl_llm.core.arguments.hyperparameters import PAPER
from jaxrl_llm.core.arguments.ranges import Count, NonNegative, Positive
from jaxrl_llm.core.buckets import bucket_best
from jaxrl_llm.core.objective import Objective
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.core.transform import Metrics, Transform, chain
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.trees import grow, line_starts, state_values


@method(
    paper="arXiv 2412.18279",
    year=2025,
    test="test_direct_advantage.py::test_direct_advantage_against_its_worked_example",
    lacks={"critic": ("the value model that is fitted to the mean rewards; they are used as they are",
                      "a critic that is trained before the policy, and not beside it")},
)  # fmt: skip
@run_settings(several_steps("several gradient steps on a batch, towards log-ratios of advantage / beta", 4))
def dapo_direct_advantage(
    beta: Annotated[Positive, PAPER] = 0.02,
    continuations: Annotated[Count, PAPER] = 16,
    gap: Annotated[NonNegative, PAPER] = 0.1,
) -> Algorithm:
    """Direct Advantage Policy Optimization (not the DAPO of decoupled clips).

    Regresses the log-ratio of one reasoning step onto its advantage. A group is a state s, the prompt and the lines of
    a solution up to a random line, and different next lines a_1 ... a_M after it:

        A(s, a_i) = V(s a_i) - mean_j V(s a_j),    u(s, a) = sum over the tokens of a of log pi - log pi_old
        loss = 1/2 mean over (s, a) of (A(s, a) / beta - u(s, a))^2

    V(s a) is the mean reward of `continuations` completions, and the reward itself where a ends the solution. A state
    counts if its greatest and least values differ by `gap` at least. pi_old is the policy of the rollouts: an iteration
    of the paper labels a whole data set and then trains on it, and is a training step here. At the first gradient step
    u is 0, and the gradient is that of REINFORCE with advantages A / beta.

    The paper fits a value model to the means by cross-entropy, and takes V from it. It draws states from six solutions
    of a problem, half of them right; each group draws its own solution here.
    """
    transform = chain(group_relative(scale="none"), drop_close_values(gap))
    return Algorithm(transform, squared_to_advantage(beta), rollout=next_lines(continuations))


@part
def next_lines(continuations: Count = 16) -> Rollout:
    """Different next lines after a state, each with its value as the reward; at most `task.samples`.

    The state is a solution up to the beginning of one of its lines, all equally likely. It is given, and the next line
    alone is trained on. A line ends after its line break, or with the completion. Equal lines are one episode. The
    value is the mean reward of `continuations` completions, of those that are scored.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        solution = await grow(tools, task, Episode(task.prompt, task.prompt_id))
        starts = [0, *(place for place in line_starts(tools, solution) if place < solution.size)]
        place = starts[int(tools.random("state").integers(len(starts)))]
        state = Episode(task.prompt, task.prompt_id)
        state = state + given(solution.own.token[:place].tolist()) if place else state
        drawn = await gather(*(grow(tools, task, state, number=1 + i) for i in range(task.samples)))

        def first_line(episode: Episode) -> Episode:
            end = next((t for t in line_starts(tools, episode) if place < t < episode.size), None)
            return episode if end is None else episode.first(end)

        different = dict[tuple[int, ...], Episode]()
        for one in map(first_line, drawn):
            different.setdefault(one.tokens, one)
        lines = list(different.values())
        wanted = [1 if one.ended or one.truncated else continuations for one in lines]
        values = await state_values(tools, task, lines, wanted, 1 + task.samples)
        return [line.scored(value) for line, value in zip(lines, values, strict=True)]

    demands = Demands(variable_size=True, max_episodes=lambda G: G)
    return Rollout(program, f"next_lines({continuations})", demands=demands)


@part
def drop_close_values(gap: NonNegative) -> Transform:
    """Drop the rows of groups whose greatest and least rewards differ by less than `gap`, up to rounding."""

    def close(batch: Trajectories) -> jnp.ndarray:
        highest, lowest = bucket_best(batch.group, batch.scores), -bucket_best(batch.group, -batch.scores)
        return highest - lowest < gap - 1e-6

    return drop_rows(close)


@part
def squared_to_advantage(beta: PositiveNumber) -> Objective:
    """1/2 (A / beta - u)^2, mean over rows, u the sum of a row's log-ratios to the old policy (2412.18279)."""

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jnp.ndarray, Metrics]:
        u = jnp.sum(weighted(log_ratio_to(outputs, batch, "old"), batch), axis=1)
        A = row_means(batch.need("advantages"), batch)
        rows = totals_of(batch)["sequences"]
        return 0.5 * jnp.sum((A / beta - u) ** 2) / rows, {"log_ratio/sum": jnp.sum(u) / rows}

    return Objective(objective, frozenset({"old_logp"}))
