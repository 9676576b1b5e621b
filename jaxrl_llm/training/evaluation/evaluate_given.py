"""Evaluation of methods that learn from given responses: their loss and metrics on held-out rows, without sampling."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, with_totals
from jaxrl_llm.core.transform import Metrics, Objective
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed.mesh import to_mesh
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.teacher import with_head
from jaxrl_llm.learner.update import prepare
from jaxrl_llm.models.outputs import DURING_UPDATE, wanted_of
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params
from jaxrl_llm.reporting.statistics import wilson_interval
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import same_prompts
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.full_size import at_full_size
from jaxrl_llm.training.other_policies.reference import reference_now
from jaxrl_llm.training.other_policies.teacher import for_teacher
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.training.setup import RunParts

# Metrics that are shares, and of how many: of a number of rows of the data set, and a mask of actions.
ACCURACIES: dict[str, Callable[[int, np.ndarray], int]] = {
    "rewards/accuracies": lambda rows, action: rows,
    "mean_token_accuracy": lambda rows, action: int(action.sum()),
}


def evaluate_given(config: TrainConfig, parts: RunParts, params: Params) -> tuple[dict[str, Any], Scored]:
    """Figures of the held-out rows under the method's objective, and these rows.

    "accuracy" is the first metric of ACCURACIES, with the interval "low" to "high"; "loss" and the other metrics of the
    objective have their own names. Memory is that of a micro-batch of the run.
    """
    held_out, algorithm, policy = parts.held_out, parts.algorithm, parts.policy
    assert held_out is not None
    scored = score_given_rows(config, parts, held_out, np.arange(len(held_out.ids)), params)
    usual = config.prompts_per_step * config.group_size
    batch = at_full_size(parts.kept(scored.batch), usual, config.group_size)
    slices = len(batch.tokens) // usual * config.minibatches * config.micro_batches
    steps = plan_steps(batch, micro_batches=slices, mesh=parts.mesh, runs=policy.config.recurrent)
    reference = reference_now(parts.reference, None, parts.frozen)
    batch = for_teacher(parts.teacher, batch, held_out.rows, algorithm.needs)
    teacher = parts.computed_teacher
    batch = provide(policy, algorithm.needs, params, reference, to_mesh(batch, parts.mesh), steps, teacher=teacher)
    _, batch = prepare(algorithm.transform, algorithm.transform.init(), batch)
    if "measured" in (batch.info or {}):  # no update takes these rows
        batch = batch.replace(weights=batch.loss_weights * (batch.need("measured") == 0)[:, None])
    policy, head = with_head(policy, algorithm.objective.needs, None, teacher, reference)
    wanted = wanted_of(algorithm.objective.needs, DURING_UPDATE)
    outputs = outputs_of(policy, combine(head, params), batch, steps, wanted)
    loss, found = _value(algorithm.objective, outputs, batch)
    metrics = {name: float(x) for name, x in found.items()}
    action, rows = np.asarray(scored.batch.action_mask), len(held_out.ids)
    shares = ((metrics[name], count(rows, action)) for name, count in ACCURACIES.items() if name in metrics)
    accuracy, of = next(shares, (math.nan, 0))
    low, high = (0.0, 1.0) if math.isnan(accuracy) else wilson_interval(round(accuracy * of), of)
    figures = {
        "prompts": rows, "samples": 1, "accuracy": accuracy, "low": low, "high": high, "loss": float(loss),
        "unscored": 0, "length": float(action.sum(axis=1).mean()),
        "truncated": float(np.asarray(scored.batch.truncated).mean()), **metrics,
    }  # fmt: skip
    return figures, scored


@partial(jax.jit, static_argnames=("objective",))
def _value(objective: Objective, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
    loss, metrics = objective(outputs, with_totals(batch))
    return jnp.asarray(loss), metrics


def score_given_rows(
    config: TrainConfig, parts: RunParts, prompts: PromptSet, places: np.ndarray, params: Params
) -> Scored:
    """The scored episodes of the rows at some places int[n], one step of them."""
    chosen = places.astype(np.int32)
    source = experience(
        Experience(
            parts.policy, prompts, parts.rewards, same_prompts(chosen), config.sampling,
            rollout_of(config, parts.algorithm),
            prompts_per_step=len(chosen), group_size=config.group_size, time_limit=config.rollout_time_limit,
            mesh=parts.sampler, hosts=parts.hosts,
        )
    )  # fmt: skip
    return source.next(source.init(), params, jax.random.key(config.seed), 0)[0].scored
