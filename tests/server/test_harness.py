"""Episodes that a harness plays with clients of its own: exact tokens, rewritten conversations, retries, failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
sys.path.append(str(Path(__file__).parents[1] / "training"))

import tiny_runs as runs
from test_agent_runs import config_of

from jaxrl_llm.cli.program import main
from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.server.harness import Harness, harness
from jaxrl_llm.training import setup

# Plays of two calls with the real client. What they heard goes to a file.
PLAYS = """
import asyncio
import json
import threading
from pathlib import Path

import openai

from jaxrl_llm.server.harness import harness

LOCK = threading.Lock()


def note(said):
    with LOCK, open(Path(__file__).with_name("heard.jsonl"), "a") as file:
        file.write(json.dumps(said) + "\\n")


def going_on(base_url, api_key, row, keep=True):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages, said = [{"role": "user", "content": row["prompt"]}], []
    for turn in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        said.append(answer)
        if keep:
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "on"}]
        else:
            messages = [{"role": "user", "content": f"{turn}"}]
    note(said)
    return float(len(said[0]) % 2)


def rewriting(base_url, api_key, row):
    return going_on(base_url, api_key, row, keep=False)


async def in_the_loop(base_url, api_key, row):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    asked = [{"role": "user", "content": row["prompt"]}]
    said = []
    async for piece in await client.chat.completions.create(model="policy", messages=asked, stream=True):
        said += [choice.delta.content or "" for choice in piece.choices]
    note(["".join(said)])
    return 1.0


def raising(base_url, api_key, row):
    going_on(base_url, api_key, row)
    raise OSError("no disk")


def silent(base_url, api_key, row):
    return 1.0


async def branching(base_url, api_key, row):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def ask(messages):
        return (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content

    asked = [{"role": "user", "content": row["prompt"]}]
    said = await asyncio.gather(*(ask(asked) for _ in range(3)))
    more = [[*asked, {"role": "assistant", "content": one}, {"role": "user", "content": "on"}] for one in said[:2]]
    said += await asyncio.gather(*(ask(messages) for messages in [*more, more[0]]))
    note(said)
    return float(len(said[0]) % 2)


plays = going_on, rewriting, in_the_loop, raising, silent, branching
goes_on, rewrites, is_async, raises, is_silent, branches = map(harness, plays)
"""


def trained(folder: Path, name: str, **changes: Any) -> tuple[list[runs.Taken], list[dict[str, Any]], list[list[str]]]:
    """What a run of two steps sampled, its metrics, and what the harness heard."""
    (folder / "plays.py").write_text(PLAYS)
    config = config_of(folder, eval_size=0, steps=2, **changes)
    config = dataclasses.replace(config, environment=f"{folder / 'plays.py'}:{name}")
    taken = list[runs.Taken]()
    with runs.watched(taken):
        runs.train(config)
    heard = folder / "heard.jsonl"
    said = [json.loads(line) for line in heard.read_text().splitlines()] if heard.exists() else []
    return taken, runs.lines_of(folder / "run" / "metrics.jsonl"), said


def replies(taken: list[runs.Taken], model: str) -> Counter[tuple[str, ...]]:
    """How often each sequence of replies is that of an episode, by the tokens that are trained on."""
    tokenizer, found = load_tokenizer(model), Counter[tuple[str, ...]]()
    for step in taken:
        batch = step.scored.batch
        episodes: dict[Any, list[str]] = {}
        for row in range(len(batch.group)):
            turns, ids = np.asarray(batch.turn[row]), np.asarray(batch.tokens[row])
            one = episodes.setdefault((int(batch.group[row]), float(batch.info["episode"][row])), [])
            for turn in range(int(turns.max(initial=-1)) + 1):
                one.append(tokenizer.decode(ids[turns == turn].tolist(), skip_special_tokens=True).strip())
        found.update(tuple(one) for one in episodes.values())
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "rows"), [("goes_on", 1), ("rewrites", 2), ("is_async", 1)])
def test_what_a_client_hears_is_what_is_trained_on(tmp_path: Path, name: str, rows: int) -> None:
    """A conversation that goes on is one row; what the harness rewrote begins another."""
    taken, lines, heard = trained(tmp_path, name)
    found = replies(taken, str(tmp_path / "model"))
    whole = Counter({one: count for one, count in found.items() if len(one) == (1 if name == "is_async" else 2)})
    assert whole
    assert whole == Counter(tuple(text.strip() for text in said) for said in heard)
    ended = [line for line in lines if line["rollout/failed_environments"] == 0]
    assert ended
    if name != "is_async":  # replies that reach their limit end an episode before
        assert all(0 < line["rollout/new_rows"] <= 1 for line in lines) == (rows == 2)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "scored"), [("raises", True), ("is_silent", False)])
def test_a_harness_that_fails_is_counted(tmp_path: Path, name: str, scored: bool) -> None:
    _, lines, _ = trained(tmp_path, name)
    assert all(line["rollout/failed_environments"] > 0 for line in lines)
    assert all(line["reward/unscored"] == (0 if scored else 1) for line in lines)


@pytest.mark.heavy
def test_the_option_gives_what_the_environment_of_the_function_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line, and with the code's digest among the run's inputs."""
    (tmp_path / "environment").mkdir()
    _, expected, _ = trained(tmp_path / "environment", "goes_on")
    plays = tmp_path / "plays.py"
    plays.write_text(PLAYS)
    config = config_of(tmp_path, None, eval_size=0, steps=2, harness=f"{plays}:going_on")
    taken = list[runs.Taken]()
    with runs.watched(taken):
        assert main(["train", *runs.as_arguments(config)]) == 0
    lines, measured = runs.lines_of(tmp_path / "run" / "metrics.jsonl"), ("loss", "reward/mean", "rollout/new_rows")
    assert [[line[name] for name in measured] for line in lines] == [
        [line[name] for name in measured] for line in expected
    ]
    said = runs.lines_of(tmp_path / "heard.jsonl")
    heard = Counter(tuple(text.strip() for text in one) for one in said)
    whole = {texts: count for texts, count in replies(taken, config.model).items() if len(texts) == 2}
    assert whole == heard
    plays.write_text(PLAYS + "\n# Other code.\n")
    capsys.readouterr()
    assert main(["train", "--resume", config.output]) == 2
    assert "the harness's file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--harness", "{}:going_on", "--environment", "{}:goes_on"],
            "environment and harness are given, but only one",
        ),
        (["--harness", "{}:gone_on"], "unknown function of .*'gone_on': did you mean"),
        (["--harness", "nowhere.py:going_on"], "no file 'nowhere.py'.* for the harness"),
        (["--harness", "nowhere:going_on"], "cannot load the harness from 'nowhere': ModuleNotFoundError"),
        (["--harness", "going_on"], "the harness 'going_on' names no file: write path/to/file.py:NAME"),
        (["--harness", "{}:note"], r"the harness note\(said\) cannot be called with three arguments"),
        (["--harness", "{}:goes_on"], r"the harness .* cannot be called with three arguments"),
    ],
)
def test_what_is_no_harness_is_refused_before_the_model_is_loaded(
    given: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(setup, "load_policy", loaded)
    (tmp_path / "plays.py").write_text(PLAYS)
    options = [one.format(tmp_path / "plays.py") for one in given]
    # Without an environment the arguments of this configuration say nothing of one.
    arguments = runs.as_arguments(config_of(tmp_path, None, rewards=("number_match",), turns=8))
    assert main(["train", *arguments, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def post(url: str, key: str, body: dict[str, Any], retry: int = 0) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


now = asyncio.run  # the methods of a harness are async
HI = {"model": "policy", "messages": [{"role": "user", "content": "Hi."}]}


def test_a_request_that_is_sent_again_gets_the_same_answer() -> None:
    def play(url: str, key: str, row: dict[str, Any]) -> float:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(post, url, key, HI)
            time.sleep(0.2)
            again = pool.submit(post, url, key, HI, 1)
            texts = [one.result()["choices"][0]["message"]["content"] for one in (first, again)]
        later = post(url, key, HI)["choices"][0]["message"]["content"]  # no retry: another reply
        return float(texts == ["a", "a"] and later == "b")

    world = Harness(play)
    seen = now(world.reset({}, 0))
    assert (list(seen.messages), seen.whole) == (HI["messages"], True)
    assert not now(world.step(Reply({"role": "assistant", "content": "a"}, (), tokens=2, prompt_tokens=3))).done
    assert now(world.step(Reply({"role": "assistant", "content": "b"}, ()))).done
    assert now(world.close()) == 1.0


def test_tools_and_thoughts_reach_the_client() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    heard = list[Any]()

    def play(url: str, key: str, row: dict[str, Any]) -> None:
        heard.append(post(url, key, {**HI, "tools": [tool], "temperature": 0.1}))

    world = Harness(play)
    now(world.reset({}, 0))
    assert list(world.tools) == [tool]
    message = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert now(world.step(Reply(message, (ReadCall("look", {"at": 1}),), tokens=5, prompt_tokens=7))).done
    assert now(world.close()) is None
    (choice,) = heard[0]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": 1}
    assert heard[0]["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "gpt-9"}, 404, "the model 'gpt-9' does not exist: this endpoint has policy"),
        ({"logprobs": True}, 400, "logprobs is not supported by the endpoint of a harness"),
        ({"messages": [{"role": "user"}]}, 400, "each message must have a role and a content"),
    ],
)
def test_the_protocol_s_errors(changes: dict[str, Any], status: int, message: str) -> None:
    found = list[tuple[int, str]]()

    def play(url: str, key: str, row: dict[str, Any]) -> None:
        for given, body in ((key, {**HI, **changes}), ("other", HI)):
            try:
                post(url, given, body)
            except urllib.error.HTTPError as error:
                found.append((error.code, json.load(error)["error"]["message"]))

    with pytest.raises(RuntimeError, match="ended without a call"):
        now(harness(play)().reset({}, 0))
    assert found[0][0] == status
    assert message in found[0][1]
    assert found[1][0] == 401


def test_an_episode_that_is_closed_answers_no_more() -> None:
    found = list[int]()

    def play(url: str, key: str, row: dict[str, Any]) -> None:
        try:
            post(url, key, HI)
        except urllib.error.HTTPError as error:
            found.append(error.code)

    world = Harness(play)
    now(world.reset({}, 0))
    assert now(world.close()) is None
    end = time.monotonic() + 30
    while not found and time.monotonic() < end:
        time.sleep(0.02)
    assert found == [401]
