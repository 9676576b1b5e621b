"""Checksums and structure of the arrays in a checkpoint.

The checksum of an array is a sum over its elements of a hash of the element's bits and its place. Sums of integers do
not depend on the order, so every device adds up its own shard: nothing is gathered, and the checksum is the same on
any mesh. As the hash permutes the 32-bit numbers at each place, a change of any single element changes the checksum.
Elements that swapped places, and other changes, leave it unchanged with a probability of about 2^-64.
"""

import json
import re
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.selection.rows import mix

_FIRST, _SECOND = 0x9E3779B1, 0xCC9E2D51  # odd; their powers, one for each axis, turn indices into two place numbers


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of each array, 64 bits, keyed by its path; see the module. Every process must call it.

    tree: a pytree of jax.Arrays of any sharding, or of NumPy arrays. Equal bits in the same shape and dtype give the
    same number; dtypes of at most 8 bytes that are not complex.
    """
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    # One is fetched before the next begins: on CPUs, collectives of programs that run at once can block each other.
    sums = {name: jax.device_get(_checksum(x)) for name, x in leaves.items()}
    return {name: int(first) | int(second) << 32 for name, (first, second) in sums.items()}


def _checksum(x: Any) -> tuple[jax.Array, jax.Array]:
    """Its two halves, on all devices. Arrays of one shape, such as weights and their moments, share a program."""
    array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if len(array.sharding.device_set) == 1:
        return _sum(None, array.addressable_shards[0].data)
    return _sum(array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None, array)


@partial(jax.jit, static_argnums=0)
def _sum(mesh: Mesh | None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _words(x)
    first = second = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        first += index * jnp.uint32(pow(_FIRST, axis + 1, 2**32))
        second += index * jnp.uint32(pow(_SECOND, axis + 1, 2**32))
    hashed = mix(words ^ mix(first))
    sums = jnp.sum(hashed, dtype=jnp.uint32), jnp.sum(hashed * (second << 1 | 1), dtype=jnp.uint32)
    return sums if mesh is None else jax.lax.with_sharding_constraint(sums, NamedSharding(mesh, PartitionSpec()))


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32; of 8-byte elements as two, along a new last axis."""
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)
    return x.astype(jnp.uint32)


def checksums_on_host(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """crc32 of the bytes of NumPy arrays, whose shapes may differ each time (nothing is compiled)."""
    return {f"['arrays']['{name}']": zlib.crc32(np.ascontiguousarray(x).tobytes()) for name, x in arrays.items()}


def checksum_of_json(value: Mapping[str, Any]) -> int:
    """crc32 of the text of a JSON object; its order does not matter."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def structure(tree: Any) -> dict[str, str]:
    """Dtype and shape of every array, keyed by its path; empty containers and None are marked "empty".

    >>> structure({"a": np.zeros((2, 3), np.float32), "b": ()})
    {"['a']": 'float32[2, 3]', "['b']": 'empty'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    kinds = {path: "empty" if _is_empty(leaf) else f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
    return {jax.tree_util.keystr(path): kind for path, kind in kinds.items()}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, tuple | list | dict) and not node)


def differences(meta: Mapping[str, Any], shapes: tuple[Any, Any]) -> str:
    """How the structure of a checkpoint differs from that of (params, state); an empty string if it does not.

    meta: its JSON object. Without a state, only the parameters are compared.
    """
    wanted, found = structure(shapes), dict(meta["structure"])
    if shapes[1] is None:
        wanted, found = ({path: x for path, x in all_.items() if path.startswith("[0]")} for all_ in (wanted, found))
    names = {path: "/".join(re.findall(r"\w+", path)[1:]) for path in (*wanted, *found)}
    differing = [
        f"the {'parameter' if path.startswith('[0]') else 'state'} {names[path]} is {found.get(path, 'not there')} in "
        f"the checkpoint, and {wanted.get(path, 'not there')} here"
        for path in dict.fromkeys([*wanted, *found])
        if wanted.get(path) != found.get(path)
    ]
    return "; ".join(differing[:2]) + (f" and {len(differing) - 2} more" if len(differing) > 2 else "")
