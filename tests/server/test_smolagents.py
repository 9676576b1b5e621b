"""Episodes that agents of the package smolagents play, unmodified: their tools, and the tokens that are trained on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
pytest.importorskip("smolagents")
sys.path.append(str(Path(__file__).parents[1] / "training"))

import tiny_runs as runs
from test_agent_runs import calling, config_of
from test_harness import replies

from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.rewards.workers.loading import load_value
from jaxrl_llm.server.harness import Harness

__all__ = ["calling"]  # a fixture
# An agent with one tool. What it was called with goes to a file.
PLAYS = """
import json
import threading
from pathlib import Path

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

LOCK = threading.Lock()
SHORT = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Call tools."}  # for a small context


def play(base_url, api_key, row):
    said = []

    @tool
    def add(text: str) -> str:
        '''Add a text.

        Args:
            text: what to add
        '''
        said.append(text)
        return f"{len(said)} so far"

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent([add], model, prompt_templates=SHORT, max_steps=2, verbosity_level=LogLevel.OFF)
    result = agent.run(row["prompt"])
    with LOCK, open(Path(__file__).with_name("heard.jsonl"), "a") as file:
        file.write(json.dumps([said, str(result)]) + "\\n")
    return float(len(said[0]) % 2) if said else 0.0
"""


def write_plays(folder: Path) -> Path:
    (folder / "plays.py").write_text(PLAYS)
    return folder / "plays.py"


@pytest.mark.heavy
@pytest.mark.usefixtures("calling")
def test_what_its_tool_is_called_with_is_what_is_trained_on(tmp_path: Path) -> None:
    """Each reply of a policy of random weights is read as a call. What the agent makes of it begins a new row."""
    config = config_of(tmp_path, None, eval_size=0, steps=2, harness=f"{write_plays(tmp_path)}:play")
    facts = tmp_path / "model" / "config.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"max_position_embeddings": 1024}))
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    heard = Counter(tuple(text.strip() for text in said) for said, _ in runs.lines_of(tmp_path / "heard.jsonl"))
    found = replies(taken, config.model)
    assert {said: count for said, count in found.items() if len(said) == 2} == heard != {}
    assert all(line["rollout/new_rows"] > 0 for line in runs.lines_of(tmp_path / "run" / "metrics.jsonl"))


def test_an_agent_uses_its_tool_and_answers(tmp_path: Path) -> None:
    play, _ = load_value(f"{write_plays(tmp_path)}:play", "the harness")
    world = Harness(play)
    seen = asyncio.run(world.reset({"prompt": "Add hm."}, 0))
    assert [one["role"] for one in seen.messages] == ["system", "user"]
    assert [tool["function"]["name"] for tool in world.tools] == ["add", "final_answer"]
    seen = asyncio.run(world.step(Reply({"role": "assistant", "content": ""}, (ReadCall("add", {"text": "hm."}),))))
    assert "1 so far" in str(seen.messages[-1]["content"])
    answer = Reply({"role": "assistant", "content": ""}, (ReadCall("final_answer", {"answer": "yes"}),))
    assert asyncio.run(world.step(answer)).done
    assert asyncio.run(world.close()) == 1.0
    assert runs.lines_of(tmp_path / "heard.jsonl") == [[["hm."], "yes"]]
