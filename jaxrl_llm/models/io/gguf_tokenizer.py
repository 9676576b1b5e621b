"""The tokenizer inside a GGUF header, rebuilt as a transformers tokenizer without torch.

Two kinds: "gpt2" is byte-level BPE with its merges listed, "llama" is SentencePiece BPE, which has only scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl_llm.models.kinds import FATAL, FLAG, TEXT, check, list_of, number, reason, whole
from jaxrl_llm.utils.errors import InputError, optional_package, shown, unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_KINDS = {
    **dict.fromkeys(("model", "pre"), TEXT),
    **dict.fromkeys(("tokens", "merges"), list_of(TEXT)),
    "token_type": list_of(whole(0)),
    "scores": list_of(number()),
    **dict.fromkeys(("add_space_prefix", "add_bos_token", "add_eos_token"), FLAG),
    **{f"{name}_token_id": whole(0) for name in ("bos", "eos", "unknown", "padding")},
}
_SETTINGS = {f"tokenizer.ggml.{name}": kind for name, kind in _KINDS.items()} | {"tokenizer.chat_template": TEXT}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Splitter:
    """How byte-level BPE cuts a text before merging. Without a pattern: GPT-2's."""

    pattern: str = ""
    single_digits: bool = False  # each digit stands alone
    compose: bool = False  # Unicode normal form C first
    whole_words: bool = False  # a word that is in the vocabulary is not built by merges
    add_bos: bool = False  # where the header does not say


_QWEN = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST
_LLAMA3 = _Splitter(_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST, whole_words=True, add_bos=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2"), _Splitter()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Splitter(single_digits=True)),
    "qwen2": _Splitter(_QWEN, compose=True),
    "deepseek-r1-qwen": _Splitter(_QWEN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the keys `tokenizer.*` of a GGUF header (`GgufModel.metadata`).

    Control tokens become special tokens; user-defined ones are kept whole in text but are shown when decoding. BOS and
    EOS surround plain text where the header says so; chat templates are rendered as they are. The padding token may
    equal EOS. InputError for an unsupported kind or pre-tokenizer, or where tokens are missing.
    """
    with optional_package("transformers", "gguf", "a tokenizer"):
        import transformers  # noqa: F401 (and with it the tokenizers)
    check(metadata, _SETTINGS, "the GGUF file")
    try:
        return _build(metadata)
    except (InputError, *FATAL):
        raise
    except BaseException as error:  # the tokenizers' Rust code has exceptions of all kinds, panics among them
        raise InputError(f"the GGUF file's tokenizer is damaged ({reason(error)}); fetch it again") from None


def _build(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise InputError("the GGUF file holds no tokenizer; convert the model again with its tokenizer")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InputError(f"the GGUF tokenizer has {len(tokens)} tokens but {len(types)} types; convert it again")
    if kind == "gpt2":
        # Files older than the key `pre` are of models that llama.cpp then told apart by architecture.
        qwen = str(metadata.get("general.architecture", "")).startswith("qwen")
        name = metadata.get("tokenizer.ggml.pre", "qwen2" if qwen else "default")
        if name not in PRE_TOKENIZERS:
            raise unknown("GGUF pre-tokenizer", name, PRE_TOKENIZERS)
        splitter = PRE_TOKENIZERS[name]
        tokenizer, add_bos = _byte_level(tokens, metadata.get("tokenizer.ggml.merges", []), splitter), splitter.add_bos
    elif kind == "llama":
        scores = metadata.get("tokenizer.ggml.scores") or []
        if len(scores) != len(tokens):
            raise InputError(f"the GGUF tokenizer has {len(tokens)} tokens but {len(scores)} scores; convert it again")
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer, add_bos = _sentencepiece(tokens, scores, types, prefix), True
    else:
        raise unknown("GGUF tokenizer model", str(kind), ("gpt2", "llama"))
    tokenizer.add_tokens(
        [
            AddedToken(token, special=code == _CONTROL, normalized=False)
            for token, code in zip(tokens, types, strict=True)
            if code in (_CONTROL, _USER_DEFINED)
        ]
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: _token(metadata, tokens, f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    ends = {f"add_{end}_token": bool(metadata.get(f"tokenizer.ggml.add_{end}_token")) for end in ("bos", "eos")}
    ends["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    ends = {name: value and special[name.removeprefix("add_")] is not None for name, value in ends.items()}
    _surround(tokenizer, *(special[f"{end}_token"] if ends[f"add_{end}_token"] else None for end in ("bos", "eos")))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
        **ends,
    )


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], key: str) -> str | None:
    index = metadata.get(key)
    if index is not None and not 0 <= index < len(tokens):
        raise InputError(f"{key} is {index}, but the GGUF tokenizer has {len(tokens)} tokens; convert it again")
    return None if index is None else tokens[index]


def _byte_level(tokens: Sequence[str], merges: Sequence[str], splitter: _Splitter) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Found here because the library ends a thread over it, with a backtrace.
    if lost := [pair for pair in pairs if not {*pair, "".join(pair)} <= vocabulary.keys()]:
        raise InputError(
            f"the GGUF tokenizer merges {shown(' '.join(lost[0]))}, which gives no token; convert it again"
        )
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splitter.whole_words))
    if splitter.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitter.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitter.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitter.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitter.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], prefix: bool) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    usual = "<unk>" if "<unk>" in vocabulary else None
    unknown_token = next((token for token, code in zip(tokens, types, strict=True) if code == _UNKNOWN), None) or usual
    merges = _merges(vocabulary, scores, types)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to build a piece out of two, in the order in which SentencePiece prefers them: the best score first.

    Only normal pieces merge: SentencePiece cuts user-defined ones out of the text beforehand, as added tokens are.
    """
    mergeable = {piece: scores[index] for piece, index in vocabulary.items() if types[index] == _NORMAL}
    found = (
        (-score, vocabulary[piece[:cut]], piece[:cut], piece[cut:])
        for piece, score in mergeable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in mergeable and piece[cut:] in mergeable
    )
    return [(left, right) for _, _, left, right in sorted(found)]


def _surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    from tokenizers.processors import TemplateProcessing

    before, after = f"{bos}:0 " if bos else "", f" {eos}:0" if eos else ""
    tokenizer.post_processor = TemplateProcessing(
        single=f"{before}$A:0{after}",
        pair=f"{before}$A:0{after} {before.replace(':0', ':1')}$B:1{after.replace(':0', ':1')}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token],
    )
