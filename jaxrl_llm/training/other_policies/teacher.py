"""The teacher of a run: a frozen model of the same tokens, on the run's devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import asks_for, of_teacher
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed import shardings_over
from jaxrl_llm.learner.setup import shard
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.server_teacher import ServerTeacher, check_offered
from jaxrl_llm.utils.errors import InputError, shown

Teacher = FrozenPolicy | Teachers | ServerTeacher
URLS = ("http://", "https://")
COLUMN = "teacher"  # of the data set, with the name of a row's teacher where there are several


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
    if several := teachers_of(config.teacher):
        if asks_for(algorithm.needs, "teacher_states"):
            raise InputError(
                f"{config.algorithm} compares whole distributions, with one teacher's unembedding: give top_k, or one "
                "teacher"
            )
        if server := next((path for path in several.values() if path.startswith(URLS)), None):
            raise InputError(f"the teacher {server} is a server, which teaches alone: give folders, or it alone")
    elif config.teacher is not None and config.teacher.startswith(URLS):
        ServerTeacher(config.teacher)  # raises InputError for one that names no model
        check_offered(config.teacher, algorithm.needs, config.temperature)


def teachers_of(text: str | None) -> dict[str, str]:
    """The paths of several teachers by their names, given as NAME=PATH,NAME=PATH; {} for one, and for none.

    >>> teachers_of("maths=runs/a,code=runs/b"), teachers_of("runs/lr=1e-5")
    ({'maths': 'runs/a', 'code': 'runs/b'}, {})

    InputError for a name that is given twice.
    """
    if text is None or text.startswith(URLS) or Path(text).exists():
        return {}
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and path for name, _, path in parts):
        return {}
    found = {name: path for name, _, path in parts}
    if len(found) < len(parts):
        raise InputError(f"teacher is {shown(text)}, which has a name twice: name each teacher once")
    return found


def check_column_of_teachers(config: TrainConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """InputError, before a model is loaded, where rows do not say which of several teachers is theirs."""
    if teachers := teachers_of(config.teacher):
        for number, row in enumerate(rows if isinstance(rows, list) else rows[:1]):
            _place_of(row, number, tuple(teachers))


def _place_of(row: Mapping[str, Any], number: int, names: Sequence[str]) -> int:
    if row.get(COLUMN) not in names:
        raise InputError(
            f"prompt {number} has {shown(row.get(COLUMN))} in the column {COLUMN!r}: give one of the teachers "
            f"{', '.join(names)}"
        )
    return names.index(row[COLUMN])


def for_teacher(
    teacher: Teacher | None, batch: Trajectories, rows: Sequence[Mapping[str, Any]], needs: frozenset[str]
) -> Trajectories:
    """A batch on the host with what is known before its update: what a server says of it, or which of several teachers
    each row has, by the column of its prompt's row."""
    if isinstance(teacher, ServerTeacher):
        return teacher.fill_in(batch, needs)
    if isinstance(teacher, Teachers):
        numbers = np.asarray(batch.prompt_id).tolist()
        places = {number: _place_of(rows[number], number, teacher.names) for number in set(numbers)}
        which: Any = np.asarray([places[number] for number in numbers], np.int32)
        return batch.with_info(teacher=which)
    return batch


def weights_of(config: TrainConfig, teacher: Teacher | None) -> list[tuple[str, FrozenPolicy]]:
    """The teachers that a run has loaded, with their paths."""
    if isinstance(teacher, Teachers):
        return list(zip(teachers_of(config.teacher).values(), teacher.policies, strict=True))
    return [(config.teacher or "", teacher)] if isinstance(teacher, FrozenPolicy) else []


def load_teacher(config: TrainConfig, policy: Policy, tokenizer: Any, mesh: Mesh) -> Teacher | None:
    """The run's teacher or teachers, sharded over the mesh as the policy is, or a server's; None where it is the
    method's own reference.

    InputError for a model with other tokens than the policy's.
    """
    if config.teacher is None:
        return None
    if config.teacher.startswith(URLS):
        return ServerTeacher(config.teacher)
    if several := teachers_of(config.teacher):
        found = (_loaded(path, config, policy, tokenizer, mesh) for path in several.values())
        return Teachers(tuple(several), tuple(found))
    return _loaded(config.teacher, config, policy, tokenizer, mesh)


def _loaded(path: str, config: TrainConfig, policy: Policy, tokenizer: Any, mesh: Mesh) -> FrozenPolicy:
    spread, context = shardings_over(mesh), config.context_tokens or None
    own, params, other = load_policy(path, dtype=config.dtype, shardings=spread, context=context)
    check_tokens(path, policy, tokenizer, own, other)
    own = replace(own, activations=policy.activations, mesh=mesh if mesh.size > 1 else None)
    return FrozenPolicy(own, shard(params, own, mesh))


def check_tokens(name: str, policy: Policy, tokenizer: Any, teacher: Policy, other: Any) -> None:
    """InputError unless each id is the same token to both, and the teacher knows all of the policy's."""
    vocabularies = (x.get_vocab() if callable(getattr(x, "get_vocab", None)) else {} for x in (tokenizer, other))
    own, theirs = ({index: token for token, index in one.items()} for one in vocabularies)
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
