"""Digests tell any difference of tokenizers, and nothing else."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.models.io.tokenizer import tokenizer_digest


@pytest.mark.heavy
def test_another_process_finds_the_same(vectors: Any) -> None:
    model = vectors("llama")
    program = (
        "import jax, sys; jax.config.update('jax_platforms', 'cpu')\n"
        "from jaxrl_llm import load_policy; from jaxrl_llm.models.io.tokenizer import *\n"
        "print(tokenizer_digest(load_policy(sys.argv[1])[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model.folder)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [tokenizer_digest(model.tokenizer)]


def test_what_is_done_with_a_tokenizer_does_not_count(vectors: Any) -> None:
    tokenizer = load_policy(vectors("llama").folder)[2]
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    tokenizer.padding_side = "left"
    assert tokenizer_digest(tokenizer) == before


@pytest.mark.heavy
def test_any_difference_of_tokenizers_counts(vectors: Any, smollm2: Any) -> None:
    original = vectors("llama").tokenizer
    digests = [tokenizer_digest(original), tokenizer_digest(smollm2[2])]
    changed = copy.deepcopy(original)
    changed.chat_template = "{{ messages }}"
    digests.append(tokenizer_digest(changed))
    changed = copy.deepcopy(original)
    changed.add_tokens(["<new>"])
    digests.append(tokenizer_digest(changed))
    changed = copy.deepcopy(original)
    changed.eos_token = "a"
    digests.append(tokenizer_digest(changed))
    changed = copy.deepcopy(original)
    from tokenizers import normalizers

    changed.backend_tokenizer.normalizer = normalizers.Lowercase()
    digests.append(tokenizer_digest(changed))
    assert len(set(digests)) == len(digests)
