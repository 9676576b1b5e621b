"""What the README and the experiments show is run: its example, the plain script, the demo."""

import json
import re
import runpy
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.cli.agent_demo import Calculator, questions
from jaxrl_llm.cli.demo import easy_first, examples
from jaxrl_llm.cli.program import main
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.in_jax.tasks import TASKS

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "tests/vectors/llama_tied")


def code_lines(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip()])


def python_blocks(path: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


def test_readme_example(capsys: pytest.CaptureFixture[str], smollm2: object) -> None:
    _, first, second = python_blocks("README.md")
    assert code_lines(first) <= 15
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)  # the example itself is under test
    assert "reference_logp" in names["grpo"].needs
    assert names["batch"].tokens.shape[0] == 4
    exec(compile(second, "README.md", "exec"), names)
    table, shown = capsys.readouterr().out.split("\nAlgorithm(")
    assert table.splitlines()[0].split() == ["row", "group", "reward", "actions", "grpo", "gspo", "mine"]
    assert f"```text\nAlgorithm({shown}```" in (ROOT / "README.md").read_text()
    assert repr(eval(f"Algorithm({shown}", names)) + "\n" == f"Algorithm({shown}"


def test_the_page_of_compositions(capsys: pytest.CaptureFixture[str], smollm2: object) -> None:
    first, second, _, before, around = python_blocks("docs/compositions.md")
    module = types.ModuleType("compositions")  # where its functions have their names, as in __main__
    sys.modules[module.__name__], names = module, vars(module)
    exec(compile(first, "compositions.md", "exec"), names)
    exec(compile(second, "compositions.md", "exec"), names)
    table, shown = capsys.readouterr().out.split("\nAlgorithm(")
    assert table.splitlines()[0].split() == ["row", "group", "reward", "actions", "grpo", "dapo", "mine"]
    assert f"```text\nAlgorithm({shown}```" in (ROOT / "docs/compositions.md").read_text()
    assert repr(eval(f"Algorithm({shown}", names)) + "\n" == f"Algorithm({shown}"
    for definition in re.findall(r"^(?:grpo|dapo|mine) = \w+\(\n(.*?)^\)", second, flags=re.DOTALL | re.MULTILINE):
        assert code_lines(definition) <= 5
    exec(compile(before, "compositions.md", "exec"), names)
    printed = capsys.readouterr().out
    for part in (
        "choose_prompts(thompson(), drop_solved(back=50))",
        "retried(from_column(), succeeds())",
        "tree(0, 256",
    ):
        assert part in printed
    exec(compile(around, "compositions.md", "exec"), names)
    printed = capsys.readouterr().out
    for part in ("outer=extrapolated(every=10)", "with_initial(periodic_reset(50), 0.5)", "refilled(max_age=10)"):
        assert part in printed


def test_what_the_readme_counts() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 220
    counts = [int(number) for number in re.findall(r"(\d+) published methods", text)]
    assert counts == [len(algorithms.names())] * 2
    assert len(list((ROOT / "colab").glob("*.ipynb"))) == len(re.findall(r"\]\(colab/\d", text)) == 7
    assert "seven notebooks" in text
    assert len(TASKS) == 13
    assert "thirteen small tasks" in (ROOT / "docs/compositions.md").read_text()


@pytest.mark.heavy
def test_the_readmes_agent_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class and its command, with a tiny model and a smaller run."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Train an agent") : text.index("## Compose an algorithm")]
    (agent,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    assert code_lines(agent) <= 10
    names: dict[str, Any] = {}
    exec(compile(agent, "README.md", "exec"), names)
    game = names["Guess"]()
    assert game.reset(seed=3)[0].startswith("Guess")
    assert game.step("0")[:3] == ("higher", 0.0, False)
    assert game.step(f"{game.number}")[1:3] == (1.0, True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(agent)
    shutil.copytree(TINY, tmp_path / "tiny")
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}\n"
    template += "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    changes = {"tokenizer_config.json": {"chat_template": template}, "config.json": {"max_position_embeddings": 256}}
    for name, settings in changes.items():
        path = tmp_path / "tiny" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    small = ["--model", "tiny", "--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--eval-size", "2"]
    words = [word for word in shlex.split(command)[1:]]
    assert main([*words, *small, "--stop", *"abcdefghijklmnopqrstuvwxyz", "--no-tensorboard"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # its file is found from where the run was started
    assert main(["train", "--resume", "../runs/guess", "--steps", "2"]) == 0
    assert main(["eval", "../runs/guess"]) == 0
    line, _ = [json.loads(one) for one in (tmp_path / "runs/guess/metrics.jsonl").read_text().splitlines()]
    assert line["rollout/failed_environments"] == 0
    assert 1 < line["rollout/turns"] <= 7
    assert line["mismatch"] < 1e-4


def test_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / path).exists(), path


def test_plain_script_trains() -> None:
    script = ROOT / "experiments/grpo_from_parts.py"
    assert len(script.read_text().splitlines()) <= 60
    main = runpy.run_path(str(script))["main"]
    state, accuracies = main(model=TINY, steps=2, prompts_per_step=2, group_size=2, eval_size=4)
    assert int(state.step) == 4  # two steps of two minibatches
    assert all(0 <= a <= 1 for a in accuracies)


@pytest.mark.heavy
def test_demo_runs_and_prints_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", TINY, "--steps", "1", "--output", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    for word in ("before  accuracy", "after   accuracy", "percentage points", "report.html"):
        assert word in printed
    assert printed.count("Calculate ") >= 3
    assert (tmp_path / "run/report.html").exists()


def test_demo_asks_easy_questions_first() -> None:
    rows = [{"reasoning_gym_entry": {"metadata": {"num_digits": digits}}} for digits in (2,) * 300 + (1,) * 100]
    curriculum = easy_first(rows, draws=120, seed=0)
    ids, state = curriculum.select(curriculum.init(), 8)
    assert (ids >= 300).sum() >= 7, "with nearly all of the first step of one digit"
    rest, _ = curriculum.select(state, 112)
    order = [*ids.tolist(), *rest.tolist()]
    assert len(set(order)) == 120, "no question twice while there are others"
    easy = [sum(i >= 300 for i in order[start : start + 30]) for start in range(0, 120, 30)]
    assert easy[0] > easy[3] + 10
    assert 9 <= easy[3] <= 11
    assert curriculum.select(curriculum.init(), 8)[0].tolist() == ids.tolist()


def test_demo_shows_one_completion_of_each_kind(tmp_path: Path) -> None:
    rewards = {"eval_before": [0, 0, 1, 0, 1], "eval_after": [0, 0, 1, 1, 0]}
    lines = [{"phase": p, "prompt_id": i, "reward": float(r)} for p, of in rewards.items() for i, r in enumerate(of)]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(kind, before["prompt_id"], after["prompt_id"]) for kind, before, after in examples(tmp_path)]
    assert found == [("wrong, then right", 3, 3), ("still wrong", 0, 0), ("right, then wrong", 4, 4)]


def chatting(folder: Path) -> str:
    """The tiny model with a chat template, and room for the demo's conversations."""
    shutil.copytree(TINY, folder)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}\n"
    template += "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    changes = {"tokenizer_config.json": {"chat_template": template}, "config.json": {"max_position_embeddings": 1024}}
    for name, settings in changes.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return str(folder)


@pytest.mark.heavy
def test_the_script_of_an_agent_trains(tmp_path: Path) -> None:
    script = ROOT / "experiments/agent_from_parts.py"
    assert len(script.read_text().splitlines()) <= 70
    main = runpy.run_path(str(script))["main"]
    state, accuracies = main(chatting(tmp_path / "tiny"), steps=2, prompts_per_step=2, group_size=2, eval_size=4)
    assert int(state.step) == 4  # two steps of two minibatches
    assert all(0 <= a <= 1 for a in accuracies)


@pytest.mark.heavy
def test_the_agent_demo_runs_and_prints_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = chatting(tmp_path / "tiny"), str(tmp_path / "run")
    assert main(["agent-demo", "--model", model, "--steps", "1", "--output", output]) == 0
    printed = capsys.readouterr().out
    for word in ("before  accuracy", "after   accuracy", "percentage points", "report.html"):
        assert word in printed
    assert (tmp_path / "run/report.html").exists()


def test_the_agent_demo_has_a_calculator() -> None:
    rows = questions(seed=0, count=9)
    assert rows == questions(seed=0, count=9)
    assert len({row["prompt"][-1]["content"] for row in rows}) == 9
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", *("user", "assistant") * 4, "user"]
    assert [message["content"] for message in rows[0]["prompt"][2:5]] == ["CALC(217 * 34)", "7378", "7378"]

    def said(text: str) -> Reply:
        return Reply({"role": "assistant", "content": text}, ())

    world = Calculator({"answer": "42"})
    assert world.step(said("CALC(6 * 7)")).messages[0]["content"] == "42"
    assert not world.step(said("CALC(6 *)")).done, "an error is told, and the episode goes on"
    for text, reward in (("42 eggs", 1.0), ("41", 0.0), ("6 * 7", 0.0)):
        end = world.step(said(text))
        assert (end.reward, end.done) == (reward, True)
