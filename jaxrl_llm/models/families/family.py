"""What a family of models is: how a config.json spells its settings, and how its files name and arrange weights.

Of all families `quantization_config` says how a model's files store weights in fewer bits than floats have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_llm.models.config import LayerKind, ModelConfig
from jaxrl_llm.models.config.checks import LAYER_TYPES
from jaxrl_llm.models.config.rope import rope_to_hf
from jaxrl_llm.models.kinds import Kind, check, list_of, one_of, or_null, shown, whole
from jaxrl_llm.utils.errors import InputError

FP8, MXFP4 = "fp8", "mxfp4"
_BLOCK = Kind("two whole numbers of at least 1", lambda x: list_of(whole(1)).test(x) and len(x) == 2)
_SETTINGS = {
    "weight_block_size": or_null(_BLOCK),
    "fmt": or_null(one_of("e4m3")),
    "expert_dtype": or_null(one_of("fp8")),
    "scale_fmt": or_null(one_of("float", "ue8m0")),
}

Values = dict[str, Any]  # the settings of a file, and what transformers takes for those that it leaves out
FULL, SLIDING = LAYER_TYPES


class Tensor(NamedTuple):
    """A tensor of a model's files: its name, the weights that it holds, and how they lie in it.

    name: {layer} and {expert} stand for their numbers; a name of a layer's weight begins after "model.layers.{layer}.".
    Where weights have experts and the name has not, the tensor has an axis of them. weights: by the names of
    `parameters.TABLE`; several lie one after another along their outputs.
    """

    name: str
    weights: tuple[str, ...]
    by_head: bool = False  # several weights: those of a head next to each other, head after head
    alternate: bool = False  # several weights: an output of each in turn
    outputs_first: bool = True  # a projection is [outputs, inputs]


class Family(NamedTuple):
    """One value of `model_type`. Functions get `Values`."""

    architecture: str  # in Hugging Face's config.json
    gguf: str  # general.architecture; "" where such files are not read
    defaults: Mapping[str, Any]
    read: Callable[[Values, str], dict[str, Any]]  # fields of `ModelConfig` besides the common ones; the file's name
    write: Callable[[ModelConfig], dict[str, Any]]  # settings besides the common ones
    types: Callable[[Values, str], Sequence[str]]  # of layers, of LAYER_TYPES
    thetas: Callable[[Values], Mapping[str, float]] | None  # by type; None: all layers have one rotation
    settings: Mapping[str, Kind]  # of which settings may be what, besides the common ones
    tensors: tuple[Tensor, ...]  # that differ from Llama's
    others: tuple[Tensor, ...]  # in place of some of them, in files of other versions
    prefixes: tuple[str, ...]  # of names of the tensors, instead of none, in checkpoints with more than this model
    skipped: tuple[str, ...]  # beginnings of the names of tensors that are no part of the language model
    partial: bool  # whether heads may be rotated in part
    unwritten: tuple[str, ...]  # common settings that its config.json has not
    spelled: Mapping[str, str]  # common settings by another name in its config.json


def family(
    architecture: str, gguf: str = "", *, read: Any = None, write: Any = None, types: Any = None, thetas: Any = None,
    settings: Mapping[str, Kind] | None = None, tensors: tuple[Tensor, ...] = (), others: tuple[Tensor, ...] = (),
    prefixes: tuple[str, ...] = (), skipped: tuple[str, ...] = (), partial: bool = False,
    unwritten: tuple[str, ...] = (), spelled: Mapping[str, str] | None = None, **defaults: Any,
) -> Family:  # fmt: skip
    """A family that is Llama but for what is given. defaults: of settings."""
    usual = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    return Family(
        architecture, gguf, MappingProxyType(usual | defaults), read or (lambda raw, where: {}),
        write or (lambda config: {}), types or all_alike, thetas, settings or {}, tensors, others, prefixes, skipped,
        partial, unwritten, spelled or {},
    )  # fmt: skip


def all_alike(raw: Values, where: str) -> list[str]:
    """All layers have a window where there is a setting of it, or none does."""
    return [SLIDING if raw.get("sliding_window") else FULL] * raw["num_hidden_layers"]


def full(raw: Values, where: str) -> list[str]:
    """No layer has a window."""
    return [FULL] * raw["num_hidden_layers"]


def types_of(raw: Values, where: str, otherwise: Callable[[int], bool], wanted: str = "") -> list[str]:
    """The file's `layer_types`; for a file without, the layers slide for which `otherwise` of their number is true."""
    types, layers, window = raw.get("layer_types"), raw["num_hidden_layers"], raw.get("sliding_window")
    if types:
        if SLIDING in types and not window:
            raise InputError(f"{where}: layer_types names sliding_attention, but sliding_window is not given{wanted}")
        return list(types)
    return [SLIDING if window and otherwise(layer) else FULL for layer in range(layers)]


def biases(raw: Values) -> dict[str, bool]:
    """The biases of attention, fields of `ModelConfig`."""
    bias = bool(raw.get("attention_bias"))
    return {"attention_bias": bias, "output_bias": bias}


def dense_and_sparse(sparse: Sequence[bool], size: int, **own: bool) -> dict[str, Any]:
    """The fields of `ModelConfig` for layers of which some have experts. size, own: of those that have none."""
    dense = {"num_experts": 0, "experts_per_token": 0, "shared_size": 0, "intermediate_size": size, **own}
    kinds = LayerKind("dense", tuple(sorted(dense.items()))), LayerKind("experts")
    return {"kinds": kinds, "kind_of_layer": tuple(map(int, sparse))}


def stacked_experts(gate_up: str, down: str) -> tuple[Tensor, ...]:
    """Experts as transformers 5 saves them: one tensor for all, gate and up together."""
    return Tensor(gate_up, ("gate", "up")), Tensor(down, ("down",))


def softcaps(raw: Values) -> dict[str, float]:
    """The soft caps of attention and of the logits, fields of `ModelConfig`."""
    names = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {field: float(raw.get(name) or 0.0) for field, name in names.items()}


def sliding(config: ModelConfig) -> list[bool]:
    """Which layers have a window."""
    return [window > 0 for window in config.window_of_layer]


def layer_types(config: ModelConfig) -> list[str]:
    """The list `layer_types` of a config.json."""
    return [SLIDING if slides else FULL for slides in sliding(config)]


def ropes_by_type(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` by type of layer."""
    return dict(zip(LAYER_TYPES, map(rope_to_hf, config.ropes), strict=True))


def number_or_whole(x: float) -> float | int:
    """A whole number as an int, if x is one but for rounding."""
    return round(x) if abs(x - round(x)) < 1e-6 * max(1.0, abs(x)) else x


# Settings that leave logits as they are: of training, generation, files and libraries, and of layers that are skipped.
NEUTRAL = frozenset((
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path",
    "auto_map", "task_specific_params", "tokenizer_class", "use_cache", "cache_implementation", "use_bfloat16",
    "torchscript", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "dropout", "initializer_range", "initializer_factor", "router_aux_loss_coef",
    "aux_loss_alpha", "seq_aux", "router_jitter_noise", "pretraining_tp", "ep_size", "pad_token_id", "sep_token_id",
    "cls_token_id", "mask_token_id", "unk_token_id", "decoder_start_token_id", "id2label", "label2id", "num_labels",
    "step_separator", "problem_type", "is_decoder", "is_encoder_decoder", "add_cross_attention",
    "chunk_size_feed_forward", "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "unsloth_fixed",
    "unsloth_version",
))  # fmt: skip


class RecordingSettings(dict[str, Any]):
    """Settings that remember which of them were looked at, also through copies with others added (`|`)."""

    def __init__(self, settings: Mapping[str, Any], seen: set[str] | None = None) -> None:
        super().__init__(settings)
        self.seen = set[str]() if seen is None else seen

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dictionary."""
        self.seen.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.seen.add(str(name))
        return super().__contains__(name)

    def __or__(self, other: Any) -> RecordingSettings:  # type: ignore[override]
        return RecordingSettings(dict(self) | other, self.seen)

    def unread(self, known: frozenset[str]) -> tuple[str, ...]:
        """The settings that have a value, were not looked at, and are not known, in order."""
        return tuple(sorted(name for name, value in self.items() if value and name not in self.seen | known))


class Quantisation(NamedTuple):
    """How quantised tensors are stored; which ones are is seen in the files."""

    method: str  # FP8 or MXFP4
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: all of a matrix

    def __str__(self) -> str:
        return f"{self.method}, blocks of {self.block[0]} x {self.block[1]}" if self.block else self.method


def quantisation_of(raw: Mapping[str, Any], where: str) -> Quantisation | None:
    """What the settings of a language model say of its weights; None for floats.

    Read are "mxfp4" (gpt-oss) and "fp8" (E4M3 with a scale for each block, as of DeepSeek-V3 and Qwen's FP8 models, or
    for each matrix). InputError, in one line, for others. Source: transformers' `Mxfp4Config` and
    `FineGrainedFP8Config`.
    """
    found = raw.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method", "unknown")
    if method == MXFP4:
        return Quantisation(MXFP4)
    if method != FP8:
        raise InputError(
            f"{where}: weights that are quantised ({shown(method)}) are not read, but only {FP8} and {MXFP4}: give the "
            "original model"
        )
    check(found, _SETTINGS, where, "quantization_config.")
    block = found.get("weight_block_size", (128, 128))
    return Quantisation(FP8, None if block is None else (block[0], block[1]))
