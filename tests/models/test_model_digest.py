"""Digests tell any difference of weights and tokenizers, and nothing else."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.digest import tokenizer_digest, weights_digest

PARAMS: dict[str, Any] = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "layers": {"a": np.zeros(2)}}


def test_weights_are_the_same_wherever_and_in_whatever_order_they_are() -> None:
    expected = weights_digest(PARAMS)
    assert len(expected) == 64
    assert weights_digest({"layers": PARAMS["layers"], "embed": PARAMS["embed"]}) == expected
    assert weights_digest(PARAMS | {"embed": jax.device_put(PARAMS["embed"])}) == expected
    assert weights_digest(PARAMS | {"embed": np.asfortranarray(PARAMS["embed"])}) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"embed": PARAMS["embed"] + np.float32(1e-6)},
        {"embed": PARAMS["embed"].reshape(3, 2)},
        {"embed": PARAMS["embed"].view(np.int32)},
        {"embed": PARAMS["embed"].T.copy().reshape(2, 3)},
        {"embed": jnp.asarray(PARAMS["embed"], jnp.bfloat16)},
        {"layers": {"b": np.zeros(2)}},
        {"layers": {"a": np.zeros(2), "b": np.zeros(0)}},
        {"layers": {"a": -np.zeros(2)}},
        {"layers": ({"a": np.zeros(2)},)},
    ],
)
def test_any_difference_of_weights_counts(change: dict[str, Any]) -> None:
    assert weights_digest(PARAMS | change) != weights_digest(PARAMS)


def test_what_is_no_array() -> None:
    with pytest.raises(InputError, match=r"embed.* is a str, but must be an array"):
        weights_digest({"embed": "x"})


def test_another_process_finds_the_same(vectors: Any) -> None:
    model = vectors("llama")
    program = (
        "import jax, sys; jax.config.update('jax_platforms', 'cpu')\n"
        "from jaxrl_llm import load_policy; from jaxrl_llm.models.digest import *\n"
        "_, params, tokenizer = load_policy(sys.argv[1]); print(weights_digest(params), tokenizer_digest(tokenizer))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model.folder)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [weights_digest(model.params), tokenizer_digest(model.tokenizer)]


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
