from asyncio import gather

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.advantages.returns import needed_values
from jaxrl_llm.algorithms.method import Algorithm, beside, exactly, method, run_settings, several_steps
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours, Paper, Positive, PositiveNumber
from jaxrl_llm.core.buckets import bucket_best, bucket_moments
from jaxrl_llm.core.parts import Metrics, control, counted_part, objective_part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.objectives.values import needed_output
from jaxrl_llm.rollouts.episode import given
from jaxrl_llm.rollouts.programs import Demands, Episode, Task, Tools, program_part
from jaxrl_llm.rollouts.trees import grow, line_starts, sampled_state_values


@method(
    paper="arXiv 2412.18279",
    year=2025,
    test="test_direct_advantage.py::test_direct_advantage_against_its_worked_example",
)
@beside("phases", "a critic that is fitted to a whole data set before the policy, and not beside it", "critic_alone")
@beside("balanced", "states of six solutions of a problem, half of them right", "nothing yet")
@run_settings(
    several_steps("several gradient steps on a batch, towards log-ratios of advantage / beta", 4),
    exactly(
        "critic_steps", 0, "a critic that learns by cross-entropy from the first step on, alone for critic_alone steps"
    ),
)
def dapo_direct_advantage(
    beta: Paper[Positive] = 0.02,
    continuations: Paper[Count] = 16,
    gap: Paper[NonNegative] = 0.1,
    critic_alone: Ours[NonNegativeInt] = 20,
    value_coefficient: Ours[Positive] = 1.0,
) -> Algorithm:
    """Direct Advantage Policy Optimization (not the DAPO of decoupled clips).

    Regresses the log-ratio of one reasoning step onto its advantage. A group is a state s, the prompt and the lines of
    a solution up to a random line, and different next lines a_1 ... a_M after it:

        A(s, a_i) = V(s a_i) - mean_j V(s a_j),    u(s, a) = sum over the tokens of a of log pi - log pi_old
        loss = 1/2 mean over (s, a) of (A(s, a) / beta - u(s, a))^2

    V is a critic, the sigmoid of its head at the state after a, and where a ends the solution the reward itself. It
    learns by cross-entropy from m(s a), the mean reward of `continuations` completions, at the states of each step:

        value loss = mean over (s, a) that does not end of -(m log V(s a) + (1 - m) log(1 - V(s a)))

    value_coefficient times it is added. V is that of before the step, which has not seen the step's m. Rewards are
    within 0 and 1. A state counts if its greatest and least values differ by `gap` at least, and no state does in the
    first critic_alone steps, in which the critic alone learns. pi_old is the policy of the rollouts: an iteration of
    the paper labels a whole data set, fits the critic and then the policy to it, and is a training step here. At the
    first gradient step u is 0, and the gradient is that of REINFORCE with advantages A / beta.

    The paper draws states from six solutions of a problem, half of them right; each group draws its own solution here.
    """
    objective = squared_to_advantage(beta) + value_coefficient * soft_value_loss()
    return Algorithm(critic_advantages(gap, critic_alone), objective, rollout=next_lines(continuations))


LINE_TOKENS = "line_tokens"


@program_part(
    "next_lines({continuations})", {LINE_TOKENS}, demands=Demands(variable_size=True, max_episodes=lambda G: G)
)
async def next_lines(tools: Tools, task: Task, continuations: Count = 16) -> list[Episode]:
    """Different next lines after a state, each with its value as the reward; at most `task.samples`.

    The state is a solution up to the beginning of one of its lines, all equally likely. It is given, and the next line
    alone is trained on. A line ends after its line break, or with the completion. Equal lines are one episode. The
    value is the mean reward of `continuations` completions, of those that are scored. An episode that goes on has one
    token more, so that a critic reads the state after the line there; info["line_tokens"] is the number of the row's
    first actions that are the line, 0 for one that ends the solution.
    """
    solution = await grow(tools, task, Episode(task.prompt, task.prompt_id))
    starts = [0, *(place for place in line_starts(tools, solution) if place < solution.size)]
    place = starts[int(tools.random("state").integers(len(starts)))]
    state = Episode(task.prompt, task.prompt_id)
    state = state + given(solution.own.token[:place].tolist()) if place else state
    drawn = await gather(*(grow(tools, task, state, number=1 + i) for i in range(task.samples)))

    def first_line(episode: Episode) -> tuple[Episode, Episode]:
        """The episode's first line, and the same with a token more where it goes on."""
        end = next((t for t in line_starts(tools, episode) if place < t < episode.size), None)
        if end is None:
            return episode, episode.with_info(line_tokens=0.0)
        return episode.first(end), episode.first(end + 1).with_info(line_tokens=float(end - place))

    different = dict[tuple[int, ...], tuple[Episode, Episode]]()
    for line, longer in map(first_line, drawn):
        different.setdefault(line.tokens, (line, longer))
    lines = [line for line, _ in different.values()]
    wanted = [1 if one.ended or one.truncated else continuations for one in lines]
    values = await sampled_state_values(tools, task, lines, wanted, 1 + task.samples)
    return [longer.scored(value) for (_, longer), value in zip(different.values(), values, strict=True)]


def after_line(batch: Trajectories) -> jnp.ndarray:
    """bool[N, L]: the action before which the critic reads the state after a row's line; none where the line ends it.

    By info["line_tokens"], see `next_lines`; none without it, and where it is NaN, as of a group that failed.
    """
    count = batch.entry(LINE_TOKENS, 0)
    return batch.action_mask & (batch.action_index == count[:, None]) & (count > 0)[:, None]


@counted_part(needed_values() | {LINE_TOKENS})
def critic_advantages(
    step: jnp.ndarray, batch: Trajectories, gap: NonNegative = 0.1, alone: NonNegativeInt = 20
) -> Trajectories:
    """A = V - the mean of V over the group; V is sigmoid(the critic's value after the line), else the row's reward.

    Rows of groups whose greatest and least V differ by less than `gap`, up to rounding, are dropped, in the first
    `alone` steps all rows, and always the token after a line. Writes the control "valued_rows", in how many rows the
    critic reads the state after the line.
    """
    at = after_line(batch)
    there = jnp.any(at, axis=1)
    read = jax.nn.sigmoid(jnp.sum(jnp.where(at, batch.need("values"), 0.0), axis=1))
    V = jnp.where(jnp.isnan(batch.scores), jnp.nan, jnp.where(there, read, batch.scores))
    _, mean, _ = bucket_moments(batch.group, V)
    spread = bucket_best(batch.group, V) + bucket_best(batch.group, -V)
    kept = (spread >= gap - 1e-6) & (step >= alone)
    A = jnp.where(jnp.isnan(V), 0.0, V - mean)[:, None] * batch.action_mask
    weights = batch.loss_weights * ~at * kept[:, None]
    count = jnp.sum(there & ~jnp.isnan(V)).astype(jnp.float32)
    return batch.replace(advantages=A, weights=weights).with_controls(valued_rows=count)


@objective_part(needed_values() | {LINE_TOKENS})
def soft_value_loss(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jnp.ndarray, Metrics]:
    """The mean cross-entropy of sigmoid(V) after a row's line (`after_line`) and the row's reward, within 0 and 1.

    Over the rows that have both, "valued_rows" in the whole batch. Metrics: "value/loss", "value/mean", and
    "value/error", the mean of abs(sigmoid(V) - reward).
    """
    values = needed_output(outputs, "values", "the value loss")
    at = after_line(batch)
    read = jnp.any(at, axis=1) & ~jnp.isnan(batch.scores)
    v = jnp.sum(jnp.where(at, values, 0.0), axis=1)
    m = jnp.where(read, batch.scores, 0.0)
    count = jnp.maximum(control(batch, "valued_rows"), 1)

    def mean(each: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum(jnp.where(read, each, 0.0)) / count

    loss = mean(optax.sigmoid_binary_cross_entropy(v, m))
    p = jax.nn.sigmoid(v)
    return loss, {"value/loss": loss, "value/mean": mean(p), "value/error": mean(jnp.abs(p - m))}


@objective_part({"old_logp"})
def squared_to_advantage(
    outputs: PolicyOutputs, batch: Trajectories, beta: PositiveNumber
) -> tuple[jnp.ndarray, Metrics]:
    """1/2 (A / beta - u)^2, mean over rows, u the sum of a row's log-ratios to the old policy (2412.18279)."""
    u = jnp.sum(weighted(log_ratio_to(outputs, batch, "old"), batch), axis=1)
    A = row_means(batch.need("advantages"), batch)
    rows = totals_of(batch)["sequences"]
    return 0.5 * jnp.sum((A / beta - u) ** 2) / rows, {"log_ratio/sum": jnp.sum(u) / rows}
