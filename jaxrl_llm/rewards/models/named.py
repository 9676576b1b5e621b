"""Rewards by the name of a model, and those among them that have a model put on the devices of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxrl_llm.models.config.groups import ScoreHead
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.rewards.models.steps import step_reward
from jaxrl_llm.rewards.models.whole import ModelReward
from jaxrl_llm.rewards.specs import MODEL, ModelName
from jaxrl_llm.rewards.workers.runner import Reward
from jaxrl_llm.utils.errors import InputError


@runtime_checkable
class OnDevices(Protocol):
    """A reward function whose model can be put on the devices of a run."""

    def on_mesh(self, mesh: jax.sharding.Mesh, dtype: Any) -> Callable[..., Any]: ...


def model_reward(named: ModelName, weight: float, folder: str | os.PathLike[str] = ".") -> Reward:
    """The reward of a model that is in a folder, or on the hub, named as the last part of its path.

    Its weights are read when it is used, or put on a mesh. InputError for a model without scores, with several where
    one is wanted, and with another number of classes of a step than there are worths.
    """
    local = Path(folder, Path(named.path).expanduser())
    name = str(local) if local.is_dir() else named.path
    found, _, config = read_scoring(name)
    head = config.score or ScoreHead((), None)
    labels, model = head.labels, ModelReward(name, load_tokenizer(found))
    if named.kind != MODEL:
        return Reward(step_reward(named, head, model), weight, Path(named.path).name)
    if len(labels) != 1:
        raise InputError(
            f"{named.path} has {len(labels)} labels ({', '.join(labels[:4])}), where a reward wants one: "
            f"steps:{named.path} scores the steps of a completion with them"
        )
    return Reward(model, weight, Path(named.path).name)


def on_devices(rewards: Sequence[Reward], mesh: jax.sharding.Mesh, dtype: Any) -> list[Reward]:
    """The rewards, with the models among them on the devices of a run."""
    return [
        dataclasses.replace(reward, function=reward.function.on_mesh(mesh, dtype))
        if isinstance(reward.function, OnDevices) else reward
        for reward in rewards
    ]  # fmt: skip
