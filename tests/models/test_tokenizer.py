"""Digests of tokenizers, which tell any difference and nothing else, and tokens that a model lacks."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.models.io.tokenizer import tokenizer_digest, with_added_tokens
from jaxrl_llm.utils.errors import InputError


@pytest.mark.heavy
def test_another_process_finds_the_same_digest(vectors: Any) -> None:
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


def test_what_is_done_with_a_tokenizer_does_not_count_in_its_digest(vectors: Any) -> None:
    tokenizer = load_policy(vectors("llama").folder)[2]
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    tokenizer.padding_side = "left"
    assert tokenizer_digest(tokenizer) == before


@pytest.mark.heavy
def test_any_difference_of_tokenizers_counts_in_their_digests(vectors: Any, smollm2: Any) -> None:
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


TAGS = ("<short>", "<think>")


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gemma4_e2b"])
def test_new_tokens_begin_as_the_mean_of_the_others(family: str, vectors: Any, tmp_path: Path) -> None:
    """With a head of its own, a tied one, and embeddings of every layer; written and read again it is the same."""
    model = vectors(family)
    known, tokens = model.policy.config.known_tokens, jnp.asarray([model.arrays["greedy_prompt"][0]])
    policy, params, tokenizer = with_added_tokens(model.policy, model.params, model.tokenizer, TAGS)
    ids = tokenizer.convert_tokens_to_ids(list(TAGS))
    assert ids == [known, known + 1]
    assert policy.config.known_tokens == known + 2
    assert policy.config.vocab_size % 64 == 0
    assert tokenizer.encode("<think>7<short>", add_special_tokens=False) == [ids[1], ord("7"), ids[0]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<short><think>", "rewards see them"
    assert len(model.tokenizer) < len(tokenizer), "that of the model is as it was"
    rows = [name for name, x in params.items() if name != "layers" and x.shape[0] == policy.config.vocab_size]
    assert set(rows) == {"embed", "unembed", "embed_inputs"} & set(params)
    for name in rows:
        old = np.asarray(model.params[name])[:known]
        np.testing.assert_array_equal(params[name][:known], old)
        np.testing.assert_allclose(params[name][jnp.asarray(ids)], np.stack([old.mean(axis=0)] * 2), atol=1e-6)
    before, after = model.policy.logits(model.params, tokens), policy.logits(params, tokens)
    np.testing.assert_allclose(after[..., :known], before[..., :known], atol=1e-5)
    save_policy(tmp_path, policy, params, tokenizer)
    again, read, other = load_policy(tmp_path)
    assert again.config == policy.config
    np.testing.assert_array_equal(again.logits(read, tokens), after)
    assert other.encode("".join(TAGS), add_special_tokens=False) == ids


def test_padding_of_the_vocabulary_is_used_first(vectors: Any) -> None:
    model = vectors("llama_tied")
    size, known = model.policy.config.vocab_size, len(model.tokenizer)
    embed = np.concatenate(
        [np.asarray(model.params["embed"])[:known], np.full((3, model.policy.config.hidden_size), 9)]
    )
    config = dataclasses.replace(model.policy.config, vocab_size=known + 3, num_tokens=known)
    policy = dataclasses.replace(model.policy, config=config)
    found, params, tokenizer = with_added_tokens(
        policy, {**model.params, "embed": jnp.asarray(embed)}, model.tokenizer, TAGS
    )
    assert (found.config.vocab_size, found.config.known_tokens) == (known + 3, known + 2)
    np.testing.assert_allclose(params["embed"][known : known + 2], [embed[:known].mean(axis=0)] * 2, atol=1e-6)
    assert (np.asarray(params["embed"])[known + 2] == 9).all()
    same = with_added_tokens(found, params, tokenizer, TAGS)
    assert same[0].config == found.config, "tokens that are there keep their ids"
    np.testing.assert_array_equal(same[1]["embed"], params["embed"])
    assert size >= known


@pytest.mark.parametrize("text", ["", " <short>", 3])
def test_an_added_text_that_is_no_token_is_refused(text: Any, vectors: Any) -> None:
    model = vectors("llama_tied")
    with pytest.raises(InputError, match="a token to add is"):
        with_added_tokens(model.policy, model.params, model.tokenizer, [text])
