"""Schedules: decay to 0, and linear interpolation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.schedules import fade, progress, ramp

close = np.testing.assert_allclose


def test_the_worked_example() -> None:
    p = progress(jnp.array([0, 20, 40, 60, 80, 99]), 100, 0.0, 0.8)
    close(fade(p, 0.99), [0.99, 0.7425, 0.495, 0.2475, 0, 0], atol=1e-6)
    close(fade(p, 0.99, "sigmoid"), [0.99, 0.886056, 0.495, 0.103944, 0, 0], atol=1e-6)
    close(fade(p, 0.99, "power"), [0.9801, 0.551306, 0.245025, 0.061256, 0, 0], atol=1e-6)


def test_a_ramp_stays_at_its_end() -> None:
    close(ramp(jnp.array([0, 5, 10, 20]), 10, 0.2, 0.8), [0.2, 0.5, 0.8, 0.8], atol=1e-6)


def test_no_time_between_start_and_end_is_a_step() -> None:
    close(progress(jnp.array([4, 5, 6]), 10, 0.5, 0.5), [0, 0, 1])
