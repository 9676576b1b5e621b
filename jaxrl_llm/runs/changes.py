"""What has changed since a checkpoint was written: settings, prompts, rewards' files, the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.runs.config import TrainConfig, located, to_dict

# Settings that a run may go on with when they are others: they change no parameter, or only what comes after.
FREE = {
    "output", "steps", "slots", "micro_batches", "reference_memory", "eval_every", "checkpoint_every",
    "keep_checkpoints", "log_completions_every", "tensorboard", "wandb", "reward_time_limit",
}  # fmt: skip
# What the parameters are made of: all that counts for who only uses them.
OF_PARAMETERS = {"model", "param_dtype", "algorithm", "critic", "lora_rank", "lora_alpha", "lora_targets"}
ACCEPT = "--accept-changed-inputs"


def settings_to_compare(config: TrainConfig, folder: str) -> dict[str, Any]:
    """The settings as a checkpoint keeps them: by name, sections flat, with paths as seen from `folder`."""
    return _flat(to_dict(located(config, folder)))


def check_changes(
    before: Mapping[str, Any],
    config: TrainConfig,
    folder: str,
    digests: Mapping[str, str],
    accept: bool,
    only: Collection[str] | None = None,
) -> list[str]:
    """Compare a checkpoint's record (`before`: its "settings" and "inputs") with what there is now.

    Returns what is to be said: settings that may change, and all else where `accept` is true. Raises InputError, which
    names everything that has changed, where it is false. What the record does not have is not compared; only: names of
    the settings to compare, by default all.
    """
    now, then = settings_to_compare(config, folder), before.get("settings", {})
    if only is not None:
        now, then = ({name: x for name, x in all_.items() if name in only} for all_ in (now, then))
    changed = [name for name in now if name in then and _json(now[name]) != _json(then[name])]
    changed += [name for name in then if name not in now]
    if "algorithm" in changed:  # another method has other hyper-parameters
        changed = [name for name in changed if not name.startswith("hyperparameters.")]
    said = {name: f"{name} was {shown(then[name], 60)}, and is now {shown(now.get(name), 60)}" for name in changed}
    free = [text for name, text in said.items() if name in FREE]
    fixed = [text for name, text in said.items() if name not in FREE]
    inputs = before.get("inputs", {})
    fixed += [f"{name} changed" for name, digest in digests.items() if inputs.get(name, digest) != digest]
    if fixed and not accept:
        raise InputError(
            f"not as when the checkpoint was written: {'; '.join(fixed)}. Set it back, or go on all the same with "
            f"{ACCEPT}"
        )
    return [f"since the checkpoint, {text}" for text in [*free, *fixed]]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def _json(value: Any) -> Any:
    """A value as JSON gives it back."""
    return [_json(entry) for entry in value] if isinstance(value, list | tuple) else value
