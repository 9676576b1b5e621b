"""What reward functions are told of the beginnings of replies."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.rewards.seen import reply_starts


class Letters:
    """A tokenizer of characters."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def test_tags_that_a_prompt_has_opened() -> None:
    wanted = {
        "<|im_start|>assistant\n": "", "<|im_start|>assistant\n<think>\n": "<think>\n", "Why?": "", "": "",
        "<assistant>": "", "a < b >": "", "Answer in <answer>": "<answer>",
    }  # fmt: skip
    prompts = [[ord(letter) for letter in text] for text in wanted]
    assert reply_starts(Letters(), prompts) == list(wanted.values())
    words = ["<think>", "\n\n", "</think>", "\n\n"]

    class Words:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(words[i] for i in ids)

    assert reply_starts(Words(), [[0, 1, 2, 3], [0, 1], [0, 1, 2]]) == [
        "<think>\n\n</think>\n\n", "<think>\n\n", "<think>\n\n</think>"
    ]  # fmt: skip
