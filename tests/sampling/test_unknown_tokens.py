"""Ids that the tokenizer does not have, as of padded vocabularies, are never drawn, and the trainer knows it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxrl_kernels import fused_logprob
from safetensors.numpy import load_file, save_file

from jaxrl_llm import load_policy, sample
from jaxrl_llm.algorithms.policy_loss.nlpo import lagged_nucleus
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.models.vocabulary import Distribution, logp_of_tokens, most_probable, vocabulary_sum
from jaxrl_llm.sampling import completion_ids

KEY = jax.random.key(0)
compiled_outputs = jax.jit(policy_outputs, static_argnums=0, static_argnames="wanted")
KNOWN = 40  # of 257 tokens, so that most of the mass is elsewhere
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 300},
    "top_p": {"top_p": 0.9},
    "allowed": {"allowed": list(range(20, 120))},
    "greedy": {"temperature": 0.0},
    "speculative": {"speculative_tokens": 3, "slots": 6},
    "int8": {"weight_dtype": "int8"},
    "a hook": {},
}


@pytest.mark.parametrize("how", HOW)
def test_they_are_never_drawn_and_the_ratio_is_one(how: str, vectors: Any) -> None:
    model = vectors("llama_tied")
    policy = dataclasses.replace(
        model.policy, config=dataclasses.replace(model.policy.config, num_tokens=KNOWN),
        hook=lagged_nucleus(0.9, 2) if how == "a hook" else None, rounding="int8" if how == "int8" else None,
    )  # fmt: skip
    params = {**model.params, "other": model.params} if policy.hook is not None and policy.hook.other else model.params
    batch = sample(
        policy, params, [[5, 9, 200], [7, 1]], KEY, group_size=3, max_new_tokens=8, stop_token_ids=[], **HOW[how]
    )
    action = np.asarray(batch.action_mask)
    drawn = np.asarray(batch.tokens)[action]
    assert drawn.size == 48
    assert (drawn < KNOWN).all()
    if how in ("allowed", "greedy", "a hook"):  # the trainer knows of other settings than these
        return
    outputs = compiled_outputs(policy, params, batch, wanted=Wanted(names=("mean_logp",)))
    np.testing.assert_allclose(np.asarray(outputs.logp)[action], np.asarray(batch.behaviour_logp)[action], atol=2e-5)
    np.testing.assert_allclose(np.asarray(outputs.entropy)[action], np.asarray(batch.entropy)[action], atol=2e-5)
    assert (np.asarray(outputs.entropy)[action] <= np.log(KNOWN) + 1e-5).all()
    assert outputs.extras is not None
    assert np.isfinite(np.asarray(outputs.extras["mean_logp"])).all()


@pytest.mark.heavy
@pytest.mark.parametrize("implementation", ["xla", "pallas", "reference"])
@pytest.mark.parametrize("floor", [None, -3.0])
def test_the_kernel_knows_no_padding(implementation: str, floor: float | None) -> None:
    random = np.random.default_rng(0)
    hidden, table = (jnp.asarray(random.normal(size=(n, 16)), jnp.float32) for n in (8, 300))
    targets = jnp.asarray([0, 3, 130, 131, 132, 299, -1, 64], jnp.int32)
    floors = None if floor is None else jnp.full(8, floor)

    def value(hidden: Any, table: Any, **settings: Any) -> Any:
        logp, entropy = fused_logprob(hidden, table, targets, support_floor=floors, softcap=8.0, **settings)
        return jnp.sum(jnp.where(jnp.isfinite(logp), logp, 0.0)) + jnp.sum(entropy), (logp, entropy)

    both = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
    (_, wanted), (hidden_wanted, table_wanted) = both(hidden, table[:132], implementation="reference")
    (_, found), (of_hidden, of_table) = both(
        hidden, table, vocab_size=132, implementation=implementation, block_size=128
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert not np.isfinite(np.asarray(found[0])[[4, 5, 6]]).any(), "no token has these ids"
    np.testing.assert_allclose(of_hidden, hidden_wanted, atol=1e-5)
    np.testing.assert_allclose(of_table[:132], table_wanted, atol=1e-5)
    assert not np.asarray(of_table[132:]).any()
    with pytest.raises(ValueError, match="vocab_size is 301, but the unembedding has 300 rows"):
        fused_logprob(hidden, table, targets, vocab_size=301)


@pytest.mark.heavy
def test_sums_over_the_vocabulary_leave_them_out() -> None:
    random = np.random.default_rng(0)
    hidden, table = (jnp.asarray(random.normal(size=(n, 8)), jnp.float32) for n in (5, 50))
    padded, plain = Distribution(hidden, table, jnp.ones(5), tokens=33), Distribution(hidden, table[:33], jnp.ones(5))
    for block in (7, 16, 4096):
        for measure in (lambda p: jnp.exp(p) * p, lambda p: p, lambda p: jnp.exp(2 * p)):
            found, wanted = vocabulary_sum(measure, padded, block=block), vocabulary_sum(measure, plain)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        tokens, values = most_probable(padded, 4, block)
        assert (tokens < 33).all()
        np.testing.assert_allclose(values, most_probable(plain, 4)[1], rtol=1e-5)
        ids = jnp.asarray([[0, 32]] * 5)
        np.testing.assert_allclose(logp_of_tokens(padded, ids, block), logp_of_tokens(plain, ids), rtol=1e-5)


@pytest.mark.heavy
def test_a_padded_model_is_known_by_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parent.parent / "vectors" / "llama_tied", folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = [one for one in weights if "embed_tokens" in one]
    random = np.random.default_rng(0)
    more = random.normal(0, weights[name].std(), (300, weights[name].shape[1])).astype(weights[name].dtype)
    weights[name] = np.concatenate([weights[name], more])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": len(weights[name])}))
    policy, params, tokenizer = load_policy(folder)
    assert policy.config.num_tokens == len(tokenizer) < policy.config.vocab_size
    batch = sample(policy, params, ["number 1:"], KEY, group_size=8, max_new_tokens=8)
    assert all(one < len(tokenizer) for ids in completion_ids(batch) for one in ids)
    whole, *_ = load_policy(Path(__file__).parent.parent / "vectors" / "llama_tied")
    assert (whole.config.num_tokens, whole.config.known_tokens) == (0, whole.config.vocab_size)
