"""Log-probabilities of given responses under the initial policy, computed once and kept on disk.

A row's are found by its tokens, in a file of the cache folder whose name is a digest of the model and of how it
computes, so that runs with other methods, settings or further rows of data share them.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.core.source import Source, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed.hosts import to_numpy
from jaxrl_llm.distributed.mesh import to_mesh
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.evaluation.evaluate_given import score_given_rows
from jaxrl_llm.training.full_size import at_full_size
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.errors import InputError, several
from jaxrl_llm.utils.process import default_cache_folder

logger = logging.getLogger("jaxrl_llm.training")
NEED = "reference_logp"
Table = Mapping[bytes, np.ndarray]  # digest of a row -> f32 of its actions


def with_kept_reference(config: TrainConfig, parts: RunParts, params: Params) -> RunParts:
    """The parts with a function that fills in what is known of the reference; unchanged unless it is kept on disk.

    params: the initial ones. What the file lacks of the rows is computed and added to it. On several hosts all must
    call this.
    """
    if config.reference_memory != "disk" or NEED not in parts.algorithm.needs:
        return parts
    how = [parts.digests["the model's weights"], config.dtype, config.activations, str(config.context_tokens)]
    how += [config.param_dtype, config.frozen_dtype, config.weight_dtype if config.same_rounding else ""]
    name = hashlib.sha256("\n".join(how).encode()).hexdigest()[:32]
    file = default_cache_folder().parent / "reference" / f"{name}.npz"
    table = parts.hosts.gather(_read(file) if parts.hosts.first else {})[0]
    before, reference = len(table), combine(parts.frozen, without_critic(params))
    for batch in _batches(config, parts, reference):
        if any(key not in table for key in _keys(batch)):
            table |= _computed(config, parts, reference, batch)
    rows = several(len(table) - before, "row")
    logger.info("log-probabilities under the initial policy: %s computed, others were in %s", rows, file)
    if parts.hosts.first and len(table) > before:
        _write(file, table)
    return parts._replace(kept=lambda batch: _filled(table, batch))


def of_source(source: Source, parts: RunParts) -> Source:
    """The source, whose batches have what is kept."""

    def following(*arguments: Any) -> tuple[Step, Any]:
        found, state = source.next(*arguments)
        return found._replace(scored=found.scored._replace(batch=parts.kept(found.scored.batch))), state

    return source._replace(next=following)


def _batches(config: TrainConfig, parts: RunParts, reference: Params) -> Iterator[Trajectories]:
    """All rows of the run, held-out ones too, in batches of a step's size."""
    for prompts in (parts.prompts, parts.held_out):
        for first in range(0, 0 if prompts is None else len(prompts.ids), config.prompts_per_step):
            assert prompts is not None
            places = np.arange(first, min(first + config.prompts_per_step, len(prompts.ids)))
            yield score_given_rows(config, parts, prompts, places, reference).batch


def _computed(config: TrainConfig, parts: RunParts, reference: Params, batch: Trajectories) -> Table:
    """What the initial policy says of a batch, in slices as the updates have."""
    whole = at_full_size(batch, config.prompts_per_step * config.group_size, config.group_size)
    steps = plan_steps(
        whole, minibatches=config.minibatches, micro_batches=config.micro_batches, mesh=parts.mesh,
        runs=parts.policy.config.recurrent,
    )  # fmt: skip
    found = provide(parts.policy, frozenset({NEED}), reference, reference, to_mesh(whole, parts.mesh), steps)
    logp, action = np.asarray(to_numpy(found.reference_logp, parts.mesh)), np.asarray(batch.action_mask)
    return {key: logp[row][action[row]] for row, key in enumerate(_keys(batch))}


def _filled(table: Table, batch: Trajectories) -> Trajectories:
    action = np.asarray(batch.action_mask)
    out = np.zeros(action.shape, np.float32)
    for row, key in enumerate(_keys(batch)):
        if key not in table:
            raise InputError("a response was not among the data set's when the run began: leave out reference_memory")
        out[row, action[row]] = table[key]
    return batch.replace(reference_logp=out)


def _keys(batch: Trajectories) -> list[bytes]:
    """A digest of each row's tokens, of which of them are actions, and of its temperature."""
    tokens, real, action = (np.asarray(x) for x in (batch.tokens, batch.token_mask, batch.action_mask))
    temperature = np.ones(len(tokens)) if batch.temperature is None else np.asarray(batch.temperature)
    rows = zip(tokens, real, action, temperature.astype(np.float32), strict=True)
    texts = (np.stack([ids[of], acts[of]]).astype(np.int32).tobytes() + heat.tobytes() for ids, of, acts, heat in rows)
    return [hashlib.sha256(text).digest()[:16] for text in texts]


def _read(file: Path) -> Table:
    """The table in a file; nothing where there is none, or it is damaged."""
    try:
        with np.load(file) as found:
            keys, ends, logp = (found[name] for name in ("keys", "ends", "logp"))
        return dict(zip(map(bytes, keys), np.split(logp, ends[:-1]), strict=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read, and is written anew: %s", file, error)
        return {}


def _write(file: Path, table: Table) -> None:
    """Write it whole or not at all; a warning where it cannot be written."""
    new = file.with_name(f"{file.stem}.{os.getpid()}.npz")
    keys = np.frombuffer(b"".join(table), np.uint8).reshape(-1, 16)
    ends = np.cumsum([len(one) for one in table.values()])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(new, keys=keys, ends=ends, logp=np.concatenate([*table.values()]))
        os.replace(new, file)
    except OSError as error:
        logger.warning("what the initial policy says of the data is not kept: %s", error)
