"""Tools of MCP servers: a small server, written with the same package, that ends, fails and hangs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.environments.sandbox.run import family
from jaxrl_llm.environments.tools.base import EachEpisode, with_tools
from jaxrl_llm.environments.tools.mcp import mcp_server
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]
SERVER = '''
import os, time
from mcp.server.mcpserver import Image, MCPServer

server, calls = MCPServer("tiny"), []

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def count() -> str:
    """Count the calls."""
    calls.append(1)
    return f"call {len(calls)}"

@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(data=b"x", format="png")

@server.tool()
def variable() -> str:
    """A variable of its environment."""
    return os.environ.get("FRUIT", "none")

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)

@server.tool()
def hang() -> str:
    """Hang."""
    time.sleep(60)

server.run()
'''
Named = dict[str, Callable[..., Any]]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    pytest.importorskip("mcp.server.mcpserver", reason="the tests of MCP servers need the package mcp")
    (tmp_path / "server.py").write_text(SERVER)
    before = len(family(os.getpid()))
    yield [sys.executable, str(tmp_path / "server.py")]
    assert len(family(os.getpid())) == before, "a server is left"


def made(each: EachEpisode) -> tuple[Any, Named]:
    kit = each.make()
    return kit, {function.__name__: function for function in kit.functions}


def test_its_tools(command: list[str]) -> None:
    kit, tools = made(mcp_server(command, environment={"FRUIT": "pear"}))
    assert list(tools) == ["add", "count", "draw", "variable", "fail", "end", "hang"]
    function = tools["add"].schema["function"]  # type: ignore[attr-defined]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert function["parameters"]["required"] == ["a"]
    assert tools["add"](a=2, b=3) == "5"
    assert tools["variable"]() == "pear"
    assert tools["draw"]() == "[image, which is not shown]"
    assert [tools["count"](), tools["count"]()] == ["call 1", "call 2"]
    with pytest.raises(RuntimeError, match="fail"):
        tools["fail"]()
    with pytest.raises(RuntimeError, match="valid integer"):
        tools["add"](a="x")
    with pytest.raises(RuntimeError, match="has ended; call again to start another"):
        tools["end"]()
    assert tools["count"]() == "call 1", "another server"
    kit.close()
    kit.close()
    with pytest.raises(RuntimeError, match="the conversation is over"):
        tools["count"]()


def test_other_text_of_a_server_is_one_line_and_counted(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    banner = 'print("tiny 1.0\\nwelcome\\nready", flush=True)\n\nserver.run()'
    (tmp_path / "server.py").write_text(SERVER.replace("server.run()", banner))
    kit, tools = made(mcp_server(command))
    assert tools["count"]() == "call 1"
    kit.close()
    said = [record.getMessage() for record in caplog.records if not record.exc_info]
    assert len([text for text in said if "prints text to its stdout that is no message" in text]) == 1
    assert [text for text in said if text.endswith("printed 3 lines that are no messages")]
    assert not [record for record in caplog.records if record.exc_info]


def says(text: str, sample: int) -> str:
    if "<tool_response>" in text:
        return f"It is {text.rpartition('<tool_response>')[2].split()[1]}.{END}"
    return f'<tool_call>\n{{"name": "count", "arguments": {{}}}}\n</tool_call>{END}'


def test_a_server_for_each_episode(command: list[str]) -> None:
    tokenizer, each = tokenizer_of("hermes"), mcp_server(command, only=["count"])
    found, _ = run_agents(agent(with_tools([each])), tokenizer, says, [{"prompt": "Count."}])
    texts = [tokenizer.decode(one.tokens) for one in found.groups[0].episodes]
    assert [text.rpartition("assistant\n")[2] for text in texts] == [f"It is 1.{END}"] * 2
    assert '"name": "add"' not in texts[0]


def test_a_shared_server(command: list[str]) -> None:
    tokenizer, each = tokenizer_of("hermes"), mcp_server(command, only=["count", "end"], shared=True)
    found, _ = run_agents(agent(with_tools([each])), tokenizer, says, [{"prompt": "Count."}])
    texts = [tokenizer.decode(one.tokens).rpartition("assistant\n")[2] for one in found.groups[0].episodes]
    assert sorted(texts) == [f"It is 1.{END}", f"It is 2.{END}"]
    _, tools = made(each)
    with pytest.raises(RuntimeError, match="has ended"):
        tools["end"]()


def test_a_call_that_hangs(command: list[str]) -> None:
    kit, tools = made(mcp_server(command, seconds=3))
    with pytest.raises(RuntimeError, match="timed out"):
        tools["hang"]()
    kit.close()


def test_servers_that_do_not_start(command: list[str]) -> None:
    for words, why in (
        (["/absent/program"], "did not start: FileNotFoundError"),
        ([sys.executable, "-c", "raise SystemExit('bad luck')"], "did not start: bad luck"),
        (f"{sys.executable} -c 'import time; time.sleep(60)'", "did not start: it gave no answer within 1 s"),
    ):
        with pytest.raises(InputError, match=why):
            mcp_server(words, seconds=1).make()
    with pytest.raises(InputError, match=r"unknown tool of .*'sub'\. Known: add, count"):
        mcp_server(command, only=["sub"]).make()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="the command of an MCP server is empty"):
        mcp_server("")
    with pytest.raises(InputError, match="seconds of mcp_server is 0"):
        mcp_server("server", seconds=0)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InputError, match=r"needs the package 'mcp': pip install 'jaxrl_llm\[mcp\]'"):
        mcp_server("server")
