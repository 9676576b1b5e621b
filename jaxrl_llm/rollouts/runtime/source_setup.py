"""The configuration of the standard source, its state, and what a checkpoint holds of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.rules import DynamicSampling, Partial
from jaxrl_llm.core.source import Curriculum, Replay
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.rewards.workers.runner import Reward
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, Held, Pool, from_arrays, to_arrays
from jaxrl_llm.rollouts.runtime.sources import no_replay
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError

Clock = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Experience:
    """The configuration of the standard source."""

    policy: Policy
    prompts: PromptSet
    rewards: Sequence[Reward]
    curriculum: Curriculum
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    rollout: Rollout = dataclasses.field(default_factory=group)
    replay: Replay = dataclasses.field(default_factory=no_replay)
    prompts_per_step: int = 16
    group_size: int = 8
    dynamic_sampling: DynamicSampling | None = None  # sample more prompts until enough groups are informative
    partial: Partial | None = None  # let a step's rollout stop before its longest completions end
    stream_rewards: bool = False  # score each group as soon as it is complete
    time_limit: float = 60.0  # seconds that a program may wait for anything but the engine
    strict_reruns: bool = False
    """End the run, and not only the group, where an environment answers otherwise when it is asked again."""
    mesh: jax.sharding.Mesh | None = None
    """The devices to sample on, of all hosts: each unit of them samples on its own."""
    reference: Params | None = None
    """Of the reference policy, for a rollout that draws from it. Where it moves, the parameters that a step is given
    have it as an entry of their own (`reference.REFERENCE`)."""
    hosts: Hosts = ALONE
    clock: Clock = lambda name: nullcontext()  # returns a context manager that times "sample" or "score"
    watch: Callable[[Stats], object] = lambda stats: None
    """Called with the counts of each engine, which it goes on to fill in."""
    state: Callable[[int], Mapping[str, Any]] = lambda step: state_of(step, 0, 0, 0)
    """What `trainer_state` of reward functions says in a step; see `state_of`."""
    beside: bool = False
    """Whether sampling goes on while the parameters are updated, so that the sampler needs weights of its own."""
    frozen: bool = False  # whether updates change adapters alone
    record_experts: bool = False
    """Of a mixture of experts: the batch has the experts of its tokens, for the update to replay."""


def state_of(step: int, steps: int, prompts_per_step: int, prompts: int) -> dict[str, Any]:
    """What `trainer_state` of reward functions says after `step` of a run's `steps`."""
    return {"global_step": step, "max_steps": steps, "epoch": step * prompts_per_step / max(prompts, 1)}


def check_setup(setup: Experience) -> None:
    """InputError for partial rollouts of what needs all groups of a step, and for no single reference policy."""
    if setup.partial is not None and (setup.rollout.demands.meets or setup.curriculum.columns is not None):
        part = f"rollout {setup.rollout.name}" if setup.rollout.demands.meets else "curriculum"
        by = "max_staleness leaves" if setup.beside else "oversample and segment_tokens leave"
        raise InputError(
            f"the {part} needs all groups of a step in that step, but {by} some of them to later steps: leave "
            f"{'it' if setup.beside else 'them'} out"
        )
    if setup.partial is not None and setup.rollout.population is not None:
        raise InputError(
            f"the members of the rollout {setup.rollout.name} are of one step, but partial rollouts continue their "
            "completions in others: leave these out"
        )
    if setup.rollout.demands.reference and (setup.reference is None or isinstance(setup.reference, Mixture)):
        raise InputError(
            f"the rollout {setup.rollout.name} draws from a reference policy: give its parameters, reference=..., of "
            "one model that does not change"
        )


# Before the names of their arrays in a checkpoint; those of the pool have none.
REPLAY, DRAFTS, CURRICULUM = "replay_", "drafts_", "curriculum_"


class ExperienceState(NamedTuple):
    """State of the standard source."""

    curriculum: Any
    replay: dict[str, np.ndarray]
    pool: Pool  # groups that continue in the next step
    drafts: Drafts  # completions of earlier steps, for speculation
    controls: Mapping[str, float] = MappingProxyType({})  # of the last update, see `Source.on_update`
    held: Mapping[GroupKey, Held] = MappingProxyType({})  # by the programs of the pool, on this host; not saved


def saved(state: ExperienceState) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A JSON object, and arrays by name."""
    curriculum = state.curriculum
    arrays: dict[str, np.ndarray] = {}
    if isinstance(curriculum, dict):
        arrays = {name: x for name, x in curriculum.items() if isinstance(x, np.ndarray)}
        curriculum = {name: x for name, x in curriculum.items() if name not in arrays}
    parts = {REPLAY: state.replay, CURRICULUM: arrays, DRAFTS: state.drafts.to_arrays() if state.drafts.of else {}}
    named = {prefix + name: x for prefix, part in parts.items() for name, x in part.items()}
    controls = {"controls": dict(state.controls)} if state.controls else {}
    return {"curriculum": curriculum, **controls}, (to_arrays(state.pool) if state.pool else {}) | named


def loaded(saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ExperienceState:
    """The inverse of `saved`."""

    def of(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}

    curriculum = saved["curriculum"]
    if own := of(CURRICULUM):
        curriculum = {**curriculum, **own}
    pool = {name: x for name, x in arrays.items() if not name.startswith((REPLAY, DRAFTS, CURRICULUM))}
    drafts, controls = Drafts.from_arrays(of(DRAFTS)), saved.get("controls", {})
    return ExperienceState(curriculum, of(REPLAY), from_arrays(pool), drafts, controls)
