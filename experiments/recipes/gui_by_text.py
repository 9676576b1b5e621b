"""Tasks on a small phone whose screens are texts, held out by instance, by template or by app.

The idea of work on how agents of Android generalise: plain GRPO on whole episodes, and held-out tasks that differ from
those of training in their values, in what is asked, or in the app. Neither paper nor card was at hand: apps, tasks and
rewards are ours, screens are lists of what is on them, and no device, emulator or picture is involved.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.recipes.recipe import Row, config_of, main, write_rows
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.training.config import TrainConfig

SWITCHES = {"Settings": ("Wi-Fi", "Bluetooth", "Dark mode"), "Clock": ("Alarm 6:00", "Alarm 7:00", "Alarm 8:00")}
FIELDS = {"Notes": "note", "Contacts": "name"}
WORDS = ("milk", "bread", "Ada", "Otto", "rain", "call home", "tea", "Mia")
HELD_OUT = {"template": "two", "app": "Clock"}
ACTION = re.compile(r"\b(tap|type|back|done)\b[ :]*([^\n]*)", re.IGNORECASE)
HOW = (
    "You use a phone. Answer each screen with one action on one line: tap NAME, type TEXT, back, or done. Say done "
    "when the task is complete.\nTask: {}"
)


class Phone:
    """An environment: the row's `goal` has, by app, the switches to be on or the text to be saved.

    The reward, at the end, is 1 where the phone is as the goal says and nothing else was changed, else 0. An episode
    ends when the policy says done, or with its turns. Replies that are no action on the screen are counted, `invalid`.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.goal: dict[str, Any] = json.loads(row["goal"])
        self.app, self.typed, self.on, self.saved = "", "", set[str](), dict[str, str]()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The home screen."""
        return self._shown()

    def step(self, reply: Reply) -> Observation:
        """The screen after an action, and the reward where it is the last."""
        said = ACTION.search(str(reply.message.get("content") or ""))
        action, what = (said[1].lower(), said[2].strip(" .\"'")) if said else ("", "")
        if action == "done":
            return Observation(reward=float(self._reached()), done=True)
        if action == "back" and self.app:
            self.app, self.typed = "", ""
        elif action == "type" and self.app in FIELDS:
            self.typed = what
        elif action != "tap" or not self._tap({name.lower(): name for name in self._names()}.get(what.lower())):
            return self._shown(invalid=1.0)
        return self._shown()

    def close(self) -> None:
        """There is no reward beside that of the last reply."""

    def _names(self) -> tuple[str, ...]:
        """What can be tapped."""
        if not self.app:
            return (*SWITCHES, *FIELDS)
        return SWITCHES.get(self.app, ("Save",))

    def _tap(self, name: str | None) -> bool:
        if name is None:
            return False
        if not self.app:
            self.app = name
        elif name == "Save":
            self.saved[self.app] = self.typed
        else:
            self.on ^= {name}
        return True

    def _reached(self) -> bool:
        wanted = {name for names in self.goal.values() if isinstance(names, list) for name in names}
        texts = {app: text for app, text in self.goal.items() if isinstance(text, str)}
        return self.on == wanted and self.saved == texts

    def _shown(self, invalid: float = 0.0) -> Observation:
        names = [
            f"{name}: {'on' if name in self.on else 'off'}" if self.app in SWITCHES else name for name in self._names()
        ]
        field = f"{FIELDS[self.app]}: {self.typed or '(empty)'}\n" if self.app in FIELDS else ""
        text = f"Screen: {self.app or 'Home'}\n{field}" + "\n".join(f"[{name}]" for name in names)
        return Observation([{"role": "user", "content": text}], info={"invalid": invalid})


def rows(seed: int, count: int) -> list[Row]:
    """Tasks of three templates: one switch, two switches, and a text that is saved."""
    chosen, out = random.Random(seed), []
    for _ in range(count):
        template = chosen.choice(("one", "two", "save"))
        app = chosen.choice(sorted(FIELDS if template == "save" else SWITCHES))
        if template == "save":
            text = f"{chosen.choice(WORDS)} {chosen.randint(2, 99)}"
            goal, task = {app: text}, f"Save the {FIELDS[app]} {text} in {app}."
        else:
            names = sorted(chosen.sample(SWITCHES[app], 1 + (template == "two")))
            goal, task = {app: names}, f"Switch on {' and '.join(names)} in {app}."
        out.append({"prompt": HOW.format(task), "goal": json.dumps(goal), "app": app, "template": template})
    return out


def config(
    folder: Path, model: str, rows: list[Row], by: Literal["instance", "template", "app"] = "app", **settings: Any
) -> TrainConfig:
    """The run. by: how held-out tasks differ: in their values alone, in what is asked (HELD_OUT), or in the app."""
    usual: dict[str, Any] = {"environment": f"{Path(__file__).resolve()}:Phone", "turns": 8, "max_new_tokens": 24}
    if by != "instance" and settings.get("eval_size") != 0:
        held = [row for row in rows if row[by] == HELD_OUT[by]]
        rows = [row for row in rows if row[by] != HELD_OUT[by]]
        usual["eval_prompts"] = write_rows(Path(f"{folder}-held-out.jsonl"), held)
    return config_of(folder, model, rows, ("environment",), **{**usual, **settings})


if __name__ == "__main__":
    main(__doc__, rows, config)
