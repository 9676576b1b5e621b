"""Search in a corpus: ranks by BM25 as it is defined, corpora of each form, and what is no corpus."""

from __future__ import annotations

import doctest
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.environments.tools import search as module
from jaxrl_llm.environments.tools.base import schema_of, with_tools
from jaxrl_llm.environments.tools.search import Passage, passages_of, search_in, words
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]
TEXTS = [
    "The Rhine flows through Basel and Cologne.",
    "The Danube flows through Vienna, Budapest and Belgrade; the Danube is long.",
    "Basel is a city.",
    "Vienna is a city on the Danube.",
    "Nothing of that.",
]


def bm25(query: str, texts: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's form, as a slow loop."""
    split = [words(text) for text in texts]
    mean = sum(map(len, split)) / len(split)
    out = []
    for one in split:
        score = 0.0
        for word in words(query):
            holding, count = sum(word in other for other in split), one.count(word)
            idf = math.log(1 + (len(split) - holding + 0.5) / (holding + 0.5))
            score += idf * count / (count + k1 * (1 - b + b * len(one) / mean))
        out.append(score)
    return out


@pytest.mark.parametrize("query", ["Danube", "the city of Basel", "Vienna city danube", "through that"])
def test_ranks_are_those_of_bm25(query: str) -> None:
    pytest.importorskip("bm25s")
    scores = bm25(query, TEXTS)
    best = sorted((n for n in range(len(TEXTS)) if scores[n] > 0), key=lambda n: -scores[n])
    told = search_in(TEXTS, results=10)(query)
    assert told == "\n\n".join(f"[{rank}] {TEXTS[n]}" for rank, n in enumerate(best, start=1))


def test_results() -> None:
    pytest.importorskip("bm25s")
    search = search_in(TEXTS, results=1, characters=10)
    assert search("budapest") == "[1] The Danube [cut]"
    assert search("zebra !?") == "Nothing is found: no passage has a word of the query."
    assert search("") == search("zebra")
    assert search_in(["same x", "same y", "same z"], results=2)("same") == "[1] same x\n\n[2] same y"
    schema = schema_of(search_in(TEXTS, results=7, name="look_up"))["function"]
    assert (schema["name"], "best 7" in schema["description"]) == ("look_up", True)


def test_corpora(tmp_path: Path) -> None:
    lines = tmp_path / "corpus.jsonl"
    lines.write_text('{"title": "Rhine", "text": "long"}\n\n{"text": "short", "more": 1}\n')
    assert passages_of(lines) == [Passage("Rhine", "long"), Passage("", "short")]
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.md").write_text(f"One.\n\n\n{'x' * 999}\n \nTwo.")
    (folder / "deep/a.txt").write_text("Deep.")
    (folder / "c.py").write_text("no = 1")
    assert passages_of(str(folder)) == [
        Passage("b.md", "One."), Passage("b.md", "x" * 999), Passage("b.md", "Two."), Passage("deep/a.txt", "Deep."),
    ]  # fmt: skip
    pytest.importorskip("bm25s")
    assert search_in(lines)("rhine") == "[1] Rhine\nlong", "titles are searched too"
    assert doctest.testmod(module).failed == 0


def test_what_is_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist: give a file of JSON lines, or a folder"):
        search_in(tmp_path / "absent")
    with pytest.raises(InputError, match="no text to search in"):
        search_in(tmp_path)
    with pytest.raises(InputError, match="no text to search in"):
        search_in(["", "!"])
    for bad in ("{", "[1]", '{"title": "x"}', '{"text": 3}'):
        (tmp_path / "bad.jsonl").write_text(f'{{"text": "x"}}\n{bad}\n')
        with pytest.raises(InputError, match=r'bad.jsonl, line 2: a passage is a JSON object with a string "text"'):
            search_in(tmp_path / "bad.jsonl")
    with pytest.raises(InputError, match="results of search_in is 0"):
        search_in(TEXTS, results=0)
    with pytest.raises(InputError, match="must be one word"):
        search_in(TEXTS, name="look up")
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(InputError, match=r"needs the package 'bm25s': pip install 'jaxrl_llm\[search\]'"):
        search_in(TEXTS)


def test_a_conversation() -> None:
    pytest.importorskip("bm25s")

    def says(text: str, sample: int) -> str:
        if "<tool_response>" in text:
            return f"{'Vienna' if 'Budapest' in text else 'No idea'}.{END}"
        query = ["Danube Belgrade", "Nile"][sample]
        return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'query': query}})}\n</tool_call>{END}"

    rollout, tokenizer = agent(with_tools([search_in(TEXTS)])), tokenizer_of("hermes")
    found, _ = run_agents(rollout, tokenizer, says, [{"prompt": "Where is the Danube?"}])
    texts = [tokenizer.decode(one.tokens).rpartition("assistant\n")[2] for one in found.groups[0].episodes]
    assert texts == [f"Vienna.{END}", f"No idea.{END}"]
