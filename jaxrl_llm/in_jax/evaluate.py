"""The success rate of a policy in a task."""

from __future__ import annotations

from functools import partial

import jax

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.in_jax.rollout import sample_batch
from jaxrl_llm.in_jax.settings import LabSettings, make_policy
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.models.checks import check_key, check_params
from jaxrl_llm.models.policy import Params, Policy


def evaluate_task(
    params: Params, task: Task, settings: LabSettings, key: Array, prompts: int = 1024, samples: int = 1
) -> dict[str, Array]:
    """f32[prompts * samples] each: "reward" and its components, the true ones, of so many sampled completions of each
    of fresh prompts, those of a prompt next to each other; compiled."""
    policy = make_policy(task, settings)
    check_params(policy, params)
    check_key(key)
    return _evaluate(policy, params, task._replace(observe=None), key, prompts, samples)


@partial(jax.jit, static_argnums=(0, 2, 4, 5))
def _evaluate(policy: Policy, params: Params, task: Task, key: Array, prompts: int, samples: int) -> dict[str, Array]:
    batch, _ = sample_batch(policy, params, task, key, 0, prompts, samples)
    return {"reward": batch.need("reward"), **(batch.rewards or {})}
