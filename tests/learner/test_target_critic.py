"""A target critic: its values, and the start of twin heads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_update import POLICY, fresh_params, prepared

from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.models.critic import critic_of, init_critic
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.utils.errors import InputError

NEEDS = frozenset({"values:4", "target_values:4"})


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["tower", "shared"])
def test_target_values_are_those_of_its_weights(kind: str) -> None:
    critic, batch = critic_of(NEEDS, kind), prepared()
    assert critic is not None
    policy = dataclasses.replace(POLICY, critic=critic)
    params = init_critic(jax.random.key(5), policy, fresh_params(), critic)
    target = jax.tree.map(lambda x: 0.5 * x + 0.1, params["critic"])
    found = provide(policy, NEEDS, params, None, batch, plan_steps(batch, micro_batches=2), target=target)
    alone = policy_outputs(policy, {**params, "critic": target}, batch, wanted=Wanted(("values",)))
    np.testing.assert_allclose(found.need("target_values"), (alone.extras or {})["values"], atol=1e-5)
    assert np.abs(np.asarray(found.need("target_values") - found.values)).max() > 0.01
    with pytest.raises(InputError, match="needs a target critic"):
        provide(policy, NEEDS, params, None, batch)


def test_its_twin_heads_differ_from_the_start() -> None:
    critic = critic_of(NEEDS)
    assert critic is not None
    assert critic.spread
    assert not critic_of({"values:4"}).spread  # type: ignore[union-attr]
    params = init_critic(jax.random.key(5), POLICY, fresh_params(), critic)
    weight = np.asarray(params["critic"]["head"]["weight"])
    assert weight.shape == (8, 4)
    assert np.abs(weight[:, None] - weight[:, :, None]).sum(0)[~np.eye(4, dtype=bool)].min() > 0.01
    assert np.sqrt((weight**2).sum(0)).mean() == pytest.approx(0.1, rel=0.5)
    assert not jnp.any(params["critic"]["head"]["bias"])
