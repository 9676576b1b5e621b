"""Progress: what a log shows, what a terminal shows, and the time left."""

import io
import math
import os
import re
import subprocess
import sys
import threading

import pytest

from jaxrl_llm.reporting.logging import progress as module
from jaxrl_llm.reporting.logging.progress import Progress
from jaxrl_llm.utils.errors import InputError

METRICS = {
    "reward/mean": 0.51249,
    "kl": 0.00123,
    "entropy": 1.25,
    "completion/length": 132.44,
    "groups/uniform": 0.25,
    "tokens_per_second": 12345.6,
}


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_log_gets_one_line_a_step_with_exact_numbers_and_times(clock):
    stream = io.StringIO()
    with Progress(4, stream=stream) as progress:
        clock.now += 60
        progress.update(0, METRICS)
        clock.now += 10
        progress.update(1, METRICS)
        progress.say("saved [a] checkpoint")
        clock.now += 20
        progress.update(2, {"kl": math.nan, "entropy": None})
        progress.update(3, METRICS)
    numbers = "reward 0.512  KL 0.0012  entropy 1.250  length 132.4  uniform 25%  tokens/s 12,346"
    assert stream.getvalue().splitlines() == [
        f"step 1/4  {numbers}  elapsed 0:01:00  left 0:03:00",  # nothing else is known yet than one slow step
        f"step 2/4  {numbers}  elapsed 0:01:10  left 0:00:20",  # the first step's compilation no longer counts
        "saved [a] checkpoint",
        "step 3/4  reward -  KL -  entropy -  length -  uniform -  tokens/s -  elapsed 0:01:30  left 0:00:15",
        f"step 4/4  {numbers}  elapsed 0:01:30  left 0:00:00",
    ]


def test_a_log_says_what_is_done_when_nothing_else_is_said_for_long(clock):
    stream, doing = io.StringIO(), iter(["compiling the sampler, once", "sampling 3/8", "", "sampling 5/8", "update"])
    progress = Progress(4, stream=stream, doing=lambda: next(doing))

    def after(seconds):
        clock.now += seconds
        progress._tell_now()

    after(9)
    after(1)  # 10 s without a line
    after(10)
    after(10)  # twice as long after a line of this kind
    after(39)
    after(1)  # there was nothing to say
    after(1)  # so that it is asked again
    progress.update(0, METRICS)
    after(10)  # as long as in the beginning
    assert stream.getvalue().splitlines() == [
        "step 1/4: compiling the sampler, once  elapsed 0:00:10",
        "step 1/4: sampling 3/8  elapsed 0:00:30",
        "step 1/4: sampling 5/8  elapsed 0:01:11",
        *[line for line in stream.getvalue().splitlines() if line.startswith("step 1/4  reward")],
        "step 2/4: update  elapsed 0:01:21",
    ]


def test_a_log_is_told_by_a_thread_that_ends_with_the_run(monkeypatch):
    monkeypatch.setattr(module, "QUIET", 0.0)
    stream, asked = io.StringIO(), threading.Event()

    def doing():
        asked.set()
        return "sampling 1/2"

    with Progress(1, stream=stream, doing=doing):
        assert asked.wait(60)
    (thread,) = [one for one in threading.enumerate() if one.name == "progress"] or [None]
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()
    assert stream.getvalue().startswith("step 1/1: sampling 1/2  elapsed 0:00:0")


def test_a_bar_shows_what_is_done(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    with Progress(3, plain=False, stream=stream, doing=lambda: "sampling 37/128") as progress:
        progress.update(1, METRICS)
    assert "sampling 37/128" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_a_resumed_run_counts_only_its_own_steps_for_the_time_left(clock):
    stream = io.StringIO()
    with Progress(100, start_step=90, stream=stream) as progress:
        clock.now += 2
        progress.update(90, {})
    assert "step 91/100" in stream.getvalue()
    assert stream.getvalue().endswith("left 0:00:18\n")


def test_stdout_that_is_no_terminal_is_plain(capsys):
    with Progress(1) as progress:
        progress.update(0, {"reward/mean": 1})
    assert capsys.readouterr().out.startswith("step 1/1  reward 1.000  KL -")


def test_a_terminal_gets_a_bar_with_text_above_it(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    with Progress(3, plain=False, stream=stream) as progress:
        progress.update(1, METRICS)
        progress.say("a note with [brackets]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "step 2/3" in text
    assert "reward 0.512" in text
    assert "━" in text
    assert "a note with [brackets]\n" in text


def test_the_terminal_is_given_back_after_an_error():
    pytest.importorskip("rich")
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress(3, plain=False, stream=stream):
        raise KeyError
    hidden, shown = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert -1 < hidden < shown  # the cursor is back


def test_a_terminal_without_rich_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(InputError, match=r"jaxrl_llm\[run\]"):
        Progress(3, plain=False, stream=io.StringIO())
    Progress(3, stream=io.StringIO())  # a log does not need it


def test_a_start_after_the_end_is_refused():
    with pytest.raises(InputError, match="5 steps are done, more than the 4 of the run"):
        Progress(4, start_step=5)
    for steps in (1.5, -1, True, None, "3"):
        with pytest.raises(InputError, match="total_steps is"):
            Progress(steps)
    with Progress(4, start_step=4, stream=io.StringIO()) as progress:
        assert progress._left() == 0.0


def test_metrics_of_other_kinds_show_nothing():
    stream = io.StringIO()
    with Progress(1, stream=stream) as progress:
        progress.update(0, {"reward/mean": "high", "kl": [1], "entropy": 10**400, "completion/length": math.inf})
    assert stream.getvalue().startswith("step 1/1  reward -  KL -  entropy -  length -  uniform -  tokens/s -")


RUN = """
import sys
from jaxrl_llm.reporting.logging.progress import Progress
sys.stdin.read()  # until the reader of standard output is gone
with Progress(3, plain=sys.argv[1] == "plain") as progress:
    for step in range(3):
        progress.say("a line")
        progress.update(step, {"reward/mean": 0.5})
    progress.say("x" * 100_000)
print("and more", flush=sys.argv[1] == "bar")
print("done", file=sys.stderr)
"""


def run(how, stdout, after=lambda process: None):
    command = [sys.executable, "-c", RUN, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, text=True)
    after(process)
    _, errors = process.communicate("", timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize("how", ["plain", "bar"])
def test_a_reader_that_goes_away_does_not_end_the_run(how):
    pytest.importorskip("rich")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(how, writing) == (0, "done\n")
    finally:
        os.close(writing)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_under_the_log_does_not_end_the_run():
    with open("/dev/full", "w") as full:
        assert run("plain", full) == (0, "done\n")


def test_without_a_standard_output_there_is_nothing_to_print(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stdout in (None, closed):
        monkeypatch.setattr(sys, "stdout", stdout)
        with Progress(1) as progress:
            progress.say("a line")
            progress.update(0, {})


def test_what_an_encoding_cannot_show_is_escaped():
    raw = io.BytesIO()
    with Progress(1, stream=io.TextIOWrapper(raw, encoding="ascii")) as progress:
        progress.say("é \ud800")
    assert raw.getvalue() == b"\\xe9 \\ud800\n"
    progress.say("more")
    assert raw.getvalue().endswith(b"more\n")
