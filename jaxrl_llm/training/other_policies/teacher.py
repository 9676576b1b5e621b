"""The teacher of a run: a frozen model of the same tokens, on the run's devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import of_teacher
from jaxrl_llm.distributed import check_mesh, fully_sharded
from jaxrl_llm.learner.setup import shard
from jaxrl_llm.learner.teacher import FrozenPolicy
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.server_teacher import ServerTeacher, check_offered
from jaxrl_llm.utils.errors import InputError, shown

URLS = ("http://", "https://")


def check_teacher(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError, before a model is loaded, for a teacher that the method does not have, and where it lacks one."""
    wanted = of_teacher(algorithm.needs)
    if config.teacher is not None and not wanted:
        raise InputError(
            f"teacher is {shown(config.teacher)}, but {config.algorithm} has no teacher: leave it out, or add "
            "distillation(...) to the method's objective"
        )
    if config.teacher is None and wanted and algorithm.reference is None:
        raise InputError(f"{config.algorithm} learns from a teacher: give one, --teacher PATH")
    if config.teacher is not None and config.teacher.startswith(URLS):
        ServerTeacher(config.teacher)  # raises InputError for one that names no model
        check_offered(config.teacher, algorithm.needs, config.temperature)


def load_teacher(
    config: TrainConfig, policy: Policy, tokenizer: Any, mesh: jax.sharding.Mesh
) -> FrozenPolicy | ServerTeacher | None:
    """The run's teacher, sharded over the mesh as the policy is, or a server's; None where it is the method's own
    reference.

    InputError for a model with other tokens than the policy's.
    """
    if config.teacher is None:
        return None
    if config.teacher.startswith(URLS):
        return ServerTeacher(config.teacher)
    spread = None if mesh.size == 1 else partial(_sharded, mesh)
    own, params, other = load_policy(
        config.teacher, dtype=config.dtype, shardings=spread, context=config.context_tokens or None
    )
    check_tokens(config.teacher, policy, tokenizer, own, other)
    own = replace(own, activations=policy.activations, mesh=mesh if mesh.size > 1 else None)
    return FrozenPolicy(own, shard(params, own, mesh))


def _sharded(mesh: jax.sharding.Mesh, model: ModelConfig, shapes: Any) -> Any:
    check_mesh(model, mesh)
    return fully_sharded(shapes, model, mesh)


def check_tokens(name: str, policy: Policy, tokenizer: Any, teacher: Policy, other: Any) -> None:
    """InputError unless each id is the same token to both, and the teacher knows all of the policy's."""
    own, theirs = ({index: token for token, index in _vocabulary(x).items()} for x in (tokenizer, other))
    wrong = next((index for index in sorted(own.keys() & theirs.keys()) if own[index] != theirs[index]), None)
    if wrong is not None:
        raise InputError(
            f"the teacher {name} has another tokenizer: token {wrong} is {shown(theirs[wrong])} to it, and "
            f"{shown(own[wrong])} to the policy; take a teacher with the same tokens"
        )
    known, size = policy.config.known_tokens, teacher.config.vocab_size
    if known > size:
        raise InputError(
            f"the teacher {name} has {size} tokens, but the policy {known}: take a teacher with the same tokens"
        )


def _vocabulary(tokenizer: Any) -> Mapping[str, int]:
    return tokenizer.get_vocab() if callable(getattr(tokenizer, "get_vocab", None)) else {}
