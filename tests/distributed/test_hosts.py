"""What hosts tell each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import on_hosts

from jaxrl_llm.distributed import connect
from jaxrl_llm.distributed.alive import silent_since
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.utils.errors import InputError


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 40))
def test_shares_make_up_the_whole(count: int, size: int) -> None:
    shares = [Hosts(index, count).share(range(size)) for index in range(count)]
    assert sorted(i for share in shares for i in share) == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_it_exchanges_nothing() -> None:
    assert (ALONE.first, ALONE.share("abc"), ALONE.any(True), ALONE.any(False)) == (True, ["a", "b", "c"], True, False)
    ALONE.agree({"the prompts": "x"})


def test_a_flag_of_one_is_known_to_all() -> None:
    assert on_hosts(3, lambda hosts: hosts.any(hosts.index == 1)) == [True] * 3
    assert on_hosts(3, lambda hosts: hosts.any(False)) == [False] * 3
    assert on_hosts(3, lambda hosts: hosts.first) == [True, False, False]


def test_hosts_that_see_other_files_are_named_on_all() -> None:
    def agree(hosts: Hosts) -> str:
        try:
            hosts.agree({"the model": "m", "the prompts": "q" if hosts.index == 2 else "p"})
        except InputError as error:
            return str(error)
        return ""

    (said,) = set(on_hosts(3, agree))
    assert said.startswith("hosts 0 and 2 differ in the prompts: all hosts need the same settings, files, code")


def test_a_silent_host_is_found_and_a_slow_one_is_not() -> None:
    judge = silent_since(20.0)
    for second in range(60):
        # Host 1 changes its counter every 15 seconds; host 2 stops after 30; host 3 never showed any.
        seen = {0: str(second), 1: str(second // 15), 2: str(min(second, 30)), 3: ""}
        expected = [3] * (second > 20) if second <= 50 else [3, 2]
        assert judge(seen, float(second)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("localhost:1", None, 1), "--coordinator needs --processes and --process, the number of this one from 0 on"),
        (("localhost:1", 2, 2), "--process is 2, but must be from 0 to 1"),
        (("localhost", 2, 1), "--coordinator is 'localhost', but must be HOST:PORT"),
        (("localhost:1", 2, 1), r"no coordinator answers at localhost:1 \(.*\): is process 0 running, and is the port"),
    ],
)
def test_hosts_that_cannot_join_are_told_why(
    options: tuple[str, int | None, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "STARTING", 0)
    with pytest.raises(InputError, match=message):
        connect.connect(*options)
