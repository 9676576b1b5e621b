"""`save_policy`: a model as a Hugging Face folder, written atomically."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.checks import check_params, check_policy
from jaxrl_llm.models.families import to_hf
from jaxrl_llm.models.io.folders import check_output, write_json, written_whole
from jaxrl_llm.models.io.huggingface import to_tensors
from jaxrl_llm.models.io.unread import Unread
from jaxrl_llm.models.kinds import json_object, reason, shown
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


def save_policy(
    directory: str | Path,
    policy: Policy,
    params: Params,
    tokenizer: Any = None,
    *,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    unread: Unread | None = None,
) -> Path:
    """Write a Hugging Face folder: config.json, safetensors in the dtype of the parameters, the tokenizer.

    transformers loads it, and `load_policy` or `load_reward_model` reads back equal parameters. Files of more than
    `shard_bytes` are split. Adapters (`lora`) are merged into the weights. unread: what `load_policy` did not read of
    the model's files, as `io.load.read_unread` gives it, which is written unchanged, beside weights with the names that
    they have there.

    The folder must be new or empty; with `overwrite` a model in it is replaced. A run's folder never is, nor are files
    that are not of a model. It is written beside its place and then renamed: a process that is killed leaves what was
    there, or the new model. Raises InputError for a folder that may not be written, a full disk, parameters that are
    not this policy's or hold NaN, and arguments of other types; what was there then stays.
    """
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise InputError(f"shard_bytes is {shown(shard_bytes)}, but must be a whole number of at least 1")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise InputError(f"the tokenizer is {shown(tokenizer)}, but must be a transformers tokenizer, or None")
    check_policy(policy)
    check_params(policy, params)
    folder = check_output(directory, overwrite)
    raw, merged = to_hf(policy.config, jax.tree.leaves(params["embed"])[0].dtype.name), merge(params)
    padding = getattr(tokenizer, "pad_token_id", None)
    if policy.config.score is None and padding is not None and padding < policy.config.vocab_size:
        raw["pad_token_id"] = padding
    tensors = to_tensors(merged, policy.config)
    generation = {name: raw[name] for name in ("bos_token_id", "eos_token_id")}
    if unread is not None:
        raw = unread.settings_of(raw)
        tensors = {unread.name_of(name): value for name, value in tensors.items()}
        tensors |= {name: read() for name, read in unread.tensors.items()}
    with written(folder, overwrite, "model") as new:
        write_json(new / "config.json", raw)
        write_json(new / "generation_config.json", generation)
        _write_weights(new, tensors, shard_bytes)
        for file in () if unread is None else unread.files:
            shutil.copyfile(file, new / file.name)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
            settings = json_object(path) if (path := new / "tokenizer_config.json").exists() else {}
            if settings.get("tokenizer_class") == "TokenizersBackend":  # its name in transformers 5, which knows both
                write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
        for file in new.glob("*.safetensors"):  # safetensors makes them readable by the owner alone
            shutil.copymode(new / "config.json", file)
    return folder


@contextmanager
def written(folder: Path, overwrite: bool, what: str) -> Iterator[Path]:
    """`written_whole`, in which any error is an InputError."""
    try:
        with written_whole(folder, overwrite) as new:
            yield new
    except InputError:
        raise
    except Exception as error:  # safetensors, tokenizers and transformers each have errors of their own for a full disk
        raise InputError(
            f"the {what} cannot be written to {folder} ({reason(error)}); nothing there was changed: "
            "free some space, or choose another folder"
        ) from error


def _write_weights(folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int) -> None:
    """Write safetensors, split into files of at most `shard_bytes` where they are larger, with an index."""
    from safetensors.numpy import save_file

    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, value in tensors.items():
        size += value.nbytes
        if shards[-1] and size > shard_bytes:
            shards.append({})
            size = value.nbytes
        shards[-1][name] = value
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(shard, file)
    total = sum(x.nbytes for x in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": place})
