from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, Given, RunSetting, method, run_settings
from jaxrl_llm.core.annotations import NonNegative, NonNegativeNumber, Positive, PositiveNumber, check_number
from jaxrl_llm.core.arguments.hyperparameters import OfRun, Ours, Recalled
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.log_ratios import needed, source
from jaxrl_llm.core.parts import Metrics, Objective, Trajectories, chain, part, weighted
from jaxrl_llm.core.repr import layout
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import total_logp
from jaxrl_llm.rewards.specs import JUDGE, component_name
from jaxrl_llm.rollouts.guidance.responses import response
from jaxrl_llm.rollouts.pairs import score_missing
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, altered, group
from jaxrl_llm.selection.rows import ranks_within, row_noise
from jaxrl_llm.utils.errors import InputError, require_choice, shown, unknown

Optimiser = Literal["crpg", "codpo", "crraft"]


@dataclass(frozen=True, repr=False)
class TaskSetting:
    """How the prompts of one task are learnt."""

    optimiser: Optimiser = "crpg"
    kl_max: float = 20.0  # nats of a whole response, above 0
    judges: tuple[str, ...] = ()  # components of the reward; one that is met is 1
    rewards: tuple[str, ...] | None = None  # components whose sum is the reward; None: the run's reward
    samples: int | None = None  # of a prompt; None: the run's group_size
    weight: float = 1.0  # of its loss

    __repr__ = layout


def _counted(config: Any, given: Given) -> bool:
    known = set(map(component_name, config.rewards))
    return all({*one.judges, *(one.rewards or ())} <= known for one in settings_of(given).values())


@method(paper="arXiv 2409.20370", test="test_judged_methods.py::test_cgpo_by_loop_and_worked_example")
@run_settings(
    RunSetting(
        "rewards",
        lambda given: tuple(sorted({f"{name}*0" for one in settings_of(given).values() for name in one.judges})),
        _counted,
        "each judge and reward of its tasks among the rewards, by name",
    )
)
def cgpo_judges(
    optimiser: Ours[Optimiser] = "crpg",
    kl_max: Ours[Positive] = 20.0,
    judges: OfRun[str | None] = None,
    tasks: OfRun[str | None] = None,
    beta: Ours[Positive] = 0.1,
    likelihood: Recalled[NonNegative] = 0.1,
    column: Ours[str] = "baseline",
) -> Algorithm:
    """Constrained Generative Policy Optimization with a mixture of judges (CGPO).

    Judges mark responses as meeting constraints or not, and only feasible ones, f = 1, which all judges accept, are
    reinforced. With R the reward, y' the response in `column`, such as that of a supervised model, l the log-ratio of a
    whole response to the reference, and c = sigmoid(R(y) - R(y')), the optimisers are

        crpg    -1/N sum over rows of (w - mean w) log pi(y),   w = c f max(1 - l / kl_max, 0), without gradient
        codpo   -log sigmoid(beta (l_chosen - l_rejected)) - likelihood log pi(chosen) / |chosen|, a mean over prompts:
                the best feasible sample against the worst of those that violate, or where none does of all; a prompt
                without a feasible sample has no pair
        crraft  -c log pi(y) of the best feasible sample with l <= kl_max, a mean over prompts that have one

    judges: names of the run's rewards, with commas between them, which are 1 where the constraint is met: rules, or
    `judge` with --rollout 'judged_rubric(...)'; with the weight 0 they are no part of R (--rewards model:PATH
    'format_match(...)*0'). The baseline counts as one that a judge accepts.

    tasks: what differs between tasks, which the column `task` of a row names, as JSON or the path of such a file:
    {"chat": {"optimiser": ..., "kl_max": ..., "judges": [...], "rewards": [...], "samples": ..., "weight": ...}}. What
    a task leaves out is as above; rewards are components whose sum is its R, samples the size of its groups, and the
    loss is the sum of the tasks' losses by their weights. The factor with kl_max and the last term of codpo are from
    memory of the paper, whose numbers we do not have.
    """
    table = settings_of({"optimiser": optimiser, "kl_max": kl_max, "judges": judges, "tasks": tasks})
    return Algorithm(
        chain(), constrained(tuple(table.values()), beta, likelihood),
        rollout=against_baseline(table, column, None if tasks is None else "task"),
    )  # fmt: skip


def settings_of(given: Mapping[str, Any]) -> dict[str, TaskSetting]:
    """The settings of each task, by name; without `tasks` of a single one. InputError for what cannot be read."""
    listed = tuple(name.strip() for name in (given["judges"] or "").split(",") if name.strip())
    plain = TaskSetting(given["optimiser"], given["kl_max"], listed)
    if (text := given["tasks"]) is None:
        return {"": plain}
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"tasks is {shown(text)}, but must be JSON, or a file of it: {error}") from None
    if not isinstance(found, dict) or not found or not all(isinstance(one, dict) for one in found.values()):
        raise InputError('tasks must be of the form {"NAME": {"optimiser": "crpg", "judges": ["NAME"]}}')
    return {str(name): _setting(name, one, plain) for name, one in found.items()}


def _setting(name: str, given: Mapping[str, Any], plain: TaskSetting) -> TaskSetting:
    for key in given:
        if key not in TaskSetting.__dataclass_fields__:
            raise unknown(f"setting of the task {name}", key, TaskSetting.__dataclass_fields__)
    listed = {key: tuple(given[key]) for key in ("judges", "rewards") if given.get(key) is not None}
    one = replace(plain, **{**given, **listed})
    require_choice(f"optimiser of the task {name}", one.optimiser, OPTIMISERS)
    check_number(f"kl_max of the task {name}", one.kl_max, above=0)
    check_number(f"weight of the task {name}", one.weight, least=0)
    check_number(f"samples of the task {name}", one.samples, least=1, whole=True, or_none=True)
    return one


class Known(NamedTuple):
    """What a batch says of its rows; without it they are of one task, feasible, and the baseline is their mean."""

    rows: jax.Array  # bool[N]: those with a reward and a baseline's
    task: jax.Array  # [N]
    feasible: jax.Array  # bool[N]
    baseline: jax.Array  # f32[N]

    @classmethod
    def of(cls, batch: Trajectories) -> Known:
        """Of a batch."""
        info, N = batch.info or {}, batch.group.shape
        baseline = info.get("baseline_reward", bucket_moments(batch.group, batch.scores)[1])
        rows = ~jnp.isnan(batch.scores) & ~jnp.isnan(baseline)
        return cls(rows, info.get("task", jnp.zeros(N)), info.get("feasible", jnp.ones(N)) > 0.5, baseline)


class Candidates(NamedTuple):
    """The rows of a batch as a task sees them; f[N] unless said."""

    rows: jax.Array  # bool[N]: of the task, and scored
    logp: jax.Array  # of whole responses, the only one with a gradient
    reference: jax.Array
    reward: jax.Array
    calibrated: jax.Array  # sigmoid(reward - that of the baseline)
    feasible: jax.Array  # bool[N]
    group: jax.Array  # int32[N]
    noise: jax.Array
    lengths: jax.Array

    @property
    def log_ratio(self) -> jax.Array:
        """l."""
        return self.logp - self.reference

    def first(self, value: jax.Array, among: jax.Array) -> jax.Array:
        """bool[N]: of each group the row of those in `among` bool[N] with the largest value, of equals one."""
        return among & (ranks_within(self.group, value, self.noise, among) == 0)

    def in_group(self, rows: jax.Array) -> jax.Array:
        """bool[N, N]: which rows of its group each row has among `rows` bool[N]."""
        return (self.group[:, None] == self.group) & rows


def crpg(found: Candidates, one: TaskSetting, beta: Any, likelihood: Any) -> jax.Array:
    """Each row's share f32[N] of the calibrated, regularised policy gradient."""
    count = jnp.maximum(jnp.sum(found.rows), 1)
    near = jnp.maximum(1 - found.log_ratio / one.kl_max, 0)
    w = jax.lax.stop_gradient(jnp.where(found.rows, found.calibrated * found.feasible * near, 0.0))
    return jnp.where(found.rows, -(w - jnp.sum(w) / count) * found.logp / count, 0.0)


def codpo(found: Candidates, one: TaskSetting, beta: Any, likelihood: Any) -> jax.Array:
    """Each row's share f32[N] of the mean loss of pairs, those of chosen rows."""
    best = found.first(found.reward, found.rows & found.feasible)
    violating = found.rows & ~found.feasible
    others = jnp.where(jnp.any(found.in_group(violating), axis=1), violating, found.rows & ~best)
    worst = found.in_group(found.first(-found.reward, others))
    place = jnp.argmax(worst, axis=1)
    better = ~found.feasible[place] | (found.reward > found.reward[place])
    pairs = best & jnp.any(worst, axis=1) & better
    z = beta * (found.log_ratio - found.log_ratio[place])
    loss = jax.nn.softplus(-z) - likelihood * found.logp / jnp.maximum(found.lengths, 1)
    return jnp.where(pairs, loss, 0.0) / jnp.maximum(jnp.sum(pairs), 1)


def crraft(found: Candidates, one: TaskSetting, beta: Any, likelihood: Any) -> jax.Array:
    """Each row's share f32[N] of the likelihood of the best feasible rows near the reference."""
    near = jax.lax.stop_gradient(found.log_ratio) <= one.kl_max
    best = found.first(found.reward, found.rows & found.feasible & near)
    return jnp.where(best, -found.calibrated * found.logp, 0.0) / jnp.maximum(jnp.sum(best), 1)


OPTIMISERS: dict[str, Callable[[Candidates, TaskSetting, Any, Any], jax.Array]] = {
    "crpg": crpg, "codpo": codpo, "crraft": crraft,
}  # fmt: skip


@part
def constrained(
    tasks: Sequence[TaskSetting] = (TaskSetting(),), beta: PositiveNumber = 0.1, likelihood: NonNegativeNumber = 0.1
) -> Objective:
    """The sum over tasks of their weights times their optimisers' losses, see `cgpo_judges`.

    Rows say by info["task"] of which task they are, by info["feasible"] whether they meet the constraints, and by
    info["baseline_reward"] what the baseline response earned. Metrics: "constrained", the loss, and "constraints/met",
    the share of feasible rows.
    """

    def shares(s: jax.Array, batch: Trajectories) -> jax.Array:
        known, reward = Known.of(batch), jnp.nan_to_num(batch.scores)
        ours = jnp.sum(weighted(source(batch, "reference"), batch), axis=1)
        calibrated = jax.nn.sigmoid(reward - jnp.nan_to_num(known.baseline))
        noise, total = row_noise(batch, 0), jnp.zeros_like(s)
        for number, one in enumerate(tasks):
            found = Candidates(
                known.rows & (known.task == number), s, ours, reward, calibrated, known.feasible, batch.group, noise,
                batch.lengths,
            )  # fmt: skip
            total += one.weight * OPTIMISERS[one.optimiser](found, one, beta, likelihood)
        return total

    def report(s: jax.Array, batch: Trajectories) -> Metrics:
        known = Known.of(batch)
        return {"constraints/met": (known.rows & known.feasible) / jnp.maximum(jnp.sum(known.rows), 1)}

    needs = needed("reference") | {"task", "feasible", "baseline_reward"}
    return coupled(total_logp, shares, "constrained", frozenset(needs), report)


@part
def against_baseline(
    tasks: Mapping[str, TaskSetting], column: str = "baseline", named: str | None = None, rollout: Rollout | None = None
) -> Rollout:
    """A rollout, `group` by default, whose episodes know their task, whether they are feasible, and the baseline.

    tasks: by name. column: the baseline response of a row, a text or messages, which is scored and not trained on.
    named: column with the task's name; None: there is a single one. An episode's reward is that of its task.
    Provides info["task"], info["feasible"] and info["baseline_reward"].
    """
    inner, places = rollout or group(), {name: number for number, name in enumerate(tasks)}

    async def program(tools: Tools, task: Task) -> list[Episode]:
        name = "" if named is None else str(task.row.get(named))
        if name not in tasks:
            raise unknown(f"task of prompt {task.prompt_id}", name, tasks)
        one = tasks[name]
        episodes = await inner.program(tools, task if one.samples is None else replace(task, samples=one.samples))
        accepted = replace(response(tools, task, column), rewards={JUDGE: 1.0})
        (baseline,) = await tools.score([accepted])
        found = await score_missing(tools, episodes)
        paid = reward_of(baseline, one)
        return [
            episode.scored(reward_of(episode, one), episode.rewards, episode.entries).with_info(
                task=float(places[name]), feasible=meets(episode, one), baseline_reward=paid
            )
            for episode in found
        ]

    most = max((one.samples or 0) for one in tasks.values())
    return altered(
        inner, program, "against a baseline", {"task", "feasible", "baseline_reward"}, filter(None, [column, named]),
        partial(against_baseline, tasks, column, named),
        at_once=False, variable_size=inner.demands.variable_size or most > 0,
        max_episodes=lambda samples: inner.rows(max(samples, most)),
    )  # fmt: skip


def reward_of(episode: Episode, one: TaskSetting) -> float:
    """The reward that a task sees."""
    return episode.score if one.rewards is None else sum(episode.rewards[name] for name in one.rewards)


def meets(episode: Episode, one: TaskSetting) -> float:
    """1 where all judges of a task accept an episode, else 0."""
    return float(all(episode.rewards[name] >= 1 - 1e-6 for name in one.judges))
