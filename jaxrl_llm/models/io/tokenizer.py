"""A model's tokenizer: more tokens, such as tags that choose how the model answers, and a digest of it."""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.models.io.load import with_tokenizer
from jaxrl_llm.models.kinds import shown
from jaxrl_llm.models.parameters import weights
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError

ROWS = 64  # where the vocabulary grows, it grows to a multiple of this, so that it still divides over devices


def with_added_tokens(
    policy: Policy, params: Params, tokenizer: Any, tokens: Sequence[str]
) -> tuple[Policy, Params, Any]:
    """The policy, parameters and tokenizer with each of these texts as one token, which is not a special one.

    A text that is in the vocabulary keeps its id. The others take ids after the last one that the tokenizer has: rows
    of the vocabulary's padding where there are some, else new rows. Their embeddings, in the output head too, are the
    mean of those before. params: without adapters, `lora.merge` them. The arguments are not changed.

    Raises InputError for texts that are empty or have white space around them, and for a tokenizer that does not keep
    them whole.
    """
    from tokenizers import AddedToken  # the core imports without it

    for text in tokens:
        if not isinstance(text, str) or not text or text.strip() != text:
            raise InputError(f"a token to add is {shown(text)}, but must be a text without white space around it")
    tokenizer, known, size = copy.deepcopy(tokenizer), policy.config.known_tokens, policy.config.vocab_size
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in tokens])
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    for text, number in zip(tokens, ids, strict=True):
        if number not in tokenizer.encode(f"a{text}b", add_special_tokens=False):
            raise InputError(f"the tokenizer does not keep the added token {shown(text)} whole: choose another text")
    count = max([known - 1, *ids]) + 1
    if count > size:
        size = -(-count // ROWS) * ROWS
    out = dict(params)
    for (name, *_), weight in weights(policy.config).items():
        if weight.axes[0] == "vocabulary":
            rows = params[name][:known]
            mean = jnp.mean(rows, axis=0, keepdims=True, dtype=jnp.float32).astype(rows.dtype)
            fresh = jnp.repeat(mean, count - known, axis=0)
            old = params[name][count:]
            padding = jnp.zeros((size - count - old.shape[0], *rows.shape[1:]), rows.dtype)
            out[name] = jnp.concatenate([rows, fresh, old, padding])
    config = dataclasses.replace(policy.config, vocab_size=size, num_tokens=0)
    return with_tokenizer(dataclasses.replace(policy, config=config), tokenizer), out, tokenizer


# Texts that tokenizers split and normalise in different ways: their tokens tell merges and rules apart.
_PROBE = (
    "The quick brown fox's 12345.678 + 9 = x**2;\n\n\tdef f(a_b):  return [a, B]\r\n",
    "na\u00efve e\u0301 \u65e5\u672c\u8a9e \U0001f642 don't HE'LL <b>&amp;</b> \\frac{1}{2}  ",
)


def tokenizer_digest(tokenizer: Any) -> str:
    """A SHA-256 of a tokenizer, 64 hexadecimal digits: vocabulary, added and special tokens, chat template, and how it
    splits a few texts. It is equal in every process; what a call sets, such as padding, does not count, nor does the
    library's version.
    """
    kept: dict[str, Any] = {}
    if callable(getattr(tokenizer, "get_vocab", None)):
        kept["vocabulary"] = sorted(tokenizer.get_vocab().items())
    kept["added"] = [
        (index, str(token), *(bool(getattr(token, name, False)) for name in ("special", "lstrip", "rstrip")))
        for index, token in sorted((getattr(tokenizer, "added_tokens_decoder", None) or {}).items())
    ]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template")
    kept |= {name: getattr(tokenizer, name, None) for name in names}
    if callable(getattr(tokenizer, "encode", None)):
        kept["probe"] = [list(map(int, tokenizer.encode(text))) for text in _PROBE]
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
