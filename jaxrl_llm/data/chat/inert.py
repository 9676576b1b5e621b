"""Control tokens in texts of users, tools and environments stay text: nothing that such a text holds forges a turn.

`guarded` marks the control tokens of a text before a chat template renders it, and `encode` tokenises the rendered text
so that marked ones are ordinary text, while those that the template writes are what they are. The ids of a text
without control tokens are those of the tokenizer itself.
"""

import json
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from jaxrl_llm.utils.errors import InputError

_NONCE = secrets.token_hex(8)  # no text holds it, so that none can forge a mark
_OPEN, _CLOSE = f"\ufdd0{_NONCE}\ufdd1", f"\ufdd1{_NONCE}\ufdd0"
_LONE = re.compile(f"{_OPEN}|{_CLOSE}")
_made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any, template: str | None = None) -> tuple[str, ...]:
    """The texts that are control tokens, longest first, as `transformers` counts them.

    They are the special tokens, and the added ones that the chat template writes, but for white space: tags such as
    <think> and <tool_call>, and of some families the beginning of a turn. template: the tokenizer's own by default.
    """
    template = getattr(tokenizer, "chat_template", None) if template is None else template
    template = template if isinstance(template, str) else json.dumps(template or "")  # several by name
    added = getattr(tokenizer, "added_tokens_decoder", {})
    key = "control", template, len(added)
    known = _made.setdefault(tokenizer, {}) if added else {}
    if key not in known:
        named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        texts = {
            token.content
            for token in added.values()
            if token.special or token.content in named or (token.content in template and not token.content.isspace())
        }
        known[key] = tuple(sorted(texts - {""}, key=lambda text: (-len(text), text)))
    return known[key]


def guarded(value: Any, control: tuple[str, ...]) -> Any:
    """A text with marks around its control tokens; of lists and mappings, all their texts.

    Neighbouring parts of a message that form one together become one part.
    """
    if isinstance(value, str):
        return pattern_of(control).sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", value) if control else value
    if isinstance(value, Mapping):
        return {guarded(key, control): guarded(one, control) for key, one in value.items()}
    if isinstance(value, list | tuple):
        texts = [one["text"] for one in value if isinstance(one, Mapping) and isinstance(one.get("text"), str)]
        if len(texts) == len(value) > 1 and control:
            apart = sum(len(pattern_of(control).findall(text)) for text in texts)
            if len(pattern_of(control).findall("".join(texts))) > apart:
                value = [{**value[0], "text": "".join(texts)}]
        return [guarded(one, control) for one in value]
    return value


def unguarded(text: str) -> str:
    """A text without the marks of `guarded`."""
    return _LONE.sub("", text)


def encode(tokenizer: Any, text: str, control: tuple[str, ...]) -> list[int]:
    """The token ids of a rendered text, without those that a tokenizer adds; marked control tokens are ordinary text.

    ids: of the tokenizer itself where nothing is marked. Otherwise of the same tokenizer, in which the control tokens
    have names that no text holds, and the text has these names wherever they are not marked. InputError for a tokenizer
    that does not keep its ids under other names.
    """
    if _OPEN not in text:
        return [int(one) for one in tokenizer.encode(text, add_special_tokens=False)]
    live = {token: f"{_NONCE}x{number}x" for number, token in enumerate(control)}
    pattern = re.compile(f"{_OPEN}(.*?){_CLOSE}|({pattern_of(control).pattern})", re.DOTALL)
    named = pattern.sub(lambda found: found[1] if found[2] is None else live[found[2]], text)
    renamed = _renamed(tokenizer, control, live)
    return [int(one) for one in renamed.encode(unguarded(named), add_special_tokens=False).ids]


def encode_inert(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text none of whose parts becomes a control token, without those that a tokenizer adds."""
    control = control_tokens(tokenizer)
    return encode(tokenizer, guarded(text, control), control)


@lru_cache(maxsize=64)
def pattern_of(control: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of all control tokens."""
    return re.compile("|".join(map(re.escape, control)) or "(?!)")


def _renamed(tokenizer: Any, control: tuple[str, ...], live: Mapping[str, str]) -> Any:
    """The tokenizer's own model with other names of the control tokens, and the same ids."""
    from tokenizers import Tokenizer

    known = _made.setdefault(tokenizer, {})
    if ("renamed", control) not in known:
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        for token in spec["added_tokens"]:
            token["content"] = live.get(token["content"], token["content"])
        model = spec["model"]
        if model.get("unk_token") in live:
            model["unk_token"] = live[model["unk_token"]]
        if isinstance(vocabulary := model.get("vocab"), dict):
            model["vocab"] = {live.get(text, text): number for text, number in vocabulary.items()}
        elif vocabulary is not None:  # pieces with their scores
            model["vocab"] = [[live.get(text, text), score] for text, score in vocabulary]
        if "merges" in model:
            pairs = ((pair, pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"])
            model["merges"] = [pair for pair, (a, b) in pairs if a not in live and b not in live and a + b not in live]
        made = Tokenizer.from_str(json.dumps(spec))
        if any(made.token_to_id(name) != tokenizer.convert_tokens_to_ids(text) for text, name in live.items()):
            raise InputError(
                "a text holds control tokens, which this kind of tokenizer cannot read as text: remove them"
            )
        known["renamed", control] = made
    return known["renamed", control]
