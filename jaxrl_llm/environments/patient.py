"""A simulated patient, whom the policy asks and then gives a diagnosis: a dialogue in words, scored reply by reply."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.utils.errors import InputError, shown

UNKNOWN = "I do not know."


class Patient:
    """An environment for `--environment jaxrl_llm.environments.patient:Patient`.

    The row has "complaint", with which the patient begins, "facts", an object of what the patient says when a reply
    mentions a word, {"fever": "Yes, since Monday."}, and "diagnosis", a text. Either may be JSON text. A reply that has
    the diagnosis ends the dialogue; others are answered with the facts whose words they mention, or with "I do not
    know.". Case does not count.

    The rubric of a reply is that of its moment: while facts are untold, one point for each of them that it asks about,
    of as many points as there are, and minus all of them for a diagnosis, which is then a guess; once all are told, one
    point for the diagnosis. The reward is the share of the points, at least 0. InputError for rows of another form.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        facts = row.get("facts")
        facts = json.loads(facts) if isinstance(facts, str) else facts
        if not isinstance(facts, Mapping) or not all(isinstance(x, str) and x for one in facts.items() for x in one):
            raise InputError(f"the column 'facts' has {shown(facts)}, but must have an object of words and answers")
        for name in ("complaint", "diagnosis"):
            if not isinstance(row.get(name), str) or not str(row[name]).strip():
                raise InputError(f"the column {name!r} has {shown(row.get(name))}, but must have a text")
        self.facts, self.complaint = {word.lower(): said for word, said in facts.items()}, str(row["complaint"])
        self.diagnosis = str(row["diagnosis"]).strip().lower()
        self.untold = set(self.facts)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The complaint."""
        return Observation([_said(self.complaint)], state=self._state())

    def step(self, reply: Reply) -> Observation:
        """What the patient answers, and how the reply is scored."""
        text = str(reply.message.get("content") or "").lower()
        asked = [word for word in self.facts if word in text]
        named, untold = self.diagnosis in text, len(self.untold)
        points = len(self.untold & set(asked)) - untold * named if untold else float(named)
        self.untold -= set(asked)
        answer = " ".join(self.facts[word] for word in asked) or UNKNOWN
        return Observation([_said(answer)], max(points / max(untold, 1), 0.0), done=named, state=self._state())

    def close(self) -> None:
        """There is no reward beside that of the replies."""

    def _state(self) -> str:
        return f"untold: {' '.join(sorted(self.untold))}"


def _said(text: str) -> Message:
    return {"role": "user", "content": text}
