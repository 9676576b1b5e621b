"""Data at http:// URLs: a file that changed is read again, and errors name the URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data import load_prompts
from jaxrl_llm.data.sources.random_access import open_records, row_of
from jaxrl_llm.utils.errors import InputError

pytest.importorskip("aiohttp", reason="http:// needs the package aiohttp")


class Served:
    """What a server of one file holds, with the headers that it sends, and the requests of its content."""

    def __init__(self) -> None:
        self.text, self.headers, self.read = "", dict[str, str](), 0


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    held = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            held.read += 1
            self.answer()
            self.wfile.write(held.text.encode())

        def answer(self) -> None:
            self.send_response_only(200)
            for name, value in {"Content-Length": str(len(held.text)), **held.headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *of: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield held, f"http://127.0.0.1:{server.server_port}/data/prompts.jsonl"
    server.shutdown()
    server.server_close()


def row(prompt: str) -> str:
    return f'{{"prompt": "{prompt}"}}\n'


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_a_file_that_changed_is_read_again(served: tuple[Served, str], header: str) -> None:
    """Both contents have one length, so that only the header tells."""
    held, url = served
    held.text, held.headers = row("one"), {header: "1"}
    assert [one["prompt"] for one in load_prompts(url)] == ["one"]
    read = held.read
    assert [one["prompt"] for one in load_prompts(url)] == ["one"]
    assert held.read == read, "the copy serves"
    held.text, held.headers = row("two"), {header: "2"}
    assert [one["prompt"] for one in load_prompts(url)] == ["two"]


def test_without_such_a_header_the_content_tells(served: tuple[Served, str]) -> None:
    held, url = served
    for prompt in ("one", "two", "one"):
        held.text = row(prompt)
        assert [one["prompt"] for one in load_prompts(url)] == [prompt]


def test_errors_name_the_url(served: tuple[Served, str], tmp_path: Path) -> None:
    held, url = served
    held.text, held.headers = row("one") + "{broken\n", {"ETag": "1"}
    with pytest.raises(InputError, match=url) as error:
        load_prompts(url)
    assert str(tmp_path) not in str(error.value)
    records = open_records(url)
    assert records is not None
    assert records.where(1) == f"{url}, line 2"
    with pytest.raises(InputError, match=url):
        row_of(records[1], records.where(1))
    held.text, held.headers = "", {"ETag": "2"}
    with pytest.raises(InputError, match=url):
        load_prompts(url)
