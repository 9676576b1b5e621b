"""Tiny policies with a vocabulary of single characters, as folders that a run loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.models import ModelConfig, Policy, init_params, save_policy
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.utils.process import use_compile_cache

END = "<end>"
CONTEXT = 64
Examples = Callable[[np.random.Generator, int], list[tuple[str, str]]]  # (random, count) -> prompts and completions


def tokenizer_of(letters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter, and for the end of a text; other letters vanish."""
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {END: len(letters)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)


def policy_of(letters: str, hidden: int = 32, layers: int = 2) -> Policy:
    """A small Llama over these letters."""
    head = 16
    config = ModelConfig(
        family="llama", vocab_size=len(letters) + 1, hidden_size=hidden, intermediate_size=2 * hidden,
        num_layers=layers, num_heads=hidden // head, num_kv_heads=hidden // head, head_dim=head, norm_epsilon=1e-6,
        tie_embeddings=False, ropes=(Rope(),), rope_of_layer=(0,) * layers, window_of_layer=(0,) * layers,
        query_scale=head**-0.5, max_positions=CONTEXT, eos_token_ids=(len(letters),),
    )  # fmt: skip
    return Policy(config, remat=False, tokenizer=tokenizer_of(letters))


def as_arrays(policy: Policy, pairs: list[tuple[str, str]], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32[N, width], real tokens bool[N, width], those to predict bool[N, width]) of prompts and answers."""
    tokens = np.full((len(pairs), width), policy.config.vocab_size - 1, np.int32)
    real, wanted = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for number, (prompt, answer) in enumerate(pairs):
        first, then = (policy.tokenizer.encode(text) for text in (prompt, answer))
        ids = [*first, *then][:width]
        tokens[number, : len(ids)], real[number, : len(ids)] = ids, True
        wanted[number, len(first) : len(ids)] = True
    return tokens, real, wanted


def taught(policy: Policy, params: Any, examples: Examples, seed: int, steps: int, rate: float = 5e-3) -> Any:
    """Parameters after `steps` supervised steps on 64 fresh examples each, of at most 32 tokens together."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(rate, 0.0, steps)))
    random = np.random.default_rng(seed)

    def loss(params: Any, tokens: Any, real: Any, wanted: Any) -> Any:
        places = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
        hidden, _ = policy.forward(params, tokens, places, real.astype(jnp.int32))
        each = optax.softmax_cross_entropy_with_integer_labels(
            policy.logits_of(params, hidden)[:, :-1], tokens[:, 1:]
        )  # fmt: skip
        return jnp.sum(each * wanted[:, 1:]) / jnp.sum(wanted[:, 1:])

    @jax.jit
    def step(params: Any, state: Any, arrays: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, *arrays), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state, as_arrays(policy, examples(random, 64), 32))
    return params


def write_model(
    folder: Path, letters: str, seed: int, examples: Examples | None = None, steps: int = 0, hidden: int = 32
) -> Path:
    """A folder with random weights, or with those after `taught`."""
    use_compile_cache()
    policy = policy_of(letters, hidden)
    params = init_params(jax.random.key(seed), policy.config, scale=hidden**-0.5)
    if examples is not None:
        params = taught(policy, params, examples, seed, steps)
    return save_policy(folder, policy, params, policy.tokenizer)
