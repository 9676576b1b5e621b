"""What of a batch a transform read before it was there."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jaxrl_llm import InputError, Trajectories
from jaxrl_llm.core.transform import stateless


def batch() -> Trajectories:
    zeros, rows, acted = jnp.zeros((2, 3), jnp.int32), jnp.arange(2, dtype=jnp.int32), jnp.ones((2, 3), bool)
    return Trajectories(
        tokens=zeros, token_mask=acted, action_mask=acted, behaviour_logp=jnp.zeros((2, 3)), policy_step=zeros,
        turn=zeros, group=rows, prompt_id=rows, truncated=rows < 0, info={"there": jnp.ones(2)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b: b.replace(weights=b.old_logp + 1), "no old_logp .*: name 'old_logp' among its needs"),
        (lambda b: b.replace(weights=2 * b.advantages), "no advantages .*: put it after the transform"),
        (lambda b: b.replace(weights=b.info["calls"] + b.info["there"]), r"no info\['calls'\].*name 'calls' among"),
        (lambda b: b.replace(reward=b.rewards["style"]), r"no rewards\['style'\].*every scored batch"),
    ],
)
def test_it_is_told_with_what_provides_it(function: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        stateless(function).apply((), batch())


def test_other_mistakes_stay_what_they_are() -> None:
    """Also of a function that looks whether a field is there."""

    def wrong(b: Trajectories) -> Trajectories:
        assert b.advantages is None
        return b.replace(weights=jnp.ones(2) @ jnp.ones(3))

    with pytest.raises(TypeError, match="same shape"):
        stateless(wrong).apply((), batch())
