"""The teacher of a run: frozen models of the same tokens, on the run's devices, or one behind an OpenAI-compatible
server, which says log-probabilities of a batch's tokens, and the most probable ones."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import OF_TEACHER, asks_for, of_teacher, value_of, values_of
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed import shardings_over
from jaxrl_llm.learner.setup import shard
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.post import posted

OFFERED = ("teacher_token_logp", "teacher_top")
MOST_ROWS, AT_ONCE, KEPT = 16, 4, 100_000  # rows of a request; requests at a time; rows whose answers are kept
PAUSES = (0.2, 1.0, 5.0)  # seconds before each repetition
TIME_LIMIT = 600.0  # seconds for an answer


class _Answer(NamedTuple):
    """What the server says of a row of T tokens; of the first one it says nothing."""

    logp: np.ndarray  # f32[T]
    top: np.ndarray  # f32[T, 2, K], ids and log-probabilities, the most probable first


def check_offered(url: str, needs: Iterable[str], temperature: float) -> None:
    """InputError for what a server does not say: more than its most probable tokens, and other temperatures than 1."""
    asked = [need for need in needs if value_of(need)[0] in set(OF_TEACHER) - set(OFFERED)]
    if asked:
        raise InputError(
            f"the teacher {url} says its most probable tokens only, but {', '.join(sorted(asked))} is needed: give "
            "top_k, at most as many as the server allows, with beta 0 or support teacher"
        )
    if temperature != 1:
        raise InputError(f"the teacher {url} samples at the temperature 1, but the run at {temperature:g}: give 1")


class ServerTeacher:
    """A server with /completions that echoes the prompt's tokens with log-probabilities, as vLLM's.

    url: http://HOST:PORT/v1#MODEL. Answers are kept by the content of a row.
    """

    def __init__(self, url: str) -> None:
        self.url, _, self.model = url.partition("#")
        if not self.model:
            raise InputError(f"the teacher {url} names no model: add it, {url}#MODEL")
        self.known: OrderedDict[str, _Answer] = OrderedDict()

    def fill_in(self, batch: Trajectories, needs: Iterable[str]) -> Trajectories:
        """A batch on the host with what the server says of its actions, of the needs that are OFFERED.

        InputError, in one line, for a server that does not answer, or says something else.
        """
        needs = list(needs)
        count = int(max(values_of(needs, "teacher_top"), default=0))
        mask, action = np.asarray(batch.token_mask), np.asarray(batch.action_mask)
        other = (batch.info or {}).get("teacher_tokens")
        places = np.cumsum(mask, axis=1) - 1
        rows = []
        for i in np.flatnonzero(action.any(axis=1)).tolist():
            own = np.asarray(batch.tokens)[i][mask[i]]
            read = own
            if other is not None:
                padded = np.asarray(other)[i]
                read = padded[padded >= 0].astype(int)
            if len(read):  # rows of both end with the actions
                rows.append((i, read.tolist(), len(read) - len(own)))
        logp = np.zeros(mask.shape, np.float32)
        top = np.zeros((*mask.shape, 2, count), np.float32)
        for (i, _, shift), found in zip(rows, self.answers([read for _, read, _ in rows], count), strict=True):
            at = places[i][action[i]] + shift
            logp[i, action[i]], top[i, action[i]] = found.logp[at], found.top[at]
        names = {value_of(need)[0] for need in needs}
        given: dict[str, Any] = {"teacher_token_logp": logp, "teacher_top": top}
        return batch.with_info(**{name: x for name, x in given.items() if name in names})

    def answers(self, rows: Sequence[Sequence[int]], count: int) -> list[_Answer]:
        """What the server says of rows of token ids, of which it is asked for those that it has not seen."""
        keys = [hashlib.sha256(json.dumps([row, count]).encode()).hexdigest() for row in rows]
        new = {key: row for key, row in zip(keys, rows, strict=True) if key not in self.known}
        parts = [list(new.items())[i : i + MOST_ROWS] for i in range(0, len(new), MOST_ROWS)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda part: self._ask([row for _, row in part], count), parts)
            for part, some in zip(parts, found, strict=True):
                self.known.update(zip((key for key, _ in part), some, strict=True))
        out = [self.known[key] for key in keys]
        while len(self.known) > KEPT:
            self.known.popitem(last=False)
        return out

    def _ask(self, rows: Sequence[Sequence[int]], count: int) -> list[_Answer]:
        body = {
            "model": self.model, "prompt": rows, "max_tokens": 1, "temperature": 0, "echo": True,
            "logprobs": max(count, 1), "return_tokens_as_token_ids": True,
        }  # fmt: skip
        try:
            said = posted(f"{self.url.rstrip('/')}/completions", body, dict, pauses=PAUSES, time_limit=TIME_LIMIT)
            choices = sorted(said["choices"], key=lambda one: one["index"])
            found = [_read(one["logprobs"], row, count) for one, row in zip(choices, rows, strict=True)]
        except RuntimeError as why:
            raise InputError(f"the teacher {self.url} does not answer ({why}): start it, and resume the run") from None
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"the teacher {self.url} does not say log-probabilities by token id ({error!r}): it must know echo, "
                "logprobs and return_tokens_as_token_ids of /completions, as vLLM does"
            ) from None
        return found


def _read(said: Any, row: Sequence[int], count: int) -> _Answer:
    """The answer for a row's tokens; ValueError where the server read others, or says too few."""
    if [_id(token) for token in said["tokens"][: len(row)]] != list(row):
        raise ValueError("it read other tokens")
    logp, top = np.zeros(len(row), np.float32), np.zeros((len(row), 2, count), np.float32)
    for t in range(1, len(row)):
        logp[t] = said["token_logprobs"][t]
        best = sorted(((x, _id(token)) for token, x in said["top_logprobs"][t].items()), reverse=True)[:count]
        if len(best) < count:
            raise ValueError(f"{len(best)} of {count} tokens")
        top[t, 0], top[t, 1] = [token for _, token in best], [x for x, _ in best]
    return _Answer(logp, top)


def _id(token: str) -> int:
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"token {token!r}")
    return int(number)


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


def teacher_list(config: TrainConfig, teacher: Teacher | None) -> list[tuple[str, FrozenPolicy]]:
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
    own, params, other = load_policy(
        path, dtype=config.dtype, shardings=shardings_over(mesh), context=config.context_tokens or None
    )
    _check_tokens(path, policy, tokenizer, own, other)
    own = replace(own, activations=policy.activations, mesh=mesh if mesh.size > 1 else None)
    return FrozenPolicy(own, shard(params, own, mesh))


def _check_tokens(name: str, policy: Policy, tokenizer: Any, teacher: Policy, other: Any) -> None:
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
