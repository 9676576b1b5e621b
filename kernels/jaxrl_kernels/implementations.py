"""Choice of a kernel's implementation. Every kernel accepts the same values of `implementation=`.

- "pallas": the Mosaic kernel on TPU; on other platforms the same kernel in interpret mode, for tests.
- "xla": plain JAX, for any platform.
- "reference": the formula, for tests. It may allocate arrays that the other two avoid.
- None: "pallas" on TPU, "xla" elsewhere, depending on the platform that the program is lowered for, so that a program
  compiled ahead of time gets the right kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax

Result = TypeVar("Result")

IMPLEMENTATIONS = ("pallas", "xla", "reference")


def check_implementation(implementation: str | None) -> None:
    """Raise a ValueError for an unknown name."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}: use None or one of {', '.join(IMPLEMENTATIONS)}")


def by_platform(
    xla: Callable[..., Result], pallas: Callable[..., Result], implementation: str | None, *operands: object
) -> Result:
    """Call `xla(*operands)` or `pallas(*operands, interpret=...)`; implementation: "xla", "pallas" or None."""
    if implementation == "xla":
        return xla(*operands)
    elsewhere = xla if implementation is None else partial(pallas, interpret=True)
    return jax.lax.platform_dependent(*operands, tpu=partial(pallas, interpret=False), default=elsewhere)
