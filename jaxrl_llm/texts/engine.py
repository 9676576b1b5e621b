"""What a method asks of the policy in a step: answers to tasks, which are scored, and replies to questions."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.data.chat.encode import encode_prompt, has_chat_template
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.scoring import score_batch
from jaxrl_llm.sampling import completion_texts, sample
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.process import stop_if

Row = Mapping[str, Any]


class Answer(NamedTuple):
    """An answer to a task."""

    row: Row
    text: str
    reward: float  # NaN where it was not scored

    @property
    def question(self) -> str:
        """The task's prompt as a text: of messages, the last one's."""
        prompt = self.row["prompt"]
        return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


class Engine(Protocol):
    """The policy in a step of a method. random: of the step; counts: of what happened in it, for the metrics."""

    random: np.random.Generator
    counts: Counter[str]

    def answers(self, asked: Sequence[tuple[str, Row]], samples: int | None = None) -> list[list[Answer]]:
        """Scored answers to tasks, each under a text; `samples` of each, by default the run's group_size."""
        ...

    def replies(self, questions: Sequence[str], count: int = 1) -> list[list[str]]:
        """`count` replies to each question, without another text."""
        ...

    def fits(self, text: str) -> bool:
        """Whether the longest task fits beside the text."""
        ...


class TextPrompts:
    """Prompts of tasks under a text: a system message where there is a chat template, else a text before the prompt."""

    def __init__(
        self, config: TrainConfig, tokenizer: Any, context: int, rows: Sequence[Row], first: str,
        held_out: Sequence[Row] = (),
    ) -> None:  # fmt: skip
        """rows, held_out: of which those stay that fit under the text `first`. context: of the model, tokens; 0: any.

        Raises InputError for prompts that no text can be put before, and where no row is left.
        """
        self.config, self.tokenizer = config, tokenizer
        self.chat = config.prompt_format == "chat" and has_chat_template(tokenizer)
        most = config.max_prompt_tokens
        self.limit = min(most, context - config.max_new_tokens) if context else most
        sets, self._longest, longest = list[list[Row]](), rows[0], -1
        for some in (rows, held_out):
            self._check(some)
            lengths = [len(self.ids(first, row)) for row in some]
            sets.append([row for row, length in zip(some, lengths, strict=True) if length <= self.limit])
            if some and not sets[-1]:
                raise InputError(
                    f"no prompt fits beside the text: the shortest has {min(lengths)} tokens with it, of {self.limit}: "
                    "raise max_prompt_tokens, or shorten the text"
                )
            for row, length in zip(some, lengths, strict=True):
                if longest < length <= self.limit:
                    self._longest, longest = row, length
        self.rows, self.held_out = sets

    def _check(self, rows: Sequence[Row]) -> None:
        if self.config.prompt_format == "rendered":
            raise InputError("prompt_format is rendered, which a text cannot be put before: give chat or plain")
        for row in rows:
            prompt = row["prompt"]
            if not isinstance(prompt, str) and any(message.get("role") == "system" for message in prompt):
                raise InputError(
                    f"the prompt {shown(prompt)} has a system message, in the place of the text that is optimised: "
                    "leave it out of the data"
                )
            if not isinstance(prompt, str) and not self.chat:
                raise InputError(f"the prompt {shown(prompt)} has messages, but the model no chat template: give texts")

    def ids(self, text: str, row: Row) -> list[int]:
        """The token ids of a task's prompt under a text."""
        if self.chat:
            return encode_prompt(self.tokenizer, row["prompt"], system_prompt=text, format=self.config.format, row=row)
        return encode_prompt(self.tokenizer, before(text) + row["prompt"], format=self.config.format)

    def fits(self, text: str) -> bool:
        """Whether the longest task fits under the text."""
        return len(self.ids(text, self._longest)) <= self.limit

    def under(self, text: str, rows: Sequence[Row]) -> PromptSet:
        """Tasks under a text, to evaluate it."""
        return PromptSet([dict(row) for row in rows], [self.ids(text, row) for row in rows])

    def settings(self, text: str) -> dict[str, str]:
        """The settings of a run that has the text in its prompts."""
        if self.chat:
            return {"system_prompt": text}
        return {"prompt_template": before(text).replace("{", "{{").replace("}", "}}") + self.config.prompt_template}


def before(text: str) -> str:
    """A text as it is written before a prompt that has no messages."""
    return f"{text}\n\n"


class StepEngine:
    """The policy in one step, see `Engine`. What it says depends on the run's seed, the step and the questions.

    Everything that is asked in a call is sampled in one batch. tokens: of a reply, at most.
    """

    def __init__(
        self, policy: Policy, params: Params, rewards: Sequence[Reward], prompts: TextPrompts, step: int, tokens: int
    ) -> None:
        self.config, self.prompts, self.tokens = prompts.config, prompts, tokens
        self.random, self.counts = np.random.default_rng([self.config.seed, step]), Counter[str]()
        self.all = list[Answer]()  # the step's
        self._policy, self._params, self._rewards, self._calls = policy, params, rewards, 0
        self._key = jax.random.fold_in(jax.random.key(self.config.seed), step)

    def fits(self, text: str) -> bool:
        return self.prompts.fits(text)

    def answers(self, asked: Sequence[tuple[str, Row]], samples: int | None = None) -> list[list[Answer]]:
        if not asked:
            return []
        many = self.config.group_size if samples is None else samples
        batch = self._sample([self.prompts.ids(text, row) for text, row in asked], many, self.config.max_new_tokens)
        scored = score_batch(self._rewards, self._policy.tokenizer, [dict(row) for _, row in asked], batch)
        rewards = np.asarray(scored.batch.reward)
        self.counts["samples/answers"] += len(scored.texts)
        found = [
            [Answer(row, scored.texts[i], float(rewards[i])) for i in range(at * many, (at + 1) * many)]
            for at, (_, row) in enumerate(asked)
        ]
        self.all += [one for group in found for one in group]
        return found

    def replies(self, questions: Sequence[str], count: int = 1) -> list[list[str]]:
        context = self._policy.config.max_positions
        ids = [encode_prompt(self._policy.tokenizer, text, format=self.config.format) for text in questions]
        fitting = [at for at, one in enumerate(ids) if not context or len(one) + self.tokens <= context]
        self.counts["samples/unasked"] += len(ids) - len(fitting)
        found: list[list[str]] = [[] for _ in questions]
        if fitting:
            batch = self._sample([ids[at] for at in fitting], count, self.tokens, stop=())
            said = completion_texts(self._policy.tokenizer, batch)
            self.counts["samples/replies"] += len(said)
            for place, at in enumerate(fitting):
                found[at] = said[place * count : (place + 1) * count]
        return found

    def _sample(self, ids: list[list[int]], many: int, tokens: int, stop: Sequence[str] | None = None) -> Any:
        config, stats = self.config, Stats()
        key, self._calls = jax.random.fold_in(self._key, self._calls), self._calls + 1
        batch = sample(
            self._policy, self._params, ids, key, group_size=many, max_new_tokens=tokens,
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            stop=config.stop if stop is None else stop, slots=config.slots or 128, stats=stats,
        )  # fmt: skip
        stop_if(stats.interrupted)
        return batch


def one_each(engine: Engine, questions: Sequence[str]) -> list[str]:
    """A reply to each question, another one to each of equal questions; "" where there is none."""
    distinct = list(dict.fromkeys(questions))
    most = max((questions.count(one) for one in distinct), default=0)
    said = dict(zip(distinct, engine.replies(distinct, most) if distinct else [], strict=True))
    left = {text: iter(replies) for text, replies in said.items()}
    return [next(left[text], "") for text in questions]


def means(answers: Sequence[Answer]) -> float:
    """The mean reward of the answers that were scored; NaN for none."""
    known = [one.reward for one in answers if not math.isnan(one.reward)]
    return sum(known) / len(known) if known else math.nan
