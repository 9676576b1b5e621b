"""How long episodes may be, and compaction: what of a conversation goes on in a new row when its budget is near.

Either a function of the messages, such as `keep_last`, drops some of them, or the policy writes a `Summary`, which is
an action like its other replies and trained on.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jaxrl_llm.core.arguments.checks import check_fields, checked
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.rewards.workers.loading import load_value
from jaxrl_llm.utils.errors import InputError, shown, unknown

ASK = (
    "The conversation becomes too long: what was said since the question will be left out. Write a summary of what was "
    "done and found, and of what is left to do. You will go on from it."
)


@dataclass(frozen=True)
class Summary:
    """The policy sums up the conversation; it goes on from the question, that summary and the last turns."""

    tokens: Count = 256  # most tokens of a summary
    keep: Count = 1  # last turns that are kept as they are, at least 1: replies with what answered them
    ask: str = ASK  # what asks for it
    told: str = "Summary of what was said since:\n"  # what comes before it where the conversation goes on

    def __post_init__(self) -> None:
        check_fields(self)

    def messages(self, asked: Sequence[Message], said: Sequence[Message], text: str) -> list[Message]:
        """The conversation that goes on. asked: what came before the first reply. said: what came after it."""
        told = {"role": "user", "content": f"{self.told}{text}"}
        return [*asked, told, *last_turns(said, self.keep)]


Compact = Callable[[Sequence[Message]], Sequence[Message]] | Summary
"""A function of the whole conversation returns what is kept of it; plain or async, and the same for the same messages.
It has the time limit of the environment's methods."""


def last_turns(messages: Sequence[Message], turns: int) -> list[Message]:
    """The last replies of these messages, with all that came after the first of them."""
    replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[replies[-turns] if len(replies) > turns else 0 :])


@checked
def keep_last(turns: Count = 1) -> Compact:
    """A function that keeps what came before the first reply, and the last turns.

    A turn is a reply with what answered it, so that calls of tools stay beside their results. turns: at least 1.

    >>> said = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, "abcdef")]
    >>> "".join(message["content"] for message in keep_last(1)([*said, {"role": "user", "content": "g"}]))
    'afg'
    """

    def kept(messages: Sequence[Message]) -> list[Message]:
        first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        return [*messages[:first], *last_turns(messages[first:], turns)]

    return kept


NAMED: dict[str, Callable[..., Any]] = {"summary": Summary, "keep_last": keep_last}


def compact_by_name(spec: str) -> Compact:
    """summary, summary(TOKENS), summary(TOKENS, TURNS), keep_last(TURNS), FILE.py:NAME or MODULE:NAME.

    NAME is a function of messages or a `Summary`. InputError for anything else.

    >>> compact_by_name("summary(64)").tokens
    64
    """
    if found := re.fullmatch(r"(\w+)(?:\((.*)\))?", spec.strip()):
        arguments = [part.strip() for part in (found[2] or "").split(",") if part.strip()]
        if found[1] not in NAMED:
            raise unknown("compact", found[1], NAMED)
        if len(arguments) > 2 - (found[1] == "keep_last") or not all(one.isdigit() for one in arguments):
            raise InputError(
                f"compact is {shown(spec)}, but its arguments must be whole numbers: summary(TOKENS, TURNS) or "
                "keep_last(TURNS)"
            )
        made: Compact = NAMED[found[1]](*map(int, arguments))
        return made
    if ":" not in spec:
        raise unknown("compact", spec, NAMED)
    loaded: Any = load_value(spec, "compact")[0]
    if not isinstance(loaded, Summary) and not callable(loaded):
        raise InputError(f"compact {spec} is {shown(loaded)}, but must be a function of messages or a Summary")
    return cast(Compact, loaded)


@dataclass(frozen=True)
class Limits:
    """How long an episode may be."""

    turns: Count = 8  # replies of an episode
    turn_tokens: Count | None = None  # sampled tokens of a reply; None: the run's limit of a completion
    episode_tokens: Count | None = None  # of an episode after its prompt, observations too; None: as the context allows
    context_tokens: Count | None = None  # tokens of a row, its prompt included; None: as the model's context allows
    compact: Compact | None = None  # what it goes on with when `context_tokens` is near; None: it ends there
    fresh: bool = False  # whether an observation is the whole prompt of the next turn

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compact is not None and (self.context_tokens is None or self.fresh):
            why = "fresh prompts have nothing to compact" if self.fresh else "context_tokens says when: give it too"
            raise InputError(f"compact is given, but {why}")
        if isinstance(self.compact, Summary) and self.compact.tokens >= (self.context_tokens or 0):
            raise InputError(
                f"a summary has {self.compact.tokens} tokens, but context_tokens is {self.context_tokens}, which must "
                "hold the prompt beside it: lower one or raise the other"
            )
