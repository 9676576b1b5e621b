"""What changed since a checkpoint was written: settings, inputs (prompts, reward files, the model) and logs."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.reporting.logging.writers import read_jsonl
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import located, to_dict
from jaxrl_llm.utils.errors import InputError, shown

# Settings that may differ on resume: they do not affect parameters, or only those of later steps.
MAY_DIFFER = {
    "output", "steps", "epochs_of_data", "eval_patience", "eval_metric", "slots", "micro_batches",
    "mesh", "sampling_mesh", "reference_memory", "eval_every",
    "checkpoint_every", "keep_checkpoints", "replay_megabytes", "log_completions_every", "tensorboard",
    "wandb", "trackio", "mlflow",
    "reward_time_limit", "strict_reruns", "sampler_devices", "samplers", "sampler_address", "replay_order",
    "hang_seconds", "hang_factor", "hang_exit", "spike_factor", "spike_metrics", "spike_window", "spike_rollbacks",
}  # fmt: skip
# Settings that determine the parameters' structure and meaning: checked when a trained model is loaded.
PARAMETER_SETTINGS = {"model", "param_dtype", "algorithm", "critic", "adapter", "lora_rank", "lora_alpha",
                      "lora_targets", "frozen_dtype", "sink_slots"}  # fmt: skip
ACCEPT = "--accept-changed-inputs"


def settings_to_compare(config: TrainConfig, folder: str) -> dict[str, Any]:
    """The settings as a checkpoint stores them: a flat dict, with relative paths resolved against `folder`."""
    return _flat(to_dict(located(config, folder)))


def check_changes(
    before: Mapping[str, Any],
    config: TrainConfig,
    folder: str,
    digests: Mapping[str, str],
    accept: bool,
    only: Collection[str] | None = None,
) -> list[str]:
    """Compare the current settings and inputs with those of a checkpoint (`before`, with "settings" and "inputs").

    Returns a note for each change that is allowed: to settings in `MAY_DIFFER`, and to anything if `accept` is true.
    Raises InputError, naming every other change, if `accept` is false. Entries that `before` lacks are not compared.
    only: names of the settings to compare; default: all.
    """
    now, then = settings_to_compare(config, folder), before.get("settings", {})
    if only is not None:
        now, then = ({name: x for name, x in all_.items() if name in only} for all_ in (now, then))
    changed = [name for name in now if name in then and _json(now[name]) != _json(then[name])]
    changed += [name for name in then if name not in now]
    if "algorithm" in changed:  # another method has other hyper-parameters
        changed = [name for name in changed if not name.startswith("hyperparameters.")]
    notes = {name: f"{name} was {shown(then[name], 60)}, and is now {shown(now.get(name), 60)}" for name in changed}
    free = [text for name, text in notes.items() if name in MAY_DIFFER]
    fixed = [text for name, text in notes.items() if name not in MAY_DIFFER]
    inputs = before.get("inputs", {})
    fixed += [f"{name} changed" for name, digest in digests.items() if inputs.get(name, digest) != digest]
    if fixed and not accept:
        raise InputError(
            f"changed since the checkpoint was written: {'; '.join(fixed)}. Change it back, or resume anyway with "
            f"{ACCEPT}"
        )
    return [f"since the checkpoint, {text}" for text in [*free, *fixed, *larger_gradient_steps(then, now)]]


def larger_gradient_steps(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A note if a step has more completions than before and its gradient steps grew with it, though not in number.

    With the size of a gradient step and the learning rate kept, more samples a step lower the noise of how far the
    policy moves; enlarging the gradient steps instead undoes part of that (arXiv 2603.06009). Settings as
    `settings_to_compare` gives them.

    >>> larger_gradient_steps({"prompts_per_step": 4, "group_size": 4, "minibatches": 2},
    ...                       {"prompts_per_step": 16, "group_size": 4, "minibatches": 2})
    ['a step has 64 completions in place of 16, and a gradient step 32 in place of 8: --minibatches 8 keeps its size']
    """
    names = ("prompts_per_step", "group_size", "minibatches")
    if any(name not in settings for settings in (then, now) for name in names):
        return []
    (old, before), (new, after) = ((s["prompts_per_step"] * s["group_size"], s["minibatches"]) for s in (then, now))
    if new <= old or new / after <= old / before or old % before:
        return []
    size = old // before
    advice = f": --minibatches {new // size} keeps its size" if new % size == 0 else ""
    grown = f"a step has {new} completions in place of {old}, and a gradient step {new / after:g} in place of {size}"
    return [grown + advice]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def _json(value: Any) -> Any:
    """The value after a round trip through JSON: tuples become lists."""
    return [_json(entry) for entry in value] if isinstance(value, list | tuple) else value


def log_digests(files: Sequence[Path]) -> dict[str, list[int]]:
    """Size in bytes and crc32 of each log that holds anything, by its name."""
    return {file.name: [size, _crc(file, size)] for file in files if (size := _size(file))}


def log_problems(
    files: Sequence[Path], first: int, checkpoint_every: int, digests: Mapping[str, Sequence[int]], checkpoints: Path
) -> list[str]:
    """Problems with the logs of a run that resumes at step `first`; InputError if they cannot be read.

    files: metrics and completions, of one folder. digests: sizes and checksums at the checkpoint (see `log_digests`):
    each file must still begin with those bytes. Without a checkpoint (`first` is 0), logs of more than two checkpoint
    intervals mean that those in the folder `checkpoints` were lost, since a checkpoint is complete before the next but
    one is started; starting over would drop those steps.
    """
    if checkpoints.exists() and not checkpoints.is_dir():
        raise InputError(f"{checkpoints} is not a folder: put the checkpoints back; nothing was changed")
    steps = [len(read_jsonl(file)) if file.exists() else 0 for file in files]  # finds damage before it is cut off
    folder = files[0].parent
    wrong = [
        f"{folder / name} does not begin with the {size} bytes it had at the checkpoint"
        for name, (size, crc) in digests.items()
        if _size(folder / name) < size or _crc(folder / name, size) != crc
    ]
    if not first and checkpoint_every and steps[0] > 2 * checkpoint_every:
        wrong.append(
            f"{files[0]} has {steps[0]} steps, but there are no checkpoints in {checkpoints}: put them back, or start "
            "a new run in another folder"
        )
    return wrong


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _crc(path: Path, size: int) -> int:
    """crc32 of the first `size` bytes."""
    crc, left = 0, size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**24))):
            crc, left = zlib.crc32(block, crc), left - len(block)
    return crc
