"""The tools of a rollout program: sampling from the engine, scoring, and external calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxrl_llm.data.chat.encode import encode_prompt, with_text
from jaxrl_llm.data.chat.inert import encode_inert
from jaxrl_llm.rollouts.episode import Episode, Segment, checksum, given
from jaxrl_llm.rollouts.program_host import Decide, Draws, Meeting
from jaxrl_llm.rollouts.runtime.external_calls import meet_others, remembered, score_recorded
from jaxrl_llm.rollouts.runtime.replay_log import CallKey
from jaxrl_llm.sampling.requests import NO_TOKENS, Tokens
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.threads import called

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.runtime.group_run import GroupRun

T = TypeVar("T")
MOST_NUMBERS = 2**20  # sample numbers that a program may give


class Tools:
    """The tools of one group's program. All answers are recorded, so that the program can be rerun from its log."""

    def __init__(
        self,
        host: GroupRun,
        tokenizer: Any,
        context: int = 0,
        controls: Mapping[str, float] | None = None,
        encode_prompt: Callable[..., list[int]] | None = None,
    ) -> None:
        self._host, self.tokenizer, self._context, self.encode_prompt = host, tokenizer, context, encode_prompt
        self.controls: Mapping[str, float] = {} if controls is None else controls
        """What the method's controllers wrote in the last update, by name; empty before the first."""

    @property
    def step(self) -> int:
        """The training step of the weights."""
        return self._host.step

    @property
    def first_step(self) -> int:
        """Training step in which the group began. It stays the same when the program is rerun from its log."""
        return self._host.first_step

    async def sample(
        self,
        context: Episode | Sequence[int],
        *,
        number: int | None = None,
        limit: int | None = None,
        pause_at: int | None = None,
        greedy: bool = False,
        temperature: float | None = None,
        reference: bool = False,
        snapshot: int | None = None,
        fixed: Sequence[int] = (),
        begun: Tokens = NO_TOKENS,
    ) -> Episode:
        """Sample a completion of an episode, or of a prompt's token ids, and return the longer episode.

        number: sample number within the group, from 0; by default the episode's own. The noise is keyed on it, the
        prompt id and the position, so two samples of one context need different numbers.
        limit: most new tokens; by default the task's. An episode that reaches it, or the end of the model's context, is
        `truncated`. pause_at: new tokens after which to return an unfinished episode, to fork or continue it. greedy:
        take the most probable tokens. temperature: instead of the run's, above 0, and without its top-k, top-p and
        min-p; log-probabilities are then those at this temperature, while the update computes them at the run's.
        reference: draw from the reference policy of the run, the initial one or the method's other, which the rollout
        must declare, `Demands.reference`; such tokens are not to be trained on. snapshot: draw from the policy in this
        place of the rollout's league, `Demands.league`; nor are these. fixed: of a masked-diffusion model, token ids
        that stand at places of the completion, from its first; -1 where one is to be drawn. begun: tokens that the
        completion begins with as if they had been drawn, such as `Tokens.instead`.

        Raises InputError for a context of the wrong type, a number or limit out of range, and if a program asks twice
        for the same sample.
        """
        episode = self._episode(context, number)
        limit = self._host.task.limit if limit is None else limit
        if not isinstance(limit, int) or limit < 1:
            raise InputError(f"limit is {shown(limit)}, but must be a whole number of tokens, at least 1")
        if pause_at is not None and (not isinstance(pause_at, int) or pause_at < 1):
            raise InputError(f"pause_at is {shown(pause_at)}, but must be a whole number of tokens, at least 1")
        if temperature is not None and (greedy or not temperature > 0):
            raise InputError(f"temperature is {shown(temperature)}, but must be above 0, and not given with greedy")
        place = episode.size
        until = place + limit
        if self._context:
            until = min(until, self._context - len(episode.prompt))
        if until <= place:  # the context is full
            return replace(episode, truncated=True)
        stop = None if pause_at is None or place + pause_at >= until else place + pause_at
        known = checksum((*episode.tokens, *fixed, *begun.token.tolist()))
        call = CallKey(episode.sample if not greedy else -1 - episode.sample, place, known)
        draws = Draws(0.0 if greedy else temperature, reference, snapshot)
        answer = await self._host.draw(call, episode, until, stop, draws, tuple(fixed), begun)
        longer = episode + answer.segment
        cut_short = stop is None and not answer.ended
        return replace(longer, ended=answer.ended, truncated=cut_short)

    def _episode(self, context: Episode | Sequence[int], number: int | None) -> Episode:
        whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (whole and 0 <= number < MOST_NUMBERS):
            raise InputError(f"number is {shown(number)}, but must be a whole number from 0 to 2^20 - 1")
        if isinstance(context, Episode):
            return context if number is None else replace(context, sample=number)
        if isinstance(context, str) or not isinstance(context, Sequence) or not len(context):
            raise InputError(f"tools.sample continues an episode or token ids, but found {shown(context)}")
        return Episode(tuple(map(int, context)), self._host.task.prompt_id, 0 if number is None else number)

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Score episodes with the run's reward functions, all in one call, and return them with their rewards."""
        if isinstance(episodes, Episode) or not all(isinstance(episode, Episode) for episode in episodes):
            raise InputError(f"tools.score takes a list of episodes, but found {shown(episodes)}")
        return await score_recorded(self._host, list(episodes))

    async def call(
        self, function: Callable[..., Any], *arguments: Any, name: str, again: bool = False, failing: bool = False
    ) -> Any:
        """Call an external function, such as a tool, a judge or a step of an environment.

        A plain function runs in a thread, an async one in an event loop that all of them share, where it cannot use
        these tools; see `jaxrl_llm.utils.threads`. The result must be a JSON value. It is recorded under `name`, which
        must be unique in the group, and returned without a call when the program is rerun from its log. again: call the
        function even then, because it has state, such as an environment's (see `hold`); a result that differs from the
        recorded one raises NotDeterministicError. failing: a call that raises or exceeds the time limit returns
        {FAILED: why} instead, which is recorded too; it is then not called again.
        """
        host = self._host
        return await remembered(
            host, name, lambda: called(function, *arguments), again, host.run.driver.time_limit, failing
        )

    async def meet(self, value: Any, *, name: str, decide: Decide | None = None) -> Meeting:
        """Wait until all programs of the step meet or are over, and return what those that meet brought.

        A barrier: for decisions about one prompt that depend on all others of the step. value: a JSON value. name: of
        the meeting, unique in the group and the same in all programs. The rollout must declare it, `Demands.meets`.
        All programs of all hosts meet, so that the result depends neither on slots, hosts nor timing. decide: a
        function of the values that returns a JSON value, the same in all programs; it is called once on each host.

        Raises InputError for a rollout that does not declare it, a value that is not JSON, a name that the program used
        before, and where programs wait for meetings of different names.
        """
        return await meet_others(self._host, name, value, decide)

    def hold(self, name: str, value: T) -> T:
        """Keep an object that has state, such as an environment, for the step that goes on with an unfinished program.

        name: unique among what the group holds. The program is rerun there, and finds it by `held`. Returns the value.
        """
        self._host.held[name] = value
        return value

    def recorded(self, name: str) -> Any:
        """What the call of this name answered before, where the program is rerun from its log, else None."""
        return self._host.recorded.get(name)

    def held(self, name: str) -> Any:
        """What the program holds under a name, maybe since the step that left it unfinished, else None.

        A run that was killed has nothing that was held: objects are in no checkpoint.
        """
        return self._host.held.get(name)

    def reruns(self, value: Any) -> bool:
        """Whether recorded calls of an object's methods are to be made again, the argument `again` of `call`.

        Not those of an object that was held: it has their effects.
        """
        return not any(value is one for one in self._host.resumed.values())

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a completion of a prompt has room for a token in the model's context."""
        return not self._context or len(prompt) < self._context

    def random(self, name: str) -> np.random.Generator:
        """A generator for choices of the program. The same name gives the same numbers when the program is rerun.

        Its seed is made of the prompt, the training step in which the program first started, the number of the group
        among those of the prompt that started in that step, and the name.
        """
        host = self._host
        seed = [host.first_step, host.task.prompt_id, zlib.crc32(name.encode())]
        return np.random.default_rng([*seed, host.repeat] if host.repeat else seed)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt(self, prompt: Any, row: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Token ids of another prompt, a text or messages, encoded as the run's prompts are.

        A text is a user's message where there is a chat template, else plain. row: of the data set, whose tools and
        template options it has.
        """
        if self.encode_prompt is not None:
            return tuple(map(int, self.encode_prompt(prompt) if row is None else self.encode_prompt(prompt, row=row)))
        return tuple(self.encode(prompt) if isinstance(prompt, str) else encode_prompt(self.tokenizer, prompt))

    def prompt_with(self, text: str, first: bool = False) -> tuple[int, ...]:
        """Token ids of the task's prompt with a text at the end, or at the beginning, of what the user says last.

        Where that is not known, because the prompt is of token ids or was truncated, the text follows the prompt, or
        comes before it.
        """
        task, encode = self._host.task, self.encode_prompt
        longer = with_text(task.row.get("prompt"), text, first)
        if encode is not None and longer is not None and tuple(encode(task.row["prompt"])) == tuple(task.prompt):
            return tuple(encode(longer))
        more = encode_inert(self.tokenizer, text)
        return (*more, *task.prompt) if first else (*task.prompt, *more)

    def given(self, text: str) -> Segment:
        """A segment of given text: conditioned on, masked out of the loss. Nothing in it becomes a control token."""
        return given(encode_inert(self.tokenizer, text), self._host.step)
