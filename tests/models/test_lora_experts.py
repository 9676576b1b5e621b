"""Adapters of experts and of embeddings: by loops, as merged weights, in the sampler and in PEFT's files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import load_policy, sample
from jaxrl_llm.models import lora
from jaxrl_llm.models.io.adapter_config import read_adapter_config
from jaxrl_llm.models.io.save import save_adapter
from jaxrl_llm.models.layers.moe import expert_mlp
from jaxrl_llm.models.outputs import NOTHING, policy_outputs
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError

RANK, ALPHA, KEY = 3, 4.5, jax.random.key(5)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 9)), jnp.int32)
OUTER = "base_model.model."
ENDS, EXPERTS = ("embed", "unembed"), ("gate", "up", "down")
pytestmark = pytest.mark.usefixtures("quickly")


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def adapted(model: Any, targets: tuple[str, ...], scale: float = 0.1) -> Any:
    """The parameters with random adapters of some targets."""
    adapters = lora.init(KEY, model.policy.config, RANK, targets)
    adapters = jax.tree.map(lambda x: scale * jax.random.normal(jax.random.fold_in(KEY, x.size), x.shape), adapters)
    return lora.scaled(combine(model.params, adapters), RANK, ALPHA)


@pytest.mark.heavy
def test_the_output_and_gradients_of_experts_by_loop_in_float64() -> None:
    """With W' = W + s A B of each expert: its weight times W_down' (silu(W_gate' x) * W_up' x), summed over those of a
    token. Gradients of A and B are s dW B^T and s A^T dW, of the merged weights."""
    from jaxrl_llm.models.config import ModelConfig

    T, D, E, F, r, s = 7, 8, 5, 6, 2, 1.7
    config = ModelConfig(
        family="mixtral", vocab_size=32, hidden_size=D, intermediate_size=F, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=4, norm_epsilon=1e-5, tie_embeddings=False, num_experts=E, experts_per_token=2,
    )  # fmt: skip
    x, cotangent = draw(0, 1, T, D), draw(1, 1, T, D)
    weights = {"gate": draw(2, E, D, F), "up": draw(3, E, D, F), "down": draw(4, E, F, D)}
    a = {name: draw(5 + i, E, w.shape[1], r) for i, (name, w) in enumerate(weights.items())}
    b = {name: draw(8 + i, E, r, w.shape[2]) for i, (name, w) in enumerate(weights.items())}
    router = draw(11, D, E)
    merged = {name: np.stack([w[e] + s * a[name][e] @ b[name][e] for e in range(E)]) for name, w in weights.items()}
    expected, through = np.zeros((T, D)), {name: np.zeros_like(w) for name, w in weights.items()}
    for t in range(T):
        token = x[0, t]
        score = np.exp(token @ router) / np.exp(token @ router).sum()
        best = np.argsort(-score)[:2]
        for e in best:
            weight = score[e] / score[best].sum()
            gate, up = token @ merged["gate"][e], token @ merged["up"][e]
            silu, slope = gate / (1 + np.exp(-gate)), 1 / (1 + np.exp(-gate))
            inner = silu * up
            expected[t] += weight * (inner @ merged["down"][e])
            d_out = weight * cotangent[0, t]
            through["down"][e] += np.outer(inner, d_out)
            d_inner = d_out @ merged["down"][e].T
            through["up"][e] += np.outer(token, d_inner * silu)
            through["gate"][e] += np.outer(token, d_inner * up * (slope + gate * slope * (1 - slope)))
    with jax.enable_x64(True):
        adapters = {
            f"{name}_lora_{end}": jnp.asarray(m[name]) for end, m in (("in", a), ("out", b)) for name in weights
        }
        frozen = {**jax.tree.map(jnp.asarray, weights), "router": jnp.asarray(router), "lora_scale": jnp.float64(s)}

        def loss(adapters: Any) -> tuple[jax.Array, jax.Array]:
            layer = {**frozen, **adapters}
            out = expert_mlp(jnp.asarray(x), layer, config, lambda gate, up: jax.nn.silu(gate) * up)
            return jnp.sum(out * cotangent), out

        found, out = jax.grad(loss, has_aux=True)(adapters)
        np.testing.assert_allclose(out[0], expected, rtol=1e-9, atol=1e-9)
        for name in weights:
            for e in range(E):
                dw = through[name][e]
                for end, value in (("in", s * dw @ b[name][e].T), ("out", s * a[name][e].T @ dw)):
                    np.testing.assert_allclose(found[f"{name}_lora_{end}"][e], value, rtol=1e-8, atol=1e-9)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mixtral", (*EXPERTS, *ENDS)),
        ("llama", (*ENDS, "query")),
        *(
            pytest.param(name, (*EXPERTS, *more), marks=pytest.mark.heavy)
            for name, more in (
                ("qwen3_moe", ()), ("gpt_oss", ENDS), ("glm4_moe", ("shared_up", *ENDS)), ("deepseek_v3", ("latent",)),
                ("qwen3_5_moe", ("shared_gate",)), ("gemma4_moe", ()),
            )
        ),
    ],
)  # fmt: skip
def test_the_policy_is_that_of_the_merged_weights(family: str, targets: tuple[str, ...], vectors: Any) -> None:
    """Merged by hand, a matrix at a time in float64; layers stacked and apart. New adapters change nothing."""
    model = vectors(family)
    policy, plain = model.policy, np.asarray(model.policy.logits(model.params, TOKENS))
    new = lora.scaled(combine(model.params, lora.init(KEY, policy.config, RANK, targets)), RANK, ALPHA)
    rounding = 1e-4 if any(kind.delta for kind in policy.config.each_kind) else 1e-5  # the delta rule magnifies it
    np.testing.assert_allclose(policy.logits(new, TOKENS), plain, atol=rounding)
    params = adapted(model, targets)
    merged = lora.merge(params)
    assert jax.tree.structure(merged) == jax.tree.structure(model.params)
    found, flat = 0, jax.tree_util.tree_leaves_with_path(params)
    by_path = {tuple(key.key for key in path): np.asarray(x, np.float64) for path, x in flat}
    of_merged = {tuple(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(merged)}
    for path, w in of_merged.items():
        *at, name = path
        expected, a = by_path[path], by_path.get((*at, f"{name}_lora_in"))
        if a is not None:
            found += 1
            b, expected = by_path[(*at, f"{name}_lora_out")], expected.copy()
            if name == "unembed":
                expected += ALPHA / RANK * (a @ b).T
            elif name == "embed":
                expected += ALPHA / RANK * a @ b
            else:
                lead = a.ndim + b.ndim - 2 - w.ndim
                for index in np.ndindex(*w.shape[:lead]):
                    product = a[index].reshape(-1, RANK) @ b[index].reshape(RANK, -1)
                    expected[index] += ALPHA / RANK * product.reshape(expected[index].shape)
        np.testing.assert_allclose(w, expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=str(path))
    assert found >= len(targets)
    logits = np.asarray(policy.logits(merged, TOKENS))
    assert np.abs(logits - plain).max() > 0.05
    for each in (params, unstack(params, policy.config)):
        np.testing.assert_allclose(policy.logits(each, TOKENS), logits, rtol=0, atol=2e-4 * np.abs(logits).max())
    apart = lora.split(params)
    assert not any("lora_in" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(apart[0]))
    jax.tree.map(np.testing.assert_array_equal, combine(*apart), params)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "targets", "how"),
    [
        ("llama", ENDS, {}),
        pytest.param("mixtral", (*EXPERTS, *ENDS), {}, marks=pytest.mark.heavy),
        pytest.param("mixtral", (*EXPERTS, *ENDS), {"weight_dtype": "int8"}, marks=pytest.mark.heavy),
        pytest.param("glm4_moe", (*EXPERTS, "shared_down", *ENDS), {}, marks=pytest.mark.heavy),
        pytest.param("gpt_oss", EXPERTS, {}, marks=pytest.mark.heavy),
    ],
)
def test_the_ratio_is_one_before_the_first_step(
    family: str, targets: tuple[str, ...], how: dict[str, Any], vectors: Any
) -> None:
    """The trainer's log-probabilities are the sampler's, with rounded weights too."""
    model = vectors(family)
    params = adapted(model, targets)
    asked: dict[str, Any] = {"group_size": 4, "max_new_tokens": 12, "stop_token_ids": []}
    batch = sample(model.policy, params, [[5, 6, 7, 8], [11, 12]], jax.random.key(0), **asked | how)
    policy = dataclasses.replace(model.policy, rounding=how.get("weight_dtype"))
    outputs = jax.jit(policy_outputs, static_argnums=(0, 4))
    found = np.asarray(outputs(policy, params, batch, None, NOTHING).logp)
    mask = np.asarray(batch.action_mask)
    assert np.abs(found - np.asarray(batch.behaviour_logp))[mask].max() < 2e-4
    plain = np.asarray(outputs(policy, model.params, batch, None, NOTHING).logp)
    assert np.abs(found - plain)[mask].max() > 0.02


@pytest.mark.parametrize(
    ("family", "targets", "module"),
    [
        ("llama", (*ENDS, "query"), "lm_head"),
        ("mixtral", (*EXPERTS, *ENDS), "model.layers.1.block_sparse_moe.experts.2.w3"),
        pytest.param(
            "qwen3_moe", ("query", *EXPERTS), "model.layers.1.mlp.experts.3.down_proj", marks=pytest.mark.heavy
        ),
        pytest.param("glm4_moe", EXPERTS, "model.layers.1.mlp.experts.3.down_proj", marks=pytest.mark.heavy),
        pytest.param(
            "deepseek_v3", ("up", "shared_up"), "model.layers.1.mlp.experts.0.up_proj", marks=pytest.mark.heavy
        ),
    ],
)
def test_they_return_from_a_file_of_peft(
    family: str, targets: tuple[str, ...], module: str, tmp_path: Path, vectors: Any
) -> None:
    """A module for each expert; B A of the file is what is added to the model's tensor."""
    model = vectors(family)
    policy, params = model.policy, adapted(model, targets)
    folder = save_adapter(tmp_path / "adapter", policy, params, base="owner/model")
    again, found, _ = load_policy(model.folder, adapter=folder)
    assert again.config == policy.config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    tensors, config = load_file(folder / "adapter_model.safetensors"), read_adapter_config(folder)
    assert f"{OUTER}{module}.lora_A.weight" in tensors
    modules = {name.split(".lora_")[0].removeprefix(OUTER) for name in tensors}
    weights = load_file(model.folder / "model.safetensors")
    named = {key.removesuffix(".weight") for key, x in weights.items() if x.ndim == 2 and "." in key}
    assert {name for name in named if config.is_target(name)} == modules
    from jaxrl_llm.models.io.huggingface import to_tensors

    merged = to_tensors(lora.merge(params), policy.config)
    for name in modules:
        ends = ("embedding_A", "embedding_B") if "embed_tokens" in name else ("A.weight", "B.weight")
        a, b = (tensors[f"{OUTER}{name}.lora_{end}"].astype(np.float64) for end in ends)
        product = config.scale_of(name) * (b @ a)
        expected = weights[f"{name}.weight"] + (product.T if "embed_tokens" in name else product)
        np.testing.assert_allclose(merged[f"{name}.weight"], expected, atol=2e-6 * np.abs(expected).max())


def test_what_peft_has_no_modules_for_is_refused(vectors: Any, tmp_path: Path) -> None:
    model = vectors("gpt_oss")
    with pytest.raises(
        InputError, match=r"one tensor in files of gpt_oss, model.layers.0.mlp.experts.* are no modules"
    ):
        save_adapter(tmp_path / "a", model.policy, adapted(model, ("up",)))
    assert not (tmp_path / "a").exists()


@pytest.mark.heavy
def test_a_file_of_dense_layers_alone_names_no_experts(vectors: Any, tmp_path: Path) -> None:
    """transformers 5 has experts in one tensor, which the same names of modules do not mean."""
    model = vectors("glm4_moe")
    folder = save_adapter(tmp_path / "a", model.policy, adapted(model, ("up", "shared_up", "query")))
    tensors = load_file(folder / "adapter_model.safetensors")
    from safetensors.numpy import save_file

    save_file({n: x for n, x in tensors.items() if ".experts." not in n}, folder / "adapter_model.safetensors")
    raw = json.loads((folder / "adapter_config.json").read_text())
    raw["target_modules"] = ["up_proj", "q_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    _, found, _ = load_policy(model.folder, adapter=folder)
    kinds = {name for name, layer in found["layers"].items() if "up_lora_in" in layer}
    assert len(kinds) == 1
