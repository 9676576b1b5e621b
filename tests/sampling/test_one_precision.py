"""Sampler and trainer at one precision: rounded weights on both sides, float32 activations, caches of eight bits.

And what it saves: bytes that a decode step reads, by the programs of XLA for TPUs and for CPUs.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import all_optimisations
from conftest import FAMILIES, quick_compiles
from heavy import few
from tpu_environment import tpu_environment

from jaxrl_llm import load_policy, sample
from jaxrl_llm.models import lora
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import Quantised, dequantised
from jaxrl_llm.models.quantised.layers import NAMES, quantised_layer
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.layouts import abstract_weights
from jaxrl_llm.utils.errors import InputError

PROMPTS = [[3, 5, 7, 9, 11, 2, 4, 8], [3, 5, 9, 1, 2]]
BFLOAT16 = jnp.dtype(jnp.bfloat16)
FLOAT32 = jnp.dtype(jnp.float32)


def differences(policy: Policy, params: Params, **how: Any) -> np.ndarray:
    """|log-probability in the trainer - in the sampler| of 4 x 16 sampled tokens."""
    with quick_compiles():
        batch = sample(
            policy, params, PROMPTS, jax.random.key(0), group_size=2, max_new_tokens=16, stop_token_ids=[], **how
        )
        outputs = policy_outputs(policy, params, batch)
    return np.abs(np.asarray(outputs.logp - batch.behaviour_logp))[np.asarray(batch.action_mask)]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", few(["int8", "float8"], ["int8"]))
@pytest.mark.parametrize("family", few(FAMILIES, ("qwen3_moe",)))
def test_the_ratio_is_one_with_the_same_rounding_and_float32_activations(vectors: Any, family: str, kind: str) -> None:
    """In bfloat16: to 1e-3, and in fact to float32's rounding; with int8 in the sampler alone it is far from it."""
    model = vectors(family)
    policy = dataclasses.replace(model.policy, dtype=BFLOAT16, activations=FLOAT32)
    both = dataclasses.replace(policy, rounding=kind)
    assert np.expm1(differences(both, model.params)).max() < 1e-4
    assert differences(policy, model.params, weight_dtype=kind).max() > 1e-2


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(FAMILIES, ("gemma2",)))
def test_float32_activations_alone_in_bfloat16(vectors: Any, family: str) -> None:
    model = vectors(family)
    policy = dataclasses.replace(model.policy, dtype=BFLOAT16, activations=FLOAT32)
    assert np.expm1(differences(policy, model.params)).max() < 1e-4
    # Without them two programs of one precision differ, by 2 where they choose other experts.
    assert differences(dataclasses.replace(policy, activations=None), model.params).max() > 5e-4


def test_states_keys_and_values_have_the_dtype_of_activations(vectors: Any) -> None:
    model = vectors("qwen3")
    policy = dataclasses.replace(model.policy, dtype=BFLOAT16, activations=FLOAT32)
    assert (policy.activation_dtype, model.policy.activation_dtype) == (FLOAT32, FLOAT32)
    tokens = jnp.asarray(PROMPTS[:1])
    hidden, _ = policy.forward(model.params, tokens, jnp.arange(8)[None], jnp.ones((1, 8), jnp.int32))
    assert hidden.dtype == FLOAT32
    # The weights are those of bfloat16, as if they had been stored in it, but for those of norms.
    stored = jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key.endswith("_norm") else x.astype(jnp.bfloat16).astype(jnp.float32),
        model.params,
    )
    wide = dataclasses.replace(policy, dtype=FLOAT32, activations=None)
    expected, exact = (np.asarray(p.logits(w, tokens)) for p, w in ((wide, stored), (wide, model.params)))
    found = np.asarray(policy.logits(model.params, tokens))
    assert np.abs(found - expected).max() < 1e-2 * np.abs(exact - expected).max()
    assert "activations=float32" in repr(policy)
    assert "rounding=int8" in repr(dataclasses.replace(policy, rounding="int8"))


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(FAMILIES, ("qwen3",)))
def test_effect_of_caches_on_log_probabilities(vectors: Any, family: str) -> None:
    """The mean over tokens; float8 has 4 bits of significand where int8 has up to 8."""
    model = vectors(family)
    exact, int8, float8 = (
        differences(model.policy, model.params, cache_dtype=dtype).mean() for dtype in (None, jnp.int8, "float8_e4m3fn")
    )
    assert exact < 1e-5
    assert 2 * exact < int8 < 0.1
    assert 2 * int8 < float8 < 1


def test_prompts_and_tokens_are_of_the_same_weights(vectors: Any) -> None:
    """What a run samples with int8 weights are the samples of the policy whose weights are those."""
    model = vectors("qwen3")
    layers = quantised_layer(model.params["layers"], "int8")
    rounded = {name: dequantised(w) if name in NAMES else w for name, w in layers.items()}
    settings: dict[str, Any] = {"group_size": 2, "max_new_tokens": 12, "stop_token_ids": []}
    with quick_compiles():
        found = sample(model.policy, model.params, PROMPTS, jax.random.key(1), weight_dtype="int8", **settings)
        params = {**model.params, "layers": rounded}
        expected = sample(model.policy, params, PROMPTS, jax.random.key(1), **settings)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.behaviour_logp, expected.behaviour_logp, atol=2e-4)


@pytest.mark.heavy
def test_adapters_are_added_to_rounded_weights(vectors: Any) -> None:
    model = vectors("llama")
    adapters = lora.init(jax.random.key(1), model.policy.config, 4)
    adapters = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    params = combine(lora.scaled(model.params, 4, 8.0), adapters)
    weights = take_weights(model.policy, params, weight_dtype="int8")
    layer = weights.loop["layers"][0]
    assert isinstance(layer["query"], Quantised)
    np.testing.assert_array_equal(layer["query_lora_in"], params["layers"]["query_lora_in"][0])
    policy = dataclasses.replace(model.policy, rounding="int8")
    assert differences(policy, params).max() < 1e-4
    assert differences(model.policy, params, weight_dtype="int8").max() > 1e-2


def test_loop_weights_ahead_of_time_are_those_that_are_taken(vectors: Any) -> None:
    for family, dtype, activations in (("qwen3_moe", FLOAT32, None), ("llama_tied", BFLOAT16, FLOAT32)):
        model = vectors(family)
        policy = dataclasses.replace(model.policy, dtype=dtype, activations=activations)
        for kind in (None, "int8", "float8", *(["float8_blocks"] if family == "llama_tied" else [])):
            found = take_weights(policy, model.params, weight_dtype=kind).loop
            shapes = abstract_weights(policy, jax.eval_shape(lambda p=model.params: p), weight_dtype=kind)
            assert jax.tree.structure(shapes) == jax.tree.structure(found)
            for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(found), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_another_dtype_is_refused(vectors: Any) -> None:
    model = vectors("llama")
    for wrong in ("int4", jnp.bfloat16):
        with pytest.raises(InputError, match=r"weight_dtype is .*, but must be int8, float8, .*, or None"):
            sample(model.policy, model.params, PROMPTS, jax.random.key(0), weight_dtype=wrong)


@pytest.mark.heavy
@pytest.mark.usefixtures("own_programs")
def test_smollm2_samples_what_it_trains_on() -> None:
    """30 layers in bfloat16: int8 weights in both, float32 activations; and with other settings, how far they are."""
    policy, params, _ = load_policy("smollm2-135m", dtype="bfloat16")
    exact = dataclasses.replace(policy, activations=FLOAT32)
    both = dataclasses.replace(exact, rounding="int8")
    assert np.expm1(differences(both, params)).max() < 1e-3
    assert np.expm1(differences(exact, params)).max() < 1e-3
    assert differences(policy, params).max() > 1e-3
    assert differences(exact, params, weight_dtype="int8").max() > 1e-2
    assert differences(exact, params, cache_dtype="int8").mean() < 0.05
    assert differences(exact, params, cache_dtype="float8_e4m3fn").mean() < 0.15


def decode_bytes(platform: str, environment: dict[str, str], **asked: Any) -> list[dict[str, float]]:
    """See the module of this name."""
    program = Path(__file__).parent / "decode_bytes.py"
    done = subprocess.run(
        [sys.executable, str(program), json.dumps({"platform": platform, **asked})],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    found: list[dict[str, float]] = json.loads(done.stdout.split("RESULT")[1])
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2"])
def test_bytes_of_a_decode_step_on_a_tpu(chip: str) -> None:
    """Four layers of Qwen3-8B's size: what the loop moves, what XLA counts, and the arguments; no wide copy is made."""
    model = {"layers": 4, "hidden": 4096, "inner": 12288, "vocabulary": 8192}
    kinds = [None, "int8", "float8"]
    wide, *narrow = decode_bytes(
        chip, tpu_environment(), model=model, rows=16, dtypes=kinds, caches=[None, None, "int8"]
    )
    assert wide["moved"] > 1.5e9  # bytes, of 772 million weights and their embedding
    for found in narrow:
        for count, most in (("moved", 0.6), ("arguments", 0.6), ("counted", 0.65)):  # the last: the core's memories too
            assert found[count] <= most * wide[count], (chip, count, found, wide)
        assert found["temporaries"] < 0.05 * found["arguments"]


@pytest.mark.heavy
def test_caches_of_eight_bits_are_not_moved_through_vmem() -> None:
    """Keys of 67 MB a layer fit v5e's VMEM: XLA would take them there and write them back, a ratio of 0.67."""
    model = {"layers": 2, "hidden": 4096, "inner": 12288, "vocabulary": 8192}
    lengths = {"group": 16, "prompt": 1024, "new": 1024}
    wide, narrow = decode_bytes(
        "v5e:2x2", tpu_environment(), model=model, rows=32, dtypes=[None, "int8"], caches=[None, "int8"],
        lengths=lengths,
    )  # fmt: skip
    assert narrow["step"] <= 0.6 * wide["step"], (narrow, wide)


@pytest.mark.heavy
def test_bytes_of_a_decode_step_on_a_cpu() -> None:
    """Arguments and temporaries: what a step reads and writes at least once. Wide copies are of some columns only.

    The unembedding, a tenth of the bfloat16 bytes here, is in float32 with all of them. XLA copies the bits of float8
    once before the loop.
    """
    model = {"layers": 2, "hidden": 1024, "inner": 4096, "vocabulary": 2048}
    kinds = [None, "int8", "float8"]
    wide, *narrow = decode_bytes(
        "cpu", {**all_optimisations(), "JAX_PLATFORMS": "cpu"}, model=model, rows=16, dtypes=kinds, caches=[None] * 3
    )
    # Of each layer the projections of queries, keys, values and outputs, and three of the MLP.
    bits = model["layers"] * (3 * model["hidden"] ** 2 + 3 * model["hidden"] * model["inner"])
    for found, copied in zip(narrow, (0, bits), strict=True):
        assert found["arguments"] + found["temporaries"] - copied <= 0.67 * (wide["arguments"] + wide["temporaries"])
        assert found["counted"] - 2 * copied <= 0.6 * wide["counted"]
    assert narrow[0]["temporaries"] < 0.5 * narrow[0]["arguments"]
