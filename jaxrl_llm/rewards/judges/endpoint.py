"""Answers of an OpenAI-compatible endpoint, /v1/chat/completions, kept by what was asked."""

import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.post import posted

KEY = "OPENAI_API_KEY"
KEPT = 2**16  # answers


@dataclass(frozen=True, eq=False)
class Endpoint:
    """A model behind a URL.

    url: up to /v1, or of the method itself. key: environment variable of the key, which is read at each request and
    kept nowhere; where it is not set, none is sent. attempts: of a request whose failure may pass, with pauses that
    double from `pause` seconds. An answer is asked for once: it depends on the question, its number and the settings.
    """

    url: str
    model: str
    temperature: float = 0.0
    tokens: int = 512
    key: str = KEY
    attempts: int = 4
    pause: float = 0.5
    time_limit: float = 60.0  # seconds of a request
    at_once: int = 16  # requests
    _places: Any = field(init=False, repr=False)
    _kept: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"an endpoint's URL begins with http:// or https://, unlike {shown(self.url)}")
        object.__setattr__(self, "_places", threading.Semaphore(self.at_once))
        object.__setattr__(self, "_kept", lru_cache(KEPT)(self._asked))

    def answer(self, question: str, number: int = 0) -> str:
        """The model's answer to a question; number: of several answers, each of which is drawn anew.

        Raises RuntimeError, which says what the endpoint said, after the last attempt.
        """
        return str(self._kept(question, number))

    def _asked(self, question: str, number: int) -> str:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": question}], "temperature": self.temperature,
            "max_tokens": self.tokens, "seed": number,
        }  # fmt: skip
        url = self.url.rstrip("/")
        url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        secret = os.environ.get(self.key)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        pauses = [self.pause * 2**attempt for attempt in range(self.attempts - 1)]
        try:
            with self._places:
                return posted(url, body, _content, headers=headers, pauses=pauses, time_limit=self.time_limit)
        except RuntimeError as error:
            raise RuntimeError(f"{url} gave no answer: {error}") from None


def _content(reply: Any) -> str:
    content = reply["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise ValueError(f"the message's content is {shown(content)}")
    return content
