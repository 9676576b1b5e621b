"""`jaxrl texts` from end to end with a tiny model: the folder, resuming, using the text, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import TrainConfig, texts
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.arguments.hyperparameters import hyperparameters_of
from jaxrl_llm.texts import method as catalogue
from jaxrl_llm.texts import methods, run
from jaxrl_llm.texts.engine import TextPrompts
from jaxrl_llm.texts.method import constructor
from jaxrl_llm.training.folder.files import run_config
from jaxrl_llm.utils.errors import InputError

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/vectors/llama_tied"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SMALL: dict[str, dict[str, Any]] = {
    "contextevolve": {"children": 1, "directed": 1, "shots": 1, "parents": 1},
    "polca": {"by": "both", "shots": 1, "best": 1},
    "spo_prompt": {"votes": 1},
    "training_free_grpo": {"lessons": "examples", "most": 2},
}
FILES = ("state.json", "metrics.jsonl", "text.txt", "text.yaml", "completions.jsonl")
pytestmark = pytest.mark.usefixtures("quickly")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Of a small run with a reward that some answers of a model without training have."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "chat")
    changes = {"tokenizer_config.json": {"chat_template": TEMPLATE}, "config.json": {"max_position_embeddings": 512}}
    for name, settings in changes.items():
        path = Path("chat") / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"count {n}"}) + "\n" for n in range(12)))
    Path("even.py").write_text("def even(completions, **columns):\n    return [len(x) % 2 for x in completions]\n")
    return TrainConfig(
        model="chat", prompts="rows.jsonl", rewards=("even.py:even",), output="run", algorithm="polca", steps=2,
        prompts_per_step=2, group_size=2, max_new_tokens=4, eval_size=3, tensorboard=False, max_prompt_tokens=256,
        hyperparameters={"by": "both", "shots": 1}, seed=1,
    )  # fmt: skip


def quiet(_: str) -> None:
    return None


def files_of(folder: str) -> dict[str, Any]:
    found = {name: (Path(folder) / name).read_text() for name in FILES}
    summary = json.loads((Path(folder) / "summary.json").read_text())
    return {**found, "summary": summary}


@pytest.mark.parametrize("method", texts.names())
def test_a_killed_run_that_is_resumed_is_the_uninterrupted_one(config: TrainConfig, method: str) -> None:
    how = SMALL[method]
    config = dataclasses.replace(config, algorithm=method, hyperparameters=how)
    texts.optimise(config, "Say it.", reply_tokens=8, say=quiet)
    whole = files_of("run")
    assert json.loads(whole["text.yaml"]) == {"system_prompt": whole["text.txt"][:-1]}
    lines = [json.loads(line) for line in whole["metrics.jsonl"].splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["samples/answers"] >= 4 for line in lines)
    assert whole["summary"]["counts"]["samples/answers"] == sum(line["samples/answers"] for line in lines)
    assert set(whole["summary"]) >= {"eval_before", "eval_after", "text", "warnings"}
    assert Path("run/report.html").exists()

    Path("run").rename("whole")
    made = texts.get(method, **how)

    def killed(state: texts.State, tasks: Any, engine: Any) -> texts.State:
        if state.candidates and Path("run/metrics.jsonl").read_text():
            engine.answers([(state.first, tasks[0])])
            raise KeyboardInterrupt
        return made.step(state, tasks, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "constructor", lambda name: lambda **_: dataclasses.replace(made, step=killed))
        with pytest.raises(KeyboardInterrupt):
            texts.optimise(config, "Say it.", reply_tokens=8, say=quiet)
    assert json.loads(Path("run/state.json").read_text())["step"] == 1
    with Path("run/metrics.jsonl").open("a") as file:  # a line that was written before the kill, and its state not
        file.write(json.dumps({"step": 2, "reward/mean": 9.0}) + "\n")
    run.resume("run", say=quiet)
    assert files_of("run") == whole


def test_the_text_is_used_by_other_commands(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--model", "chat", "--prompts", "rows.jsonl", "--rewards", "even.py:even", "--output", "run", "--steps", "1",
        "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "4", "--eval-size", "3",
        "--reply-tokens", "8", "--algorithm.lessons", "examples", "--text", "Say é {it}.",
    ]  # fmt: skip
    assert main(["texts", "Training-Free-GRPO", *options]) == 0
    said = capsys.readouterr().out
    assert "before: accuracy" in said
    assert "after:  accuracy" in said
    text = Path("run/text.txt").read_text()[:-1]
    assert text.startswith("Say é {it}.")
    assert run_config("run").system_prompt == text
    after = json.loads(Path("run/summary.json").read_text())["eval_after"]
    assert main(["eval", "run", "--output", "found.json"]) == 0
    assert json.loads(Path("found.json").read_text())["accuracy"] == after["accuracy"]
    assert main(["sample", "run", "count 1", "--max-new-tokens", "2"]) == 0
    assert main(["report", "run"]) == 0
    assert parse_config(["--config", "run/text.yaml"]).system_prompt == text
    assert main(["texts", "--resume", "run", "--steps", "2"]) == 0
    assert json.loads(Path("run/state.json").read_text())["step"] == 2


def test_without_a_chat_template_the_text_is_before_the_prompt(config: TrainConfig) -> None:
    config = dataclasses.replace(config, model=str(TINY), algorithm="contextevolve", hyperparameters={}, steps=1)
    texts.optimise(config, "Say {it}.", reply_tokens=4, say=quiet)
    text = Path("run/text.txt").read_text()[:-1]
    found = run_config("run")
    assert found.system_prompt is None
    assert found.prompt_template.format(prompt="count 1") == f"{text}\n\ncount 1"


def test_tasks_are_drawn_in_epochs() -> None:
    rows = [{"prompt": str(n)} for n in range(5)]
    config = TrainConfig(prompts_per_step=2, seed=3)
    drawn = [row["prompt"] for step in range(5) for row in run.tasks_of(config, rows, step)]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == ["0", "1", "2", "3", "4"]
    assert drawn[:5] != drawn[5:]


class Letters:
    """A tokenizer without a chat template: a token for each letter."""

    chat_template = None
    all_special_tokens: tuple[str, ...] = ()

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize(
    ("settings", "text", "problem"),
    [
        ({}, " ", "the text to begin with is empty"),
        ({"system_prompt": "Go."}, "Go.", "system_prompt is the text that is optimised"),
        ({"eval_size": 0}, "Go.", "eval_size is 0, so that nothing is held out"),
        ({"algorithm": "polka"}, "Go.", "unknown method of texts 'polka': did you mean 'polca'"),
        ({"hyperparameters": {"epsilon": 2.0}}, "Go.", "polca: epsilon is 2.0"),
        ({"hyperparameters": {"rewrite": "Go."}}, "Go.", r"the template rewrite is 'Go\.', without \{text\}"),
        ({"prompt_format": "rendered"}, "Go.", "prompt_format is rendered"),
        ({"max_prompt_tokens": 8}, "Go on and on.", "no prompt fits beside the text"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    config: TrainConfig, settings: dict[str, Any], text: str, problem: str
) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        texts.optimise(dataclasses.replace(config, **settings), text, say=quiet)
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()


def test_prompts_with_a_system_message_are_refused(config: TrainConfig) -> None:
    talk = [{"role": "system", "content": "Be."}, {"role": "user", "content": "count"}]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": [*talk, *talk[1:] * n]}) + "\n" for n in range(12)))
    with pytest.raises(InputError, match="has a system message, in the place of the text"):
        texts.optimise(config, "Go.", say=quiet)


def test_a_resumed_run_must_have_its_inputs(config: TrainConfig) -> None:
    texts.optimise(dataclasses.replace(config, steps=1, hyperparameters={"by": "examples"}), "Go.", say=quiet)
    Path("even.py").write_text("def even(completions, **columns):\n    return [0.5 for x in completions]\n")
    with pytest.raises(InputError, match="the prompts or rewards of run have changed: put them back"):
        run.resume("run", steps=2, say=quiet)
    with pytest.raises(InputError, match="--steps is 0, but the run has taken 1 steps"):
        run.resume("run", steps=0, say=quiet)


def test_what_never_worked_is_said() -> None:
    assert run._warnings({"judge/verdicts": 4, "judge/unreadable": 4}) == [
        "the judge gave no readable verdict of 4 questions: no text could win"
    ]
    assert run._warnings({"texts/proposed": 3, "texts/empty": 2, "texts/duplicates": 1})
    assert not run._warnings({"judge/verdicts": 4, "judge/unreadable": 3, "texts/proposed": 3, "texts/empty": 2})


def test_rows_that_do_not_fit_are_left_out() -> None:
    rows = [{"prompt": "x" * n} for n in (3, 9, 5)]
    prompts = TextPrompts(TrainConfig(max_prompt_tokens=9, prompt_format="plain"), Letters(), 0, rows, "Go")
    assert prompts.rows == [rows[0], rows[2]]
    held_out = [{"prompt": "x" * 4}, *rows]
    other = TextPrompts(TrainConfig(max_prompt_tokens=9, prompt_format="plain"), Letters(), 0, rows[:1], "Go", held_out)
    assert (other.rows, other.held_out) == (rows[:1], [held_out[0], rows[0], rows[2]])
    assert not other.fits("Go.")  # the longest is held out
    assert (prompts.fits("Go"), prompts.fits("Go."), prompts.limit) == (True, False, 9)


@pytest.mark.parametrize("name", texts.names())
def test_the_catalogue_describes_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / f"jaxrl_llm/texts/methods/{name}.py").exists()
    assert sorted(path.stem for path in (ROOT / "jaxrl_llm/texts/methods").glob("[a-z]*.py")) == texts.names()
    file, _, test = catalogue.facts(name).test.partition("::")
    tree = ast.parse((ROOT / "tests/texts" / file).read_text())
    assert test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    page = catalogue.page(name)
    for parameter in hyperparameters_of(constructor(name)):
        assert f"  {parameter.name} = " in page
        assert parameter.name in page.partition("Hyper-parameters")[0]
    assert main(["algorithms", name]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert main(["train", "--algorithm", name]) == 2
    assert f"run it with jaxrl texts {name}" in capsys.readouterr().err


def test_the_list_of_methods_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index((methods.__doc__ or "").strip()[:-1])
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == texts.names()
    assert main(["algorithms", "--find", "epsilon lucky"]) == 2
    assert main(["algorithms", "--find", "pool mean"]) == 0
