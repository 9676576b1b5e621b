"""Episodes of an agent in a terminal: what the policy says, what its environment answers, and what it is rewarded."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.encode import parsed_json
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.environments.protocol import Environment, Observation
from jaxrl_llm.environments.tools.base import WithTools
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.specs import environment
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import same_prompts
from jaxrl_llm.sampling.live import visible_text
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout.agents import check_agent, make_environment, tell_ends
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.threads import called

Say = Callable[[str], object]


@dataclass
class Played:
    """What happened in an episode."""

    row: Mapping[str, Any]
    said: list[dict[str, Any]] = field(default_factory=list)  # messages after those of the row
    rewards: list[float] = field(default_factory=list)  # of each turn
    final: float | None = None  # beside those of turns
    state: str = "cut off"  # or "done"
    rewarded: bool = True  # whether the environment gives rewards; tools alone do not

    @property
    def reward(self) -> float | None:
        """The sum of all; None if the environment gives none."""
        return sum(self.rewards) + (self.final or 0.0) if self.rewarded else None

    @property
    def outcome(self) -> str:
        """Its end and its reward in a line."""
        turns = f"{len(self.rewards)} turn{'s' if len(self.rewards) != 1 else ''}"
        return f"{self.state} after {turns}" + ("" if self.reward is None else f", reward {self.reward:g}")

    def as_json(self, sample: int) -> str:
        """A line with row, sample, messages, turn_rewards, reward and done."""
        return json.dumps({
            "row": dict(self.row), "sample": sample, "messages": self.said, "turn_rewards": self.rewards,
            "reward": self.reward, "done": self.state == "done",
        }, default=str)  # fmt: skip


class Watched:
    """An environment that notes what goes in and out of another. say: gets each message as a line of a transcript."""

    def __init__(self, inner: Environment, played: Played, say: Say) -> None:
        self._inner, self._played, self._say = inner, played, say
        self.tools: Sequence[Mapping[str, Any]] = inner.tools
        played.rewarded = bool(getattr(inner, "gives_reward", not isinstance(inner, WithTools)))

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """As the other."""
        return self._seen(await called(self._inner.reset, row, seed))

    async def step(self, reply: Reply | list[Reply]) -> Observation:
        """As the other."""
        for one in [reply] if isinstance(reply, Reply) else reply:
            self._note(dict(one.message))
        seen = self._seen(await called(self._inner.step, reply))
        self._played.rewards.append(float(seen.reward))
        self._played.state = "done" if seen.done else "cut off"
        if seen.reward:
            self._say(f"  reward {seen.reward:g}")
        return seen

    async def close(self) -> float | None:
        """As the other."""
        close = getattr(self._inner, "close", None)
        final = None if close is None else await called(close)
        self._played.final = None if final is None else float(final)
        return self._played.final

    def _seen(self, seen: Observation) -> Observation:
        for messages in () if seen.done else seen.conversations:
            for message in messages:
                self._note(dict(message))
        return seen

    def _note(self, message: dict[str, Any]) -> None:
        self._played.said.append(message)
        self._say(message_as_text(message))


def message_as_text(message: Mapping[str, Any]) -> str:
    """A message as text: its role, its reasoning, its content, and its calls of tools.

    >>> message_as_text({"role": "tool", "name": "add", "content": "7"})
    '[tool add] 7'
    """
    role = " ".join(str(message[name]) for name in ("role", "name") if message.get(name))
    parts = [f"({message['reasoning_content']})"] if message.get("reasoning_content") else []
    parts += [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        inner = call.get("function", call)
        parts.append(f"-> {inner.get('name')}({json.dumps(inner.get('arguments'), default=str)})")
    return visible_text(f"[{role}] {' '.join(parts)}")


def rows_to_play(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the data set: a JSON object is one with all its columns, any other text a prompt. Without any, one whose
    environment says everything. InputError for an object without a prompt that is a text, or that is cut off."""
    rows: list[dict[str, Any]] = []
    for text in prompts or ("",):
        row = parsed_json(text) if text.lstrip().startswith("{") else None
        row = row if isinstance(row, dict) else None
        if row is None and text.lstrip().startswith('{"'):
            raise InputError(f'the row {shown(text)} is not valid JSON: write {{"prompt": ...}}, or a text')
        if row is not None and not isinstance(row.get("prompt", ""), str | list):
            raise InputError(f"the row's prompt is {shown(row['prompt'])}, but must be a text or messages")
        rows.append({"prompt": ""} | row if row is not None else {"prompt": text})
    return rows


def play_rows(
    config: TrainConfig, policy: Policy, params: Params, rows: Sequence[dict[str, Any]], say: Say, *, samples: int = 1,
    seed: int = 0, temperature: float = 1.0, watch: Callable[[Stats], object] = lambda stats: None,
) -> list[Played]:  # fmt: skip
    """Play `samples` episodes of each row with the environment or tools of a run, in the order of the rows.

    say: gets the lines of transcripts, of a single episode as they are said. temperature: 0 is greedy. watch: called
    with the counts of the engine, which it goes on to fill in. Raises InputError as a run with this environment would.
    """
    tell_ends(check_agent(config, list(rows), lambda: policy.tokenizer), policy.config.eos_token_ids)
    made: list[Played] = []
    alone, make = len(rows) * samples == 1, make_environment(config)

    def watched(row: Mapping[str, Any]) -> Environment:
        made.append(Played(dict(row)))
        return Watched(make(row), made[-1], say if alone else lambda line: None)

    rollout = agent(
        watched, config.turns, config.turn_tokens or None, config.episode_tokens or None, greedy=temperature == 0,
        system=config.system_prompt, format=config.format,
    )  # fmt: skip
    source = experience(
        Experience(
            policy, PromptSet(list(rows), [[0] for _ in rows]),  # an agent begins with the messages of its row
            (Reward(environment),), same_prompts(np.arange(len(rows), dtype=np.int32)),
            replace(config.sampling, temperature=temperature or 1.0, slots=min(64, len(rows) * samples)), rollout,
            prompts_per_step=len(rows), group_size=samples, time_limit=config.rollout_time_limit, watch=watch,
        )
    )  # fmt: skip
    source.next(source.init(), params, jax.random.key(seed), seed)
    places = {json.dumps(row, default=str): place for place, row in reversed(list(enumerate(rows)))}
    return sorted(made, key=lambda one: places[json.dumps(dict(one.row), default=str)])
