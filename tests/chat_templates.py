"""The chat templates of TRL's wheel, which `make` puts into the folder `trl` of the virtual environment, with a byte
tokenizer that knows their control tokens."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(sys.prefix) / "trl" / "trl" / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TRAINING = "_training"  # the same template with marks of what is trained

_NONE = pytest.param("", marks=pytest.mark.skip("there is no TRL beside the environment: make .dev"))
each_template = pytest.mark.parametrize("name", NAMES or [_NONE])
_CONTROL = re.compile(
    r"<\|[\w ]+\|>|<\uff5c[^\uff5c<]+\uff5c>|<[a-z_]+\|>|<\|[a-z_]+>"
    r"|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]|</?(?:think|tool_\w+|s)>"
)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer with a template of TRL. Tags of thoughts and calls are added tokens that are not special."""
    return tokenizer_with((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A byte tokenizer with a chat template, and what the template writes as control tokens."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>")
    for text in sorted(set(_CONTROL.findall(template or ""))):
        special = not re.search("think|tool_", text)
        made.add_tokens([AddedToken(text, special=special, normalized=False)], special_tokens=special)
    made.chat_template = template
    return made
