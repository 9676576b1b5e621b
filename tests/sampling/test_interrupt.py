"""Ctrl-C during a rollout: what is finished comes back, and the next Ctrl-C means what it meant before."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sample
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.process import interruptible

pytestmark = pytest.mark.heavy

KEY = jax.random.key(0)
PROMPTS = [[5, 9, 200], [7, 1, 60], [80, 81]]
NAMES = [30, 10, 20]


@pytest.fixture(scope="module")
def model(vectors: Any) -> Any:
    return vectors("llama")


@pytest.fixture(autouse=True)
def handler() -> Iterator[Any]:
    """A handler of the test's own, which must be there again after the rollout."""
    heard: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, own)
    yield own, heard
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is own
    assert not heard


def draw(model: Any, **settings: Any) -> Any:
    """Six completions through two slots, 12 tokens each unless a token ends them."""
    settings = {"group_size": 2, "max_new_tokens": 12, "stop_token_ids": [-1], "slots": 2} | settings
    return sample(model.policy, model.params, PROMPTS, KEY, prompt_ids=NAMES, **settings)


@pytest.fixture(scope="module")
def whole(model: Any) -> list[list[int]]:
    found = draw(model)
    assert found.group.tolist() == [0, 0, 1, 1, 2, 2]
    return completion_ids(found)


@pytest.mark.parametrize("after", [1, 3, 6])
def test_finished_rows_come_back(after: int, model: Any, whole: Any, caplog: Any) -> None:
    """Interrupted as the first, third and last completion comes; those that end in the same step come too."""
    ended: list[int] = []

    def on_completion(completion: Completion) -> None:
        ended.append(completion.index)
        if len(ended) == after:
            signal.raise_signal(signal.SIGINT)

    with caplog.at_level(logging.WARNING, "jaxrl_llm.sampling"):
        found = draw(model, on_completion=on_completion)
    assert after <= len(ended) < after + 2
    assert f"interrupted: {len(ended)} of 6 completions" in caplog.text
    rows = sorted(ended)
    assert completion_ids(found) == [whole[row] for row in rows]
    assert found.group.tolist() == [row // 2 for row in rows]
    assert found.prompt_id.tolist() == [NAMES[row // 2] for row in rows]
    assert found.tokens.shape[0] == len(rows)


def test_a_caller_with_stats_reads_it_there(model: Any, caplog: Any) -> None:
    def on_completion(completion: Completion) -> None:
        if not ended:
            signal.raise_signal(signal.SIGINT)
        ended.append(completion.index)

    stats = Stats()
    ended: list[int] = []
    with caplog.at_level(logging.WARNING, "jaxrl_llm.sampling"):
        draw(model, on_completion=on_completion, stats=stats)
    assert stats.interrupted
    assert not caplog.text


def test_rows_that_ended_out_of_order(model: Any, whole: Any) -> None:
    """A late prompt's row ends first: its group number is its own."""
    end = next(t for t in whole[3][:4] if t not in whole[0] + whole[1] + whole[2])
    ended: list[int] = []

    def on_completion(completion: Completion) -> None:
        ended.append(completion.index)
        signal.raise_signal(signal.SIGINT)

    found = draw(model, stop_token_ids=[end], slots=0, on_completion=on_completion)
    assert 3 in ended
    assert 0 not in ended
    assert found.group.tolist() == [row // 2 for row in sorted(ended)]
    row = sorted(ended).index(3)
    assert completion_ids(found)[row] == whole[3][: whole[3].index(end) + 1]
    assert not found.truncated[row]


def settings_of() -> DrawSettings:
    return DrawSettings(seed_of(KEY), jnp.float32(1.0), None, None, jnp.asarray([-1], jnp.int32))


def requests_of() -> list[Request]:
    return [Request(tuple(prompt), 12, name, i) for prompt, name in zip(PROMPTS, NAMES, strict=True) for i in range(2)]


def test_the_stream_gives_what_it_has(model: Any, whole: Any) -> None:
    """Interrupted before anything ended, between two looks at the rows: all come, unfinished, with their tokens."""
    looks: list[int] = []

    def watch(index: int, tokens: np.ndarray) -> None:
        looks.append(index)
        if len(looks) == 3:
            signal.raise_signal(signal.SIGINT)

    stats, weights = Stats(), take_weights(model.policy, model.params)
    found = list(
        stream(model.policy, weights, requests_of(), settings_of(), slots=2, chunk=3, watch=watch, stats=stats)
    )
    assert sorted(c.index for c in found) == list(range(6))
    assert all(c.unfinished for c in found)
    sizes = {c.index: c.tokens.size for c in found}
    # A token from the prompt and one step, then three steps; the others waited.
    assert sizes == {0: 5, 1: 5, 2: 0, 3: 0, 4: 0, 5: 0}
    for completion in found:
        assert completion.tokens.token.tolist() == whole[completion.index][: completion.tokens.size]


def test_nothing_finished_is_a_keyboard_interrupt(model: Any, whole: Any, monkeypatch: Any) -> None:
    """The signal comes in the first look of the host, when no completion has ended."""
    from jaxrl_llm.sampling import engine

    decode = engine.decode

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return decode(*args, **kwargs)

    monkeypatch.setattr(engine, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw(model)


def test_a_second_ctrl_c_is_as_ever(handler: Any) -> None:
    """The first is only remembered; from then on the handler of before is there."""
    own, heard = handler
    with interruptible() as interrupted:
        assert signal.getsignal(signal.SIGINT) is not own
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        assert not heard
        signal.raise_signal(signal.SIGINT)
        assert len(heard) == 1
    assert signal.getsignal(signal.SIGINT) is own
    heard.clear()


def test_the_handler_is_put_back_after_an_error(handler: Any) -> None:
    with pytest.raises(RuntimeError), interruptible():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is handler[0]


def test_the_handler_is_put_back_while_a_callback_s_error_is_handled(handler: Any, model: Any, whole: Any) -> None:
    def on_completion(completion: Completion) -> None:
        raise RuntimeError("a reward function failed")

    try:
        with pytest.raises(RuntimeError, match="a reward function failed") as caught:
            draw(model, on_completion=on_completion)
        assert caught.value.__traceback__ is not None
        assert signal.getsignal(signal.SIGINT) is handler[0]
    finally:
        signal.signal(signal.SIGINT, handler[0])


def test_other_threads_do_not_touch_signals(handler: Any) -> None:
    """Signals belong to the main thread; elsewhere there is nothing to hear."""
    found: list[Any] = []

    def elsewhere() -> None:
        with interruptible() as interrupted:
            found.append((interrupted(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(False, handler[0])]
