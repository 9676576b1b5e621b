"""The pages of the documentation as text: their blocks of code, and what is written above a block.

A comment right above a block says how it is tested. `<!-- file: NAME -->`: it is a file of the page's folder
(`repeat: N`: so many times over). `<!-- heavy -->`: it is run by `make test-all` only. Blocks of Python without
a comment are run by `make test`, one after another in one namespace.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TINY = ROOT / "tests/vectors/llama_tied"
FENCE = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    mark: str  # the comment above it; "" without
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = re.match(r"file: (\S+)", self.mark)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(found["language"], found["mark"] or "", found["text"], text[: found.start("text")].count("\n") + 1)
        for found in FENCE.finditer(text)
    ]


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that are files into a folder."""
    for block in blocks(page):
        if block.file:
            times = re.search(r"repeat: (\d+)", block.mark)
            (folder / block.file).write_text(_repeated(block.text, int(times[1])) if times else block.text)


def _repeated(lines: str, times: int) -> str:
    """Rows of JSON over and over, with questions that differ."""
    rows = [json.loads(line) for line in lines.splitlines()]
    return "".join(
        json.dumps({**row, "question": f"{number}. {row['question']}"}) + "\n"
        for number in range(times)
        for row in rows
    )


def tiny_chat_model(folder: Path) -> Path:
    """A copy of the tiny model with a chat template and a longer context, in place of the models that pages name."""
    copy = folder / "tiny"
    shutil.copytree(TINY, copy)
    changes = {"tokenizer_config.json": {"chat_template": TEMPLATE}, "config.json": {"max_position_embeddings": 1024}}
    for name, settings in changes.items():
        (copy / name).write_text(json.dumps({**json.loads((copy / name).read_text()), **settings}))
    return copy


def programs(page: Path, heavy: bool) -> list[Block]:
    """The blocks of Python that are run: those of `make test`, or with `heavy` all of them."""
    return [b for b in blocks(page) if b.language == "python" and not b.file and (heavy or b.mark != "heavy")]


def run_programs(page: Path, model: Path, heavy: bool) -> dict[str, Any]:
    """Run the blocks of a page in the current folder, with a tiny model; returns their names."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in programs(page, heavy):
        text = block.text.replace('"smollm2-135m"', repr(str(model)))
        # Empty lines in front, so that a traceback shows the line of the page.
        exec(compile("\n" * block.line + text, str(page), "exec"), names)
    return names


def commands(text: str) -> Iterator[list[str]]:
    """The words of each jaxrl command in a block of shell lines; of one within another command too."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(r"^(\$ )?jaxrl |-- jaxrl ", line) or "..." in line:
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        yield words[words.index("jaxrl") + 1 :]
