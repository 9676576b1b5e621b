"""Sampling beside updates (`max_staleness`): its devices, its order, and the correction for stale tokens."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.signatures import PYTHON
from jaxrl_llm.core.transform import chain
from jaxrl_llm.distributed import data_mesh, mesh_of, sampling_mesh_of
from jaxrl_llm.distributed.peers import PeerListener, address_of, shared_key
from jaxrl_llm.objectives.off_policy import interpolated_proximal, stale_correction
from jaxrl_llm.replay.base import Swarm
from jaxrl_llm.rollouts.asynchronous.remote import RemoteSamplers
from jaxrl_llm.rollouts.asynchronous.rule import FILE, Asynchrony, read_order
from jaxrl_llm.rollouts.asynchronous.samplers import InThread, Open
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.provenance import code_digest
from jaxrl_llm.utils.errors import InputError, several
from jaxrl_llm.utils.storage import is_url

if TYPE_CHECKING:
    from jaxrl_llm.training.setup import RunParts

CAP = 2.0  # on the weights of stale tokens, as of truncated importance sampling


def check_asynchrony(config: TrainConfig, algorithm: Algorithm, own_source: bool) -> None:
    """InputError for asynchronous sampling where a run has a source of its own."""
    if config.max_staleness and (own_source or isinstance(algorithm.replay, Swarm)):
        raise InputError("max_staleness is above 0, but the run has a source of its own: leave one of the two out")
    if config.samplers:
        address_of(config.sampler_address)
        shared_key()
        try:
            portable = bool(pickle.dumps(config))
        except (pickle.PicklingError, AttributeError, TypeError):
            portable = False
        if config.algorithm.startswith(PYTHON) or not portable:
            raise InputError(
                "samplers are other programs, which cannot have Python values of this one: give the algorithm, the "
                "rewards and the environment by their names, or those of a file"
            )


class Greeting(NamedTuple):
    """What a sampler in a program of its own must know, and be equal to."""

    config: TrainConfig
    digests: dict[str, str]  # of the inputs, the code and the packages


def samplers_of(config: TrainConfig, parts: RunParts) -> Open:
    """What opens the samplers of a run on this host."""
    if not config.samplers:
        return InThread
    digests = parts.digests | {"the code and packages": code_digest()}
    greeting, address = Greeting(config, digests), address_of(config.sampler_address, parts.hosts.index)
    return lambda scene, waitlist: RemoteSamplers(
        scene, waitlist, PeerListener(address, shared_key()), config.samplers, greeting
    )


def meshes_of(config: TrainConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """The meshes on which a run learns and samples. InputError as of `mesh_of`, and where no device is to learn."""
    learning, own = by_task(config)
    mesh = mesh_of(config.mesh, learning)
    return mesh, sampling_mesh_of(config.sampling_mesh, data_mesh(own) if own else mesh)


def by_task(config: TrainConfig) -> tuple[list[jax.Device], list[jax.Device]]:
    """The devices on which a run learns, and the `sampler_devices`, as many of each host, which sample only.

    InputError where they do not divide so, and where none is left to learn.
    """
    devices, own, hosts = jax.devices(), config.sampler_devices, jax.process_count()
    if own >= len(devices):
        raise InputError(
            f"sampler_devices is {own}, but there {'is' if len(devices) == 1 else 'are'} "
            f"{several(len(devices), 'device')}, one of which must learn: lower it"
        )
    if own % hosts:
        raise InputError(f"sampler_devices is {own}, but each of {hosts} hosts samples on as many: give a multiple")
    learning, sampling = list[jax.Device](), list[jax.Device]()
    for host in range(hosts):
        mine = [device for device in devices if device.process_index == host]
        learns = len(mine) - own // hosts
        if learns < 1:
            raise InputError(f"host {host} has {several(len(mine), 'device')}, one of which must learn: lower "
                             f"sampler_devices, which is {own}")  # fmt: skip
        learning, sampling = learning + mine[:learns], sampling + mine[learns:]
    return learning, sampling


def asynchrony_of(config: TrainConfig, parts: RunParts) -> Asynchrony:
    """How a run samples beside its updates."""
    own = set(parts.sampler.devices.flat)
    shared = bool(own & set(parts.mesh.devices.flat))
    return Asynchrony(
        config.max_staleness, config.steps,
        record=None if is_url(config.output) else Path(config.output) / FILE,
        repeat=read_order(config.replay_order, config.steps) if config.replay_order else (),
        keep=config.stale_cache == "keep", turns=shared and len(own) > 1 and not config.samplers,
    )  # fmt: skip


def with_correction(config: TrainConfig, algorithm: Algorithm) -> Algorithm:
    """The method, with stale tokens corrected for; see `TrainConfig.stale_correction`.

    A method that needs the old policy's log-probabilities says itself what it does about the policy that sampled.
    """
    if not config.max_staleness or config.stale_correction == "none" or "old_logp" in algorithm.needs:
        return algorithm
    if config.stale_correction == "interpolate":
        return dataclasses.replace(algorithm, objective=interpolated_proximal(algorithm.objective, cap=CAP))
    corrected = chain(algorithm.transform, stale_correction(config.stale_correction, CAP))
    return dataclasses.replace(algorithm, transform=corrected)
