"""The interpreter: sessions of episodes, what the policy is told, and where it refuses to start."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, Speaking, by_length, run_agents, tokenizer_of

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.environments.sandbox import Limits, Result
from jaxrl_llm.environments.sandbox.run import family
from jaxrl_llm.environments.tools import python as module
from jaxrl_llm.environments.tools.base import Kit, Toolbox, schema_of, with_tools
from jaxrl_llm.environments.tools.python import as_told, python, python_tools, shortened
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]


@pytest.fixture
def kit() -> Iterator[Kit]:
    made = python.make()
    yield made
    made.close()


def test_what_it_shows(kit: Kit) -> None:
    (run,) = kit.functions
    assert run("import math\na = math.comb(5, 2)") == "[it printed nothing]"
    assert run("print('so')\na + 1") == "so\n11"
    assert run("import sys\nprint('first', file=sys.stderr)\nprint('second')") == "first\nsecond"
    assert run("import os\nos.system('echo third')\nNone") == "third"
    assert run("1 / 0").splitlines() == [
        "Traceback (most recent call last):",
        '  File "<code>", line 1, in <module>',
        "ZeroDivisionError: division by zero",
    ]
    assert run("def f(:").splitlines()[:2] == ['  File "<code>", line 1', "    def f(:"]
    assert run("open('f', 'w').write('kept')") == "4"
    assert run("open('f').read()") == "'kept'"
    assert run("object()") == "<object object at 0x...>"


def test_the_same_code_prints_the_same() -> None:
    code = "{chr(n) for n in range(65, 80)}, hash('x')"
    found = set()
    for _ in range(2):
        made = python.make()
        found.add(made.functions[0](code))
        made.close()
    assert len(found) == 1


def test_a_session_that_is_stopped_begins_anew() -> None:
    made = python_tools(limits=Limits(seconds=1.0, memory=256)).make()
    (run,) = made.functions
    run("a = 1")
    assert run("while True: pass") == (
        "[stopped: it ran for more than 1 seconds. The session begins anew: its names and files are lost.]"
    )
    assert "NameError" in run("a")
    assert run("import os\nos._exit(3)").startswith("[the interpreter ended with exit code 3. The session begins anew")
    assert "MemoryError" in run("bytearray(2**30)")
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="the conversation is over"):
        run("a")


def test_without_state() -> None:
    made = python_tools(state=False).make()
    (run,) = made.functions
    assert run("a = 3\na") == "3"
    assert "NameError" in run("a")
    made.close()


def test_results_are_cut_in_the_middle() -> None:
    made = python_tools(characters=100).make()
    (run,) = made.functions
    told = run("print('x' * 10_000)\n1 / 0")
    assert len(told) < 200
    assert told.startswith("xxx")
    assert "characters are left out" in told
    assert told.endswith("ZeroDivisionError: division by zero")
    made.close()
    assert shortened("abcdef", 5) == "abc\n[... 1 characters are left out ...]\nef"
    assert shortened("abcdef", 6) == "abcdef"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Result("a\n", "", None, "memory", 1.0), "a\n[stopped: it used more than 512 MiB of memory."),
        (Result("", "", None, "processes", 1.0), "[stopped: it used more than 16 processes."),
        (Result("a", "", -9, None, 1.0), "a\n[the interpreter ended with signal 9."),
    ],
)
def test_how_an_end_is_told(found: Result, told: str) -> None:
    assert as_told(found, Limits(), 100).startswith(told)
    assert as_told(found, Limits(), 100, state=False) == told.replace(".", ".]")


def test_limits_are_told_to_the_policy() -> None:
    made = python_tools(limits=Limits(seconds=2.5, memory=300), characters=1234).make()
    told = schema_of(made.functions[0])["function"]
    assert told["name"] == "python"
    assert all(part in told["description"] for part in ("2.5 seconds", "300 MiB", "1,234 characters", "are kept until"))
    made.close()
    assert (
        "no names and files are kept"
        in schema_of(python_tools(state=False).make().functions[0])["function"]["description"]
    )


def test_it_refuses_to_start_where_too_little_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: frozenset({"limits"}))
    with pytest.raises(InputError, match="would not be kept from files, network, processes"):
        with_tools([python])
    with pytest.raises(InputError, match="would not be kept from memory, resources"):
        with_tools([python_tools(layers=["landlock", "seccomp"])])
    made = python_tools(weak=True).make()
    assert made.functions[0]("1 + 1") == "2"
    made.close()
    with pytest.raises(InputError, match="characters of python_tools is 5, but must be at least 100"):
        python_tools(characters=5)


def test_episodes_have_sessions_of_their_own_which_end() -> None:
    def says(text: str, sample: int) -> str:
        turns = text.count("<tool_response>")
        if turns == 2:
            return f"It is {text.rpartition('<tool_response>')[2].split()[0]}.{END}"
        code = f"n = {sample}" if turns == 0 else "n + 40"
        return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>{END}"

    gc.collect()  # those of tests before
    tokenizer, before = tokenizer_of("hermes"), len(family(os.getpid()))
    found, _ = run_agents(agent(with_tools([python])), tokenizer, says, [{"prompt": "Add."}], samples=3)
    assert [tokenizer.decode(one.tokens)[-len(f"40.{END}") :] for one in found.groups[0].episodes] == [
        f"{40 + sample}.{END}" for sample in range(3)
    ]
    assert {one.info["calls"] for one in found.groups[0].episodes} == {2.0}
    assert len(family(os.getpid())) == before


@pytest.mark.heavy
def test_a_conversation_goes_on_from_its_log_with_a_new_session() -> None:
    """Its calls are made again, and print the same; what they kept is there again."""
    codes = ["class A: pass\na = A()\na", "{'x', 'y', 'z'}, hash('a')", "type(a), 1 / 0", "1", "2", "3"]

    def says(text: str, sample: int) -> str:
        turns = text.count("<tool_response>")
        if "Short." in text or turns == len(codes):
            return f"Done.{END}"
        return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': codes[turns]}})}\n</tool_call>{END}"

    tokenizer, rollout = tokenizer_of("hermes"), agent(with_tools([python]))
    rows = [{"prompt": "Short."}, {"prompt": "Long."}]
    gc.collect()
    before = len(family(os.getpid()))
    whole = run_agents(rollout, tokenizer, says, rows)[0].groups[1].episodes
    logs = [GroupLog((1,), number, 2, 0) for number in range(2)]
    flight = [(log, Task(rows[log.prompt_id], log.prompt, log.prompt_id, 2, 200)) for log in logs]
    driver = Driver(rollout, lambda *_: Speaking(tokenizer, says), by_length, tokenizer)
    found = driver.run(flight, Rule(wanted=1))
    assert len(found.left) == 1
    recorded = dict(found.left[0].recorded)
    assert "0/0" in recorded, "a call was made"
    assert f"0/{len(codes) - 1}" not in recorded
    resumed = run_agents(rollout, tokenizer, says, rows, flight=found.left)[0].groups[0].episodes
    assert [one.tokens for one in resumed] == [one.tokens for one in whole]
    assert "A object at 0x...>" in tokenizer.decode(resumed[0].tokens)
    assert "ZeroDivisionError" in tokenizer.decode(resumed[0].tokens)
    del found, driver
    gc.collect()
    assert len(family(os.getpid())) == before, "sessions of the run that was stopped"


@pytest.mark.heavy
def test_an_abandoned_session_ends_too() -> None:
    gc.collect()  # those of tests before
    before = len(family(os.getpid()))
    box = Toolbox([python])
    box.functions["python"]("1")
    assert len(family(os.getpid())) > before
    del box
    gc.collect()
    assert len(family(os.getpid())) == before
