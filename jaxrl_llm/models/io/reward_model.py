"""`load_reward_model`: models for sequence classification; `save.save_policy` is the way back."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.families import score_head
from jaxrl_llm.models.io.folders import DEMO_MODEL
from jaxrl_llm.models.io.huggingface import SCORE, open_folder
from jaxrl_llm.models.io.load import Shardings, begin_loading, folder_of_hub, logger, read_folder, read_settings
from jaxrl_llm.models.kinds import path_of, shown
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


def load_reward_model(
    path_or_name: str | Path,
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = None,
    remat: Remat = True,
    shardings: Shardings | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
) -> tuple[Policy, Params, Any]:
    """Read a reward model, or another classifier of sequences: (model, params, tokenizer); see `Policy.scores`.

    path_or_name: a Hugging Face folder for sequence classification (score.weight) of any family that `load_policy`
    reads, or its name on the hub. Its labels and the id of padding are in `model.config.score`. The other arguments are
    those of `load_policy`; `save_policy` writes such a folder again.

    Raises InputError as `load_policy`, and for a model without such scores.
    """
    dtype, kept = begin_loading(dtype, param_dtype, remat)
    folder, raw, config = read_scoring(path_or_name)
    found = read_folder(folder, raw, config, dtype, kept, remat, shardings, adapter, keep=None, context=context)
    model, params, tokenizer = found
    pad = config.score.pad_token_id if config.score else None
    if pad is None:
        logger.warning("%s: no pad_token_id, so a row's last token is scored, whichever it is", folder)
    elif pad in model.config.eos_token_ids:
        logger.warning(
            "%s: pad_token_id %d is an end token: where a row ends with it, the token before it is scored", folder, pad
        )
    return model, params, tokenizer


def is_scoring(path_or_name: str | Path) -> bool:
    """Whether a local folder has the scores of a reward model."""
    return os.path.isdir(path_or_name) and SCORE in open_folder(Path(path_or_name))


def read_scoring(path_or_name: str | Path) -> tuple[Path, dict[str, Any], ModelConfig]:
    """A reward model's folder, the settings in it and the model that they describe, without its weights. InputError."""
    path, name = path_of(path_or_name, "the reward model"), str(path_or_name)
    if name == DEMO_MODEL or name.endswith(".gguf"):
        raise InputError(f"{name} is a language model: give a Hugging Face folder for sequence classification")
    folder = path if os.path.isdir(path) else folder_of_hub(name)
    raw, config = read_settings(folder)
    if SCORE not in open_folder(folder):
        named = raw.get("architectures") or ["unknown"]
        raise InputError(
            f"{folder} has no {SCORE} (architecture {shown(named[0])}): give a model for sequence classification"
        )
    return folder, raw, dataclasses.replace(config, score=score_head(raw, str(folder / "config.json")))
