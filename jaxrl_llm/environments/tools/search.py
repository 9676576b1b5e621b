"""Search in a local corpus as a tool: BM25 over passages, by the package bm25s."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.utils.errors import InputError, optional_package, shown

PASSAGE = 1000  # characters of a passage of a text file
_WORD = re.compile(r"\w+")

_TOLD = """Search the library for passages about a query, and return the best {results}.

Args:
    query: Words to look for.
"""


class Passage(NamedTuple):
    """What is found: a text, and the title of what it is from."""

    title: str
    text: str


@checked
def search_in(
    corpus: str | Path | Sequence[str], results: Count = 3, characters: Count = PASSAGE, name: str = "search"
) -> Callable[[str], str]:
    """A tool `search(query)` over a corpus; all episodes share its index.

    corpus: texts; or a file of JSON lines, each a passage {"text", perhaps "title"}; or a folder, whose .txt and .md
    files are split into passages at empty lines. results: most passages that a call returns. characters: of each.
    name: of the tool, for several of them.

    Passages are ranked by BM25 (Robertson and others, 1994; Lucene's form, k1 = 1.5, b = 0.75) on lower-case words,
    equal ones in the corpus's order. Those without a word of the query are not returned.

    Raises InputError for a corpus that is missing, empty or has a line without a text, numbers below 1, and where bm25s
    is not installed.
    """
    if not name.isidentifier():
        raise InputError(f"a tool's name is {shown(name)}, but must be one word")
    passages = passages_of(corpus)
    with optional_package("bm25s", "search", "search in a corpus"):
        from bm25s import BM25
    index = BM25(k1=1.5, b=0.75, method="lucene")
    index.index([words(f"{one.title} {one.text}") for one in passages], show_progress=False)
    known = set(index.vocab_dict)

    def search(query: str) -> str:
        asked = [word for word in words(str(query)) if word in known]
        if not asked:
            return "Nothing is found: no passage has a word of the query."
        scores = np.asarray(index.get_scores(asked))
        best = [place for place in np.argsort(-scores, kind="stable")[:results] if scores[place] > 0]
        return "\n\n".join(_told(number, passages[place], characters) for number, place in enumerate(best, start=1))

    search.__name__, search.__doc__ = name, _TOLD.format(results=results)
    return search


def words(text: str) -> list[str]:
    """The words of a text, in lower case.

    >>> words("It's 3 o'clock.")
    ['it', 's', '3', 'o', 'clock']
    """
    return _WORD.findall(text.lower())


def passages_of(corpus: str | Path | Sequence[str]) -> list[Passage]:
    """The passages of a corpus; see `search_in`. InputError if there are none."""
    if not isinstance(corpus, str | Path):
        found = [Passage("", text) for text in corpus]
        where = "the corpus"
    else:
        path, where = Path(corpus).expanduser(), f"the corpus {corpus}"
        if path.is_dir():
            found = list(_of_folder(path))
        elif path.is_file():
            found = list(_of_lines(path))
        else:
            raise InputError(f"{where} does not exist: give a file of JSON lines, or a folder of .txt and .md files")
    if not any(words(one.text) for one in found):
        raise InputError(f"{where} has no text to search in")
    return found


def _of_lines(path: Path) -> Iterator[Passage]:
    with path.open(encoding="utf-8", errors="replace") as opened:
        for number, line in enumerate(opened, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield Passage(str(row.get("title") or ""), row["text"] + "")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise InputError(f'{path}, line {number}: a passage is a JSON object with a string "text"') from None


def _of_folder(folder: Path) -> Iterator[Passage]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in (".txt", ".md") and path.is_file():
            title = path.relative_to(folder).as_posix()
            for text in split(path.read_text("utf-8", "replace")):
                yield Passage(title, text)


def split(text: str, most: int = PASSAGE) -> list[str]:
    """Passages of a text: paragraphs, of which short ones are put together and long ones cut, to at most `most`.

    >>> split("One.\\n\\nTwo.\\n\\nThree is long.", 12)
    ['One.\\n\\nTwo.', 'Three is lon', 'g.']
    """
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if out and paragraph and len(out[-1]) + 2 + len(paragraph) <= most:
            out[-1] += f"\n\n{paragraph}"
        else:
            out += [paragraph[start : start + most] for start in range(0, len(paragraph), most)]
    return out


def _told(number: int, passage: Passage, characters: int) -> str:
    text = passage.text if len(passage.text) <= characters else f"{passage.text[:characters]} [cut]"
    return f"[{number}] {passage.title}\n{text}" if passage.title else f"[{number}] {text}"
