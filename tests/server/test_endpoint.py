"""The endpoint with the protocol's real client: tokens of the engine, streams, tools, refusals, clients that go."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.cli.serve import check_exposure
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.models import lora
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.sampler import requests_of, settings_of
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.server.engines import Engines
from jaxrl_llm.utils.errors import InputError

openai = pytest.importorskip("openai")
web = pytest.importorskip("aiohttp.web")

MODEL = Path(__file__).parents[1] / "vectors" / "llama_tied"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | "
    "tojson }}</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
KEY = "secret"


@pytest.fixture(scope="module")
def policy() -> Any:
    policy, params, tokenizer = load_policy(MODEL)
    tokenizer.chat_template = TEMPLATE
    return policy, params


@pytest.fixture(scope="module")
def served(policy: Any) -> Iterator[tuple[str, Engines]]:
    """The base URL of an endpoint, and its engines."""
    engines = Engines(*policy, slots=4, seed=5)
    with serving(engines) as url:
        yield url, engines


@contextmanager
def serving(engines: Engines, adapters: Mapping[str, PromptFormat] = {}) -> Iterator[str]:
    """Context manager: an endpoint in a thread of its own; its base URL."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    from jaxrl_llm.server.app import ModelServer, application

    urls = list[str]()

    async def run() -> None:
        app = application(ModelServer(engines, "tiny", key=KEY, adapters=adapters))
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        ready.set()
        await stopped.wait()
        await runner.cleanup()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    loop.call_soon_threadsafe(stopped.set)
    thread.join(30)


@pytest.fixture(scope="module")
def client(served: Any) -> Any:
    return openai.OpenAI(base_url=served[0], api_key=KEY, max_retries=0, timeout=120)


def greedy(policy: Any, text: str, limit: int) -> list[int]:
    """What the engine draws after a text, without a server."""
    own, params = policy
    settings = settings_of(own, jax.random.key(0), temperature=0.0)
    ids = own.tokenizer.encode(text)
    (done,) = stream(own, take_weights(own, params), [Request(tuple(ids), limit)], settings)
    return done.tokens.token.tolist()


def test_a_completion_is_the_engine_s(client: Any, policy: Any) -> None:
    found = client.completions.create(
        model="tiny", prompt="Ab", max_tokens=9, temperature=0, logprobs=1, extra_body={"return_token_ids": True}
    )
    (choice,) = found.choices
    expected = greedy(policy, "Ab", 9)
    assert choice.token_ids == expected
    assert found.prompt_token_ids == policy[0].tokenizer.encode("Ab")
    assert choice.text == policy[0].tokenizer.decode(expected, skip_special_tokens=True)
    assert found.usage.completion_tokens == len(expected) == len(choice.logprobs.token_logprobs)
    assert all(x <= 0 for x in choice.logprobs.token_logprobs)
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_adapters_are_models_by_name(policy: Any) -> None:
    """They share the model's memory and one engine, and each gives what the engine does with its parameters."""
    own, params = policy
    adapters = {name: adapted(own, params, seed, rank) for seed, name, rank in ((0, "one", 2), (1, "two", 3))}
    engines = Engines(own, params, slots=4, seed=5, adapters=adapters)
    leaves = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    weights, own_adapters = lora.split(engines.weights[None].prompts)
    shared = [x.unsafe_buffer_pointer() in leaves for x in jax.tree.leaves(weights)]
    assert sum(shared) == len(leaves)
    assert not {x.unsafe_buffer_pointer() for x in jax.tree.leaves(own_adapters)} & leaves
    with serving(engines, {name: PromptFormat() for name in adapters}) as url:
        client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120)
        assert [model.id for model in client.models.list()] == ["tiny", "one", "two"]

        def ask(name: str) -> list[int]:
            found = client.completions.create(
                model=name, prompt="Ab", max_tokens=9, temperature=0, extra_body={"return_token_ids": True}
            )
            assert found.model == name
            return found.choices[0].token_ids

        with ThreadPoolExecutor(3) as pool:
            together = dict(zip(("tiny", "one", "two"), pool.map(ask, ("tiny", "one", "two")), strict=True))
        assert together == {name: greedy((own, of), "Ab", 9) for name, of in (("tiny", params), *adapters.items())}
        assert len({tuple(ids) for ids in together.values()}) == 3
        assert len(engines._engines) == 1
        with pytest.raises(openai.NotFoundError, match="'three' does not exist: this endpoint has tiny, one, two"):
            ask("three")


def adapted(policy: Any, params: Any, seed: int, rank: int = 2) -> Any:
    """The parameters with adapters that change what is drawn."""
    adapters = lora.init(jax.random.key(seed), policy.config, rank=rank)
    noise = jax.random.key(seed + 10)
    adapters = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(noise, x.shape), adapters)
    return lora.scaled(combine(params, adapters), rank, 4.0)


def test_a_stream_has_the_same_text_and_tokens(client: Any) -> None:
    how: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "seed": 3, "extra_body": {"return_token_ids": True}}
    messages = [{"role": "user", "content": "Count."}]
    whole = client.chat.completions.create(messages=messages, n=2, **how)
    texts, ids, finish, usage = ["", ""], [[], []], [None, None], None
    for piece in client.chat.completions.create(
        messages=messages, n=2, stream=True, stream_options={"include_usage": True}, **how
    ):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += choice.token_ids
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage == whole.usage
    assert texts[0] != texts[1]
    again = client.chat.completions.create(messages=messages, n=2, **how)
    assert [choice.token_ids for choice in again.choices] == ids
    other = client.chat.completions.create(messages=messages, n=2, **{**how, "seed": 4})
    assert [choice.token_ids for choice in other.choices] != ids


def test_clients_at_once_get_what_they_get_alone(client: Any) -> None:
    """More than there are slots, of two temperatures."""

    def ask(number: int) -> list[int]:
        found = client.completions.create(
            model="tiny", prompt=f"n{number % 5}", max_tokens=12 + number, temperature=(0.5, 1.0)[number % 2],
            seed=number, extra_body={"return_token_ids": True},
        )  # fmt: skip
        return found.choices[0].token_ids

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [ask(number) for number in range(12)]


def test_stop_strings_end_a_text_before_them(client: Any) -> None:
    how: dict[str, Any] = {"model": "tiny", "prompt": "Ab", "max_tokens": 60, "seed": 1}
    whole = client.completions.create(**how).choices[0].text
    stop = whole[7:9]
    found = client.completions.create(stop=[stop, "\0never"], **how).choices[0]
    assert found.text == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"
    pieces = [piece.choices[0] for piece in client.completions.create(stop=stop, stream=True, **how)]
    assert "".join(piece.text for piece in pieces) == found.text
    assert pieces[-1].finish_reason == "stop"


def test_calls_of_tools_are_read(served: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that calls a tool, as the model would have sampled it."""
    engines = served[1]
    tokenizer = engines.policy.tokenizer
    said = tokenizer.encode('Look: <tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>')
    drawn = [*said, engines.policy.config.eos_token_ids[0]]

    async def sample(asked: Any) -> Any:
        from jaxrl_llm.sampling.requests import Tokens
        from jaxrl_llm.server.engines import CompletionSoFar

        zeros = np.zeros(len(drawn), np.float32)
        yield CompletionSoFar(
            Tokens(np.asarray(drawn, np.int32), zeros, zeros, zeros, zeros, zeros.astype(np.int32)), "stop"
        )

    monkeypatch.setattr(engines, "sample", sample)
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": schema}}
    how: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Look."}], "tools": [tool]}
    (choice,) = client.chat.completions.create(**how).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": "sky"}
    assert choice.message.content.strip() == "Look:"
    pieces = list(client.chat.completions.create(stream=True, **how))
    (call,) = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "look")
    assert pieces[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "gpt-9"}, "the model 'gpt-9' does not exist: this endpoint has tiny"),
        ({"temperature": -1}, "temperature is -1, but must be a number from 0 to 100"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"extra_body": {"colour": 1}}, "colour is not known"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be a whole number from 1"),
        ({"messages": []}, "messages is .*, but must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice is 'required', but must be 'auto' or 'none'"),
        ({"max_tokens": 100_000}, "the model's context is"),
    ],
)
def test_what_it_does_not_do_is_refused(client: Any, given: dict[str, Any], message: str) -> None:
    how = {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, **given}
    with pytest.raises(openai.APIStatusError, match=message) as raised:
        client.chat.completions.create(**how)
    assert raised.value.status_code == (404 if "model" in given else 400)


def test_what_asks_for_nothing_is_taken(client: Any) -> None:
    neutral = {"frequency_penalty": 0, "response_format": {"type": "text"}, "user": "me", "max_tokens": 4}
    assert client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi."}], **neutral
    ).choices


def test_a_key_is_asked_for(served: Any) -> None:
    stranger = openai.OpenAI(base_url=served[0], api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        stranger.models.list()
    check_exposure("127.0.0.1", None)
    check_exposure("localhost", None)
    check_exposure("0.0.0.0", "k")
    with pytest.raises(InputError, match="can be reached by others: set JAXRL_API_KEY"):
        check_exposure("0.0.0.0", None)


def test_malformed_bodies_get_the_protocol_s_error(served: Any) -> None:
    def post(path: str, body: bytes) -> tuple[int, Any]:
        asked = urllib.request.Request(served[0] + path, body, {"Authorization": f"Bearer {KEY}"})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    for body, message in ((b"{", "the body is not JSON"), (b"[]", "the body must be a JSON object")):
        status, found = post("/chat/completions", body)
        assert status == 400
        assert message in found["error"]["message"]
    assert post("/nothing", b"{}")[0] == 404


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_goes_away_frees_its_slot(served: Any, client: Any) -> None:
    """It asked for 64 completions, of which four decode at a time."""
    engines = served[1]
    how: dict[str, Any] = {"model": "tiny", "prompt": "long", "max_tokens": 110, "temperature": 0.9, "n": 64}
    stream = client.completions.create(stream=True, **how)
    next(iter(stream))
    stream.close()
    wait_until(lambda: not engines._jobs)
    (engine,) = [engine for (_, how), engine in engines._engines.items() if how.temperature == 0.9]
    assert not engine.busy
    assert engine.stats.asked == 64
    assert engine.stats.finished < 32
    assert client.completions.create(**{**how, "n": 1}).choices[0].finish_reason


def test_cancelled_requests_leave_the_others_as_they_are(policy: Any) -> None:
    """Of decoding and of waiting requests, also of a group that keeps its prompt's slot."""
    from jaxrl_llm.sampling.capacity import Size, lasting
    from jaxrl_llm.sampling.engine import Engine

    own, params = policy
    asked = requests_of(own, ["one", "two", "one"], jax.random.key(1), group_size=3, max_new_tokens=30)
    weights = take_weights(own, params)
    alone = {done.index: done.tokens.token.tolist() for done in stream(own, weights, asked.requests, asked.settings)}
    engine = Engine(own, weights, asked.settings, Size(lasting(2, 2, 2), 64, 64))
    for request in asked.requests:
        engine.submit(request)
    found = {done.index: done.tokens.token.tolist() for done in engine.step(4)}
    for number in (0, 2, 4, 5):
        engine.cancel(number)
    while engine.busy:
        found |= {done.index: done.tokens.token.tolist() for done in engine.step(4)}
    kept = {1, 3, 6, 7, 8}
    assert kept <= set(found)
    assert {number: found[number] for number in kept} == {number: alone[number] for number in kept}
    assert engine.schedule.free_rows == [0, 1]
    assert sorted(engine.schedule.free_slots) == [0, 1]
