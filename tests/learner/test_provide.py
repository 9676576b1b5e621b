"""Needs of a method, computed from the policies at hand: one forward pass of each, whatever is read of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "algorithms"))

from batches import batch_of

from jaxrl_llm.core.needs import NEEDS
from jaxrl_llm.core.trajectory import PolicyOutputs
from jaxrl_llm.learner import checks, inputs, outputs
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.models.outputs import DURING_UPDATE, MEASURES, NOTHING, Wanted, wanted_of
from jaxrl_llm.utils.errors import InputError

N, L = 2, 3
POLICY: Any = SimpleNamespace(hook=None)
NOW, INITIAL, BEFORE = {"now": -1.0}, {"initial": -2.0}, {"before": -3.0}
BATCH = batch_of(np.ones((N, L)), np.zeros(N), np.zeros((N, L))).replace(old_logp=None)


IN_OTHER_CONTEXTS = {"answer_logp", "blanked_logp"}  # and test_other_contexts.py these
OF_TARGET = {"target_values"}  # test_target_critic.py has this
# test_teacher.py and test_distilled.py have these.
OF_TEACHER = {"top_tokens", "top_logp", *(name for name in NEEDS if name.startswith("teacher_"))}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Wanted]]:
    """Forward passes that are made, with what they find; they give -1 for the weights now and -2 for the reference."""
    made: list[tuple[Any, Wanted]] = []

    def outputs_of(policy: Any, params: Any, batch: Any, *more: Any) -> PolicyOutputs:
        wanted = next((x for x in more if isinstance(x, Wanted)), NOTHING)
        made.append((params, wanted))
        names = {*wanted.names, *(f"tempered_logp:{times:g}" for times in wanted.temperatures)}
        value = jnp.full((N, L), *params.values())
        shape = {"hidden": (N, L, 4), "values": (N, L, 2)}
        return PolicyOutputs(value, value, {name: jnp.ones(shape.get(name, (N, L))) for name in names} or None)

    monkeypatch.setattr(outputs, "outputs_of", outputs_of)
    for check in ("check_rows", "check_params", "check_alive"):
        for place in (inputs, checks):
            monkeypatch.setattr(place, check, lambda *arguments, **named: None)
    return made


def test_all_that_is_read_of_a_policy_takes_one_forward_pass(passes: list[tuple[Any, Wanted]]) -> None:
    asked = {name for name, need in NEEDS.items() if need.compute is not None} - {"reference_affinity"}
    asked = asked - {
        "tempered_logp",
        "internal_logp",
        "heated_logp",
        "elbo_terms",
        *OF_TEACHER,
        *IN_OTHER_CONTEXTS,
        *OF_TARGET,
    }
    asked |= {"tempered_logp:0.5", "tempered_logp:2", "internal_logp:3", "heated_logp:1.5", "elbo_terms:8"}
    found = provide(POLICY, frozenset(asked), NOW, INITIAL, BATCH, previous=BEFORE)
    names = {*MEASURES, "values", "hidden", "internal_logp", "heated_logp", "implicit_logp", "greedy", "scores"}
    names |= {"elbo_terms"}
    assert len(passes) == 3
    assert (INITIAL, NOTHING) in passes
    assert (BEFORE, NOTHING) in passes
    assert (NOW, Wanted(tuple(sorted(names)), (0.5, 2.0), 3, 1.5, masks=8)) in passes
    assert float(found.old_logp[0, 0]) == -1
    assert float(found.reference_logp[0, 0]) == -2
    assert float(found.previous_logp[0, 0]) == -3
    assert found.values.shape == (N, L, 2)
    assert set(found.info) == {*MEASURES, "hidden_square", "effective_rank", "tempered_logp:0.5", "tempered_logp:2",
                               "internal_logp", "heated_logp", "implicit_logp", "drift", "greedy", "elbo_terms",
                               "scores"}  # fmt: skip
    assert found.info["hidden_square"].tolist() == [[4.0] * L] * N


def test_a_policy_that_nothing_is_read_of_is_not_run(passes: list[tuple[Any, Wanted]]) -> None:
    assert provide(None, frozenset({"feedback", "guided", "turns"}), NOW, None, BATCH) is BATCH  # type: ignore[arg-type]
    assert passes == []
    found = provide(POLICY, frozenset({"reference_logp"}), NOW, INITIAL, BATCH)
    assert passes == [(INITIAL, NOTHING)]
    assert found.old_logp is None


def test_what_a_source_kept_of_the_reference_is_not_computed_again(passes: list[tuple[Any, Wanted]]) -> None:
    kept = BATCH.replace(reference_logp=jnp.full((N, L), -7.0))
    found = provide(POLICY, frozenset({"reference_logp", "old_logp"}), NOW, None, kept)
    assert passes == [(NOW, NOTHING)]
    assert float(found.reference_logp[0, 0]) == -7
    assert float(provide(POLICY, frozenset({"reference_logp"}), NOW, INITIAL, kept).reference_logp[0, 0]) == -2


def test_what_is_needed_must_be_there_to_compute_it_from(passes: list[tuple[Any, Wanted]]) -> None:
    for name in ("reference_logp", "reference_affinity"):
        with pytest.raises(InputError, match="needs a reference policy, but none is loaded"):
            provide(None, frozenset({name, "old_logp"}), NOW, None, BATCH)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs the weights before the last update"):
        provide(None, frozenset({"previous_logp", "old_logp"}), NOW, INITIAL, BATCH)  # type: ignore[arg-type]
    assert passes == [], "nothing is computed in vain"
    with pytest.raises(InputError, match="only one layer is supported"):
        wanted_of({"internal_logp:1", "internal_logp:2"})


def test_objectives_find_what_is_differentiated_and_no_more() -> None:
    assert set(DURING_UPDATE) == {
        "values", "mean_logp", "internal_logp", "heated_logp", "top_logp", "implicit_logp", "greedy", "scores",
        "teacher_top_logp", "teacher_divergence", "elbo_terms", "perturbation", "adam_step",
    }  # fmt: skip
    needs = {"values:2", "internal_logp:6", "squared_probability", "tempered_logp:0.5", "hidden_square", "guided"}
    assert wanted_of(needs, DURING_UPDATE) == Wanted(("internal_logp", "values"), (), 6)
    assert wanted_of({"old_logp", "guided"}) == NOTHING
