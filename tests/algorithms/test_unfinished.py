"""Methods that lack a part: listed, and refused unless the run excludes the part explicitly."""

from __future__ import annotations

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.unfinished import BESIDES, UNFINISHED, check_whole, missing, names_in, take_without
from jaxrl_llm.errors import InputError
from jaxrl_llm.options import parse_config
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.setup import make_algorithm


def test_the_tables_are_of_methods_and_say_what_is_missing() -> None:
    assert set(UNFINISHED) | set(BESIDES) <= set(algorithms.names())
    assert not set(UNFINISHED) & set(BESIDES)
    for parts in [*UNFINISHED.values(), *BESIDES.values()]:
        assert parts
        for name, said in parts.items():
            assert name.isidentifier()
            assert all(text and not text.endswith(".") for text in said)


def test_a_whole_method_is_whole() -> None:
    check_whole("grpo")
    check_whole("minirl")
    assert missing("grpo") == {}
    with pytest.raises(InputError, match="unknown part that grpo lacks 'tree'"):
        check_whole("grpo", "tree")


def test_a_part_must_be_named_and_each_of_them() -> None:
    with pytest.raises(InputError, match=r"^hbpo lacks budgets: .* without: --algorithm.without budgets$") as one:
        check_whole("hbpo")
    assert "\n" not in str(one.value)
    check_whole("hbpo", "budgets")
    with pytest.raises(InputError, match=r"^ettrl lacks answers: .*--algorithm.without tree,answers$"):
        check_whole("ettrl", "tree")
    for both in ("tree,answers", " answers , tree ", ("tree", "answers"), ["answers", "tree"]):
        check_whole("ettrl", both)
    with pytest.raises(InputError, match="unknown part that ettrl lacks 'treee': did you mean 'tree'"):
        check_whole("ettrl", "treee,answers")


def test_what_a_run_has_after_all_is_not_missing() -> None:
    check_whole("fapo", provided=["sound"])
    with pytest.raises(InputError, match="fapo lacks sound"):
        check_whole("fapo", provided=["number_match"])
    judged = TrainConfig(algorithm="fapo", rewards=("number_match", "judge.py:sound*0"))
    assert make_algorithm(judged).needs == frozenset()


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_run_is_refused_until_it_says_what_it_goes_without(name: str) -> None:
    parts = ",".join(UNFINISHED[name])
    with pytest.raises(InputError, match=f"{name} lacks .*--algorithm.without {parts}"):
        make_algorithm(parse_config(["--algorithm", name]))
    config = parse_config(["--algorithm", name, "--algorithm.without", parts])
    assert config.hyperparameters["without"] == parts
    assert make_algorithm(config).needs == algorithms.get(name).needs


def test_without_is_no_hyperparameter_of_the_method() -> None:
    assert take_without("hbpo", {"without": "budgets", "scale": 2.0}) == {"scale": 2.0}
    assert take_without("grpo", {"without": "", "clip_low": 0.1}) == {"clip_low": 0.1}
    assert "without" not in parse_config(["--algorithm", "hbpo"]).hyperparameters
    assert names_in("") == ()
    with pytest.raises(InputError, match="unknown part that grpo lacks 'kl'"):
        make_algorithm(TrainConfig(algorithm="grpo", hyperparameters={"without": "kl"}))


def test_a_rollout_may_provide_the_part() -> None:
    """Groups that are retried with a hint provide the guided rows that the method needs."""
    with pytest.raises(InputError, match="icpo_in_context lacks guided"):
        make_algorithm(TrainConfig(algorithm="icpo_in_context"))
    method = make_algorithm(TrainConfig(algorithm="icpo_in_context", rollout="hinted(hint)"))
    assert isinstance(method, algorithms.Algorithm)
