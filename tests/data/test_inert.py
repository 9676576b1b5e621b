"""Texts that hold control tokens, for tokenizers of several kinds: what they hold stays text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data import PromptFormat, encode_prompt
from jaxrl_llm.data.chat.encode import format_notes
from jaxrl_llm.data.chat.inert import control_tokens, encode, encode_inert, guarded, unguarded
from jaxrl_llm.utils.errors import InputError

LETTERS = sorted({*"abdefghijklmnoprstuxz<|>/_ \n", "▁"})
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def byte_pairs() -> Tokenizer:
    """Byte pairs, as of GPT-2, Llama 3 and Qwen."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("i", "m"), ("im", "_"), ("e", "n"), ("en", "d"), ("<", "|"), ("|", ">"), ("a", "b")]
    vocabulary = {**letters, **{a + b: len(letters) + n for n, (a, b) in enumerate(merges)}}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return core


def pieces() -> Tokenizer:
    """A unigram model, as of SentencePiece, whose own pieces are control tokens, too."""
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((one, -5.0) for one in LETTERS), ("▁ab", -3.0)]
    core = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def legacy() -> Tokenizer:
    """Byte pairs with a prefix space, as of Llama 2, whose vocabulary has the control tokens."""
    vocabulary = {one: n for n, one in enumerate(["<unk>", "<s>", "</s>", *LETTERS, "ab"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def tokenizer(core: Tokenizer) -> PreTrainedTokenizerFast:
    """With turns that are special tokens, one of which takes the white space after it, and tags that are none."""
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    for text in ("<|im_start|>", "<|im_end|>", "<|pad|>", "<think>", "</think>", "<|other|>"):
        special = "think" not in text and "other" not in text
        made.add_tokens(
            [AddedToken(text, special=special, normalized=False, rstrip=text == "<|pad|>")], special_tokens=special
        )
    made.chat_template = TEMPLATE
    return made


KINDS = {make.__name__: tokenizer(make()) for make in (byte_pairs, pieces, legacy)}
each_kind = pytest.mark.parametrize("kind", KINDS)
words = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "</s>", "<s>", "<|pad|>", "<think>", "</think>", "ab", " ", "\n",
                     "<", "|>", "im_", "end", "x"]), max_size=8,
).map("".join)  # fmt: skip


@each_kind
def test_special_tokens_and_those_that_the_template_writes(kind: str) -> None:
    found = control_tokens(KINDS[kind])
    assert set(found) >= {"<|im_start|>", "<|im_end|>", "</s>", "<s>", "<think>"}
    assert "<|other|>" not in found, "it is neither special nor in the template"
    assert "</think>" not in found


@each_kind
@settings(max_examples=60, deadline=None)
@given(said=words, begin=st.sampled_from(["", "<|im_start|>", "ab<|pad|> "]), end=st.sampled_from(["", "<|im_end|>\n"]))
def test_what_a_text_holds_is_text_and_the_rest_is_as_ever(kind: str, said: str, begin: str, end: str) -> None:
    one = KINDS[kind]
    control = control_tokens(one)
    safe = guarded(said, control)
    assert unguarded(safe) == said
    ids = encode(one, f"{begin}{safe}{end}", control)
    numbers = set(one.convert_tokens_to_ids(list(control))) - {one.unk_token_id}
    wanted = [text for text in control if text in begin + end]
    assert [one.convert_ids_to_tokens(x) for x in ids if x in numbers] == sorted(wanted, key=(begin + end).index)
    usual = one(f"{begin}{said}{end}", add_special_tokens=False)["input_ids"]
    if safe == said:
        assert ids == usual
    else:
        assert "".join(one.decode(ids).split()) == "".join(one.decode(usual).split()), "the text is the same"


@each_kind
@settings(max_examples=30, deadline=None)
@given(said=words)
def test_a_user_forges_no_turn(kind: str, said: str) -> None:
    one = KINDS[kind]
    turn = encode_prompt(one, [{"role": "user", "content": f"x{said}x"}])
    plain = encode_prompt(one, [{"role": "user", "content": "xx"}])
    numbers = set(one.convert_tokens_to_ids(list(control_tokens(one)))) - {one.unk_token_id}
    assert [x for x in turn if x in numbers] == [x for x in plain if x in numbers]
    assert not {*encode_inert(one, said)} & numbers
    ends = [x for x in encode_prompt(one, said, format=PromptFormat("plain")) if x in numbers] if said else []
    assert ends == ([] if kind == "byte_pairs" or not said else [one.bos_token_id]), "the tokenizer's own alone"


def test_two_parts_form_no_control_token() -> None:
    one = KINDS["byte_pairs"]
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    numbers = encode_prompt(one, [{"role": "user", "content": parts}])
    assert numbers.count(one.convert_tokens_to_ids("<|im_end|>")) == 1


def test_replies_keep_theirs_and_so_do_rendered_prompts() -> None:
    one = KINDS["byte_pairs"]
    think = one.convert_tokens_to_ids("<think>")
    said = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "<think>a"}]
    assert encode_prompt(one, [*said, {"role": "user", "content": "b"}]).count(think) == 2, "its own, and the next"
    rendered = PromptFormat("rendered")
    text = one.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=True, tokenize=False)
    wanted = one.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=True, return_dict=False)
    for given_text in (text, text.removeprefix("<s>")):
        for kind in KINDS:
            other = KINDS[kind]
            ids = encode_prompt(other, given_text, format=rendered)
            assert ids[0] == other.bos_token_id
            assert ids.count(other.bos_token_id) == 1
        assert encode_prompt(one, given_text, format=rendered) == wanted
    bare = tokenizer(pieces())
    bare.chat_template = None
    assert encode_prompt(bare, "ab", format=rendered) == bare("ab")["input_ids"]


def test_formats_that_do_not_fit_are_one_line() -> None:
    one, messages = KINDS["byte_pairs"], [{"role": "user", "content": "ab"}]
    assert encode_prompt(one, "ab", format=PromptFormat("plain")) == one("ab")["input_ids"]
    for kind in ("plain", "rendered"):
        with pytest.raises(InputError, match=f"the prompt format is {kind}"):
            encode_prompt(one, messages, format=PromptFormat(kind))
        with pytest.raises(InputError, match=f"the prompt format is {kind}"):
            encode_prompt(one, "ab", system_prompt="be", format=PromptFormat(kind))


def notes(rows: Any, **format: Any) -> list[str]:
    return format_notes(KINDS["byte_pairs"], rows, PromptFormat(**format))


def test_prompts_that_look_rendered_are_said() -> None:
    rows = [{"prompt": "<|im_start|>user\nab<|im_end|>\n"}, {"prompt": "ab"}]
    (line,) = notes(rows)
    assert line.startswith("1 of 2 prompts begin with a control token")
    assert "--prompt-format rendered" in line
    assert notes(rows, kind="rendered") == notes(rows[1:]) == []
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert notes([{"prompt": "ab", "tools": [tool]}]) == [
        "the column tools is not used: the chat template describes no tools"
    ]
    assert notes([{"prompt": "ab", "tools": ["f"]}]) == [
        "the column tools is not used: it holds no JSON schemas of tools"
    ]
