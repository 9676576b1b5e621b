"""The families of today against what transformers computed with a tiny model of each, and its files.

Logits are also compared far out, where a wrong rotation shows. Layers that carry states are computed in chunks, which
round otherwise: their bounds are wider.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TODAY, VECTORS, quick_compiles
from heavy import few

from jaxrl_llm import load_policy, sample, save_policy
from jaxrl_llm.models import from_hf, to_hf
from jaxrl_llm.models.io.huggingface import open_folder, to_tensors
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.sampling import completion_ids

LIGHT = ("qwen3_5", "gemma4_e2b")
SWITCHES = ("phi3_longrope",)  # transformers changes all rotations on the way; here the longest sequence decides


@pytest.mark.heavy
def test_longrope_is_that_of_transformers_before_and_after_its_switch() -> None:
    """A greedy continuation that grows beyond the original context, in its two parts, each with its own factors."""
    folder = VECTORS / "phi3_longrope"
    whole = np.load(folder / "vectors.npz")["greedy"][0].tolist()
    for context, begin, end in ((16, 8, 17), (24, 17, 24)):  # 16 tokens predict the 17th, still with the short ones
        policy, params, _ = load_policy(folder, context=context)
        rows = sample(
            policy, params, [whole[:begin]], jax.random.key(0), temperature=0.0, max_new_tokens=end - begin,
            stop_token_ids=[],
        )  # fmt: skip
        assert completion_ids(rows)[0] == whole[begin:end]


@pytest.fixture(autouse=True)
def _quick() -> Any:
    with quick_compiles():  # many programs, each run once or twice
        yield


def fused(gradient: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients by the names of live transformers modules, where experts are stacked, gate and up in one matrix."""
    out = dict(gradient)
    for name in expected:
        if name in gradient or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        prefix = name.rpartition(".")[0]
        count = len({key.split(".")[-3] for key in gradient if key.startswith(f"{prefix}.")})
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        each = [np.concatenate([gradient[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(count)]
        out[name] = np.stack(each)
    return out


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(TODAY, LIGHT))
def test_logits_near_and_far(family: str, vectors: Any) -> None:
    model = vectors(family)
    arrays, config = model.arrays, model.policy.config
    bound = 5e-4 if any(kind.delta for kind in config.each_kind) else 1e-4
    logits = np.asarray(model.policy.logits(model.params, arrays["ids"]))
    assert np.abs(logits - arrays["logits_f64"]).max() < bound
    mask = arrays["pad_mask"].astype(bool)
    padded = np.asarray(model.policy.logits(model.params, arrays["pad_ids"], mask))
    assert np.abs(padded - arrays["pad_logits"])[mask].max() < bound
    far = np.asarray(model.policy.logits(model.params, arrays["long_ids"]))[:, arrays["long_at"]]
    assert np.abs(far - arrays["long_logits"]).max() < bound
    unrolled = np.asarray(model.policy.logits(unstack(model.params, config), arrays["ids"]))
    assert np.abs(unrolled - logits).max() < bound


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(TODAY, LIGHT))
def test_gradients(family: str, vectors: Any) -> None:
    """Of every parameter that transformers trains, within 1e-3 of its norm."""
    model = vectors(family)
    policy, ids = model.policy, jnp.asarray(model.arrays["ids"], jnp.int32)

    @jax.jit
    def loss(params: Any) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden, _ = policy.forward(params, ids, places, jnp.ones_like(ids))
        logp = jax.nn.log_softmax(policy.logits_of(params, hidden))
        return -jnp.mean(jnp.take_along_axis(logp[:, :-1], ids[:, 1:, None], axis=2))

    value, gradient = jax.value_and_grad(loss)(model.params)
    assert float(value) == pytest.approx(float(model.arrays["loss"]), abs=1e-4)
    expected = {name.removeprefix("grad/"): x for name, x in model.arrays.items() if name.startswith("grad/")}
    found = fused(to_tensors(gradient, policy.config), expected)
    assert expected.keys() <= found.keys()
    for name, reference in expected.items():
        assert np.linalg.norm(found[name] - reference) < 1e-3 * np.linalg.norm(reference), name
    rest = found.keys() - expected.keys()
    # What the files hold and transformers does not train.
    assert all(name.endswith(("layer_scalar", "e_score_correction_bias")) or ".experts." in name for name in rest)


@pytest.mark.parametrize("family", few(TODAY, LIGHT))
def test_greedy_continuation_and_ratio_one(family: str, vectors: Any) -> None:
    """What the sampler draws, transformers continues with; and the trainer gives it the sampler's log-probability."""
    model = vectors(family)
    prompt, whole = (model.arrays[name][0].tolist() for name in ("greedy_prompt", "greedy"))
    prompts = [prompt, [*prompt[:2], prompt[5]]]
    settings: Any = {"max_new_tokens": 16, "stop_token_ids": [], "group_size": 2}  # of both, which have one prefill
    if family not in SWITCHES:
        greedy = sample(model.policy, model.params, prompts, jax.random.key(0), temperature=0.0, **settings)
        assert completion_ids(greedy)[0] == whole[len(prompt) :]
    drawn = sample(model.policy, model.params, prompts, jax.random.key(1), **settings)
    outputs = policy_outputs(model.policy, model.params, drawn)
    ratio = np.exp(np.asarray(outputs.logp) - np.asarray(drawn.behaviour_logp))[np.asarray(drawn.action_mask)]
    assert np.abs(ratio - 1).max() < (3e-4 if model.policy.config.recurrent else 3e-5)
    # Both are of the logits as transformers has them: scaled, and with their soft cap.
    logits = model.policy.without_unknown(model.policy.logits(model.params, drawn.tokens, drawn.token_mask))
    whole_logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], drawn.tokens[:, 1:, None], axis=2)[:, :, 0]
    action = np.asarray(drawn.action_mask)[:, 1:]
    np.testing.assert_allclose(outputs.logp[:, 1:][action], whole_logp[action], rtol=0, atol=3e-4)


@pytest.mark.parametrize("family", TODAY)
def test_files_come_back_bit_for_bit(family: str, vectors: Any, tmp_path: Any) -> None:
    model = vectors(family)
    config = model.policy.config
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
    original = {name: read() for name, read in open_folder(model.folder).items()}
    folder = save_policy(tmp_path / "saved", model.policy, model.params, model.tokenizer)
    saved = {name: read() for name, read in open_folder(folder).items()}
    assert saved.keys() == original.keys()
    for name, x in original.items():
        np.testing.assert_array_equal(saved[name], x, err_msg=name)
    again, params, _ = load_policy(folder)
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, params, model.params)


# Settings of which transformers makes the same model: what it derives where a file leaves them out, another spelling,
# and what is only of layers that the language model does without.
ALIKE = {
    "rope_parameters", "num_nextn_predict_layers", "vocab_size_per_layer_input", "full_attn_idxs", "max_window_layers",
    "no_rope_layer_interval", "pad_token_id", "initializer_range", "_name_or_path",
}  # fmt: skip


@pytest.mark.parametrize("family", TODAY)
def test_transformers_reads_the_same_settings(family: str, vectors: Any, tmp_path: Any) -> None:
    from transformers import AutoConfig

    model = vectors(family)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model.policy.config)))
    ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path, model.folder))
    other = {name for name in theirs if ours.get(name) != theirs[name]} - ALIKE
    assert other <= ({"intermediate_size"} if family == "qwen3_5_moe" else set())  # of dense layers: it has none
    rope, original = ({k: v for k, v in each["rope_parameters"].items() if k != "type"} for each in (ours, theirs))
    derived = {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
    rest = set(original) - derived - ({"rope_theta", "rope_type"} if family == "olmo3" else set())
    assert {name: rope.get(name) for name in rest} == {name: original[name] for name in rest}
