"""The parser of GGUF files: a header of typed keys and values, a table of tensors, and the tensors' quantised blocks.

Whatever a file says is checked before it is used, so that a damaged one is told in a line and takes no memory.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.kinds import TEXT, check, number, reason, shown, whole
from jaxrl_llm.utils.errors import InputError, optional_package

# Value types by code; the letters mean the same to struct and to numpy. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_HEADS, _POSITIVE = whole(1, 2**16), number(above=0)
# What the settings of an architecture may be; its name stands before each.
_SETTINGS = {
    "block_count": whole(1, 10_000),
    **dict.fromkeys(("embedding_length", "feed_forward_length", "expert_feed_forward_length"), whole(1, 2**24)),
    "expert_count": whole(0, 2**16),
    **dict.fromkeys(("expert_used_count", "rope.dimension_count"), _HEADS),
    **dict.fromkeys((f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length")), _HEADS),
    **dict.fromkeys(("context_length", "attention.sliding_window"), whole(0)),
    "attention.layer_norm_rms_epsilon": _POSITIVE,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), number(least=0)),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), number(above=1)),
    **dict.fromkeys(("rope.scale_linear", "rope.scaling.factor"), number(least=0)),
    "rope.scaling.type": TEXT,
    "rope.scaling.original_context_length": whole(1),
    **dict.fromkeys(
        (f"rope.scaling.{name}" for name in ("yarn_beta_fast", "yarn_beta_slow", "attn_factor")), _POSITIVE
    ),
}
_GENERAL = {"general.architecture": TEXT, "general.alignment": whole(1, 2**20), "split.count": whole(0)}
_GENERAL |= {f"tokenizer.ggml.{end}_token_id": whole(0) for end in ("bos", "eos", "eot", "padding", "unknown")}


class GgufFile:
    """A parsed header, and the memory map under it. InputError where a file is damaged; see `read_gguf`."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        with optional_package("gguf", "gguf", "reading a GGUF file"):
            import gguf
        self._gguf: Any = gguf
        if path.exists() and not path.is_file():
            raise InputError(f"cannot read {path}: it is no file")
        try:
            with path.open("rb") as handle:
                self.map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if handle.seek(0, 2) else b""
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {reason(error)}") from None
        self.view, self.position = memoryview(self.map), 4
        if self.view[:4] != b"GGUF":
            raise InputError(f"{self.name} is not a GGUF file: it does not begin with 'GGUF'")
        version = self._number("I")
        if version not in (2, 3):
            raise InputError(f"{self.name}: GGUF version {version} is not supported; use little-endian versions 2 or 3")
        count, keys = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._string()
            self.metadata[name] = self._value(self._number("I"))
        check(self.metadata, _GENERAL, self.name)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            name, axes = self._string(), self._number("I")
            if axes > 4 or name in self.shapes:
                what = f"has {axes} axes" if axes > 4 else "stands there twice"
                raise InputError(f"{self.name}: tensor {shown(name)} {what}; the file is damaged: fetch it again")
            # The file gives the innermost dimension first.
            self.shapes[name] = tuple([self._number("Q") for _ in range(axes)][::-1]) or (1,)
            self._places[name] = self._number("I"), self._number("Q")
        alignment = self.metadata.get("general.alignment", 32)
        self.start = -(-self.position // alignment) * alignment
        for name in self.shapes:
            self._blocks(name)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key under the architecture's prefix; a list of equal values, one a layer, counts as one."""
        full = f"{self.metadata['general.architecture']}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, list):
            value = value[0] if value and all(x == value[0] for x in value) else None
        if value is None:
            raise InputError(f"{self.name}: the header lacks one {full} for all layers; convert the model again")
        if full in self.metadata:
            check({key: value}, {key: _SETTINGS[key]}, self.name, f"{self.metadata['general.architecture']}.")
        return value

    def _take(self, size: int) -> memoryview:
        begin, self.position = self.position, self.position + size
        if self.position > len(self.view):
            raise InputError(f"{self.name} is cut short or damaged: its header runs past the end; fetch it again")
        return self.view[begin : self.position]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == 8:
            return self._string()
        if kind != 9:
            raise InputError(f"{self.name}: unknown GGUF value type {kind}; the file is damaged: fetch it again")
        inner, length = self._number("I"), self._number("Q")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner]).newbyteorder("<")
            return np.frombuffer(self._take(length * dtype.itemsize), dtype).tolist()
        if inner != 8:
            raise InputError(f"{self.name}: a GGUF list of the type {inner} is not supported; fetch the file again")
        return [self._string() for _ in range(length)]

    def _blocks(self, name: str) -> tuple[np.ndarray, Any]:
        """The stored bytes uint8[..., bytes of a row] and their quantisation type."""
        shape, (code, offset) = self.shapes[name], self._places[name]
        if code not in set(self._gguf.GGMLQuantizationType):
            raise InputError(f"{self.name}: tensor {shown(name)} has the unknown type {code}; update the package gguf")
        kind = self._gguf.GGMLQuantizationType(code)
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise InputError(
                f"{self.name}: tensor {shown(name)} has shape {shape}, impossible for type {kind.name}; fetch it again"
            )
        row = shape[-1] // block * size
        length, begin = math.prod(shape[:-1]) * row, self.start + offset
        if begin + length > len(self.view):
            raise InputError(f"{self.name} is cut short: tensor {shown(name)} runs past its end; fetch it again")
        return np.frombuffer(self.map, np.uint8, length, begin).reshape(*shape[:-1], row), kind

    def read(self, name: str, expert: int | None = None, heads: int = 0, offset: float = 0.0) -> np.ndarray:
        """One tensor, or one expert of a stack, as float32; `heads` > 0 undoes llama.cpp's order of rotary pairs."""
        blocks, kind = self._blocks(name)
        try:
            out = self._gguf.quants.dequantize(blocks if expert is None else blocks[expert], kind)
            if heads:  # pairs (i, i + half) of a head lie next to each other
                out = out.reshape(heads, out.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(out.shape)
        except NotImplementedError:
            raise InputError(f"{self.name}: tensor {shown(name)} of type {kind.name} cannot be dequantised") from None
        except (ValueError, IndexError, TypeError):
            raise InputError(f"{self.name}: tensor {shown(name)} cannot have the shape {self.shapes[name]}") from None
        return out - np.float32(offset) if offset else out
