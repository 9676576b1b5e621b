"""Divergences from a teacher in double precision, against TRL's values and gradients, by hand, and at their limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.distillation.divergences import (
    generalised_jsd,
    log_probabilities,
    on_support,
    top_k_divergence,
)
from jaxrl_llm.objectives.distillation.sampled_tokens import (
    iw_opd_advantage,
    log_ratio_to_student,
    minillm_advantage,
    position_weights,
    sparse_top_1_divergence,
)
from jaxrl_llm.utils.errors import InputError

FOLDER = Path(__file__).parents[1] / "preference_vectors"


def loss_of(case: dict[str, Any], student: Any, given: dict[str, Any]) -> Any:
    """What TRL's function of a case computes, by ours."""
    temperature, name = case.get("temperature", 1.0), case["fn"].split(".")[1]
    tokens, mask, teacher = given["tokens"], given["mask"], given["teacher_logits"]
    s, t = log_probabilities(student, teacher, temperature)
    own, taught = (jnp.take_along_axis(x, tokens[..., None], -1)[..., 0] for x in (s, t))
    tail = case.get("add_tail", True)
    if "top_k" in case:
        whose = case["support"].split()[0]
        value = top_k_divergence(
            student, teacher, case["top_k"], case["beta"], support=whose, tail=tail, temperature=temperature
        )
    elif name in ("generalized_jsd_loss", "compute_full_logit_self_distillation_loss"):
        value = generalised_jsd(s, t, case["beta"])
    elif name == "compute_sampled_token_self_distillation_loss":
        value = -jax.lax.stop_gradient(log_ratio_to_student(own, taught, mask)) * own
    elif name == "_compute_iw_opd_loss":
        sampler = given[f"rollout_logprobs/T{temperature}"] if case["rollout_logprobs"] else own
        value = -jax.lax.stop_gradient(iw_opd_advantage(sampler, taught, mask, case["gamma"])) * own
    else:
        assert name == "_compute_sparse_top_1_divergence_loss"
        best = jnp.argmax(t, axis=-1)
        pair = jnp.stack([best, tokens], axis=-1)
        s, t = (jnp.take_along_axis(x, pair, axis=-1) for x in (s, t))
        value = sparse_top_1_divergence(s, t, best == tokens, case["beta"], tail=tail)
    if not case.get("masked", True):
        return value.sum() / len(value)
    divide = case.get("divide", "tokens")
    return jnp.sum(jnp.where(mask > 0, value, 0.0)) / (mask.sum() if divide == "tokens" else divide)


def test_all_are_as_trl_has_them() -> None:
    with np.load(FOLDER / "distill.npz") as file, jax.enable_x64(True):
        given = {name: jnp.asarray(file[name]) for name in file.files if name != "cases"}
        cases = [json.loads(str(case)) for case in file["cases"]]
        assert len(cases) == 97
        for number, case in enumerate(cases):
            value, gradient = jax.value_and_grad(lambda x, case=case: loss_of(case, x, given))(given["student_logits"])
            np.testing.assert_allclose(value, given["loss"][number], rtol=1e-9, err_msg=str(case))
            expected = given["grad_student_logits"][number]
            np.testing.assert_allclose(gradient, expected, rtol=1e-8, atol=1e-12, err_msg=str(case))


def test_advantages_of_minillm() -> None:
    with np.load(FOLDER / "dropped_by_trl.npz") as file, jax.enable_x64(True):
        for chosen in ("s0", "s1"):
            student, teacher, mask = (
                file[f"{chosen}/{name}"][:8] for name in ("token_logps", "ref_token_logps", "mask")
            )
            student, teacher = student * mask, teacher * mask
            for gamma in (0.0, 0.9, 1.0):
                for whether in (0, 1):
                    expected = file[f"{chosen}/minillm/gamma{gamma}/length_norm{whether}/advantage"]
                    weights = np.where(mask > 0, 1, 1e-4) if whether else mask  # TRL counts padding as so much
                    found = minillm_advantage(
                        jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(weights), gamma,
                        length_normalised=bool(whether and gamma), from_start=True,
                    )  # fmt: skip
                    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_worked_examples() -> None:
    s, t = jnp.log(jnp.asarray([0.4, 0.5, 0.1])), jnp.log(jnp.asarray([0.7, 0.2, 0.1]))
    found = [generalised_jsd(s, t, beta) for beta in (0, 0.1, 0.5, 0.9, 1)]
    np.testing.assert_allclose(found, [0.208473, 0.018831, 0.053923, 0.020632, 0.234299], atol=2e-6)
    s, t = jnp.log(jnp.asarray([0.3, 0.4, 0.1, 0.2])), jnp.log(jnp.asarray([0.6, 0.2, 0.15, 0.05]))
    np.testing.assert_allclose(generalised_jsd(s, t, 0), 0.268764, atol=2e-6)
    np.testing.assert_allclose(on_support(s[:2], t[:2], 0, tail=False), 0.213042, atol=2e-6)
    np.testing.assert_allclose(on_support(s[:2], t[:2], 0), 0.196166, atol=2e-6)
    student, teacher, all_of_them = jnp.asarray([[-1, -0.5, -2]]), jnp.asarray([[-0.4, -0.6, -3]]), jnp.ones((1, 3))
    plain = minillm_advantage(student, teacher, all_of_them, 0.9, length_normalised=False)
    np.testing.assert_allclose(plain, [[-0.3, -1, -1]], atol=1e-6)
    normalised = minillm_advantage(student, teacher, all_of_them, 0.9)
    np.testing.assert_allclose(normalised, [[-0.110701, -0.526316, -1]], atol=1e-6)
    weights = position_weights(jnp.asarray([[0.6, -0.1, -1, 0.3]]), jnp.ones((1, 4)))
    np.testing.assert_allclose(weights, [[1.5, 1.35, 1.325, 1.075]], atol=1e-6)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_what_is_forbidden_to_both_changes_nothing(beta: float) -> None:
    s, t = jnp.asarray([0.3, -1.0, 0.2, -jnp.inf]), jnp.asarray([0.1, 0.4, -0.7, -jnp.inf])

    def loss(s: Any, t: Any) -> Any:
        return generalised_jsd(*log_probabilities(s, t, 0.7), beta)

    value, gradient = jax.value_and_grad(loss)(s, t)
    without, gradient_without = jax.value_and_grad(loss)(s[:3], t[:3])
    np.testing.assert_allclose(value, without, rtol=1e-6)
    np.testing.assert_allclose(gradient, [*gradient_without, 0], atol=1e-7)


def test_all_tokens_are_the_whole_distribution_and_equals_have_none() -> None:
    with jax.enable_x64(True):
        s, t = (jnp.asarray(np.random.default_rng(k).normal(size=(2, 3, 9))) for k in range(2))
        for beta in (0, 0.4, 1):
            for tail in (False, True):
                found = top_k_divergence(s, t, 20, beta, tail=tail)
                np.testing.assert_allclose(found, generalised_jsd(*log_probabilities(s, t), beta), rtol=1e-9)
            np.testing.assert_allclose(top_k_divergence(s, s, 3, beta), 0, atol=1e-14)


def test_bad_numbers_are_refused_in_a_line() -> None:
    x = jnp.zeros((1, 3))
    for arguments, said in (
        ((x, x, 0), "top_k is 0"), ((x, x, 2, 1.5), "beta of a divergence"), ((x, jnp.zeros((1, 4)), 2), "vocabulary"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            top_k_divergence(*arguments)
    with pytest.raises(InputError, match="temperature"):
        top_k_divergence(x, x, 2, temperature=0)
    with pytest.raises(InputError, match="support"):
        top_k_divergence(x, x, 2, support="both")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="gamma"):
        minillm_advantage(x, x, x, 1.5)
    with pytest.raises(InputError, match="gamma"):
        position_weights(x, x, -1)
