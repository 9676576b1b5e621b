"""The reward of single calls of search tools: which are useful and which redundant (2509.24107).

A call is a search, with an argument such as `query`, or opens a page, with an argument `url`. Each has a label:

    unique search       no earlier one has nearly the same words
    redundant search    one has
    exploration         the first call that opens this page
    verification        a later one of a page that the answer cites, at most B_v times
    redundant query     any other

With T calls, rho = the redundant ones / T, dS = unique - redundant searches, dQ = explorations + verifications -
redundant queries,

    right answer:   r = max(1 - rho, 1/2)
    wrong answer:   r = c1 min(1, dS / C_S) + c2 min(1, dQ / C_Q),    c1 = c2 = 0.2
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.rewards.entries import REWARD
from jaxrl_llm.rewards.graded import reads_prompts
from jaxrl_llm.rewards.judges.questions import stated
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.utils.errors import InputError, shown

if TYPE_CHECKING:
    from jaxrl_llm.rewards.judges.endpoint import Endpoint

AT_ONCE = 16  # completions whose calls are labelled side by side
UNIQUE, REDUNDANT_SEARCH = "unique search", "redundant search"
EXPLORATION, VERIFICATION, REDUNDANT_QUERY = "exploration", "verification", "redundant query"
SEARCH, PAGE = "search", "page"
LABELS = {SEARCH: (UNIQUE, REDUNDANT_SEARCH), PAGE: (EXPLORATION, VERIFICATION, REDUNDANT_QUERY)}
NEAR = 0.8  # share of the words of two searches that both have, from which on they are nearly the same
ARGUMENTS = {PAGE: ("url", "urls", "link"), SEARCH: ("query", "queries", "q", "keywords")}

ASK = """A model searches for the answer to a question, with calls of tools. Label one of its calls.

Question:
{problem}

Its calls so far:
{before}

The call to label:
{call}

Its answer in the end:
{answer}

Labels:
{labels}

Explain in a sentence. Then write the label in the last line, such as [[{example}]]."""
MEANINGS = {
    UNIQUE: "it looks for what no earlier search looked for",
    REDUNDANT_SEARCH: "an earlier search looked for the same",
    EXPLORATION: "it reads the page for the first time",
    VERIFICATION: "it reads the page again, or another one, to check a claim of the answer",
    REDUNDANT_QUERY: "it reads again what is known",
}


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def kind(self) -> str | None:
        """SEARCH, PAGE, or None for another tool."""
        return next((kind for kind, names in ARGUMENTS.items() if any(self.arguments.get(one) for one in names)), None)

    @property
    def object(self) -> str:
        """What it looks for, or the page that it opens."""
        found = next((x for one in ARGUMENTS.get(self.kind or "", ()) if (x := self.arguments.get(one))), "")
        return " ".join(map(str, found)) if isinstance(found, list | tuple) else str(found)


# (the problem, the calls of a conversation, its last text) -> the label of each call, None of those of other tools
Label = Callable[[str, Sequence[Call], str], list[str | None]]


def calls_of(completion: Any) -> list[Call]:
    """The calls in a completion, in their order; none in a text.

    >>> calls_of([{"role": "assistant", "content": "", "tool_calls": [
    ...     {"function": {"name": "search", "arguments": '{"query": "tides"}'}}]}])
    [Call(name='search', arguments={'query': 'tides'})]
    """
    if isinstance(completion, str):
        return []
    out = []
    for message in completion:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    arguments = {}
            out.append(Call(str(function.get("name", "")), arguments if isinstance(arguments, Mapping) else {}))
    return out


def valid_calls(completions: Sequence[Any], **_: Any) -> list[float]:
    """1.0 unless a tool or environment answered with an error, "Error: ...", as to calls that cannot be read.

    >>> valid_calls(["4", [{"role": "tool", "content": "Error: there is no tool 'ad', but add"}]])
    [1.0, 0.0]
    """
    answers = (() if isinstance(one, str) else one for one in completions)
    told = (
        [text_of([{**one, "role": "assistant"}]) for one in messages if one.get("role") != "assistant"]
        for messages in answers
    )
    return [float(not any(text.startswith("Error: ") for text in texts)) for texts in told]


def page_key(url: str) -> str:
    """A page's address without what does not change the page.

    >>> page_key("https://www.Example.org/Tides/#high"), page_key("example.org/Tides")
    ('example.org/Tides', 'example.org/Tides')
    """
    short = re.sub(r"^https?://", "", url.strip(), flags=re.IGNORECASE).partition("#")[0].rstrip("/")
    host, slash, rest = short.partition("/")
    return host.lower().removeprefix("www.") + slash + rest


def cites(text: str, url: str) -> bool:
    """Whether a text has the address of a page, and not only one that goes on after it.

    >>> cites("See https://example.org/a.", "http://example.org/a"), cites("example.org/ab", "example.org/a")
    (True, False)
    """
    return bool(re.search(rf"(?<![\w.-])(?:www\.)?{re.escape(page_key(url))}/?(?![\w/-]|[.?=&]\w)", text))


def are_near(one: str, other: str) -> bool:
    """Whether two searches have nearly the same words.

    >>> are_near("tides of the Moon", "the moon: of tides!"), are_near("tides", "tides today")
    (True, False)
    """
    a, b = (set(re.findall(r"\w+", text.lower())) for text in (one, other))
    return one.strip() == other.strip() or (bool(a | b) and len(a & b) / len(a | b) >= NEAR)


def labels_by_rules(problem: str, calls: Sequence[Call], answer: str) -> list[str | None]:
    """The labels that need no judge: by the words of searches, the addresses of pages, and which of them the answer
    cites. Verifications are not limited here."""
    out, searches, pages = list[str | None](), list[str](), set[str]()
    for call in calls:
        if call.kind == SEARCH:
            out.append(REDUNDANT_SEARCH if any(are_near(call.object, one) for one in searches) else UNIQUE)
            searches.append(call.object)
        elif call.kind == PAGE:
            known = page_key(call.object) in pages
            again = VERIFICATION if cites(answer, call.object) else REDUNDANT_QUERY
            out.append(again if known else EXPLORATION)
            pages.add(page_key(call.object))
        else:
            out.append(None)
    return out


def judged(endpoint: Endpoint, template: str = ASK) -> Label:
    """Labels by a language model, which is asked about each call; where it states none, those of the rules.

    template: with {problem}, {before}, {call}, {answer}, {labels} and {example}, as `str.format` fills them in. A
    failing endpoint raises RuntimeError.
    """

    def label(problem: str, calls: Sequence[Call], answer: str) -> list[str | None]:
        out = labels_by_rules(problem, calls, answer)
        told = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in calls]
        for place, call in enumerate(calls):
            if call.kind is None:
                continue
            allowed = LABELS[call.kind]
            question = template.format(
                problem=problem, before="\n".join(told[:place]) or "none", call=told[place], answer=answer,
                labels="\n".join(f"{one}: {MEANINGS[one]}" for one in allowed), example=allowed[0],
            )  # fmt: skip
            said = stated(endpoint.answer(question))
            out[place] = said if said in allowed else out[place]
        return out

    return label


def limited(labels: Sequence[str | None], calls: Sequence[Call], checks: int) -> list[str | None]:
    """The labels, where a page has more than `checks` verifications those after them as redundant queries."""
    counts: Counter[str] = Counter()
    out = list(labels)
    for place, (label, call) in enumerate(zip(labels, calls, strict=True)):
        if label == VERIFICATION:
            counts[page_key(call.object)] += 1
            out[place] = label if counts[page_key(call.object)] <= checks else REDUNDANT_QUERY
    return out


def call_reward(
    labels: Sequence[str | None], right: bool, searches: float = 8, pages: float = 16,
    weights: tuple[float, float] = (0.2, 0.2),
) -> float:  # fmt: skip
    """r of the labels of T calls: 1/2 to 1 for right answers, at most c1 + c2 for wrong ones, without a least value.

    searches, pages: C_S and C_Q. weights: c1 and c2. Calls of other tools have no label, and count in T alone.
    """
    count = {one: sum(label == one for label in labels) for one in MEANINGS}
    if right:
        redundant = count[REDUNDANT_SEARCH] + count[REDUNDANT_QUERY]
        return max(1 - redundant / max(len(labels), 1), 0.5)
    more_searches = count[UNIQUE] - count[REDUNDANT_SEARCH]
    more_pages = count[EXPLORATION] + count[VERIFICATION] - count[REDUNDANT_QUERY]
    return weights[0] * min(1, more_searches / searches) + weights[1] * min(1, more_pages / pages)


def useful_calls(
    base: Callable[..., Any], searches: float = 8, pages: float = 16, checks: int = 1,
    weights: tuple[float, float] = (0.2, 0.2), label: Label = labels_by_rules,
) -> Callable[..., Any]:  # fmt: skip
    """A reward of answers and of the calls of search tools that led to them, `call_reward`.

    base: the reward of the answer, which is right above 0.5; a completion that it does not score has none. searches,
    pages, checks, weights: C_S, C_Q, B_v (for each page), c1 and c2. label: what labels the calls, such as
    judged(Endpoint(URL, MODEL)). InputError for numbers that are not above 0, and a negative `checks`.
    """
    if not (searches > 0 and pages > 0 and checks >= 0):
        raise InputError(
            f"useful_calls: C_S {shown(searches)} and C_Q {shown(pages)} must be above 0, and B_v {shown(checks)} at "
            "least 0"
        )

    @functools.wraps(base, assigned=())
    def useful_calls(completions: Sequence[Any], prompts: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        found = base(completions, prompts=prompts, **columns)
        entries = dict(found) if isinstance(found, dict) else {REWARD: found}

        def one(completion: Any, prompt: Any, value: float | None) -> float | None:
            if value is None or value != value:  # not scored
                return None
            calls = calls_of(completion)
            asked = prompt
            if not isinstance(prompt, str):  # what the user says last
                asked = text_of([{**one, "role": "assistant"} for one in prompt if one.get("role") == "user"])
            labels = limited(label(asked, calls, text_of(completion)), calls, checks)
            return call_reward(labels, value > 0.5, searches, pages, weights)

        with ThreadPoolExecutor(AT_ONCE) as pool:  # for judges, which take long to answer
            return {**entries, REWARD: list(pool.map(one, completions, prompts, entries[REWARD]))}

    reads_prompts(useful_calls, base)
    return useful_calls
