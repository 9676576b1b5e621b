"""Every block of code of the documentation and the README runs, and every command and option in them exists.

A block of "text" is what a program prints; the test of its page compares it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
from doc_pages import DOCS, PAGES, ROOT, blocks, commands, programs, run_programs, tiny_chat_model, write_files

from jaxrl_llm import algorithms
from jaxrl_llm.cli import commands as command_line
from jaxrl_llm.cli.host_options import host_options
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.cli.program import main
from jaxrl_llm.cli.texts import parse_texts
from jaxrl_llm.in_jax.tasks import TASKS, get_task
from jaxrl_llm.rewards.registry import names as reward_names
from jaxrl_llm.training.config import OptimizerConfig, TrainConfig

ALONE = [page for page in PAGES if page.parent == DOCS]  # README's blocks are run by test_examples.py
each = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
# Of other commands, and those that `jaxrl train` takes before its settings.
OTHERS = {
    "--config", "--resume", "--accept-changed-inputs", "--coordinator", "--processes", "--process", "--distributed",
    "--topology", "--shardings", "--slices", "--json", "--picture", "--find", "--compare", "--overwrite", "--samples",
    "--jsonl", "--stats", "--size", "--traceback", "--no-deps", "--kills", "--algorithm.without", "--algorithm.preset",
    "--algorithms", "--tasks", "--first-seed", "--keep-unread", "--adapters", "--add-tokens", "--name", "--host",
    "--port", "--text", "--wait",
}  # fmt: skip
SMALL = {
    "--steps": "1", "--prompts-per-step": "2", "--group-size": "4", "--max-new-tokens": "4", "--eval-size": "2",
    "--samples": "2", "--epochs-of-data": "0.1",
}  # fmt: skip


@pytest.mark.parametrize("page", [p for p in ALONE if programs(p, heavy=False)], ids=lambda page: page.stem)
def test_its_programs_run(page: Path, importable_folder: Path) -> None:
    write_files(page, importable_folder)
    run_programs(page, tiny_chat_model(importable_folder), heavy=False)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "page", [p for p in ALONE if programs(p, heavy=True) != programs(p, heavy=False)], ids=lambda page: page.stem
)
def test_all_its_programs_run(page: Path, importable_folder: Path) -> None:
    write_files(page, importable_folder)
    run_programs(page, tiny_chat_model(importable_folder), heavy=True)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart", ["train", "report", "eval", "sample", "export"]),
        ("agents", ["train", "report", "sample"]),
        ("serving", ["train"]),
        ("preferences", ["train", "export", "train", "train", "export", "reward-eval", "train", "train"]),
    ],
)
def test_the_commands_of_a_whole_task_run(name: str, expected: list[str], importable_folder: Path) -> None:
    """In their order, with a tiny model and few steps in place of those on the page."""
    page = DOCS / f"{name}.md"
    write_files(page, importable_folder)
    model = str(tiny_chat_model(importable_folder))
    if name in ("agents", "preferences", "serving"):
        exec(compile(programs(page, heavy=False)[0].text, str(page), "exec"), {})  # writes its data
    ran = []
    for block in blocks(page):
        for words in commands(block.text) if block.language == "bash" else []:
            smaller = [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]
            smaller = [model if word == "smollm2-135m" else word for word in smaller]
            assert main(smaller) == 0, f"jaxrl {shlex.join(smaller)}"
            ran.append(words[0])
    assert ran == expected
    for run in (importable_folder / "runs").iterdir():
        assert (run / "report.html").exists()
    assert name != "quickstart" or (importable_folder / "model/config.json").exists()


@each
def test_its_blocks_are_marked_well(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("python", "bash", "json", "text", ""), f"{page.name}, line {block.line}"
        assert re.fullmatch(r"|heavy|file: \S+( repeat: \d+)?", block.mark), f"{page.name}, line {block.line}"
        if block.language == "python":
            ast.parse(block.text)
        if block.language == "json":
            assert all(json.loads(line) for line in block.text.splitlines())
    assert page.read_text().count("```") == 2 * len(blocks(page)), "a fence that is not at the start of its line"


@each
def test_its_commands_are_valid(page: Path) -> None:
    for block in blocks(page):
        for words in commands(block.text) if block.language in ("bash", "") else []:
            assert words[0] in command_line.COMMANDS, words
            if words[0] == "texts" and words[1] != "--resume":
                assert parse_texts(words[1], words[2:])[1], "a command that has a text to begin with"
            if words[0] == "train" and words[1] not in ("--resume", "--help") and "--config" not in words:
                _, settings = host_options([w for w in words[1:]])
                settings = [w for w in settings if w != "--resume" and w != "auto"]
                config = parse_config(settings, "")
                assert config.output != TrainConfig.output, "a command that shows where its results are"


@each
def test_every_option_that_it_names_exists(page: Path) -> None:
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    settings |= {f"optimizer.{field.name}" for field in dataclasses.fields(OptimizerConfig)}
    for name in algorithms.names():
        settings |= {f"algorithm.{one}" for one in inspect.signature(algorithms.constructor(name)).parameters}
    known = {"--" + name.replace("_", "-") for name in settings} | OTHERS
    for span in re.findall(r"`(--[^`\n]+)`", page.read_text()):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", span):
            positive = re.sub(r"^--(\w+\.)?no-", r"--\1", option)
            assert option in known or positive in known, f"{page.name}: {option}"


@each
def test_methods_and_files_that_it_names_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"--algorithm ([a-z_]+)(?![\w.])", text):
        assert name in algorithms.names(), f"{page.name}: {name}"
    for path in re.findall(r"`((?:experiments|tests|jaxrl_llm|kernels|docs)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
    for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / path).exists() or path.startswith("generated/"), f"{page.name}: {path}"


def test_the_page_of_the_laboratory_lists_its_tasks() -> None:
    text = (DOCS / "laboratory.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(TASKS)
    assert {get_task(name).best for name in TASKS} == {1.0}


def test_the_page_of_rewards_lists_them_all() -> None:
    text = (DOCS / "rewards.md").read_text()
    for name in reward_names():
        assert f"`{name}" in text
