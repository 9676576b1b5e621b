"""Clients of a harness that go away, send again, or ask for what is refused, while others are answered."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
sys.path += [str(Path(__file__).parents[1] / "rollouts"), str(Path(__file__).parents[1] / "training")]

import openai
from speaking import Speaking
from test_harness import HI, post
from test_harness_trees import Ask, Played, chat, playing, user

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.server.episodes import EpisodeCalls, endpoint
from jaxrl_llm.server.harness import Harness

now = asyncio.run  # the methods of a harness are async


def until(holds: Callable[[], bool]) -> None:
    """Wait for what takes a moment."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def calls_of(url: str) -> EpisodeCalls:
    return endpoint().episodes[url.split("/")[-2]]


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def unread(url: str, key: str) -> socket.socket:
    """A request whose answer nobody reads, until it is closed."""
    where, body = urllib.parse.urlsplit(url), json.dumps(HI)
    found = socket.create_connection((where.hostname, where.port))
    head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {key}\r\n"
    found.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return found


def replies(*texts: str) -> list[Reply]:
    return [Reply({"role": "assistant", "content": text}, ()) for text in texts]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_of_equal_calls_at_once_the_one_that_was_lost_is_sent_again(lost: int) -> None:
    """It gets its own reply; the others have theirs, and the policy is asked three times."""
    asked, heard = threading.Event(), dict[int, str]()

    def play(url: str, key: str, row: dict[str, Any]) -> float:
        calls = calls_of(url)
        with ThreadPoolExecutor(2) as pool:
            others, gone = dict[int, Any](), None
            for number in range(3):
                if number == lost:
                    gone = unread(url, key)
                else:
                    others[number] = pool.submit(post, url, key, HI)
                until(lambda size=number + 1: len(calls.requests) == size)
            asked.wait(60)
            assert gone is not None
            gone.close()
            until(lambda: calls.requests[lost].lost)
            heard.update({number: text_of(one.result()) for number, one in others.items()})
        heard[lost] = text_of(post(url, key, HI, 1))
        return float(len(calls.requests))

    world = Harness(play)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl_llm.server.harness.PAUSE", 0.5)
        seen = now(world.reset({}, 0))
    assert [list(one) for one in seen.conversations] == [HI["messages"]] * 3
    asked.set()
    until(lambda: any(request.lost for request in world._calls.requests))
    assert now(world.step(replies("a", "b", "c"))).done
    assert heard == {0: "a", 1: "b", 2: "c"}
    assert now(world.close()) == 3.0


def test_a_client_that_goes_away_before_the_policy_is_asked_is_not_answered() -> None:
    asked = threading.Event()

    def play(url: str, key: str, row: dict[str, Any]) -> float:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, url, key, HI)
            asked.wait(60)
            gone = unread(url, key)
            until(lambda: len(calls_of(url).requests) == 2)
            gone.close()
            until(lambda: len(calls_of(url).requests) == 1)
            went.set()
            return float(text_of(first.result()) == "a")

    went, world = threading.Event(), Harness(play)
    assert not now(world.reset({}, 0)).also
    asked.set()
    assert went.wait(60)
    assert now(world.step(replies("a")[0])).done
    assert now(world.close()) == 1.0


def test_a_client_may_name_its_requests() -> None:
    """Of one name there is one; of two names there are two, though they say the same."""

    def send(url: str, key: str, name: str) -> str:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": name}
        sent = urllib.request.Request(f"{url}/chat/completions", json.dumps(HI).encode(), headers)
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return text_of(json.load(answer))

    def play(url: str, key: str, row: dict[str, Any]) -> float:
        with ThreadPoolExecutor(3) as pool:
            heard = list(pool.map(send, [url] * 3, [key] * 3, ("x", "y", "x")))
        return float(heard[0] == heard[2] != heard[1])

    world = Harness(play)
    seen = now(world.reset({}, 0))
    texts = iter("ab")
    while not seen.done:
        seen = now(world.step(replies(*(next(texts) for _ in seen.conversations))))
    assert now(world.close()) == 1.0
    assert next(texts, None) is None


def test_calls_at_once_of_which_one_is_refused() -> None:
    """The client hears of it; the others are answered, and the episode goes on."""
    refused = list[BaseException]()

    async def play(ask: Ask) -> float:
        wrong: Any = [{"role": "user"}]
        found = await asyncio.gather(*map(ask, ([user("p")], wrong, [user("q")])), return_exceptions=True)
        refused.extend(one for one in found if isinstance(one, BaseException))
        await ask([user("r")])
        return 1.0

    played = Played(playing(play))
    assert [type(one) for one in refused] == [openai.BadRequestError]
    assert [text.partition("<|im_end|>")[0] for text in played.texts] == [chat(one)[:-10] for one in "pqr"]
    assert {row.rewards["environment"] for row in played.rows} == {1.0}


def test_more_calls_at_once_than_turns_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def play(ask: Ask) -> float:
        await asyncio.gather(*(ask([user("q")]) for _ in range(3)))
        return 1.0

    played = Played(playing(play), turns=2)
    assert "3 replies are asked for at once, but an episode has 2: give more turns" in caplog.text
    (row,) = played.rows
    assert np.isnan(row.score)
    assert row.info["failed_environments"] == 1.0


def test_an_episode_ends_where_calls_at_once_are_more_than_the_turns_that_are_left() -> None:
    async def play(ask: Ask) -> float:
        await ask([user("q")])
        await asyncio.gather(*(ask([user("q")]) for _ in range(2)), return_exceptions=True)
        return 1.0

    played = Played(playing(play), turns=2)
    assert played.requests == 1
    assert [row.truncated for row in played.rows] == [True]


def test_a_reply_that_reached_its_limit_says_so() -> None:
    finish = list[str]()

    def play(url: str, key: str, row: dict[str, Any]) -> None:
        found = post(url, key, {**HI, "n": 2})["choices"]
        finish.extend(choice["finish_reason"] for choice in found)

    world = Harness(play)
    now(world.reset({}, 0))
    one, other = replies("a", "b")
    assert now(world.step([one._replace(truncated=True), other])).done
    assert finish == ["length", "stop"]


def test_a_harness_that_is_too_slow_to_begin_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Its client, which calls later, is told that the episode is over."""
    refused, late = list[int](), threading.Event()

    def play(url: str, key: str, row: dict[str, Any]) -> None:
        late.wait(60)
        try:
            post(url, key, HI)
        except urllib.error.HTTPError as error:
            refused.append(error.code)

    before = set(endpoint().episodes)
    played = Played(play, time_limit=0.2)
    assert "did not answer within 0.2 s" in caplog.text
    assert np.isnan(played.rows[0].score)
    until(lambda: set(endpoint().episodes) <= before)
    late.set()
    until(lambda: refused[:1] == [401])


def test_a_harness_of_a_group_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[int]()

    def play(url: str, key: str, row: dict[str, Any]) -> None:
        try:
            post(url, key, HI)
        except urllib.error.HTTPError as error:
            refused.append(error.code)

    def fails(engine: Speaking, chunk: int) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(Speaking, "step", fails)
    with pytest.raises(RuntimeError, match="no device"):
        Played(play)
    gc.collect()
    until(lambda: refused == [401])
