"""Needs as values: where they are, how they are computed or provided, and stand-ins that methods can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from experience import L, N, case

from jaxrl_llm import algorithms
from jaxrl_llm.core.needs import NEEDS, fill_in, need_of, of_previous, of_reference, of_target, value_of, values_of
from jaxrl_llm.core.needs.placeholders import TOP
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.learner.checks import check_batch_provides
from jaxrl_llm.models.outputs import MEASURES
from jaxrl_llm.utils.errors import InputError

SHAPES = {
    "[N, L]": (N, L), "[N]": (N,), "[N, 2]": (N, 2), "[N, 3]": (N, 3), "[N, 4]": (N, 4), "[N, U]": (N, 3),
    "[] each": (), "[N, L, K]": (N, L, TOP), "[N, T]": (N, L + 2), "[N, A]": (N, 3), "[N, K]": (N, -(-L // 4)),
    "[N, L, H]": (N, L, 4), "[N, L, S]": (N, L, 1), "[N, L, D]": (N, L, 2), "[N, L, 2, K]": (N, L, 2, TOP),
    "[N, C]": (N, 3), "[N, n]": (N, 4), "[N, L, 2]": (N, L, 2),
}  # fmt: skip
OF_TOP = ("top_tokens", "top_logp")
OTHERS = (
    "values",
    "internal_logp",
    "heated_logp",
    "implicit_logp",
    "greedy",
    "scores",
    "most_probable",
    "head_states",
    "elbo_terms",
    *OF_TOP,
)
PROBABILITIES = ("squared_probability", "cubed_probability", "reference_affinity")


def bare(**fields: Any) -> Trajectories:
    """A batch that has nothing of what methods need."""
    nothing = batch_of(np.ones((N, L)), np.arange(N) % 2, -np.ones((N, L)), np.arange(N) // 4)
    return nothing.replace(old_logp=None, **fields)


@pytest.mark.parametrize("name", NEEDS)
def test_a_drawn_stand_in_is_of_its_shape_and_range(name: str) -> None:
    need, random = NEEDS[name], np.random.default_rng(0)
    logp = -random.gamma(2.0, 0.5, (N, L))
    found = need.stand_in.draw(random, logp)
    assert need.name == name
    assert found.shape == SHAPES[need.shape]
    assert np.isfinite(found).all()
    if name.endswith("_logp"):
        assert (found <= 0).all()
    if name in PROBABILITIES:
        assert ((found > 0) & (found <= 1)).all()


@pytest.mark.parametrize("name", sorted({need for one in algorithms.names() for need in algorithms.get(one).needs}))
def test_it_is_found_where_it_says(name: str) -> None:
    """In a batch with every need, and not in an empty one."""
    method = next(one for one in map(algorithms.get, algorithms.names()) if name in one.needs)
    found, (known, number) = case(1, method), value_of(name)
    need = need_of(name)
    assert need is NEEDS[known]
    if known != "turns":  # every batch has a number for each turn, if only 0
        assert need.of(bare(), number) is None
    if known != "feedback":
        assert need.of(found.batch, number).shape[0] == N
    if need.by_outputs:
        assert found.outputs.extras is not None
        assert need.by_outputs in found.outputs.extras


@pytest.mark.parametrize("name", [name for name, need in NEEDS.items() if name not in ("feedback", "turns")])
def test_what_is_put_into_a_batch_is_found_in_it_and_nothing_else(name: str) -> None:
    need, number = NEEDS[name], 0.5 if name == "tempered_logp" else None
    batch, value = bare(), jnp.ones(SHAPES[NEEDS[name].shape])
    assert need.of(need.put(batch, value, number), number) is value
    assert all(other.of(need.put(batch, value, number)) is None for other in NEEDS.values() if other.where != need.where
               and other.name not in ("turns", "tempered_logp"))  # fmt: skip


def test_a_need_is_computed_or_provided_and_not_both() -> None:
    for need in NEEDS.values():
        assert (need.compute is None) or (need.provider is None)
        of_update = need.name in ("feedback", "teacher_top_logp", "teacher_divergence", "perturbation", "adam_step")
        assert (need.compute is None) == (of_update or need.provider is not None)
        if need.measure is not None:
            assert need.compute is not None
            assert need.measure in (*MEASURES, *OTHERS, "hidden", "tempered_logp")
        assert need.where in need.text
        assert (need.provider or "") in need.text


class Seen:
    """Models that say which forward passes are read."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    def outputs(self, name: str, value: float) -> PolicyOutputs:
        self.passes.append(name)
        extras = {key: jnp.full((N, L), value) for key in (*MEASURES, *OTHERS, "tempered_logp:0.5")}
        return PolicyOutputs(jnp.full((N, L), value), jnp.full((N, L), value), extras | {"hidden": jnp.ones((N, L, 4))})

    @property
    def old(self) -> PolicyOutputs:
        return self.outputs("old", -1.0)

    @property
    def reference(self) -> PolicyOutputs:
        return self.outputs("reference", -2.0)

    @property
    def previous(self) -> PolicyOutputs:
        return self.outputs("previous", -3.0)

    @property
    def target_values(self) -> Any:
        return self.outputs("target", -5.0).logp

    @property
    def teacher(self) -> PolicyOutputs:
        return self.outputs("teacher", -4.0)

    def of_states(self, function: Callable[[Any, Any], Any]) -> Any:
        return function(self.outputs("old", -1.0).extras["hidden"], jnp.ones((N, L), bool))  # type: ignore[index]

    def of_logp(self, function: Callable[[Any, Any], Any]) -> Any:
        return function(self.outputs("old", -1.0).logp, bare())

    @property
    def answers(self) -> Any:
        return self.outputs("old", -1.0).logp

    @property
    def blanked(self) -> Any:
        return self.outputs("old", -1.0).logp

    @property
    def affinity(self) -> Any:
        return self.outputs("affinity", 0.5).logp


def test_each_is_computed_from_the_policy_that_it_is_of() -> None:
    for name, need in NEEDS.items():
        if need.compute is None:
            continue
        models = Seen()
        found = need.compute(models, bare(), 0.5 if name == "tempered_logp" else None)
        expected = {
            "reference_logp": ("reference", -2.0), "reference_affinity": ("affinity", 0.5),
            "previous_logp": ("previous", -3.0), "teacher_logp": ("teacher", -4.0),
            "teacher_entropy": ("teacher", -4.0), "target_values": ("target", -5.0),
            "teacher_token_logp": ("teacher", -4.0), "teacher_top": ("teacher", -4.0),
            "teacher_states": ("teacher", -4.0),
        }  # fmt: skip
        of, value = expected.get(name, ("old", -1.0))
        assert set(models.passes) == {of}
        assert of_reference({name}) == (of in ("reference", "affinity", "teacher"))
        assert of_previous({name}) == (of == "previous")
        assert of_target({name}) == (of == "target")
        if name == "effective_rank":
            assert found.shape == (N, 3)  # of states that are all the same
            np.testing.assert_allclose(found[:, 0], 1.0, atol=1e-5)
        elif name == "drift":
            assert np.isnan(found).all()  # there is no earlier response
        else:
            np.testing.assert_allclose(found, 4.0 if name == "hidden_square" else value)


def test_stand_ins_fill_in_what_a_batch_lacks_and_are_named() -> None:
    batch = bare()
    numbers = {"tempered_logp": "tempered_logp:0.5", "target_values": "target_values:4", "elbo_terms": "elbo_terms:4"}
    asked = {numbers.get(name, name) for name in NEEDS}
    full, extras, words = fill_in(batch, asked)
    assert set(words) == asked - {"feedback", "turns"}
    assert words["old_logp"] == "the behaviour policy"
    for text in asked:
        (name, number), need = value_of(text), need_of(text)
        if need.stand_in.value is not None:
            assert need.of(full, number).shape == (SHAPES[need.shape] if name != "answer_logp" else (N, 1))  # no turns
        elif name not in ("feedback", "turns"):  # the method has a default of its own
            assert need.of(full, number) is None
        if need.by_outputs is not None:
            assert extras[need.by_outputs] is need.of(full, number)
    given, _, words = fill_in(batch.replace(values=jnp.ones((N, L))), {"values"})
    assert words == {}
    assert float(given.values.sum()) == N * L
    assert fill_in(batch, {"values:2"})[0].values.shape == (N, L, 2)


def test_a_batch_that_lacks_what_its_source_should_provide_is_refused() -> None:
    computed = {"old_logp", "feedback"}
    check_batch_provides(bare(), computed)
    check_batch_provides(bare(info={"guided": np.zeros(N)}), computed | {"guided"})
    with pytest.raises(InputError, match=r"the batch has no info\['guided'\], though .* provides guided"):
        check_batch_provides(bare(info={"budget": np.zeros(N)}), {"guided", "budget"})
    empty = bare(action_mask=np.zeros((N, L), bool))
    check_batch_provides(empty, {"guided"})  # of a step in which every rollout failed


def test_an_unknown_need_is_refused_with_the_nearest() -> None:
    for read in (need_of, value_of):
        with pytest.raises(InputError, match="unknown need 'old_log': did you mean 'old_logp'"):
            read("old_log")
    with pytest.raises(InputError, match="the need 'values:two' has the value 'two', which is not a number"):
        need_of("values:two")
    assert values_of({"values:2", "tempered_logp:0.5", "old_logp"}, "tempered_logp") == [0.5]
