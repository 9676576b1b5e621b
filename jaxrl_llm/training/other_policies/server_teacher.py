"""A teacher behind an OpenAI-compatible server: log-probabilities of a batch's tokens, and the most probable ones."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.needs import OF_TEACHER, value_of, values_of
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.post import posted

OFFERED = ("teacher_token_logp", "teacher_top")
MOST_ROWS, AT_ONCE, KEPT = 16, 4, 100_000  # rows of a request; requests at a time; rows whose answers are kept
PAUSES = (0.2, 1.0, 5.0)  # seconds before each repetition
TIME_LIMIT = 600.0  # seconds for an answer


class Answer(NamedTuple):
    """What the server says of a row of T tokens; of the first one it says nothing."""

    logp: np.ndarray  # f32[T]
    top: np.ndarray  # f32[T, 2, K], ids and log-probabilities, the most probable first


def check_offered(url: str, needs: Iterable[str], temperature: float) -> None:
    """InputError for what a server does not say: more than its most probable tokens, and other temperatures than 1."""
    asked = [need for need in needs if value_of(need)[0] in OF_TEACHER and value_of(need)[0] not in OFFERED]
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
        self.known: OrderedDict[str, Answer] = OrderedDict()

    def fill_in(self, batch: Trajectories, needs: Iterable[str]) -> Trajectories:
        """A batch on the host with what the server says of its actions, of the needs that are OFFERED.

        InputError, in one line, for a server that does not answer, or says something else.
        """
        needs = list(needs)
        count = int(max(values_of(needs, "teacher_top"), default=0))
        mask, action = np.asarray(batch.token_mask), np.asarray(batch.action_mask)
        other = (batch.info or {}).get("teacher_tokens")
        rows, places = [], np.cumsum(mask, axis=1) - 1
        for i in np.flatnonzero(action.any(axis=1)).tolist():
            own = np.asarray(batch.tokens)[i][mask[i]]
            read = own if other is None else np.asarray(other)[i][np.asarray(other)[i] >= 0].astype(int)
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

    def answers(self, rows: Sequence[Sequence[int]], count: int) -> list[Answer]:
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

    def _ask(self, rows: Sequence[Sequence[int]], count: int) -> list[Answer]:
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


def _read(said: Any, row: Sequence[int], count: int) -> Answer:
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
    return Answer(logp, top)


def _id(token: str) -> int:
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"token {token!r}")
    return int(number)
