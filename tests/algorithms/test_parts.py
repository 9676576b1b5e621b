"""Methods that lack a part, or need what only some runs provide: refused unless the run provides or excludes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.describe import method_card, page
from jaxrl_llm.algorithms.method import Facts, beside, facts_of, method, run_needs
from jaxrl_llm.algorithms.parts import check_needs, check_whole, missing, names_in
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.signatures import options
from jaxrl_llm.core.needs import NEEDS, need_of
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import check_method, check_provided, make_algorithm, provided_by
from jaxrl_llm.utils.errors import InputError

FACTS = {name: method_card(name).facts for name in algorithms.names()}
NEEDED = {name: facts.needs for name, facts in FACTS.items() if facts.needs}
BESIDES = {name: facts.beside for name, facts in FACTS.items() if facts.beside}
PARTIAL = [name for name in FACTS if missing(name)]
PROVIDED = sorted({need for needs in NEEDED.values() for need in needs})
HAS = """from jaxrl_llm.rollouts.programs import Rollout, group

def made():
    return Rollout(group().program, provides=frozenset({{{0!r}}}))
"""
TALK = """from jaxrl_llm.rollouts.programs import conversation

def talk():
    return conversation(lambda row: None)
"""


def refused(config: TrainConfig) -> None:
    """What a run checks before anything is loaded."""
    algorithm = make_algorithm(config)
    check_provided(config, algorithm, provided_by(config, algorithm))


def test_the_year_is_that_of_the_paper_unless_another_is_given() -> None:
    def made() -> Algorithm:
        raise AssertionError

    years = [("arXiv 2412.18279", None, 2024), ("arXiv 2412.18279", 2025, 2025), ("Machine Learning 8", 1992, 1992)]
    for paper, given, year in years:
        facts = facts_of(method(paper=paper, year=given, test="")(made))
        assert facts is not None
        assert facts.year == year
    with pytest.raises(InputError, match="'Machine Learning 8' is no number in arXiv, which has the year: give year="):
        method(paper="Machine Learning 8", test="")


def test_decorators_that_method_reads_stand_below_it() -> None:
    def made() -> Algorithm:
        raise AssertionError

    facts = facts_of(method(paper="arXiv 2412.18279", test="")(run_needs(a="one")(run_needs(b="two")(made))))
    assert facts is not None
    assert facts.needs == {"a": "one", "b": "two"}
    done = method(paper="arXiv 2412.18279", test="")(made)
    for decorate in (run_needs(guided="hints"), beside("part", "what", "provider")):
        with pytest.raises(InputError, match="stands above @method, which reads it: write it below"):
            decorate(done)


def test_facts_say_what_is_missing() -> None:
    assert not any(set(missing(name)) & set(parts) for name, parts in BESIDES.items()), "a part is in one table"
    for parts in [*map(missing, PARTIAL), *BESIDES.values()]:
        for name, said in parts.items():
            assert name.isidentifier()
            assert all(text and not text.endswith(".") for text in said)


OMISSION = re.compile(
    r"\bnot here\b|\bNot here:|not implemented|out of scope|\bis absent|\bis not there\b|"
    r"\b(?:variant|option|stage|rule|version|paper's|code's)\b[^.]*(?:left out\b(?! of)|is not here)"
)


@pytest.mark.parametrize("name", algorithms.names())
def test_a_docstring_that_speaks_of_an_omission_has_an_entry(name: str) -> None:
    """Of a part that the paper has and the method has not; `jaxrl algorithms NAME` shows it."""
    said = " ".join((inspect.getdoc(algorithms.constructor(name)) or "").split())
    found = OMISSION.search(said)
    assert found is None or FACTS[name].beside, found and found[0]


@pytest.mark.parametrize("name", BESIDES)
def test_what_a_method_leaves_out_is_shown(name: str) -> None:
    shown = page(name)
    assert "Also in the paper, but not implemented:" in shown
    assert all(part in shown for part in BESIDES[name])


@pytest.mark.parametrize("name", algorithms.names())
def test_the_table_has_the_needs_of_each_method(name: str) -> None:
    """Those that a run with the method's own rollout and replay does not provide."""
    method = algorithms.get(name)
    needs = {need_of(need).name for need in method.needs if need_of(need).provider is not None}
    own = {need for one in (method.rollout, method.replay, method.phases) if one is not None for need in one.provides}
    assert needs - own - {"greedy_reward"} == set(NEEDED.get(name, {}))
    assert ("without" in [one.name for one in options(name)]) == bool(missing(name))


def test_a_whole_method_is_whole() -> None:
    for name in ("grpo", "minirl", "remax"):
        refused(TrainConfig(algorithm=name))
    assert missing("grpo") == {}
    with pytest.raises(InputError, match="unknown part that grpo lacks 'tree'"):
        check_whole("grpo", without="tree")


def test_a_need_must_be_named_and_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"node": "trees", "answer_key": "votes"}
    monkeypatch.setattr(algorithms.constructor("grpo"), "facts", Facts("", 2026, "", named))
    needs = {"answer_key", "node", "old_logp"}
    with pytest.raises(
        InputError, match=r"^grpo needs answer_key \(votes\).*; node \(trees\).* answer_key,node$"
    ) as caught:
        check_whole("grpo", needs)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"^grpo needs answer_key .*--algorithm.without node,answer_key$"):
        check_whole("grpo", needs, "node")
    with pytest.raises(InputError, match=r"^grpo needs node .*--algorithm.without answer_key,node$"):
        check_whole("grpo", needs, "answer_key")
    for both in ("node,answer_key", " answer_key , node ", ("node", "answer_key"), ["answer_key", "node"]):
        check_whole("grpo", needs, both)
    with pytest.raises(InputError, match="unknown part that grpo lacks 'nodee': did you mean 'node'"):
        check_whole("grpo", needs, "nodee,answer_key")


@pytest.mark.parametrize("need", [need for need in PROVIDED if need != "league_member"])  # see test_shor_psro.py
def test_the_refusal_names_what_would_provide_the_need(need: str, tmp_path: Path) -> None:
    """And a run that has it is not refused."""
    # They take rollouts of agents alone; see test_agent_trees.py.
    forking = ("aepo_agentic", "agent_r", "arpo_agentic", "dart_gui", "dyna_grpo", "evocua", "r3l", "resim")
    own = {name for name in NEEDED if (made := algorithms.get(name).rollout) is not None and made.wrap is None}
    method = next(name for name in NEEDED if need in NEEDED[name] and name not in own.union(forking))
    others = ",".join(name for name in missing(method) if name != need)
    config = TrainConfig(algorithm=method, hyperparameters={"without": others})
    provider = NEEDS[need].provider
    assert provider
    with pytest.raises(InputError) as error:
        check_method(config, data_mesh())
    said = str(error.value)
    assert said.startswith(f"{method} needs {need} ({NEEDED[method][need]}), which no part of this run provides: use ")
    assert provider in said
    assert "\n" not in said
    have: dict[str, Any]
    if need == "sound":
        have = {"rewards": ("number_match", "judge.py:sound*0")}
    else:
        (tmp_path / "own.py").write_text(HAS.format(need))
        have = {"rollout": f"{tmp_path / 'own.py'}:made"}
    assert need in check_method(dataclasses.replace(config, **have), data_mesh()).needs


def test_rewards_and_rollouts_of_the_library_provide_what_they_say(tmp_path: Path) -> None:
    """The method's own rollout makes guided rows, which none of another kind replaces; a conversation makes turns."""
    for name in ("icpo_in_context", "hbpo"):
        refused(TrainConfig(algorithm=name))
    with pytest.raises(InputError, match=r"icpo_in_context has a rollout of its own, .* but rollout is hinted\(hint\)"):
        refused(TrainConfig(algorithm="icpo_in_context", rollout="hinted(hint)"))
    with pytest.raises(InputError, match="hbpo has a rollout of its own, with_budgets"):
        refused(TrainConfig(algorithm="hbpo", rollout="hinted(hint)"))
    (tmp_path / "talk.py").write_text(TALK)
    refused(TrainConfig(algorithm="epo", rollout=f"{tmp_path / 'talk.py'}:talk"))
    refused(TrainConfig(algorithm="fapo", rewards=("number_match", "judge.py:sound*0")))
    with pytest.raises(InputError, match="fapo needs sound"):
        refused(TrainConfig(algorithm="fapo", rewards=("number_match",)))
    with pytest.raises(InputError, match="epo needs turns"):  # a name is not what it names
        refused(TrainConfig(algorithm="epo", rewards=("number_match", "my.py:turns")))
    with pytest.raises(InputError, match="epo needs turns"):
        refused(TrainConfig(algorithm="epo", rollout="hinted(hint)"))


def test_an_algorithm_that_is_given_as_a_value_is_checked_too() -> None:
    with pytest.raises(InputError, match=r"^the algorithm needs guided .*: use --rollout 'hinted\(COLUMN\)'$"):
        check_method(TrainConfig(), data_mesh(), dataclasses.replace(algorithms.get("icpo_in_context"), rollout=None))
    check_method(TrainConfig(), data_mesh(), algorithms.get("icpo_in_context"))
    without = dataclasses.replace(algorithms.get("icpo_in_context"), rollout=None)
    check_method(TrainConfig(rollout="hinted(hint)"), data_mesh(), without)
    with pytest.raises(InputError, match="has a rollout of its own"):
        check_method(TrainConfig(rollout="hinted(hint)"), data_mesh(), algorithms.get("icpo_in_context"))
    check_needs({"old_logp", "feedback", "values:2"}, ())
    # What a source of one's own provides is known, and checked, when it has been made.
    check_method(TrainConfig(algorithm="icpo_in_context"), data_mesh(), own_source=True)


@pytest.mark.parametrize("name", PARTIAL)
def test_a_run_is_refused_until_it_says_what_it_goes_without(name: str) -> None:
    parts = ",".join(missing(name))
    with pytest.raises(InputError, match=f"^{name} (lacks|needs) .*--algorithm.without {parts}$"):
        refused(parse_config(["--algorithm", name]))
    config = parse_config(["--algorithm", name, "--algorithm.without", parts])
    assert config.hyperparameters["without"] == parts
    refused(config)
    assert make_algorithm(config).needs == algorithms.get(name).needs - set(missing(name))


def test_without_is_no_hyperparameter_of_the_method() -> None:
    config = TrainConfig(algorithm="hbpo", hyperparameters={"without": "budget", "scale": 2.0})
    assert make_algorithm(config).needs == algorithms.get("hbpo").needs - {"budget"}, "its own rollout provides it"
    make_algorithm(TrainConfig(algorithm="grpo", hyperparameters={"without": "", "clip_low": 0.1}))
    assert "without" not in parse_config(["--algorithm", "hbpo"]).hyperparameters
    assert names_in("") == ()
    with pytest.raises(InputError, match="unknown part that grpo lacks 'kl'"):
        refused(TrainConfig(algorithm="grpo", hyperparameters={"without": "kl"}))
