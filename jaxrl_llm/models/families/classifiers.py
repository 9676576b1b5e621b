"""Settings of models for sequence classification: what a config.json says of their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.groups import ScoreHead
from jaxrl_llm.models.families.family import Family
from jaxrl_llm.models.kinds import SECTION, TEXT, check, given, or_null, shown, whole
from jaxrl_llm.utils.errors import InputError

SETTINGS = {
    "id2label": or_null(SECTION), "num_labels": or_null(whole(1, 2**16)), "pad_token_id": or_null(whole(-1)),
    "step_separator": or_null(TEXT),
}  # fmt: skip
LABELS = 2  # of a config.json that does not say, as transformers leaves its own default out


def read_score_head(raw: Mapping[str, Any], family: Family, where: str) -> ScoreHead:
    """The scores of a config.json: labels by `id2label`, or `num_labels` without names, the id of padding, and our own
    `step_separator` of a process reward model.

    InputError for labels whose numbers are not 0, 1 ..., and settings of other types.
    """
    check(raw, SETTINGS, where)
    pad = raw["pad_token_id"] if "pad_token_id" in raw else family.defaults.get("pad_token_id")
    names = raw.get("id2label") or {str(n): f"LABEL_{n}" for n in range(given(raw, "num_labels", LABELS))}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise InputError(f"{where}: id2label is {shown(names)}, but must number its labels from 0 on")
    labels = tuple(str(names[str(number)]) for number in range(len(names)))
    return ScoreHead(labels, pad, raw.get("step_separator"))


def write_score_head(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The settings of a classifier from which `read_score_head` makes its scores again; {} of a language model."""
    if config.score is None:
        return {}
    text = "Text" * config.family.endswith("_text")  # of families that have models with towers too
    labels, separator = config.score.labels, config.score.step_separator
    return {
        "architectures": [family.architecture.replace("ForCausalLM", f"{text}ForSequenceClassification")],
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
        "pad_token_id": config.score.pad_token_id,
        **({} if separator is None else {"step_separator": separator}),
    }
