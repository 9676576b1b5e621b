"""Data parallelism: every device holds the parameters and a share of the rows."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError


def data_mesh(devices: list[Any] | None = None) -> Mesh:
    """All devices (or those given) along one axis, "data"."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Put a whole copy of every array on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Spread the leading axis of every array over the devices; it must be a multiple of their number."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("data")))


def check_rows(rows: int, minibatches: int, micro_batches: int, devices: int) -> None:
    """InputError unless `rows` completions split evenly into minibatches, micro-batches and devices."""
    parts = minibatches * micro_batches * devices
    if rows % parts:
        raise InputError(
            f"a step has {rows} completions (prompts_per_step x group_size), which {minibatches} minibatches x "
            f"{micro_batches} micro_batches x {devices} devices = {parts} does not divide: change one of them"
        )
