"""Recorded trajectories of an expert as environments: the policy's replies are compared with the expert's actions."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.data.chat.encode import is_conversation
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.utils.errors import InputError, shown

Judge = Callable[[str, Mapping[str, Any]], tuple[float, float]]
"""(reply, the expert's action) -> (whether its form is right, how alike the action is), each from 0 to 1."""


def judge_action(reply: str, expert: Mapping[str, Any]) -> tuple[float, float]:
    """The form and the action of a reply, as UI-S1 grades them.

    The form is right, 1, if the reply has one <action>...</action> with a JSON object of an "action". The action is 1
    if it equals the expert's, 0.5 if only the kind, "action", does, 0.1 if there is any such object, else 0. Texts are
    compared without case and space around them.

    >>> judge_action('<action>{"action": "click", "at": 3}</action>', {"action": "click", "at": 3})
    (1.0, 1.0)
    >>> judge_action('{"action": "click", "at": 4}', {"action": "click", "at": 3})
    (0.0, 0.5)
    """
    tagged = re.findall(r"<action>(.*?)</action>", reply, re.DOTALL)
    action = _object(tagged[0]) if len(tagged) == 1 else None
    form = float(action is not None)
    if action is None:
        start, end = reply.find("{"), reply.rfind("}")
        action = _object(reply[start : end + 1]) if 0 <= start < end else None
    if action is None:
        return form, 0.0
    if _plain(action) == _plain(expert):
        return form, 1.0
    return form, 0.5 if _plain(action["action"]) == _plain(expert.get("action")) else 0.1


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, if it says an action."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("action"), str) else None


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip().casefold()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


class RecordedSteps:
    """An episode on a recorded trajectory, for `agent(..., fresh=True)`: each observation is the whole prompt.

    The row's column has the expert's steps, {"observation": text, "action": {"action": kind, ...}}, perhaps with a
    "thought" that the expert's reply begins with. A reply that matches stays in the dialogue. For one that does not the
    expert's stands there, up to `patches` times (-1: always); the next one ends the episode.

    A turn's reward is form_weight times the form plus the rest times the action, by `judge`; it matches if the action
    is 1. The final reward is the share of the trajectory's steps that matched. InputError for steps of another form.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self, row: Mapping[str, Any], column: str = "steps", patches: int = 2, judge: Judge = judge_action,
        form_weight: float = 0.1,
    ) -> None:  # fmt: skip
        steps = row.get(column)
        steps = json.loads(steps) if isinstance(steps, str) else steps
        if not isinstance(steps, list) or not steps or not all(map(_is_step, steps)):
            raise InputError(
                f"the column {column!r} holds {shown(steps)}, but must be a list of steps of an expert, each with an "
                "observation (a text) and an action (an object with a text named action)"
            )
        self.steps, self.patches, self.judge, self.form_weight = steps, patches, judge, form_weight
        self.at, self.patched, self.matched = 0, 0, 0
        prompt: Any = row.get("prompt") or ""
        self.told: list[Message] = list(prompt) if is_conversation(prompt) else []
        if isinstance(prompt, str) and prompt:
            self.told.append({"role": "user", "content": prompt})
        self.asked = len(self.told)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The first observation, which comes after the row's prompt."""
        self.told.append({"role": "user", "content": self.steps[0]["observation"]})
        return Observation(self.told[self.asked :], state="0")

    def step(self, reply: Reply) -> Observation:
        """Compare the reply with the expert's action; the next observation is the whole dialogue."""
        text, expert = str(reply.message.get("content") or ""), self.steps[self.at]
        form, alike = self.judge(text, expert["action"])
        reward = self.form_weight * form + (1 - self.form_weight) * alike
        matches = alike >= 1
        self.at, self.matched = self.at + 1, self.matched + matches
        if not matches:
            if 0 <= self.patches <= self.patched:
                return Observation(reward=reward, done=True)
            self.patched, text = self.patched + 1, said_by(expert)
        if self.at == len(self.steps):
            return Observation(reward=reward, done=True)
        seen = self.steps[self.at]["observation"]
        self.told += [{"role": "assistant", "content": text}, {"role": "user", "content": seen}]
        return Observation(list(self.told), reward, state=str(self.at), info={"patched": float(not matches)})

    def close(self) -> float:
        """The share of the trajectory's steps that matched."""
        return self.matched / len(self.steps)


def said_by(step: Mapping[str, Any]) -> str:
    """The expert's reply in a step."""
    action = f"<action>{json.dumps(step['action'], ensure_ascii=False)}</action>"
    return f"{step['thought']}\n{action}" if step.get("thought") else action


def _is_step(step: Any) -> bool:
    told = isinstance(step, Mapping) and isinstance(step.get("observation"), str)
    return told and isinstance(step.get("action"), Mapping) and isinstance(step["action"].get("action"), str)
