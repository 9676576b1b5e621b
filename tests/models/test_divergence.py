"""Divergence from a teacher by blocks of the vocabulary, against all logits in double precision, and its memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.outputs.divergence import divergence
from jaxrl_llm.models.vocabulary import Distribution
from jaxrl_llm.objectives.distillation.divergences import generalised_jsd
from jaxrl_llm.utils.errors import InputError

RANDOM = np.random.default_rng(0)


def made(M: int, D: int, V: int, **more: Any) -> Distribution:
    return Distribution(
        *(jnp.asarray(RANDOM.normal(size=shape)) for shape in ((M, D), (V, D))),
        jnp.asarray(RANDOM.uniform(0.5, 1.5, M)), **more,
    )  # fmt: skip


def whole(source: Distribution, tokens: int) -> Any:
    z = source.hidden @ source.unembedding[:tokens].T
    z = source.softcap * jnp.tanh(z / source.softcap) if source.softcap else z
    return jax.nn.log_softmax(z / source.temperature[:, None], axis=1)


@pytest.mark.heavy
@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize(("tokens", "block"), [(None, 8), (17, 64), (19, 5)])
def test_values_and_gradients_are_those_of_all_logits(beta: float, tokens: int | None, block: int) -> None:
    with jax.enable_x64(True):
        student, teacher = made(6, 4, 23, softcap=3.0, tokens=tokens), made(6, 3, 21, softcap=2.0)
        teacher = teacher._replace(temperature=student.temperature)
        count, weights = tokens or 21, jnp.asarray(RANDOM.normal(size=6))

        def by_blocks(hidden: Any, unembedding: Any) -> Any:
            return weights @ divergence(student._replace(hidden=hidden, unembedding=unembedding), teacher, beta, block)

        def dense(hidden: Any, unembedding: Any) -> Any:
            own = whole(student._replace(hidden=hidden, unembedding=unembedding), count)
            return weights @ generalised_jsd(own, whole(teacher, count), beta)

        at = student.hidden, student.unembedding
        (found, by), (value, gradients) = (jax.value_and_grad(f, (0, 1))(*at) for f in (by_blocks, dense))
        np.testing.assert_allclose(found, value, rtol=1e-11)
        for x, y in zip(by, gradients, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-13)


def test_in_bfloat16_it_is_near() -> None:
    student, teacher = (jax.tree.map(jnp.bfloat16, made(5, 8, 40)) for _ in range(2))
    wide = [jax.tree.map(jnp.float32, x) for x in (student, teacher)]
    np.testing.assert_allclose(
        divergence(student._replace(temperature=wide[0].temperature), teacher, 1.0, 16),
        divergence(wide[0], wide[1], 1.0, 16), rtol=0.02,
    )  # fmt: skip


def test_no_array_has_all_logits() -> None:
    M, D, V = 256, 8, 8192
    student, teacher = (jax.tree.map(jnp.float32, made(M, D, V)) for _ in range(2))

    def loss(hidden: Any, unembedding: Any) -> Any:
        return divergence(student._replace(hidden=hidden, unembedding=unembedding), teacher, 0.5, 256).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(student.hidden, student.unembedding).compile()
    assert program.memory_analysis().temp_size_in_bytes < M * V * 4 / 2


def test_a_beta_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="beta of a divergence from the teacher"):
        divergence(made(1, 1, 3), made(1, 1, 3), 1.5)
