"""Rollouts that take responses from the data set: pairs, single verdicts, texts, and demonstrations.

Nothing is sampled, so that no engine is built. Responses are texts or messages of the assistant, one or several turns;
their tokens and the token that ends a turn are actions, and what others say between them is not. As they were not
sampled, their `behaviour_logp` is 0: methods read their log-probabilities as `old_logp`, or not at all.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxrl_llm.core.arguments.ranges import NonNegativeInt
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.data.chat.encode import encode_plain, has_chat_template, is_conversation, whole_text
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.programs import group, program_part
from jaxrl_llm.utils.errors import InputError, shown

ReadResponse = Callable[[Tools, Task, str], Episode]  # of a column


def given_rows(most: int | None = None, **others: Any) -> Demands:
    """The demands of a program whose episodes are those of a row, at most so many; None: as many as a group has."""
    return Demands(variable_size=True, max_episodes=lambda G: G if most is None else most, given=True, **others)


@program_part("chosen_and_rejected", columns=("chosen", "rejected"), demands=given_rows(2))
async def chosen_and_rejected(tools: Tools, task: Task, read: ReadResponse | None = None) -> list[Episode]:
    """The columns `chosen` and `rejected` of each row as two episodes of a group, with the rewards 1 and 0.

    read: (tools, task, column) -> Episode; default `response`.

    The entry info["margin"] is the column `margin`, where there is one. The group has the reward NaN, which no method
    trains on, and info["equal"] 1, where both are the same after they were cut.
    """
    chosen, rejected = ((read or response)(tools, task, column) for column in ("chosen", "rejected"))
    if (margin := task.row.get("margin")) is not None:
        if not isinstance(margin, int | float):
            raise InputError(f"prompt {task.prompt_id} has the margin {shown(margin)}, but it must be a number")
        chosen = chosen.with_info(margin=float(margin))
    same = float(chosen.tokens == rejected.tokens)
    rewards = (float("nan"),) * 2 if same else (1.0, 0.0)
    return [
        one.with_info(equal=same).scored(reward, {GIVEN: reward})
        for one, reward in zip((chosen, rejected), rewards, strict=True)
    ]


@part
def judged_completions(mismatched: bool = False) -> Rollout:
    """The column `completion` of each row as an episode, with the reward 1 where its `label` is true, else 0.

    mismatched: a second episode is the next completion of the step that belongs to another prompt, with
    info["measured"] 1: it estimates how far the policy is from the reference, and is not trained on.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        own = response(tools, task, "completion")
        label = task.row.get("label")
        if not isinstance(label, bool | int) or label not in (0, 1):
            raise InputError(f"prompt {task.prompt_id} has the label {shown(label)}, but it must be true or false")
        own = own.scored(float(label), {GIVEN: float(label)})
        if not mismatched:
            return [own]
        brought = [list(own.prompt), [(one.tokens.token.tolist(), one.sampled) for one in own.segments]]
        met = await tools.meet(brought, name="completions")
        others = [*met.values[met.place + 1 :], *met.values[: met.place]]
        segments = next((parts for prompt, parts in others if tuple(prompt) != own.prompt), None)
        if segments is None:
            raise InputError(
                "a step needs completions of two prompts at least, to compare each with another's: raise "
                "prompts_per_step, or take another method"
            )
        pieces = (given(ids, tools.step)._replace(sampled=sampled) for ids, sampled in segments)
        other = Episode(own.prompt, own.prompt_id, sample=1, segments=tuple(pieces), ended=True)
        return [own.with_info(measured=0.0), other.with_info(measured=1.0).scored(float("nan"), {GIVEN: float("nan")})]

    return Rollout(
        program, "judged_completions", frozenset({"measured"}) if mismatched else frozenset(), ("completion", "label"),
        given_rows(1 + mismatched, meets=mismatched),
    )  # fmt: skip


@program_part("written_completions", columns=["{column}|completion|answer"], demands=given_rows(1))
async def written_completions(
    tools: Tools, task: Task, column: str | None = None, turns: Literal["last", "all"] = "last"
) -> list[Episode]:
    """The text or messages in a column of each row as an episode with the reward 1.

    column: default completion, or answer in rows without one; of a conversation in one column they are what follows
    the prompt. turns: last, or all of the assistant, also those in the prompt. Raises InputError for other turns.
    """
    if column is None:
        column = "answer" if task.row.get("completion") is None else "completion"
    return [response(tools, task, column, earlier=turns == "all").scored(1.0, {GIVEN: 1.0})]


@program_part("listed_completions", columns=("completions", "labels"), demands=given_rows())
async def listed_completions(tools: Tools, task: Task) -> list[Episode]:
    """The column `completions` of each row as the episodes of a group, with the rewards of the column `labels`.

    A row has as many as the run's group_size at most. A label that is null makes a completion unscored.
    """
    said, labels = task.row.get("completions"), task.row.get("labels")
    if not isinstance(said, list | tuple) or not isinstance(labels, list | tuple) or len(said) != len(labels):
        raise InputError(
            f"prompt {task.prompt_id} has the completions {shown(said)} and the labels {shown(labels)}, but must "
            "have two lists of one length"
        )
    if not 1 <= len(said) <= task.samples:
        raise InputError(
            f"prompt {task.prompt_id} has {len(said)} completions, but must have 1 to {task.samples}: set "
            "group_size to the longest list"
        )
    if wrong := [x for x in labels if x is not None and not isinstance(x, bool | int | float)]:
        raise InputError(f"prompt {task.prompt_id} has the label {shown(wrong[0])}, but it must be a number")
    numbers = [float("nan") if x is None else float(x) for x in labels]
    tasks = [dataclasses.replace(task, row={**task.row, "completion": one}) for one in said]
    return [
        dataclasses.replace(response(tools, one, "completion"), sample=at).scored(number, {GIVEN: number})
        for at, (one, number) in enumerate(zip(tasks, numbers, strict=True))
    ]


def response(tools: Tools, task: Task, column: str, earlier: bool = False) -> Episode:
    """The response in a column as an episode, cut and `truncated` where it exceeds the task's limit.

    earlier: what the assistant says in the prompt, after another, are actions too, and count towards the limit. Raises
    InputError for another value than a text or messages that end with the assistant, and where a chat template does
    not keep what it wrote before a later turn.
    """
    said, end, prompt = task.row.get(column), getattr(tools.tokenizer, "eos_token_id", None), task.prompt
    stop = [] if end is None else [end]
    pieces: list[tuple[Sequence[int], bool]] = []
    if isinstance(said, str) and whole_text(task.row) is not None:  # its first token is the prompt
        rest = encode_plain(tools.tokenizer, said)[1:]
        pieces.append((rest if rest[-1:] == stop else [*rest, *stop], True))
    elif isinstance(said, str) and not _talks(tools, task):
        pieces.append(([*tools.encode(said), *stop], True))
    elif isinstance(said, str) or is_conversation(said):
        turns = [{"role": "assistant", "content": said}] if isinstance(said, str) else list(said or ())
        asked = task.row["prompt"]
        talk = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        speaks = [at for at, message in enumerate(talk) if at and message["role"] == "assistant"]
        if earlier and speaks:
            talk, turns = talk[: speaks[0]], [*talk[speaks[0] :], *turns]
            prompt = tools.prompt(talk, task.row)
        now: list[int] = list(prompt)
        for number, message in enumerate(turns):
            if message["role"] == "assistant":
                if number:
                    opening = _after(now, tools.prompt(talk, task.row), task, column)
                    pieces.append((opening, False))
                    now += opening
                written = [*_after(now, tools.prompt([*talk, message], task.row), task, column), *stop]
                pieces.append((written, True))
                now += written
            talk.append(message)
        if turns[-1]["role"] != "assistant":
            raise InputError(f"prompt {task.prompt_id}: {column} ends with the role {turns[-1]['role']}, not assistant")
    else:
        raise InputError(f"prompt {task.prompt_id} has no text or messages in the column {column!r}: {shown(said)}")
    room, segments = task.limit, []
    for ids, sampled in pieces:
        segments.append(given(ids[:room], tools.step)._replace(sampled=sampled))
        room -= len(segments[-1].tokens.token)
    whole = sum(len(ids) for ids, _ in pieces) <= task.limit
    kept = tuple(one for one in segments if len(one.tokens.token))
    return Episode(prompt, task.prompt_id, segments=kept, ended=whole, truncated=not whole)


def _talks(tools: Tools, task: Task) -> bool:
    """Whether the row's prompt was written as a conversation."""
    prompt = task.row["prompt"]
    if not isinstance(prompt, str):
        return is_conversation(prompt)
    return (
        has_chat_template(tools.tokenizer)
        and tools.prompt([{"role": "user", "content": prompt}], task.row) == task.prompt
    )


def _after(now: Sequence[int], longer: Sequence[int], task: Task, column: str) -> list[int]:
    """The tokens of `longer` that follow those of `now`."""
    if list(longer[: len(now)]) != list(now):
        raise InputError(
            f"prompt {task.prompt_id}: the chat template does not write {column} after what it wrote of earlier turns: "
            "end the response with its first turn, or choose another --prompt-format"
        )
    return list(longer[len(now) :])


NEED = "demonstrated"


def demonstration(tools: Tools, task: Task, column: str) -> Episode:
    """The row's `response` in a column as an episode with info["demonstrated"] 1."""
    return response(tools, task, column).with_info(demonstrated=1.0)


@program_part("demonstrated({column})", {NEED}, ["{column}"], Demands(variable_size=True, max_episodes=lambda G: 1))
async def demonstrated(tools: Tools, task: Task, column: str = "answer") -> list[Episode]:
    """The demonstration of each prompt alone: nothing is sampled. A step has `prompts_per_step` of them.

    column: of the data set, with the texts. Set group_size to 1. Provides info["demonstrated"], 1 for these episodes.
    """
    return [demonstration(tools, task, column)]


@program_part("demonstrated_before({step}, {column})", {NEED}, ["{column}"], Demands(variable_size=True))
async def demonstrated_before(tools: Tools, task: Task, step: NonNegativeInt, column: str = "answer") -> list[Episode]:
    """Demonstrations in the steps before `step`, and groups of samples from there on.

    Provides info["demonstrated"]. Raises InputError unless step is a whole number, at least 0.
    """
    if tools.first_step < step:
        return [demonstration(tools, task, column)]
    return [one.with_info(demonstrated=0.0) for one in await group().program(tools, task)]
