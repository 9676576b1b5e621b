"""Tensors of safetensors files, each read when it is called for; also of types that numpy has not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.kinds import reason, shown
from jaxrl_llm.utils.errors import InputError

Tensors = Mapping[str, Callable[[], np.ndarray]]  # name -> a function that reads it
FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors calls them
# Floats of eight bits, which safetensors does not give to numpy.
EIGHT_BITS = {
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
    "F8_E8M0": jnp.dtype(jnp.float8_e8m0fnu),
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: calling it reads it."""

    opened: Any  # by safetensors
    path: Path
    name: str  # in the file
    dtype: str  # as safetensors calls it

    def __call__(self) -> np.ndarray:
        """The tensor as it is stored. InputError where the file cannot be read."""
        from safetensors import SafetensorError

        try:
            if self.dtype in EIGHT_BITS:
                return self._bytes().view(EIGHT_BITS[self.dtype])
            return np.asarray(self.opened.get_tensor(self.name))
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.path}: tensor {shown(self.name)} cannot be read ({reason(error)}): download it again"
            ) from None

    def _bytes(self) -> np.ndarray:
        """The bytes of a tensor whose numbers have one each: the header says where they are."""
        with self.path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))[self.name]
            start, end = entry["data_offsets"]
            file.seek(8 + size + start)
            return np.frombuffer(file.read(end - start), np.uint8).reshape(entry["shape"])


def dtype_of(read: Callable[[], np.ndarray]) -> str:
    """The type of a tensor's numbers as it is stored; one that is computed is of floats."""
    return read.dtype if isinstance(read, FileTensor) else "F32"
