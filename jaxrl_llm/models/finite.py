"""Whether arrays on the host are finite, in about the time of reading them and without large copies."""

from __future__ import annotations

import numpy as np

_CHUNK = 2**20  # numbers tested at a time where that takes copies


def all_finite(x: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity. Copies at most a few MB at a time."""
    flat = x.reshape(-1) if x.flags.c_contiguous else x.flatten()
    if x.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum of finite numbers may overflow: only then look at each.
            if np.isfinite(np.sum(flat)):
                return True
    parts = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    if x.dtype.itemsize == 2:
        # A float's exponent is all ones where it is not finite; numpy converts each bfloat16 to find that out.
        least = np.uint16(0x7C00 if x.dtype == np.float16 else 0x7F80)
        return all(int(np.max(part.view(np.uint16) & 0x7FFF)) < least for part in parts)
    return all(bool(np.isfinite(part).all()) for part in parts)


def non_finite(x: np.ndarray) -> str:
    """What is not finite in an array: "NaN" or "infinity", and at how many places."""
    values = x.astype(np.float32)
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    kinds = [f"{name} at {count} of {x.size} places" for name, count in (("NaN", nan), ("infinity", infinite)) if count]
    return " and ".join(kinds)
