"""The standard source of batches, made from the configuration, and embeddings of prompts for curricula."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.core.source import Curriculum, Source, Step
from jaxrl_llm.curriculum.embedded import EMBEDDING, FromEmbeddings
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.hosts import Hosts, to_numpy
from jaxrl_llm.distributed.mesh import to_device, to_mesh
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.scores import pooled_states
from jaxrl_llm.replay.base import Swarm
from jaxrl_llm.replay.disk import is_available, on_disk
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rollouts.asynchronous.source import asynchronous
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Clock, Experience, state_of
from jaxrl_llm.rollouts.runtime.sources import no_replay, shuffled_epochs
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.asynchrony import asynchrony_of, samplers_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of, strategy_of
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.source.swarm import swarm_source
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.starting import phase
from jaxrl_llm.utils.storage import is_url

OfRows = Callable[[Sequence[dict[str, Any]]], Curriculum]  # makes it from the training rows


def source_of(
    config: TrainConfig, parts: RunParts, clock: Clock, curriculum: OfRows | None = None,
    watch: Callable[[Stats], object] = lambda stats: None,
) -> Source:  # fmt: skip
    """The `Source` of a run: curriculum, rollouts, rewards, replay. watch: see `Experience`.

    curriculum: instead of the method's, which are shuffled epochs by default.
    """
    algorithm = parts.algorithm
    if isinstance(algorithm.replay, Swarm):
        return swarm_source(
            config, parts, algorithm.replay, lambda given, alone: source_of(given, alone, clock, curriculum, watch)
        )
    replay = algorithm.replay or no_replay()
    if parts.hosts.count == 1 and not is_url(config.output) and is_available():
        folder, above = Path(config.output) / "replay", config.replay_megabytes * 10**6
        replay = on_disk(replay, folder, above, config.keep_checkpoints)
    setup = experience_of(
        config, algorithm, parts.policy, parts.prompts, parts.rewards, parts.sampler, parts.hosts, curriculum,
        replay=replay, reference=parts.first_reference, clock=clock, watch=watch,
    )  # fmt: skip
    if not config.max_staleness:
        return experience(setup)
    return asynchronous(setup, asynchrony_of(config, parts), samplers_of(config, parts))


def experience_of(
    config: TrainConfig, algorithm: Algorithm, policy: Policy, prompts: PromptSet, rewards: Sequence[Reward],
    mesh: jax.sharding.Mesh, hosts: Hosts, curriculum: OfRows | None = None, **more: Any,
) -> Experience:  # fmt: skip
    """The configuration of a run's standard source. more: further fields of it."""
    rows = prompts.rows
    order = (algorithm.prompts or shuffled_epochs)(rows, config.seed) if curriculum is None else curriculum(rows)
    return Experience(
        policy, prompts, rewards, order, config.sampling, rollout_of(config, algorithm), mesh=mesh, hosts=hosts,
        prompts_per_step=config.prompts_per_step, group_size=config.group_size,
        dynamic_sampling=algorithm.resampling, partial=strategy_of(config, algorithm),
        stream_rewards=config.stream_rewards, time_limit=config.rollout_time_limit, strict_reruns=config.strict_reruns,
        state=lambda step: state_of(step, config.steps, config.prompts_per_step, len(rows)),
        frozen=bool(config.adapts), record_experts=algorithm.routing == "rollout", **more,
    )  # fmt: skip


def timed(source: Source, clock: Clock) -> Source:
    """The source with its time counted as sampling, but for what it times itself."""

    def following(*arguments: Any) -> tuple[Step, Any]:
        with clock("sample"):
            return source.next(*arguments)

    return source._replace(next=following)


TOKENS = 16_384  # of a batch of prompts, about


def with_embeddings(config: TrainConfig, parts: RunParts, params: Params, curriculum: OfRows | None) -> OfRows | None:
    """What makes the run's curriculum; where the method's reads embeddings, from rows that have them.

    params: the initial ones, from which a resumed run computes the same embeddings again. curriculum: instead of the
    method's, returned as it is. On several hosts all must call this. InputError for prompts that are read as they are
    drawn.
    """
    make = parts.algorithm.prompts
    if curriculum is not None or not isinstance(make, FromEmbeddings):
        return curriculum
    if not isinstance(parts.prompts.rows, list | tuple):
        raise InputError(
            "the curriculum reads an embedding of every prompt, but prompts are read as they are drawn: use fewer "
            "prompts, or a file that is loaded as a whole"
        )
    with phase("embed the prompts"):
        table = prompt_embeddings(parts, combine(parts.frozen, without_critic(params)), make.pieces)
    return lambda rows: make([{**row, EMBEDDING: own} for row, own in zip(rows, table, strict=True)], config.seed)


def prompt_embeddings(parts: RunParts, params: Params, pieces: int) -> np.ndarray:
    """f32[P, pieces, D]: `pooled_states` of the run's prompts."""
    prompts = parts.prompts
    shards = row_shards(parts.mesh)
    sizes = np.array([len(ids) for ids in prompts.ids])
    order = np.argsort(sizes, kind="stable")
    table = np.zeros((len(sizes), pieces, parts.policy.config.hidden_size), np.float32)
    first = 0
    while first < len(order):
        # The batch ends there at the latest: its first prompt is its shortest, and fewer of longer ones fit.
        end = min(first + _rows(int(sizes[order[first]]), shards), len(order))
        length = _length(int(sizes[order[end - 1]]))
        rows = _rows(length, shards)
        chosen = order[first : first + rows]
        tokens, real = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
        for row, place in enumerate(np.resize(chosen, rows).tolist()):  # those beyond them repeat prompts
            ids = prompts.ids[place]
            tokens[row, : len(ids)], real[row, : len(ids)] = ids, True
        found = _pooled(parts.policy, params, *to_mesh((tokens, real), parts.mesh), pieces)
        table[chosen] = np.asarray(to_numpy(found, parts.mesh))[: len(chosen)]
        first += rows
    return table


@compiled(static_argnames=("policy", "pieces"))
def _pooled(policy: Policy, params: Params, tokens: jax.Array, real: jax.Array, pieces: int) -> jax.Array:
    return pooled_states(policy, to_device(params), tokens, real, pieces)


def _length(size: int) -> int:
    """Of a batch whose longest prompt has `size` tokens: few lengths, so that few programs are compiled."""
    return bucket(size, 16, 1)


def _rows(length: int, shards: int) -> int:
    """How many prompts of this length a batch has: a multiple of `shards`."""
    return max(TOKENS // _length(length) // shards, 1) * shards
