"""Write completions to a terminal or file, while they are decoded or as they end."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.requests import Completion
from jaxrl_llm.sampling.sampler import StreamArguments
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights

CHUNK = 4  # tokens between two pieces of text that is shown live
LONG_CHUNK = 16  # otherwise; this many may still be decoded after Ctrl-C or a stop string

# Text of a model can contain control characters, which a terminal would execute: show them as symbols.
_SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_SIGNS |= {127: "\u2421", **{code: "\ufffd" for code in range(128, 160)}}


def write_completions(
    policy: Policy,
    params: Params,
    prompts: Sequence[str],
    asked: StreamArguments,
    out: TextIO,
    *,
    as_json: bool = False,
    stats: Stats | None = None,
) -> Stats:
    """Decode requests and write the completions to `out`. Ctrl-C writes what there is and stops (`Stats.interrupted`).

    prompts: their labels; each has the same number of requests in `asked`, next to each other.
    out: a terminal shows a single completion piece by piece, and several as they end, labelled with prompt and number.
    Any other file gets "[prompt] text" in the order of the requests.
    as_json: write one object per line instead, in that order: prompt, sample (from 0), text, ended (by a stop token
    or stop string), tokens (their number) and mean_logp (nats per token under the sampling distribution; null without
    tokens).
    """
    stats = Stats() if stats is None else stats
    tokenizer, each = policy.tokenizer, len(asked.requests) // len(prompts)
    terminal = out.isatty() and not as_json
    alone = terminal and len(asked.requests) == 1
    shown = ""

    def text_of(tokens: np.ndarray) -> str:
        return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def watch(request: int, tokens: np.ndarray) -> None:
        nonlocal shown
        end = asked.cut(tokens) if asked.cut is not None else None  # the engine checks for stop strings later
        shown = _show(out, shown, whole_characters(text_of(tokens[:end])))

    completions: Iterable[Completion] = stream(
        policy, take_weights(policy, params), asked.requests, asked.settings, cut=asked.cut,
        chunk=CHUNK if alone else LONG_CHUNK, watch=watch if alone else None, stats=stats,
    )  # fmt: skip
    for completion in completions if terminal else in_order(completions):
        text, (prompt, number) = text_of(completion.tokens.token), divmod(completion.index, each)
        if completion.unfinished and not completion.tokens.size:
            continue
        if as_json:
            print(json.dumps(_as_dict(completion, text, prompts[prompt], number)), file=out, flush=True)
        elif alone:
            _show(out, shown, text)
            print(file=out, flush=True)
        else:
            mark = f"{prompts[prompt]} {number + 1}/{each}" if terminal and each > 1 else prompts[prompt]
            line = f"[{mark}] {text}"
            print(visible_text(line) if terminal else line, file=out, flush=True)
    return stats


def visible_text(text: str) -> str:
    """The text with symbols for control characters, which a terminal would execute."""
    return text.translate(_SIGNS)


def in_order(completions: Iterable[Completion]) -> Iterator[Completion]:
    """Yield completions in the order of their requests, each as soon as it and all before it have ended."""
    held: dict[int, Completion] = {}
    following = 0
    for completion in completions:
        held[completion.index] = completion
        while following in held:
            yield held.pop(following)
            following += 1


def whole_characters(text: str) -> str:
    """The text without trailing characters that the next token may complete.

    Tokenizers decode the bytes of an incomplete UTF-8 character to one U+FFFD, or to one per byte.

    >>> whole_characters("caf\\ufffd")
    'caf'
    """
    return text.rstrip("\ufffd")


def unseen(shown: str, text: str) -> str:
    """What to write after `shown` so that `text` can be read; "" if `shown` starts with `text`.

    The next tokens can change how earlier ones decode. Text that was already written stays, followed by the new text
    from the first difference on.

    >>> unseen("The ans", "The answer")
    'wer'
    """
    if shown.startswith(text):
        return ""
    alike = next((i for i, (a, b) in enumerate(zip(shown, text, strict=False)) if a != b), len(shown))
    return text[alike:]


def throughput_line(stats: Stats) -> str:
    """One line: tokens per second including waiting, seconds to the first token, share of busy slots."""
    compiling = f", {stats.compiles} programs compiled or fetched" if stats.compiles else ""
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens / max(stats.seconds, 1e-9):.1f} tokens/s), "
        f"first token after {stats.first_token:.2f} s, occupancy {stats.occupancy:.0%}{compiling}"
    )


def _show(out: TextIO, shown: str, text: str) -> str:
    """Write the new part of the text to a terminal. Returns the text that is shown now."""
    if piece := unseen(shown, text):
        out.write(visible_text(piece))
        out.flush()
    return shown if shown.startswith(text) else text


def _as_dict(completion: Completion, text: str, prompt: str, number: int) -> dict[str, Any]:
    logp = completion.tokens.logp
    return {
        "prompt": prompt,
        "sample": number,
        "text": text,
        "ended": completion.ended,
        "tokens": completion.tokens.size,
        "mean_logp": float(np.mean(logp, dtype=np.float64)) if logp.size else None,
    }
