"""Settings of a config.json that the reading of a family does not look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
