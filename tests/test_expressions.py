"""Parts print as the code that composes them, and what they record changes nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
import jaxrl_llm.advantages
import jaxrl_llm.algorithms
import jaxrl_llm.objectives
import jaxrl_llm.rewards
import jaxrl_llm.selection
from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_relative, revised
from jaxrl_llm.algorithms import DynamicSampling
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.repr import WIDTH, code, is_code, leaves, part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Objective, Transform, chain, stateless
from jaxrl_llm.objectives import Average, clip, entropy, kl, log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.penalties import right_answers
from jaxrl_llm.utils.errors import InputError

PARTS = {name: getattr(objectives, name) for name in objectives.__all__} | {"chain": chain}


def doubled(batch: Trajectories) -> jax.Array:
    return 2 * batch.need("advantages")


@part
def scaled(factor: Any, *names: str, base: float = 2.0, **others: float) -> Objective:
    return Objective(lambda outputs, batch: (jnp.float32(factor), {}))


A, B, C = scaled(1.0), scaled(2.0), scaled(3.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (clip(), "clip()"),
        (clip(0.2, 0.28), "clip(0.2, 0.28)"),
        (clip(0.1), "clip(0.1)"),
        (clip(0.2, None, None), "clip()"),
        (clip(high=0.3), "clip(high=0.3)"),
        (clip(low=0.2, dual=3.0), "clip(dual=3.0)"),
        (group_relative("none", ddof=0), 'group_relative("none", ddof=0)'),
        (group_relative("std", 1, 1e-4), 'group_relative("std", 1, 0.0001)'),
        (objectives.sequence_ratio(), "sequence_ratio()"),
        (objectives.entropy_target(0.5), "entropy_target(0.5)"),
        (log_probability(objectives.capped(5.0)), "log_probability(capped(5.0))"),
        (objectives.product(objectives.capped(2), objectives.within(0.2)), "product(capped(2), within(0.2))"),
        (
            objectives.by_rows(otherwise=token_mean(), a=0.5 * token_mean()),
            "by_rows(otherwise=token_mean(), a=0.5 * token_mean())",
        ),
        (scaled(1.0, "a", "b", base=2.0, more=3.0), 'scaled(1.0, "a", "b", more=3.0)'),
        (scaled(np.float32(0.5), base=jnp.int32(3)), "scaled(0.5, base=3)"),
        (revised(doubled, {"values", "old_logp"}), 'revised(doubled, {"old_logp", "values"})'),
        (chain(), "chain()"),
        (DynamicSampling(doubled, rounds=3), "DynamicSampling(informative=doubled, rounds=3)"),
        (Transform(doubled, doubled), "Transform(init=doubled, apply=doubled)"),
        (Average(doubled), "Average(function=doubled)"),
        (scaled('it\'s "x"'), "scaled('it\\'s \"x\"')"),
    ],
)
def test_a_part_is_its_call_without_defaults(value: Any, text: str) -> None:
    assert repr(value) == code(value) == text


@pytest.mark.parametrize(
    "text",
    [
        "A + B - C",
        "A - (B - C)",
        "A - (B + C)",
        "A + (B + C)",
        "0.5 * A",
        "A * 0.5",
        "A / 2",
        "0.5 * A / 2",
        "2 * (A + B)",
        "(A - B) / 2",
        "0.1 * (2.0 * A)",
        "-A",
        "-A + B",
        "-(A + B)",
        "2 * -A",
        "-0.5 * A",
        "A * -0.5",
        "A - -B",
        '"beta" * A',
    ],
)
def test_sums_and_products_print_as_written(text: str) -> None:
    names = {"A": A, "B": B, "C": C}
    printed = code(eval(text, {}, names))
    for name, value in names.items():
        printed = printed.replace(code(value), name)
    assert printed == text


def test_a_sum_of_a_list_prints_its_terms() -> None:
    assert code(sum([A, B, C])) == f"{A} + {B} + {C}"
    assert code(A + 0.0 * B - 0 * C) == code(A), "terms that are off are left out"
    assert code(0.0 * B) == "0.0 * scaled(2.0)"


def test_long_expressions_are_laid_out_like_code() -> None:
    algorithm = Algorithm(
        chain(group_relative(), revised(doubled)),
        policy_gradient(token_ratio(), clip(0.2, 0.28), token_mean())
        + 0.04 * kl(average=token_mean())
        - 0.01 * entropy(),
    )
    assert repr(algorithm) == (
        "Algorithm(\n"
        "    transform=chain(group_relative(), revised(doubled)),\n"
        "    objective=policy_gradient(token_ratio(), clip(0.2, 0.28), token_mean())\n"
        "    + 0.04 * kl(average=token_mean())\n"
        "    - 0.01 * entropy(),\n"
        ")"
    )
    assert repr(algorithm.objective).startswith("(\n    policy_gradient(")
    deep = 0.5 * (sum([kl(metric=f"a metric with a long name {i}") for i in range(9)]) - algorithm.objective)
    assert repr(deep).startswith('0.5 * (\n    kl(metric="a metric with a long name 0")\n    + kl(')
    assert repr(-deep).startswith("-(\n    0.5 * (\n")
    assert repr(deep / 2).endswith("\n) / 2")
    for value in (algorithm, algorithm.objective, deep, -deep, deep / 2, deep - deep):
        assert max(map(len, repr(value).splitlines())) <= WIDTH
        names = {leaf.__name__: leaf for leaf in leaves(value) if callable(leaf)}
        again = eval(repr(value), names)
        assert code(again) == code(value)


def test_what_has_no_name_is_not_code() -> None:
    local = revised(lambda batch: batch.advantages)
    assert code(local) == "revised(<function>)"
    assert not is_code(local)
    assert is_code(revised(doubled))
    assert code(scaled(jnp.ones(2))) == "scaled(<float32[2]>)"
    texts = []
    jax.jit(lambda x: texts.append(code(scaled(x))) or x)(jnp.float32(1))
    assert texts == ["scaled(<float32[]>)"]
    assert not is_code(scaled(jnp.ones(2)))


def test_a_changed_copy_forgets_how_it_was_composed() -> None:
    changed = replace(kl(), needs=frozenset({"old_logp"}))
    assert code(changed).startswith("Objective(function=<function>, needs=")
    assert "stateless" not in code(replace(stateless(doubled), needs=frozenset({"values"})))


def test_an_argument_that_is_returned_keeps_its_record() -> None:
    @part
    def same(value: Objective) -> Objective:
        return value

    assert same(A) is A
    assert code(same(A)) == "scaled(1.0)"


def test_records_take_no_part_in_equality_hashing_and_compilation() -> None:
    traced = 0

    @partial(jax.jit, static_argnums=0)
    def apply(objective: Objective, x: jax.Array) -> jax.Array:
        nonlocal traced
        traced += 1
        return x

    plain = Objective(A.function, A.needs, A.refresh)
    assert plain == A
    assert hash(plain) == hash(A)
    assert code(plain) != code(A)
    for objective in (A, plain, A):
        apply(objective, jnp.ones(1))
    assert traced == 1
    surrogate = objectives.soft_gate()
    assert len({surrogate, surrogate, objectives.soft_gate()}) == 2, "functions are equal to themselves alone"


@pytest.mark.parametrize(
    ("compose", "words"),
    [
        (lambda: log_probability(objectives.capped), "weight of log_probability is the function capped"),
        (lambda: objectives.product(objectives.capped(2.0), objectives.gamma), r"weights\[1\] of .* gamma, which"),
        (lambda: revised(advantages=group_relative), "the revised advantages is group_relative, which makes"),
        (lambda: objectives.imitation(rows=right_answers), r"rows of imitation .* call it, right_answers\("),
        (lambda: policy_gradient(token_ratio(), clip, token_mean()), "surrogate .* the function clip, .* call it"),
        (lambda: kl(average=token_mean), "the average is the function token_mean, which makes one: call it"),
        (lambda: chain(group_relative), "part 1 of a chain must .* group_relative, which makes one: call it"),
        (lambda: A + kl, "added to an objective must .* the function kl, which makes one: call it"),
    ],
)
def test_a_part_that_is_not_called_is_one_clear_line(compose: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        compose()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(set(objectives.__all__) - {"Average", "Ratio"}))
def test_factories_keep_their_signature_and_docstring(name: str) -> None:
    factory = PARTS[name]
    assert factory.__name__ == name
    assert factory.__doc__


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A + 1", "what is added to an objective must be of the type Objective, but is of the type int"),
        ("1 + A", "what an objective is added to must be of the type Objective, but is of the type int"),
        ("A - 3", "what is subtracted from an objective must be of the type Objective"),
        ("sum([A, 3])", "what is added to an objective must be of the type Objective"),
        ("A / 0", "an objective is divided by 0"),
        ('A / "x"', "what an objective is divided by is 'x', but must be a number"),
        ("A * None", "the scale of an objective is None, but must be a number"),
        ("A * B", "the scale of an objective is .*, but must be a number"),
        ("chain([group_relative()])", "part 1 of a chain must be of the type Transform, but is of the type list"),
        (
            "Algorithm(A, group_relative())",
            "algorithm's transform must be of the type Transform, but is .* Objective",
        ),
        ("kl(average=clip())", r"the average is .*, but must be an Average, or a function of \(values, batch\)"),
        (
            "policy_gradient(token_ratio(), 3, token_mean())",
            "surrogate .* int, but must be a function of 3 arguments",
        ),
        ("log_probability(0.2)", r"weight of log_probability is 0.2, but must be a function of \(ratio, batch\)"),
        ("prepare(group_relative, None, None)", r"prepares a batch must .* makes a part: call it, group_relative\("),
    ],
)
def test_what_does_not_fit_is_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        eval(text, {**globals(), "prepare": jaxrl_llm.prepare})
    assert "\n" not in str(error.value)


def test_each_name_in_printed_code_is_of_one_factory() -> None:
    """A namespace of the library's factories can hold all of them: no two share a name."""
    packages = (
        jaxrl_llm.advantages,
        jaxrl_llm.objectives,
        jaxrl_llm.algorithms,
        jaxrl_llm.rewards,
        jaxrl_llm.selection,
    )
    modules = [
        importlib.import_module(one.name)
        for package in packages
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    found: dict[str, set[Any]] = {}
    for module in [*modules, sys.modules["jaxrl_llm.core.transform"]]:
        for name, value in vars(module).items():
            if getattr(value, "makes_parts", False):
                found.setdefault(name, set()).add(value)
    assert len(found) > 130
    assert {name for name, values in found.items() if len(values) > 1} == set()
    assert not set(found) & set(jaxrl_llm.algorithms.names())
