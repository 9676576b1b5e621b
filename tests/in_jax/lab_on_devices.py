"""Runs of a method on all devices of this process; `test_lab_runs` starts it, and makes the same runs on one device.

python lab_on_devices.py FILE.npz
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.in_jax.lab.laboratory import RUNS, Ran, seed_key, together
from jaxrl_llm.in_jax.settings import LabSettings, fresh_params
from jaxrl_llm.in_jax.tasks import sequence_lock
from jaxrl_llm.in_jax.train import make_train

TASK = sequence_lock(1, 2)
TINY = LabSettings(iterations=4, prompts=4, group_size=4, hidden=8, layers=1, heads=1, learning_rate=1e-2)
RATES = (1e-2, 1e-2, 3e-3, 3e-3, 1e-1, 0.0)


def start() -> dict[str, jax.Array]:
    """Parameters of a policy that opens the lock now and then."""
    return fresh_params(jax.random.key(3), TASK, TINY)


def runs(devices: list[jax.Device], chosen: tuple[int, ...] = tuple(range(len(RATES)))) -> Ran:
    """Six runs, or some of them: seeds 0, 1, 0, 1 ... with learning rates of their own."""
    train = make_train(TASK, "grpo", TINY)
    mesh = Mesh(np.array(devices), (RUNS,))
    keys = [seed_key(i % 2) for i in chosen]
    return together(train, keys, [{"learning_rate": RATES[i]} for i in chosen], {"kl_coefficient": 0.0}, start(), mesh)


if __name__ == "__main__":
    ran = runs(jax.devices())
    arrays = {f"params{i}": x for i, x in enumerate(jax.tree.leaves(ran.params))}
    np.savez(sys.argv[1], devices=jnp.int32(jax.device_count()), **ran.metrics, **arrays)
