"""Choice of a kernel's implementation. Every kernel accepts the same values of `implementation=`.

- "pallas": the Mosaic kernel on TPU, and the Triton kernel on CUDA if there is one; elsewhere the kernel for TPUs in
  interpret mode, for tests.
- "xla": plain JAX, for any platform.
- "reference": the formula, for tests. It may allocate arrays that the other two avoid.
- None: "pallas" on TPU, and on CUDA if there is a Triton kernel and the GPUs are new enough for it; "xla" elsewhere.
  This depends on the platform that the program is lowered for, so that a program compiled ahead of time gets the right
  kernel.
"""

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


def found(x: jax.Array) -> str:
    """How an error says what an array is, such as "found float32[2, 3]"."""
    return f"found {x.dtype}{list(x.shape)}"


def takes_triton(device: jax.Device) -> bool:
    """Whether a device is a GPU that Triton compiles for: NVIDIA's, from Ampere on."""
    capability = str(getattr(device, "compute_capability", ""))  # such as "9.0"; AMD's are names
    return device.platform == "gpu" and capability[:1].isdigit() and float(capability) >= 8


def by_platform(
    xla: Callable[..., Result], pallas: Callable[..., Result], implementation: str | None, *operands: object,
    triton: Callable[..., Result] | None = None,
) -> Result:  # fmt: skip
    """Call `xla(*operands)`, or `pallas(*operands, interpret=...)` or `triton(*operands, interpret=...)`.

    implementation: "xla", "pallas" or None; or, for tests, "triton", which elsewhere than on CUDA is interpreted.
    triton: the kernel for CUDA; None: there is none.
    """
    if implementation == "xla":
        return xla(*operands)
    on_cuda = {} if triton is None else {"cuda": partial(triton, interpret=False)}
    if implementation == "triton":
        assert triton is not None
        return jax.lax.platform_dependent(*operands, **on_cuda, default=partial(triton, interpret=True))
    if implementation is None:
        try:
            serves = all(map(takes_triton, jax.local_devices(backend="cuda")))
        except RuntimeError:  # there is no GPU here: the program is for another machine
            serves = True
        on_cuda = on_cuda if serves else {}
    elsewhere = xla if implementation is None else partial(pallas, interpret=True)
    return jax.lax.platform_dependent(*operands, **on_cuda, tpu=partial(pallas, interpret=False), default=elsewhere)
