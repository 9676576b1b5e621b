"""Who answers a judge's questions: the policy, the reference policy, another model, or an endpoint."""

import threading
import zlib
from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.core.arguments.ranges import Count, NonNegative
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.data.chat.encode import encode_prompt
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards.judges.endpoint import KEPT, KEY, Endpoint
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import sampled_ids
from jaxrl_llm.rollouts.program_host import FAILED
from jaxrl_llm.sampling import completion_texts, sample
from jaxrl_llm.utils.errors import InputError

TOKENS = 256  # of an answer, at most
FIRST = 2**16  # sample number of a program's first answer: those of its samples come before

Texts = list[list[str]]  # the answers to each question; without those that failed
Answers = Callable[[Tools, Task, Sequence[str], int, int], Awaitable[Texts]]


@dataclass(frozen=True, repr=False)
class Answerer:
    """Who answers.

    answers: an async function (tools, task, questions, count, first) -> `count` answers to each question, where the
    program has asked `first` questions times count before. reference: whether it draws from the reference policy.
    """

    answers: Answers
    name: str
    reference: bool = False

    __repr__ = layout

    async def once_each(self, tools: Tools, task: Task, questions: Sequence[str], count: int, first: int = 0) -> Texts:
        """`answers` to questions of which equal ones are asked once."""
        distinct = list(dict.fromkeys(questions))
        found = await self.answers(tools, task, distinct, count, first) if distinct else []
        by_text = dict(zip(distinct, found, strict=True))
        return [by_text[one] for one in questions]


def _of_engine(name: str, tokens: int, temperature: float | None, reference: bool) -> Answerer:
    greedy = temperature == 0

    async def one(tools: Tools, ids: Sequence[int], number: int) -> str:
        said = await tools.sample(
            ids, number=number, limit=tokens, greedy=greedy, temperature=None if greedy else temperature,
            reference=reference,
        )  # fmt: skip
        return tools.decode(sampled_ids(said))

    async def answers(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> Texts:
        prompts = [tools.prompt(text) for text in questions]
        fitting = [place for place, ids in enumerate(prompts) if tools.fits(ids)]
        number, found = FIRST + first, Texts([] for _ in prompts)
        asked = [(place, number + count * place + k) for place in fitting for k in range(count)]
        for (place, _), text in zip(
            asked, await gather(*(one(tools, prompts[place], n) for place, n in asked)), strict=True
        ):
            found[place].append(text)
        return found

    return Answerer(answers, name, reference)


@part
def policy(tokens: Count = TOKENS, temperature: NonNegative | None = None) -> Answerer:
    """The policy that learns. temperature: None is the run's, 0 takes the most probable tokens.

    A question that fills the model's context has no answer.
    """
    return _of_engine("the policy", tokens, temperature, reference=False)


@part
def reference(tokens: Count = TOKENS, temperature: NonNegative | None = None) -> Answerer:
    """The reference policy, which is the first one, or another that does not move; otherwise as `policy`."""
    return _of_engine("the reference policy", tokens, temperature, reference=True)


@part
def model(path: str, tokens: Count = TOKENS, temperature: NonNegative = 0.0) -> Answerer:
    """Another model, by its folder or name on the hub, on the default device; it is loaded when it is first asked.

    Questions that groups ask at the same time are answered in one batch. An answer depends on its question and number
    alone. A question that fills the model's context has no answer.
    """
    other = _OtherModel(path, tokens, temperature)

    async def answers(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> Texts:
        _ = other.loaded  # outside of the call, whose time is limited
        found = await tools.call(other.answers, list(questions), count, name=f"{path} {first}", failing=True)
        return [[] for _ in questions] if isinstance(found, dict) and FAILED in found else list(found)

    return Answerer(answers, path)


@part
def endpoint(
    url: str, model: str = "default", tokens: Count = TOKENS, temperature: NonNegative = 0.0, key: str = KEY
) -> Answerer:
    """A model behind an OpenAI-compatible URL; see `rewards.judges.endpoint.Endpoint`.

    A question whose answer fails, or takes longer than the run's rollout_time_limit, has none.
    """
    client = Endpoint(url, model, temperature, tokens, key)

    async def one(tools: Tools, question: str, number: int, name: str) -> list[str]:
        found = await tools.call(client.answer, question, number, name=name, failing=True)
        return [found] if isinstance(found, str) else []

    async def answers(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> Texts:
        each = [(place, k) for place in range(len(questions)) for k in range(count)]
        said = await gather(
            *(one(tools, questions[place], k, f"{url} {first + count * place + k}") for place, k in each)
        )
        found = Texts([] for _ in questions)
        for (place, _), texts in zip(each, said, strict=True):
            found[place] += texts
        return found

    return Answerer(answers, f"{model} at {url}")


def answerer(by: Answerer | str) -> Answerer:
    """Who answers: an `Answerer` as it is, or by a text: "policy", "reference", a URL with perhaps "#MODEL" at its end,
    or a model's path or name.

    InputError for an empty text.
    """
    if isinstance(by, Answerer):
        return by
    name = str(by).strip()
    if not name:
        raise InputError(
            "a judge is policy, reference, a URL such as http://localhost:8000/v1#MODEL, or a model's path"
        )
    if name in OF_ENGINE:
        return OF_ENGINE[name]()
    if name.startswith(("http://", "https://")):
        url, _, served = name.partition("#")
        return endpoint(url, served or "default")
    return model(name)


OF_ENGINE: dict[str, Callable[[], Answerer]] = {"policy": policy, "reference": reference}


@dataclass(eq=False)
class _OtherModel:
    path: str
    tokens: int
    temperature: float

    def __post_init__(self) -> None:
        self._waiting: list[tuple[list[str], int, Future[Texts]]] = []
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._known: dict[tuple[str, int], list[str]] = {}

    @cached_property
    def loaded(self) -> Any:
        """(policy, params, tokenizer)."""
        return load_policy(str(Path(self.path).expanduser()) if Path(self.path).expanduser().is_dir() else self.path)

    def answers(self, questions: list[str], count: int) -> Texts:
        """`count` answers to each question, in a batch with the questions of other threads that wait meanwhile."""
        own: Future[Texts] = Future()
        with self._lock:
            self._waiting.append((questions, count, own))
        with self._asking:  # whoever is here first asks for all
            with self._lock:
                taken, self._waiting = self._waiting, []
            try:
                for number in sorted({one[1] for one in taken}):
                    self._ask([text for texts, many, _ in taken if many == number for text in texts], number)
                for texts, many, future in taken:
                    future.set_result([self._known[text, many] for text in texts])
            except Exception as error:
                for _, _, future in taken:
                    if not future.done():
                        future.set_exception(error)
        return own.result()

    def _ask(self, questions: Sequence[str], count: int) -> None:
        policy, params, tokenizer = self.loaded
        new = [text for text in dict.fromkeys(questions) if (text, count) not in self._known]
        context = policy.config.max_positions
        ids = {text: encode_prompt(tokenizer, text) for text in new}
        fitting = [text for text in new if not context or len(ids[text]) < context]
        if len(self._known) > KEPT:
            self._known = {one: said for one, said in self._known.items() if one[0] in set(questions)}
        self._known |= {(text, count): [] for text in new}
        if not fitting:
            return
        batch = sample(
            policy, params, [ids[text] for text in fitting], jax.random.key(0), group_size=count,
            max_new_tokens=self.tokens, temperature=self.temperature,
            prompt_ids=[zlib.crc32(text.encode()) & 0x7FFFFFFF for text in fitting],
        )  # fmt: skip
        said = completion_texts(tokenizer, batch)
        for place, text in enumerate(fitting):
            self._known[text, count] = said[place * count : (place + 1) * count]
