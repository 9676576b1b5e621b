"""The command line: its output, the files it writes, and its exit status."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "training"))

import tiny_runs as runs

from jaxrl_llm import algorithms, load_policy, sample
from jaxrl_llm.algorithms import grpo
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.cli.program import COMMANDS, main
from jaxrl_llm.data.chat.rendering import today
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.sampling import completion_texts, live
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Tokens
from jaxrl_llm.sampling.sampler import requests_of
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.texts import method as texts
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.inputs import InputSettings
from jaxrl_llm.training.config.json_text import from_dict, to_dict
from jaxrl_llm.utils import starting


def output_of(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


@pytest.fixture
def copied_run(tmp_path: Path) -> Path:
    """A copy of the finished run that tests may modify, with the files that its configuration names."""
    shutil.copytree(runs.finished_run(), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_commands_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, *arguments)
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert inspect.getdoc(command).splitlines()[0] in text  # type: ignore[union-attr]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_helps(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(output_of(capsys, command, "--help").split())
    assert " ".join(inspect.getdoc(COMMANDS[command]).split())[:60] in text.replace("│ ", "")  # type: ignore[union-attr]


def test_the_help_of_train_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "train", "--help", "all")
    for field in dataclasses.fields(TrainConfig):
        name = field.name.replace("_", "-")
        if field.name == "hyperparameters":
            for parameter in inspect.signature(grpo).parameters:
                assert f"--algorithm.{parameter.replace('_', '-')} " in text
        elif field.name == "optimizer":
            for inner in dataclasses.fields(OptimizerConfig):
                assert re.search(rf"--optimizer.{inner.name.replace('_', '-')}[ ,]", text), inner.name
        else:
            assert re.search(rf"--{name}[ ,]", text), name
    for more in ("--resume RUN", "--config FILE", "--traceback"):
        assert more in " ".join(text.replace("│", " ").split())


def test_every_setting_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """A line under each field, which is what the help shows."""
    source = "".join(map(inspect.getsource, (InputSettings, TrainConfig, OptimizerConfig)))
    for kind in (TrainConfig, OptimizerConfig):
        for field in dataclasses.fields(kind):
            assert re.search(rf'    {field.name}: [^\n]*\n    """[A-Z%-]?\w', source), field.name


def test_an_unknown_command_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown command 'trian': did you mean 'train'?" in capsys.readouterr().err


SETTINGS: dict[str, Any] = {
    "steps": 7,
    "temperature": 0.5,
    "prompts": "reasoning-gym:chain_sum",
    "prompt_template": "- {prompt}\nAnswer:",
    "system_prompt": "--- be brief ---",
    "stop": ["\n\n", "</s>"],
    "rewards": ["number_match*0.5", "format_match(x+)"],
    "remat": False,
    "task_options": {"max_digits": 3, "name": "x y"},
    "optimizer": {"learning_rate": 3e-6, "schedule": "cosine"},
    "hyperparameters": {"clip_high": 0.28, "scale": "none"},
}
YAML = """
steps: 7
prompts: reasoning-gym:chain_sum
temperature: 0.5
prompt-template: "- {prompt}\\nAnswer:"
system_prompt: "--- be brief ---"
stop: ["\\n\\n", "</s>"]
rewards: [number_match*0.5, format_match(x+)]
remat: false
wandb: null
trackio: null
mlflow: null
task_options: {max_digits: 3, name: x y}
optimizer:
  learning_rate: 3e-6
  schedule: cosine
hyperparameters:
  clip_high: 0.28
  scale: none
"""
TOML = """
steps = 7
prompts = "reasoning-gym:chain_sum"
temperature = 0.5
prompt_template = "- {prompt}\\nAnswer:"
system_prompt = "--- be brief ---"
stop = ["\\n\\n", "</s>"]
rewards = ["number_match*0.5", "format_match(x+)"]
remat = false
[task_options]
max_digits = 3
name = "x y"
[optimizer]
learning-rate = 3e-6
schedule = "cosine"
[hyperparameters]
clip-high = 0.28
scale = "none"
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.yml", YAML), ("run.toml", TOML)])
def test_files_set_what_options_set(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    expected = from_dict(
        {
            **SETTINGS,
            "task_options": {"max_digits": "3", "name": "x y"},
            "hyperparameters": {**grpo_defaults(), **SETTINGS["hyperparameters"]},
        }
    )
    assert parse_config(["--config", str(tmp_path / name)]) == expected
    assert parse_config([f"--config={tmp_path / name}"]) == expected


def grpo_defaults() -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(grpo).parameters.items()}


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    more = ["--steps", "9", "--optimizer.schedule", "linear", "--algorithm.scale=std", "--stop", "--remat"]
    for arguments in ([*more, "--config", str(tmp_path / "run.yaml")], [f"--config={tmp_path / 'run.yaml'}", *more]):
        config = parse_config(arguments)
        assert (config.steps, config.temperature) == (9, 0.5)
        assert config.optimizer == OptimizerConfig(learning_rate=3e-6, schedule="linear")
        assert config.hyperparameters == {**grpo_defaults(), "clip_high": 0.28, "scale": "std"}
        assert config.stop == ()
        assert config.remat is True


def test_nothing_given_is_the_default() -> None:
    assert parse_config([]) == dataclasses.replace(TrainConfig(), hyperparameters=grpo_defaults())


def test_options_of_the_algorithm_are_its_hyperparameters() -> None:
    config = parse_config(["--algorithm", "grpo", "--algorithm.clip-high", "0.28"])
    assert config.algorithm == "grpo"
    assert config.hyperparameters == {**grpo_defaults(), "clip_high": 0.28}


def test_the_options_are_those_of_the_algorithm_that_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line, the last time, or else in the file."""

    def other(strength: float = 2.0, gentle: bool = False) -> algorithms.Algorithm:
        """Another method."""
        return grpo(clip_low=strength)

    monkeypatch.setitem(algorithms.CATALOGUE, "other", other)
    wanted = {"strength": 3.0, "gentle": True}
    given = ["--algorithm.strength", "3", "--algorithm.gentle"]
    assert parse_config(["--algorithm", "grpo", "--algorithm=other", *given]).hyperparameters == wanted
    (tmp_path / "run.yaml").write_text("algorithm: other\nhyperparameters: {gentle: true}\n")
    assert parse_config(["--config", str(tmp_path / "run.yaml"), "--algorithm.strength=3"]).hyperparameters == wanted
    assert main(["train", "--algorithm", "other", "--algorithm.clip-high", "1"]) == 2
    assert "--algorithm.clip-high" in capsys.readouterr().err
    (tmp_path / "own.py").write_text("from jaxrl_llm.algorithms import get\n\nmine = get('dapo')\n")
    assert main(["train", "--algorithm", f"{tmp_path}/own.py:mine", "--algorithm.clip-high", "1"]) == 2
    assert "--algorithm.clip-high: the algorithm has no hyper-parameters: give a fun" in capsys.readouterr().err


def test_any_configuration_can_be_given_as_options(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, hyperparameters={**grpo_defaults(), "ddof": 0}, stop=("a b",), eval_every=3)
    assert parse_config(runs.as_arguments(config)) == config
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms import get\n\ndef mine(clip_high: float = 0.3):\n    return get('dapo')\n"
    )
    for algorithm in ("dapo", f"{tmp_path}/own.py:mine"):
        config = runs.small_config(tmp_path, algorithm=algorithm)
        config = parse_config([*runs.as_arguments(config), "--algorithm.clip-high", "0.4"])
        assert (config.algorithm, config.hyperparameters["clip_high"]) == (algorithm, 0.4)
        assert parse_config(runs.as_arguments(config)) == config


def test_train_tells_what_it_does() -> None:
    """A complete run, with the report and TensorBoard's files."""
    run = runs.finished_run()
    text, config = (run.parent / "said.txt").read_text(), runs.small_config(run.parent, tensorboard=True)
    assert "grpo on " in text
    assert re.search(r"before training: accuracy \d+\.\d % \(\d+\.\d to \d+\.\d\) on 4 held-out prompts", text)
    assert all(f"step {n}/4" in text for n in (1, 2, 3, 4))
    assert text.rstrip().endswith(f"report: {run / 'report.html'}")
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("config.json", "summary.json", "metrics.jsonl", "completions.jsonl", "report.html"),
        *("groups.jsonl", "checkpoints", "tensorboard", "environment.json"),
    }
    assert any((run / "tensorboard").iterdir())
    written = json.loads((run / "config.json").read_text())
    assert written.pop("started_in") == str(run.parent.resolve())
    assert written.pop("started_on") == today(), "the day on which this process first asked for it"
    assert from_dict(written) == dataclasses.replace(config, hyperparameters=grpo_defaults())


def test_resume_through_the_command_line(
    copied_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    before = (copied_run / "completions.jsonl").read_bytes()
    shutil.rmtree(copied_run / "checkpoints" / "4")
    text = output_of(capsys, "train", "--resume", copied_run)
    assert f"output in {copied_run}" in text, "the folder may have been moved"
    assert "resuming from step 2" in text
    assert (copied_run / "completions.jsonl").read_bytes() == before
    assert (copied_run / "checkpoints" / "4").is_dir()


def test_eval_of_a_run_gives_what_the_run_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.finished_run()
    text = output_of(capsys, "eval", run, "--output", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == json.loads((run / "summary.json").read_text())["eval_after"]
    low, mean, high = (100 * figures[name] for name in ("low", "accuracy", "high"))
    said = f"accuracy {mean:.1f} % ({low:.1f} to {high:.1f}) on 4 held-out prompts"
    assert text.splitlines() == [f"{said}, {figures['length']:.1f} tokens a completion"]
    assert 1 <= figures["length"] <= 6


@pytest.mark.heavy
def test_eval_of_a_run_on_fewer_prompts_and_with_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.finished_run()
    arguments = ["eval", run, "--size", 2, "--samples", 4, "--output", tmp_path / "figures.json"]
    text = output_of(capsys, *arguments)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["prompts"], figures["samples"], figures["temperature"]) == (2, 4, 1.0)
    assert [line.split(" ")[0] for line in text.splitlines()] == ["accuracy", "pass@1", "pass@2", "pass@4"]
    for line, k in zip(text.splitlines()[1:], (1, 2, 4), strict=True):
        found = figures["pass_at"][str(k)]
        assert line == f"pass@{k} {100 * found['value']:.1f} % ({100 * found['low']:.1f} to {100 * found['high']:.1f})"
    assert output_of(capsys, *arguments) == text, "the same seed gives the same answers"
    assert main(["eval", str(run), "--size", "5"]) == 2
    assert "the run held 4 prompts" in capsys.readouterr().err


def test_eval_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`from_answer` gives each prompt its own answer, 0 or 1 in turn: half of them are right."""
    prompts = runs.write_prompts(tmp_path / "prompts.jsonl", count=4)
    rewards = f"{runs.write_rewards(tmp_path)}:from_answer"
    arguments = ["--prompts", prompts, "--rewards", rewards, "--size", 4, "--max-new-tokens", 6]
    text = output_of(capsys, "eval", runs.MODEL, *arguments)
    assert text.startswith(f"accuracy 50.0 % (15.0 to 85.0) on 4 prompts of {prompts}, ")
    assert main(["eval", str(runs.MODEL), "--samples", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_sample_prints_completions(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["sample", runs.MODEL, "number 01:", "number 02:", "--temperature", 0, "--max-new-tokens", 6]
    text = output_of(capsys, *greedy)
    assert text.count("[number 01:] ") == text.count("[number 02:] ") == 1
    assert output_of(capsys, *greedy, "--seed", 1) == text
    drawn = ["sample", runs.finished_run(), "number 01:", "--samples", 4, "--max-new-tokens", 6, "--top-p", 0.9]
    text = output_of(capsys, *drawn)
    assert text.count("[number 01:] ") == 4
    assert output_of(capsys, *drawn) == text
    assert output_of(capsys, *drawn, "--seed", 1) != text


class Terminal(io.StringIO):
    """Standard output that is a terminal; `pieces` has what each write wrote, and `hook` is called before each."""

    def __init__(self, hook: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.hook = hook

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.hook()
        self.pieces.append(text)
        return super().write(text)


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, *arguments: Any, status: int = 0, hook: Callable[[], object] = lambda: None
) -> Terminal:
    """What a command writes to a terminal."""
    terminal = Terminal(hook)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main([str(argument) for argument in arguments]) == status
    return terminal


# Greedy, the tiny model writes one control character again and again; drawn, it writes much that is no UTF-8.
LONE = ["sample", runs.MODEL, "number 01:", "--max-new-tokens", 24]
SEVERAL = ["sample", runs.MODEL, "number 01:", "number 02:", "--samples", 2, "--max-new-tokens", 6]


def test_a_lone_completion_comes_piece_by_piece_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = output_of(capsys, *LONE).removeprefix("[number 01:] ")
    terminal = on_terminal(monkeypatch, *LONE)
    assert terminal.getvalue() == piped.rstrip("\n").translate(live._SIGNS) + "\n"
    assert len(terminal.pieces) >= 4, "24 tokens, looked at every 4"
    assert max(map(len, terminal.pieces)) <= 12
    assert "\x1b" not in terminal.getvalue()


def test_nothing_is_shown_beyond_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two looks tokens may be decoded that do not belong to the completion: every place in a chunk is tried."""
    (line,) = output_of(capsys, *LONE, "--jsonl").splitlines()
    text = json.loads(line)["text"]
    ends = [i for i in range(3, len(text)) if text[i] not in text[:i] and text[i] != "\ufffd"][:4]
    assert len(ends) == 4
    for i in ends:
        (line,) = output_of(capsys, *LONE, "--stop", text[i], "--jsonl").splitlines()
        stopped = json.loads(line)
        assert (stopped["text"], stopped["ended"]) == (text[: i + 1], True)
        terminal = on_terminal(monkeypatch, *LONE, "--stop", text[i])
        assert terminal.getvalue() == text[: i + 1].translate(live._SIGNS) + "\n"


def test_several_completions_are_marked_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in output_of(capsys, *SEVERAL, "--jsonl").splitlines()]
    wanted = [f"[{row['prompt']} {row['sample'] + 1}/2] {row['text']}\n".translate(live._SIGNS) for row in rows]
    text = on_terminal(monkeypatch, *SEVERAL).getvalue()
    assert len(text) == sum(map(len, wanted))
    assert all(text.count(line) == 1 for line in wanted)


def test_completions_as_json_are_those_of_sample(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in output_of(capsys, *SEVERAL, "--jsonl", "--seed", 3).splitlines()]
    policy, params, tokenizer = load_policy(runs.MODEL)
    prompts = ["number 01:", "number 02:"]
    batch = sample(policy, params, prompts, jax.random.key(3), group_size=2, max_new_tokens=6)
    action, logp = np.asarray(batch.action_mask), np.asarray(batch.behaviour_logp)
    assert [(row["prompt"], row["sample"]) for row in rows] == [(p, n) for p in prompts for n in range(2)]
    assert [row["text"] for row in rows] == completion_texts(tokenizer, batch)
    assert [row["tokens"] for row in rows] == action.sum(1).tolist()
    assert [row["ended"] for row in rows] == (~np.asarray(batch.truncated)).tolist()
    np.testing.assert_allclose(
        [row["mean_logp"] for row in rows], [x[a].mean() for x, a in zip(logp, action, strict=True)]
    )
    lines = output_of(capsys, *SEVERAL, "--seed", 3)
    assert lines == "".join(f"[{row['prompt']}] {row['text']}\n" for row in rows)


def test_figures_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(x) for x in (*SEVERAL, "--stats", "--temperature", 0)]) == 0
    out, err = capsys.readouterr()
    assert "tokens/s" not in out
    assert re.fullmatch(
        r"24 tokens in \d+\.\d\d s \(\d+\.\d tokens/s\), first token after \d+\.\d\d s, occupancy 100%"
        r"(, \d+ programs compiled or fetched)?\n",
        err,
    )
    assert live.throughput_line(Stats(rows=2, steps=5, live=7, tokens=9, seconds=2.0, first_token=0.5)) == (
        "9 tokens in 2.00 s (4.5 tokens/s), first token after 0.50 s, occupancy 70%"
    )
    assert main(["sample", str(runs.MODEL), "x", "--samples", "0"]) == 2
    assert "--samples is 0, but must be at least 1" in capsys.readouterr().err


def test_an_interrupt_leaves_what_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    whole = on_terminal(monkeypatch, *LONE[:-1], 100).getvalue()
    writes: list[int] = []

    def interrupt() -> None:
        writes.append(0)
        if len(writes) == 3:
            signal.raise_signal(signal.SIGINT)

    capsys.readouterr()
    before = signal.getsignal(signal.SIGINT)
    cut = on_terminal(monkeypatch, *LONE[:-1], 100, status=130, hook=interrupt).getvalue()
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before
    assert cut.endswith("\n")
    assert whole.startswith(cut.rstrip("\n\ufffd"))
    assert 0 < len(cut) <= 1 + 5 * 4 < len(whole), "it ends at the next look"


def engine_of(*texts: tuple[bytes, bool], step: int = 1) -> Any:
    """A stand-in for the engine: each request's bytes, watched every `step`, then all completions, the last one first.

    A text that has not ended comes back unfinished.
    """

    def stream(policy: Any, weights: Any, requests: Any, settings: Any, **options: Any) -> Iterator[Completion]:
        for index, (text, _) in enumerate(texts):
            for end in range(step, len(text) + 1, step):
                if options["watch"] is not None:
                    options["watch"](index, np.frombuffer(text[:end], np.uint8).astype(np.int32))
        for index in reversed(range(len(texts))):
            text, ended = texts[index]
            token = np.frombuffer(text, np.uint8).astype(np.int32)
            others = (np.full(len(text), -0.5, np.float32) for _ in range(4))
            yield Completion(index, Tokens(token, *others, token), ended, 1000)

    return stream


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_policy(runs.MODEL)


def written(
    monkeypatch: pytest.MonkeyPatch,
    tiny: Any,
    out: io.StringIO,
    *texts: tuple[bytes, bool],
    prompts: Any = ("p",),
    **how: Any,
) -> str:
    monkeypatch.setattr(live, "stream", engine_of(*texts, step=how.pop("step", 1)))
    asked = requests_of(
        tiny[0], list(prompts), jax.random.key(0), group_size=len(texts) // len(prompts), max_new_tokens=99
    )
    live.write_completions(tiny[0], tiny[1], prompts, asked, out, **how)
    return out.getvalue()


MANY_BYTES = "na\u00efve \u20ac5 \U0001f600! \u4f60\u597d"


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_only_whole_characters_are_shown(monkeypatch: pytest.MonkeyPatch, tiny: Any, step: int) -> None:
    """The tiny models' tokens are bytes."""
    terminal = Terminal()
    assert written(monkeypatch, tiny, terminal, (MANY_BYTES.encode(), True), step=step) == MANY_BYTES + "\n"
    assert "\ufffd" not in "".join(terminal.pieces)
    assert all(MANY_BYTES.startswith("".join(terminal.pieces[:n])) for n in range(len(terminal.pieces)))
    if step == 1:
        assert terminal.pieces == [*MANY_BYTES, "\n"]


def test_bytes_that_become_no_character_are_shown_in_the_end(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    terminal = Terminal()
    written(monkeypatch, tiny, terminal, (b"a\xffb\xe2\x82", False))
    assert terminal.pieces == ["a", "\ufffdb", "\ufffd", "\n"]


def test_text_that_changes_later_is_written_from_where_it_differs() -> None:
    """As with tokenizers whose byte tokens decode together or not at all: nothing is written until all is there."""

    def decode(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    data = "\u20ac\U0001f600".encode()
    shown, pieces = "", []
    for end in range(1, len(data) + 1):
        text = live.whole_characters(decode(data[:end]))
        pieces.append(live.unseen(shown, text))
        shown = shown if shown.startswith(text) else text
    assert [piece for piece in pieces if piece] == ["\u20ac", "\U0001f600"]
    assert live.unseen("a b", "a, b c") == ", b c"
    assert live.unseen("", "") == live.unseen("ab", "ab") == live.unseen("ab", "a") == ""


def test_pipes_get_the_order_of_the_requests(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    texts = [(b"one", True), (b"two", True), (b"", False), (b"three", False)]
    how: dict[str, Any] = {"prompts": ("p", "q")}
    assert written(monkeypatch, tiny, io.StringIO(), *texts, **how) == "[p] one\n[p] two\n[q] three\n"
    assert written(monkeypatch, tiny, Terminal(), *texts, **how) == "[q 2/2] three\n[p 2/2] two\n[p 1/2] one\n"
    rows = [json.loads(x) for x in written(monkeypatch, tiny, Terminal(), *texts, as_json=True, **how).splitlines()]
    assert rows[0] == {"prompt": "p", "sample": 0, "text": "one", "ended": True, "tokens": 3, "mean_logp": -0.5}
    assert [(row["prompt"], row["sample"], row["text"], row["ended"]) for row in rows[1:]] == [
        ("p", 1, "two", True),
        ("q", 1, "three", False),
    ]


def test_requests_are_in_order_as_soon_as_they_can_be() -> None:
    def completions() -> Iterator[Completion]:
        for index in (2, 0, 1, 3):
            taken.append(index)
            yield Completion(index, NO_TOKENS, True, 1)

    taken: list[int] = []
    given = live.in_order(completions())
    assert (next(given).index, taken) == (0, [2, 0])
    assert ([next(given).index for _ in range(2)], taken) == ([1, 2], [2, 0, 1])
    assert [completion.index for completion in given] == [3]


def test_export_writes_the_parameters_of_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "export", runs.finished_run(), tmp_path / "model")
    assert text.strip() == str(tmp_path / "model")
    policy, params, tokenizer = load_policy(tmp_path / "model")
    runs.assert_equal_trees(jax.tree.map(np.asarray, params), runs.final_params(runs.finished_run()))
    start, untrained, _ = load_policy(runs.MODEL)
    assert policy.config == start.config
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, untrained)), strict=True))
    assert tokenizer("ab")["input_ids"] == [97, 98]


def test_algorithms_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "algorithms").partition("\n\n")[2].splitlines()  # after those to start with
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == sorted(
        [*algorithms.names(), *texts.names()]
    )
    assert any(line.startswith("  grpo ") and "Group Relative Policy Optimization" in line for line in lines)
    text = output_of(capsys, "algorithms", "grpo")
    assert "def grpo(" in text
    assert "2402.03300" in text
    assert "test_grpo.py::" in text
    found = output_of(capsys, "algorithms", "--find", "greedy Baseline").splitlines()
    assert [line.split()[0] for line in found if line.startswith("  ")] == ["remax"]
    for wrong, said in (
        (["--find", "zebras in pyjamas"], "no method mentions"),
        (["--find"], "--find needs a value"),
        (["grpo", "--find", "length"], "--find searches all methods: remove grpo"),
    ):
        assert main(["algorithms", *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["algorithms", "gropo"]) == 2
    assert "did you mean 'grpo'?" in capsys.readouterr().err
    assert main(["algorithms", "grpo", "rloo"]) == 2
    assert "one name at most: remove rloo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], ""),
        (["nowhere", "also-nowhere"], "nowhere holds no run"),
        (["RUN", "RUN"], "a run is given twice"),
        (["RUN", "--output"], "--output needs a value"),
        (["RUN", "--runs"], "jaxrl report has no option --runs"),
        (["--output", "x.html"], "needs the folder of a run"),
        (["RUN", "nowhere", "--compare", "grpo"], "--compare is for the report of one run"),
    ],
)
def test_what_report_cannot_do_is_one_line(
    wrong: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path) if word == "RUN" else word for word in wrong]
    assert main(["report", *arguments]) == (2 if wrong else 0)
    out = capsys.readouterr()
    assert said in out.err
    assert "Traceback" not in out.err
    if not wrong:
        assert "usage: jaxrl report RUN [RUN ...]" in out.out


@pytest.mark.heavy
def test_report_writes_the_page_again(copied_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied_run / "report.html").unlink()
    text = output_of(capsys, "report", copied_run)
    assert text.strip() == str(copied_run / "report.html")
    assert "<svg" in (copied_run / "report.html").read_text()


@pytest.mark.heavy
def test_the_report_shows_what_other_methods_make_of_the_completions(
    copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of(capsys, "report", copied_run, "--compare", "grpo", "rloo")
    text = (copied_run / "report.html").read_text()
    assert "Credit by method" in text
    assert text.count("<th>rloo</th>") == text.count("<th>grpo (this run), grpo</th>") > 4
    assert main(["report", str(copied_run), "--compare"]) == 2
    assert "--compare needs at least one name" in capsys.readouterr().err
    assert main(["report", str(copied_run), "--compare", "gropo"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_a_run_without_held_out_prompts_asks_for_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs.finished_run(), run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "eval_size": 0}))
    assert main(["eval", str(run)]) == 2
    assert "the run has no held-out prompts (eval_size 0)" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: TrainConfig, **how: Any) -> dict[str, Any]:
        starting.started()  # as `train` says once a run has a folder
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", stop)
    assert main(["train", "--prompts", "reasoning-gym:chain_sum"]) == 130
    assert "resume a training run with jaxrl train --resume RUN" in capsys.readouterr().err


def test_the_installed_command_ends_with_its_status() -> None:
    command = [sys.executable, "-m", "jaxrl_llm.cli"]
    good = subprocess.run([*command, "algorithms"], capture_output=True, text=True, env=runs.environment(), check=False)
    bad = subprocess.run([*command, "nothing"], capture_output=True, text=True, env=runs.environment(), check=False)
    assert (good.returncode, bad.returncode) == (0, 2)
    assert good.stderr == ""
    assert bad.stderr.count("\n") == 1
    assert to_dict(TrainConfig())["algorithm"] in good.stdout
