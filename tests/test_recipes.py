"""The recipes: their rows and rewards by hand, and a step of each."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from compiling import optimised

from experiments.recipes import (
    code_efficiency,
    drug_approval,
    gui_by_text,
    molecules,
    phishing,
    refactoring,
    travel_planning,
    triton_kernels,
    web_search,
)
from jaxrl_llm.data.chat.calls import Reply

sys.path += [str(Path(__file__).parent / "training")]

NAMES = sorted(
    path.stem for path in (Path(__file__).parents[1] / "experiments/recipes").glob("*.py")
    if path.stem not in ("__init__", "recipe")
)  # fmt: skip


def block(code: str) -> str:
    return f"So:\n```python\n{code}\n```"


@pytest.mark.parametrize("name", NAMES)
def test_rows_repeat_and_differ_by_seed(name: str) -> None:
    recipe = importlib.import_module(f"experiments.recipes.{name}")
    rows = recipe.rows(0, 12)
    assert len(rows) == 12
    assert rows == recipe.rows(0, 12) == json.loads(json.dumps(rows))
    assert [row["prompt"] for row in rows] != [row["prompt"] for row in recipe.rows(1, 12)]
    assert len({frozenset(row) for row in rows}) == 1, "all have the same columns"


def test_right_and_fast_code_is_worth_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference itself is right and no faster; the loop is; what fails or is no code is below."""
    assert code_efficiency.seconds_of("1 / 0", "2") == float("inf")
    assert 0 < code_efficiency.seconds_of("import time", "time.sleep(0.05)") < 10
    monkeypatch.setattr(code_efficiency, "seconds_of", lambda code, call: 0.1 if "for" in code else 0.4)
    row: Any = next(row for row in code_efficiency.rows(0, 3) if "fib" in row["timed"])
    fast = "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"
    said = [block(row["reference"]), block(fast), block("def fib(n):\n    return 0"), block("def fib(n:"), "No idea."]
    columns = {name: [row[name]] * len(said) for name in ("reference", "timed", "tests")}
    plain, quick, wrong, broken, nothing = code_efficiency.efficiency(said, **columns)
    assert (plain, quick) == (1.0, 2.0)
    assert wrong == pytest.approx(-0.5 + 0.4 / 3)
    assert broken == nothing == -1.0
    assert code_efficiency.bonus(1.0, float("inf")) == 0.0


def test_an_extracted_function_is_found() -> None:
    row: Any = refactoring.rows(0, 1)[0]
    space: dict[str, Any] = {}
    body = row["source"].splitlines()[1].split(" = ")[1].replace("a", "x")
    extracted = f"def one(x):\n    return {body}\n\ndef total(a, b, c):\n    return one(a) + one(b) + one(c)\n"
    exec(extracted, space)
    assert space["total"](1, 2, 3) is not None
    wrong = extracted.replace("one(c)", "one(b)")
    said = [block(extracted), block(row["source"]), block(wrong), block("def total(:"), ""]
    columns = {name: [row[name]] * len(said) for name in ("source", "tests")}
    found = refactoring.refactored(said, **columns)
    assert found[:2] == pytest.approx([1.0, 0.5])
    assert 0.2 <= found[2] < 0.5, "what computes something else has extracted nothing"
    assert found[3:] == [0.0, 0.0]


def test_rules_of_a_kernel() -> None:
    whole = """
import triton, triton.language as tl, torch
@triton.jit
def kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)
def add(x, y):
    out = torch.empty_like(x)
    kernel[(4,)](x, y, out, x.numel(), BLOCK=256)
    return out
"""
    every = dict.fromkeys(("kernel", "launched", "stores", "own"), True)
    assert triton_kernels.rules_of(whole, "add") == every
    assert triton_kernels.rules_of(whole, "mul") == every | {"launched": False}
    instead = whole.replace("kernel[(4,)](x, y, out, x.numel(), BLOCK=256)", "out = torch.add(x, y)")
    assert triton_kernels.rules_of(instead, "add") == every | {"launched": False, "own": False}
    assert not any(triton_kernels.rules_of("def add(", "add").values())
    assert triton_kernels.rules([block(whole), "no"], name=["add", "add"]) == [1.0, 0.0]


def test_confidence_counts() -> None:
    yes, sure, no = "<answer>yes</answer>", "<confidence>1</confidence>", "<answer>no</answer>"
    found = drug_approval.approval([yes + sure, yes, no + sure, no, "yes"], answer=["yes"] * 5)
    assert found == pytest.approx([1.2, 0.95, -0.8, -0.05, 0.0])


def test_a_tell_counts_where_the_mail_phishes() -> None:
    said = [
        "<answer>phishing</answer><tell>link</tell>",
        "<answer>phishing</answer><tell>haste</tell>",
        "<answer>fine</answer>",
    ]
    assert phishing.detected(said, answer=["phishing"] * 3, tells=["link sender"] * 3) == [1.5, 1.0, 0.0]
    assert phishing.detected(said, answer=["fine"] * 3, tells=[""] * 3) == [0.0, 0.0, 1.0]
    for row in phishing.rows(0, 20):
        assert ("198.51.100.7" in row["prompt"]) == ("link" in row["tells"].split())


def test_a_plan_is_checked_against_the_tables() -> None:
    by_train, by_town = travel_planning.tables()
    (train, fare), (room, price) = by_train["Alder", "Birch"][0], by_town["Birch"][0]
    assert f"{train} {fare}" in travel_planning.trains("Alder", "Birch")
    assert travel_planning.rooms("Nowhere") == "There is no such town."
    total = fare + 2 * price
    plan = f"<train>{train}</train> <room>{room}</room> <cost>{total}</cost>"
    said = [plan, plan.replace(str(total), str(total + 1)), plan.replace(train, "T000"), "Take the bus."]
    assert travel_planning.planned(said, trip=[f"Alder,Birch,2,{total}"] * 4) == [1.0, 0.75, 0.25, 0.0]
    assert travel_planning.planned([plan], trip=[f"Alder,Birch,2,{total - 1}"]) == [0.75]


def test_the_sandbox_answers_from_its_file_alone(tmp_path: Path) -> None:
    kit = travel_planning.sandbox(tmp_path / "answers.jsonl")()
    ask_trains, ask_rooms = kit.functions
    for start, end in ("Alder", "Birch"), ("Elm", "Dune"):
        assert asyncio.run(ask_trains(start=start, end=end)) == travel_planning.trains(start, end)
    assert asyncio.run(ask_rooms(town="Cedar")) == travel_planning.rooms("Cedar")
    with pytest.raises(LookupError, match="no answer of rooms to"):
        asyncio.run(ask_rooms(town="Nowhere"))


def test_the_corpus_answers_its_questions() -> None:
    corpus = "\n".join(web_search.passages(0))
    for row in web_search.rows(3, 20):
        person = row["prompt"].split(" where ")[1].split(" was born")[0]
        town = (
            next(line for line in corpus.splitlines() if line.startswith(f"{person} is")).split(" in ")[1].rstrip(".")
        )
        assert f"{town} is a town on the river {row['answer']}." in corpus
    said = [[{"role": "assistant", "content": text}] for text in ("It is the Dove.", "The Dove or the Esk.")]
    assert web_search.names_river(said, answer=["Dove", "Dove"]) == [1.0, 0.0]


def test_properties_of_molecules() -> None:
    """Aspirin has a ring, a donor and 180.16 g/mol; ethanol none, one and 46.07."""
    said = [
        "<molecule>CC(=O)OC1=CC=CC=C1C(=O)O</molecule>",
        "<molecule>CCO</molecule>",
        "<molecule>C(</molecule>",
        "CCO",
    ]
    wish = {"rings": [1] * 4, "donors": [1] * 4, "low": [160] * 4, "high": [220] * 4}
    assert molecules.as_wished(said, **wish) == [1.0, 0.5, 0.0, 0.0]
    assert molecules.properties("CCO") == pytest.approx((0, 1, 46.07), abs=0.01)
    assert molecules.properties("") is None


def test_a_phone_is_as_the_goal_says() -> None:
    def played(goal: dict[str, Any], *said: str) -> tuple[list[str], float, float]:
        row = {"goal": json.dumps(goal)}
        phone = gui_by_text.Phone(row)
        seen = [phone.reset(row, 0)]
        seen += [phone.step(Reply({"role": "assistant", "content": text}, ())) for text in said]
        shown = [str(one.messages[0]["content"]) for one in seen if one.messages]
        return shown, seen[-1].reward, sum(one.info.get("invalid", 0.0) for one in seen)

    shown, reward, invalid = played({"Settings": ["Wi-Fi"]}, "tap Settings", "Tap wi-fi.", "done")
    assert (reward, invalid) == (1.0, 0.0)
    assert shown[0].startswith("Screen: Home")
    assert ("[Wi-Fi: off]" in shown[1], "[Wi-Fi: on]" in shown[2]) == (True, True)
    assert played({"Settings": ["Wi-Fi"]}, "tap Settings", "tap Wi-Fi", "tap Bluetooth", "done")[1] == 0.0
    assert played({"Settings": ["Wi-Fi"]}, "tap Wi-Fi", "hello", "done")[1:] == (0.0, 2.0)
    saved = "tap Notes", "type milk 3", "tap Save", "back", "done"
    assert played({"Notes": "milk 3"}, *saved)[1:] == (1.0, 0.0)
    assert played({"Notes": "milk 4"}, *saved)[1] == 0.0


def test_tasks_are_held_out_by_template_and_app(tmp_path: Path) -> None:
    rows = gui_by_text.rows(0, 60)
    for by, held in gui_by_text.HELD_OUT.items():
        config = gui_by_text.config(tmp_path / by, "model", rows, by)
        parts = [[json.loads(line) for line in Path(path).read_text().splitlines()] for path in (
            config.prompts, config.eval_prompts
        )]  # fmt: skip
        assert sum(map(len, parts)) == 60
        assert {row[by] == held for row in parts[0]} == {False}
        assert {row[by] == held for row in parts[1]} == {True}
    assert gui_by_text.config(tmp_path / "all", "model", rows, "instance").eval_prompts is None


@optimised
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_each(name: str, tmp_path: Path) -> None:
    """On the tiny model, with room for its prompts."""
    import tiny_runs as runs

    shutil.copytree(runs.MODEL, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 2048}))
    recipe = importlib.import_module(f"experiments.recipes.{name}")
    config = recipe.config(
        tmp_path / "run", str(tmp_path / "model"), recipe.rows(0, 8), steps=1, prompts_per_step=2, group_size=2,
        max_new_tokens=8, eval_size=0, tensorboard=False, max_prompt_tokens=1500, reward_time_limit=300.0,
    )  # fmt: skip
    runs.train(config)
    (line,) = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert (line["reward/unscored"] > 0) == (line.get("judge/unparsed") == 1), "noise states no verdict"
    assert line.get("rollout/failed_groups", 0) == 0
