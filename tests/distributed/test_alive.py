"""Signs of life: an error of one host waits until the others have shown that they live, or are found dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxrl_llm.cli import program
from jaxrl_llm.distributed import connect
from jaxrl_llm.distributed.alive import ALIVE, LOST, SAID, Watch
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import Preempted

BEAT, SILENT = 0.01, 1.0
PATIENCE = 30.0
GLOO = RuntimeError("FAILED_PRECONDITION: Gloo AllGather failed:\n connection closed by peer")


class Store:
    """The coordinator's store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.gone = False
        self.answers = threading.Event()
        self.answers.set()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.answers.wait()
        if self.gone:
            raise RuntimeError("UNAVAILABLE")
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, name: str) -> list[tuple[str, str]]:
        if self.gone:
            raise RuntimeError("UNAVAILABLE")
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(f"{name}/")]


class Ends:
    """Records the line and the status with which a host would end."""

    def __init__(self) -> None:
        self.first: tuple[str, int] | None = None
        self.came = threading.Event()

    def __call__(self, text: str, status: int) -> None:
        self.first = self.first or (text, status)
        self.came.set()

    def wait(self) -> tuple[str, int] | None:
        assert self.came.wait(PATIENCE)
        return self.first


@contextmanager
def watching(store: Store, index: int, count: int, silent: float = SILENT) -> Iterator[tuple[Watch, Ends]]:
    ends = Ends()
    watch = Watch(store, index, count, beat=BEAT, silent=silent, end=ends)
    watch.start()
    try:
        yield watch, ends
    finally:
        watch.stop()


@contextmanager
def holding(watch: Watch, error: BaseException) -> Iterator[threading.Thread]:
    """A thread in which the error is held."""
    thread = threading.Thread(target=watch.hold, args=(error,), daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_error_is_a_hosts_own_once_all_others_have_beaten() -> None:
    store = Store()
    with (
        watching(store, 0, 3, PATIENCE) as (first, ends),
        watching(store, 1, 3, PATIENCE),
        watching(store, 2, 3, PATIENCE),
    ):
        with holding(first, GLOO):
            pass
        assert ends.first is None


def test_an_error_is_held_while_another_host_is_silent() -> None:
    store = Store()
    with watching(store, 0, 3, PATIENCE) as (first, ends), watching(store, 2, 3, PATIENCE):
        store.values[f"{ALIVE}/1"] = "other 7"
        with holding(first, GLOO) as thread:
            thread.join(20 * BEAT)
            store.values[f"{ALIVE}/1"] = "other 8"  # it may have been on its way when the host died
            thread.join(20 * BEAT)
            assert thread.is_alive()
            assert ends.first is None
            store.values[f"{ALIVE}/1"] = "other 99"


def test_a_host_with_an_error_ends_with_the_line_about_the_one_that_died() -> None:
    store = Store()
    with watching(store, 0, 3) as (first, ends), watching(store, 2, 3) as (_, others):
        store.values[f"{ALIVE}/1"] = "other 7"
        with holding(first, GLOO) as thread:
            for found in (ends, others):
                assert found.wait() == (f"host 1 has shown no sign of life for {SILENT:.0f} s", LOST)
            assert thread.is_alive(), "the error is not this host's own"
            store.values[f"{SAID}/1"] = "it is over"


def test_words_of_another_host_go_before_the_error_that_they_caused() -> None:
    store = Store()
    with watching(store, 0, 2, PATIENCE) as (_, ends), watching(store, 1, 2, PATIENCE) as (other, own):
        other.tell(InputError("the disk\nis full"))
        assert ends.wait() == ("host 1 ended: the disk is full", 2)
        assert own.first is None


def test_hosts_that_fail_alike_end_by_themselves() -> None:
    """Also where the other one has ended by then, and is silent."""
    store, error = Store(), InputError("steps is 0")
    with watching(store, 0, 2) as (first, ends):
        store.values[f"{ALIVE}/1"] = "other 7"
        with holding(first, error) as thread:
            while first._failing is None:
                time.sleep(BEAT)
            assert thread.is_alive()
            store.values[f"{SAID}/1"] = str(error)
        time.sleep(2 * SILENT)
        assert ends.first is None


def test_a_host_that_is_started_again_is_another_one() -> None:
    store = Store()
    with watching(store, 0, 2, PATIENCE) as (_, ends):
        with watching(store, 1, 2, PATIENCE):
            time.sleep(20 * BEAT)
        assert ends.first is None
        with watching(store, 1, 2, PATIENCE):
            assert ends.wait() == ("host 1 was started again", LOST)


@pytest.mark.parametrize("how", ["refuses", "does not answer"])
def test_a_coordinator_that_is_gone_is_said(how: str) -> None:
    store = Store()
    with watching(store, 1, 2) as (_, ends):
        if how == "refuses":
            store.gone = True
        else:
            store.answers.clear()
        found = ends.wait()
        store.answers.set()
    assert found == (f"the coordination service, on host 0, has not answered for {SILENT:.0f} s", LOST)


class Recorded(Watch):
    """Says what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def hold(self, error: BaseException) -> None:
        self.asked.append(f"hold {error}")

    def tell(self, error: BaseException) -> None:
        self.asked.append(f"tell {error}")


@pytest.mark.parametrize(
    ("error", "at_the_end", "expected"),
    [
        (GLOO, None, ["hold", "tell"]),
        (InputError("free space there"), None, ["hold", "tell"]),
        (None, GLOO, ["hold", "tell"]),
        (Preempted("stop"), GLOO, ["hold", "tell"]),
        (KeyboardInterrupt("stop"), None, ["tell"]),
        (Preempted("stop"), None, []),
        (None, None, []),
    ],
)
def test_every_error_of_a_joined_host_is_held(
    error: BaseException | None, at_the_end: Exception | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, left = Recorded(), []

    def leave(_: Watch) -> None:
        left.append(True)
        if at_the_end is not None:
            raise at_the_end

    monkeypatch.setattr(connect, "connect", lambda *_: watch)
    monkeypatch.setattr(connect, "leave", leave)
    raised: BaseException | None = None
    try:
        with connect.joined():
            if error is not None:
                raise error
    except BaseException as found:
        raised = found
    assert raised is (at_the_end or error)
    assert watch.asked == [f"{verb} {raised}" for verb in expected]
    assert bool(left) == (error is None or isinstance(error, Preempted))


@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize(("error", "status"), [(GLOO, 1), (InputError("free space there"), 2)])
def test_a_host_that_fails_waits_for_no_thread_at_its_end(
    error: Exception, status: int, is_joined: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads that write a checkpoint wait for the other hosts, which have ended too."""

    def fail(_: list[str]) -> int:
        raise error

    ended: list[int] = []
    monkeypatch.setitem(program.COMMANDS, "train", fail)
    monkeypatch.setattr("sys.argv", ["jaxrl", "train"])
    monkeypatch.setattr(connect, "is_joined", lambda: is_joined)
    monkeypatch.setattr(connect, "end", ended.append)
    later: list[int] = []
    monkeypatch.setattr(program, "end_within", lambda _, status: later.append(status))  # it would end pytest's process
    if status == 1:
        with pytest.raises(RuntimeError, match="Gloo"):
            program.main()
    else:
        assert program.main() == status
    assert ended == [status] * is_joined
    assert later == [status] * (status != 1)  # an exception is left to Python
    said = capsys.readouterr().err
    assert ("Traceback" in said) == (status == 1 and is_joined)  # else Python prints it
