"""Going back to the last checkpoint where a step is a loss spike.

PaLM (2204.02311, section 5.1) restarted from a checkpoint some 100 steps before each spike and skipped 200 to 500
batches: spikes came of certain batches at certain parameters, not of bad data. Here, too, parameters, optimiser and the
method's memory go back, and the batches since are skipped: the prompts go on. What differs: a robust bound decides
(`loss_spikes`), not a person; the checkpoint is the last one; and steps are counted on, so that no random numbers and
no lines of the logs come twice. A resumed run repeats all of it, bit by bit.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax

from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.health.goodput import Clock, useful
from jaxrl_llm.training.health.loss_spikes import Rule, judge
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.state import LoopState, RunState, restored_state, shapes_of


class Judged(NamedTuple):
    """What comes of a step."""

    state: RunState  # to go on from
    metrics: Mapping[str, float] = MappingProxyType({})
    notes: Sequence[str] = ()  # to print


def undo_spike(
    config: TrainConfig, parts: RunParts, state: RunState, loop: LoopState, checkpoints: Checkpoints, clock: Clock
) -> Judged:
    """Go back to the last checkpoint if step `loop.step` is a spike.

    state: after that step, whose metrics are `loop.feedback`. If the step is undone its parameters and moments are
    deleted, so that there are never two copies, and the loop's feedback is as of the checkpoint.
    """
    rule = Rule(config.spike_metrics, config.spike_factor, config.spike_window, config.spike_rollbacks)
    there, number = bool(checkpoints.steps()), f"step {loop.step + 1}"
    loop.spikes, spike, undo = judge(loop.spikes, loop.step, loop.feedback, rule, undoable=there)
    if not undo:
        why = f"{rule.rollbacks} in {rule.window} steps were" if there else "there is no checkpoint to go back to"
        return Judged(state, {"rollback": 0.0}, [f"{number}: {spike}; not rolled back: {why}"] if spike else [])
    with clock("checkpoint"):
        checkpoints.wait()
        shapes = shapes_of(state)
        jax.tree.map(lambda x: x.delete(), state.train)
        restored = checkpoints.latest(*shapes)
    assert restored is not None  # `latest` raises InputError where none can be used
    loop.feedback = restored.meta["feedback"]
    loop.undone = restored.meta.get("undone", 0.0) + useful(clock.seconds) - useful(restored.meta["seconds"])
    note = f"{number}: {spike}; going back to the checkpoint of step {restored.step}, and on with the next prompts"
    return Judged(restored_state(restored, state.source), {"rollback": 1.0}, [note])
