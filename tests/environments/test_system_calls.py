"""The filter of system calls, run as the kernel runs it."""

from __future__ import annotations

import struct

import pytest

from jaxrl_llm.environments.sandbox.system_calls import ARCHITECTURES, OWN_PID, filter_program

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
ONES = 0xFFFFFFFF


def verdict(machine: str, namespaces: bool, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the program returns for a call."""
    audit = ARCHITECTURES[machine][1] if architecture is None else architecture
    data = struct.pack("=IIQ6Q", number & ONES, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    text = filter_program(machine, namespaces)
    program = [struct.unpack_from("=HBBI", text, 8 * place) for place in range(len(text) // 8)]
    place = held = 0
    while True:
        code, true, false, value = program[place]
        place += 1
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            held &= value
        elif code in (0x15, 0x35):
            place += true if (held == value if code == 0x15 else held >= value) else false
        else:
            assert code == 0x06
            return value


NAMES = (
    "read", "mmap", "kill", "socket", "memfd_create", "chmod", "clone", "clone3", "fcntl", "sendto", "prlimit64",
    "ptrace", "socketpair",
)  # fmt: skip
CALLS = {
    "x86_64": dict(zip(NAMES, (0, 9, 62, 41, 319, 90, 56, 435, 72, 44, 302, 101, 53), strict=True)),
    "aarch64": dict(zip(NAMES, (63, 222, 129, 198, 279, 52, 220, 435, 25, 206, 261, 117, 199), strict=True)),
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_not_listed_is_refused(machine: str) -> None:
    calls = CALLS[machine]
    for namespaces in (False, True):
        assert verdict(machine, namespaces, calls["read"]) == ALLOW
        for name in ("socket", "memfd_create", "ptrace"):
            assert verdict(machine, namespaces, calls[name]) == ERROR | 1
        for number in (calls["clone3"], 500, 9999, 0x40000000, ONES):
            assert verdict(machine, namespaces, number) == ERROR | 38
        assert verdict(machine, namespaces, calls["read"], architecture=3) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_conditions_of_arguments(machine: str) -> None:
    calls = CALLS[machine]
    own, other, high = OWN_PID, 4321, 1 << 32
    for namespaces in (False, True):
        assert verdict(machine, namespaces, calls["fcntl"], 3, 3) == ALLOW
        assert verdict(machine, namespaces, calls["fcntl"], 3, 8) == ERROR | 22, "no owner"
        assert verdict(machine, namespaces, calls["sendto"], 3, 0, 0, 0, 0) == ALLOW
        assert verdict(machine, namespaces, calls["sendto"], 3, 0, 0, 0, high) == ERROR | 1, "no address"
        assert verdict(machine, namespaces, calls["socketpair"], 1, 1 | 0x80000) == ALLOW
        assert verdict(machine, namespaces, calls["socketpair"], 1, 2) == ERROR | 1, "no datagrams"
        assert verdict(machine, namespaces, calls["mmap"], 0, 4096, 3, 0x22) == ALLOW
        assert verdict(machine, namespaces, calls["mmap"], 0, 4096, 3, 0x21) == ERROR | 1, "none that is shared"
        assert verdict(machine, namespaces, calls["clone"], 0x10000 | 0x10000000) == ERROR | 1
        assert verdict(machine, namespaces, calls["clone"], 0x3D0F00) == ALLOW, "a thread"
        assert (verdict(machine, namespaces, calls["clone"], 17) == ALLOW) == namespaces, "a process"
        assert (verdict(machine, namespaces, calls["chmod"]) == ALLOW) == namespaces
        assert verdict(machine, namespaces, calls["kill"], own, 9) == ALLOW
        assert (verdict(machine, namespaces, calls["kill"], other, 9) == ALLOW) == namespaces
        assert verdict(machine, namespaces, calls["prlimit64"], 0, 7) == ALLOW
        assert verdict(machine, namespaces, calls["prlimit64"], 0, 2) == ERROR | 1, "its part of the memory"
        assert (verdict(machine, namespaces, calls["prlimit64"], other, 7) == ALLOW) == namespaces


def test_another_machine() -> None:
    with pytest.raises(ValueError, match="no filter is known"):
        filter_program("m68k", True)
