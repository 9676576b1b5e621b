"""A swarm in one process: the run's policy and others like it, which sample, share groups and learn side by side."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.source import Source, Step
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.learner.setup import start
from jaxrl_llm.models.policy import Params
from jaxrl_llm.replay.base import Swarm, shared
from jaxrl_llm.rollouts.runtime.sources import mixed_step
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.state import RunState
from jaxrl_llm.training.step import learn
from jaxrl_llm.utils.errors import InputError


class _Node(NamedTuple):
    """One of the other policies."""

    train: Any  # TrainState, or after a restart its leaves
    memory: Any
    source: Any
    feedback: dict[str, float]


class SwarmState(NamedTuple):
    """State of the run's own source, and the other nodes; none before the first step."""

    own: Any
    others: tuple[_Node, ...]


def swarm_source(
    config: TrainConfig, parts: RunParts, given: Swarm, make: Callable[[TrainConfig, RunParts], Source]
) -> Source:
    """The source of a run that trains `given.nodes` policies, of which its own is the first.

    All begin with the run's weights and have prompts in orders of their own. In each step every node samples, then
    each trains on `shared` groups. The first is the run's; metrics "swarm/reward_K" are the mean rewards of the others.
    make: (configuration, parts) -> the source of one node. Raises InputError for several processes and for adapters.
    """
    if parts.hosts.count > 1 or parts.frozen is not None:
        raise InputError("a swarm trains whole policies in one process: leave out other processes and adapters (LoRA)")
    alone = parts._replace(algorithm=dataclasses.replace(parts.algorithm, replay=None))
    configs = [dataclasses.replace(config, seed=config.seed + number) for number in range(given.nodes)]
    first, *_ = sources = [make(one, alone) for one in configs]

    def begin(params: Params) -> _Node:
        copied, facts = jax.tree.map(jnp.copy, params), RunFacts(prompts=len(parts.prompts.rows), steps=config.steps)
        train, memory = start(parts.policy, parts.algorithm, parts.optimizer, copied, facts, parts.mesh)
        return _Node(train, memory, None, {})

    def following(state: SwarmState, params: Params, key: jax.Array, step: int) -> tuple[Step, SwarmState]:
        others = state.others
        if not others:
            others = tuple(begin(params)._replace(source=source.init()) for source in sources[1:])
        elif isinstance(others[0].train, list):  # read from a checkpoint
            shape = begin(params)
            others = tuple(
                one._replace(train=_like(shape.train, one.train), memory=_like(shape.memory, one.memory))
                for one in others
            )
        keys = [key, *(jax.random.fold_in(key, 2**30 + number) for number in range(1, given.nodes))]
        found, own = first.next(state.own, params, key, step)
        steps, ats = [found], [own]
        for number, one in enumerate(others, start=1):
            sampled, at = sources[number].next(one.source, one.train.params, keys[number], step)
            steps.append(sampled)
            ats.append(at)
        after, metrics = list[_Node](), dict[str, float]()
        batches = [
            shared(
                one.scored,
                [other.scored for place, other in enumerate(steps) if place != number],
                given.own, given.foreign, int(jax.random.bits(jax.random.fold_in(keys[number], 2**31 - 1))),
            )
            for number, one in enumerate(steps)
        ]  # fmt: skip
        for number, one in enumerate(others, start=1):
            before = RunState(one.train, one.memory, None)
            state_after, learned = learn(parts, configs[number], before, batches[number].batch, step, one.feedback)
            feedback = {**learned.metrics, "updates": one.feedback.get("updates", 0.0) + 1}
            after.append(_Node(state_after.train, state_after.memory, ats[number], feedback))
            metrics[f"swarm/reward_{number}"] = float(np.nanmean(np.asarray(steps[number].scored.batch.need("reward"))))
        mixed = mixed_step(found, batches[0], step, parts.prompts)
        return mixed._replace(metrics=mixed.metrics | metrics), SwarmState(own, tuple(after))

    def save(state: SwarmState) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        saved, arrays = first.save(state.own)
        nodes = []
        for number, one in enumerate(state.others, start=1):
            of_source, more = sources[number].save(one.source)
            nodes.append({"source": of_source, "feedback": one.feedback})
            named = {f"source_{name}": x for name, x in more.items()}
            for kind, tree in (("train", one.train), ("memory", one.memory)):
                named |= {f"{kind}_{place:06d}": np.array(x) for place, x in enumerate(jax.tree.leaves(tree))}
            arrays = arrays | {f"node{number}_{name}": x for name, x in named.items()}
        return {"own": saved, "nodes": nodes}, arrays

    def load(saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> SwarmState:
        def of(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}

        own = first.load(saved["own"], {name: x for name, x in arrays.items() if not name.startswith("node")})
        others = []
        for place, one in enumerate(saved["nodes"], start=1):
            train, memory = ([x for _, x in sorted(of(f"node{place}_{kind}_").items())] for kind in ("train", "memory"))
            at = sources[place].load(one["source"], of(f"node{place}_source_"))
            others.append(_Node(train, memory, at, one["feedback"]))
        return SwarmState(own, tuple(others))

    return Source(lambda: SwarmState(first.init(), ()), following, save, load, first.provides | given.provides)


def _like(tree: Any, leaves: list[np.ndarray]) -> Any:
    """Saved leaves in the place, dtype and sharding of those of a tree."""
    flat, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [jax.device_put(x.astype(old.dtype), old.sharding) for x, old in zip(leaves, flat, strict=True)]
    )
