"""PEFT's adapters: what a file adds to the weights, computed by hand in the file's own layout, and round trips."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import VECTORS
from safetensors.numpy import load_file, save_file

from jaxrl_llm import load_policy
from jaxrl_llm.models import lora
from jaxrl_llm.models.io.adapter_config import AdapterConfig, read_adapter_config
from jaxrl_llm.models.io.huggingface import to_tensors
from jaxrl_llm.models.io.save_adapter import save_adapter
from jaxrl_llm.models.parameters import adapted_weights, combine
from jaxrl_llm.utils.errors import InputError

Tensors = dict[str, np.ndarray]
OUTER = "base_model.model."
EMBED, HEAD = "model.embed_tokens", "lm_head"
KEY = jax.random.key(3)


def write_adapter(folder: Path, tensors: Tensors, **settings: Any) -> Path:
    """A folder of PEFT's; names of tensors without the beginning that all have."""
    folder.mkdir(exist_ok=True)
    usual = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(usual | settings))
    save_file({OUTER + name: x for name, x in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def halves(module: str, weight: np.ndarray, rank: int, seed: int, embedding: bool = False) -> Tensors:
    """Random A and B of a module."""
    rng = np.random.default_rng(seed)
    outputs, inputs = weight.shape[::-1] if embedding else weight.shape
    a, b = (rng.normal(size=size).astype(np.float32) * 0.3 for size in ((rank, inputs), (outputs, rank)))
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    return {f"{module}.{name}": x for name, x in zip(names, (a, b), strict=True)}


def by_hand(weights: Tensors, adapter: Tensors, scale: Any) -> Tensors:
    """W + scale B A of each module in double precision; scale: a number, or a function of the module."""
    out = {name: x.astype(np.float64) for name, x in weights.items()}
    for name, a in adapter.items():
        if not re.search(r"lora_(embedding_)?A", name):
            continue
        module = name.split(".lora_")[0]
        b = adapter[name.replace("_A", "_B")]
        product = b.astype(np.float64) @ a.astype(np.float64)
        factor = scale(module) if callable(scale) else scale
        out[f"{module}.weight"] += factor * (product.T if "embedding" in name else product)
    return out


def assert_merged(name: str, folder: Path, expected: Tensors, dtype: str = "float32") -> Any:
    """The model with the adapter, merged, has the expected tensors; returns it."""
    policy, params, _ = load_policy(VECTORS / name, adapter=folder, dtype=dtype)
    found = to_tensors(lora.merge(params), policy.config)
    for key, value in expected.items():
        bound = (2e-6 if dtype == "float32" else 2**-8) * np.abs(value).max()
        np.testing.assert_allclose(found[key].astype(np.float64), value, rtol=0, atol=bound, err_msg=key)
    assert found.keys() == expected.keys()
    return policy, params


MODELS = ["llama", "phi3", "qwen3_5", "deepseek_v3", "glm4", "gemma4_e2b", "lfm2", "mixtral", "gpt_oss", "olmo3"]
FEW = {"llama", "phi3", "deepseek_v3"}


@pytest.mark.heavy
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.heavy] * (n not in FEW)) for n in MODELS])
def test_all_projections_of_a_family(name: str, tmp_path: Path) -> None:
    """Fused ones too, whose parts share A, embeddings and experts; those of routers and tied embeddings are merged."""
    weights = load_file(VECTORS / name / "model.safetensors")
    raw = json.loads((VECTORS / name / "config.json").read_text())
    adapter: Tensors = {}
    for seed, (key, value) in enumerate(weights.items()):
        tied = key == f"{EMBED}.weight" and raw["tie_word_embeddings"]
        if value.ndim == 2 and key.endswith(".weight") and not tied:
            adapter |= halves(key.removesuffix(".weight"), value, 4, seed, embedding="embed_tokens" in key)
    folder = write_adapter(tmp_path / "adapter", adapter, target_modules=".*")
    policy, params = assert_merged(name, folder, by_hand(weights, adapter, 6 / 4))
    learning = lora.split(params)[1]
    targets = {weight.name for weight in adapted_weights(policy.config).values()}
    targets -= {"gate", "up", "down"} if name == "gpt_oss" else set()  # one tensor of three axes for all experts
    assert jax.tree.structure(learning) == jax.tree.structure(lora.init(KEY, policy.config, 1, sorted(targets)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.heavy) for n in MODELS])
def test_the_policy_is_that_of_the_merged_weights(name: str, tmp_path: Path) -> None:
    weights, adapter = load_file(VECTORS / name / "model.safetensors"), dict[str, np.ndarray]()
    for seed, (key, value) in enumerate(weights.items()):
        if value.ndim == 2 and ".layers." in key and key.endswith(".weight"):
            adapter |= halves(key.removesuffix(".weight"), value, 4, seed)
    policy, params, _ = load_policy(VECTORS / name, adapter=write_adapter(tmp_path / "a", adapter))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 200, (1, 7)))
    logits, merged = (np.asarray(policy.logits(p, tokens)) for p in (params, lora.merge(params)))
    np.testing.assert_allclose(logits, merged, rtol=0, atol=2e-4 * np.abs(merged).max())


def test_patterns_of_rank_and_scale_and_rslora(tmp_path: Path) -> None:
    """Ranks and scales that differ within a layer, between layers, and layers without an adapter."""
    weights, adapter = load_file(VECTORS / "llama" / "model.safetensors"), dict[str, np.ndarray]()
    ranks = {"q_proj": 2, "layers.1.mlp.up_proj": 5}
    alphas = {"v_proj": 3.0, "layers.0.self_attn.q_proj": 7}
    targets = ["q_proj", "v_proj", "up_proj", "layers.1.self_attn.o_proj"]

    def of(module: str, pattern: dict[str, Any], usual: Any) -> Any:
        return next((x for end, x in pattern.items() if f".{module}".endswith(f".{end}")), usual)

    modules = [key.removesuffix(".weight") for key in weights]
    modules = [m for m in modules if any(f".{m}".endswith(f".{t}") for t in targets)]
    for seed, module in enumerate(modules):
        adapter |= halves(module, weights[f"{module}.weight"], of(module, ranks, 4), seed)
    settings = {"rank_pattern": ranks, "alpha_pattern": alphas, "target_modules": targets}
    for root in (False, True):
        folder = write_adapter(tmp_path / f"adapter{root}", adapter, use_rslora=root, **settings)

        def scale(module: str, root: bool = root) -> float:
            return of(module, alphas, 6) / of(module, ranks, 4) ** (0.5 if root else 1)

        policy, params = assert_merged("llama", folder, by_hand(weights, adapter, scale))
        layers = params["layers"]
        assert layers["query_lora_in"].shape[-1] == 2
        assert layers["up_lora_in"].shape[-1] == 5
        assert not np.any(layers["up_lora_in"][0, :, 4:]), "padding"
        assert not np.any(layers["out_lora_in"][0]), "a layer without"
        # It is written again as it was, but for what its scales are called.
        again = save_adapter(tmp_path / f"again{root}", policy, params)
        found = load_file(again / "adapter_model.safetensors")
        assert found.keys() == {OUTER + name for name in adapter}
        raw = json.loads((again / "adapter_config.json").read_text())
        assert set(raw["target_modules"]) == {"q_proj", "v_proj", "up_proj", "model.layers.1.self_attn.o_proj"}
        assert_merged("llama", again, by_hand(weights, adapter, scale))
        assert all(np.array_equal(found[f"{OUTER}{m}.lora_A.weight"], adapter[f"{m}.lora_A.weight"]) for m in modules)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.heavy] * (n not in FEW)) for n in [*MODELS, "qwen3_moe", "gemma4_moe"]]
)
def test_adapters_return_from_a_file(name: str, tmp_path: Path) -> None:
    """Those that were trained here; of fused modules as one adapter with the ranks of all parts."""
    policy, base, _ = load_policy(VECTORS / name)
    adapters = lora.init(KEY, policy.config, 3)
    adapters = jax.tree.map(
        lambda x: 0.2 * jax.random.normal(jax.random.fold_in(KEY, x.size), x.shape, x.dtype), adapters
    )
    params = combine(lora.scaled(base, 3, 4.0), adapters)
    folder = save_adapter(tmp_path / "adapter", policy, params, base="owner/model")
    raw = json.loads((folder / "adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == "owner/model"
    assert (raw["r"], raw["lora_alpha"]) in ((3, 4), (6, 8))
    assert json.loads(json.dumps(raw)) == raw
    again, found, _ = load_policy(VECTORS / name, adapter=folder)
    assert again.config == policy.config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    second = save_adapter(tmp_path / "second", policy, found, base="owner/model")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (second / file).read_bytes() == (folder / file).read_bytes()
    # What PEFT computes with the file: W + alpha / r B A of each module that it names.
    tensors = load_file(folder / "adapter_model.safetensors")
    config = read_adapter_config(folder)
    names = {key.split(".lora_")[0].removeprefix(OUTER) for key in tensors}

    def named(module: str) -> str:  # of modules beside experts PEFT takes the tensor
        return module if config.is_target(module) else f"{module}.weight"

    weights = load_file(VECTORS / name / "model.safetensors")
    modules = {key.removesuffix(".weight") for key, x in weights.items() if x.ndim == 2 and ".experts." not in key}
    meant = {module for module in modules if config.is_target(module) or config.is_parameter(named(module))}
    assert meant == names
    own = {key.removeprefix(OUTER): x for key, x in tensors.items()}
    expected = by_hand(weights, own, lambda module: config.scale_of(named(module)))
    merged = to_tensors(lora.merge(params), policy.config)
    for key, value in expected.items():
        np.testing.assert_allclose(merged[key], value, rtol=0, atol=2e-6 * np.abs(value).max(), err_msg=key)
    assert all(
        len(x) == config.rank_of(named(key.split(".lora_")[0][len(OUTER) :]))
        for key, x in tensors.items()
        if "A" in key
    )


def test_shared_halves_of_a_fused_module_stay_shared(tmp_path: Path) -> None:
    """A file of PEFT's is written again with the same numbers."""
    weights, adapter = load_file(VECTORS / "phi3" / "model.safetensors"), dict[str, np.ndarray]()
    for layer in range(4):
        for module in (f"model.layers.{layer}.self_attn.qkv_proj", f"model.layers.{layer}.mlp.gate_up_proj"):
            adapter |= halves(module, weights[f"{module}.weight"], 2, layer)
    settings = {"r": 2, "lora_alpha": 5, "target_modules": ["qkv_proj", "gate_up_proj"]}
    folder = write_adapter(tmp_path / "adapter", adapter, **settings)
    policy, params, _ = load_policy(VECTORS / "phi3", adapter=folder)
    np.testing.assert_array_equal(params["layers"]["query_lora_in"], params["layers"]["value_lora_in"])
    again = save_adapter(tmp_path / "again", policy, params)
    found = load_file(again / "adapter_model.safetensors")
    assert found.keys() == {OUTER + key for key in adapter}
    assert all(np.array_equal(found[OUTER + key], x) for key, x in adapter.items())
    raw = json.loads((again / "adapter_config.json").read_text())
    assert {key: raw[key] for key in settings} == settings | {"target_modules": sorted(settings["target_modules"])}  # type: ignore[type-var]
    assert not raw["rank_pattern"]


def test_modules_that_are_there_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    weights = load_file(VECTORS / "llama" / "model.safetensors")
    saved = {f"{EMBED}.weight", f"{HEAD}.weight", "model.norm.weight"}
    whole = {key: rng.normal(size=weights[key].shape).astype(np.float32) for key in saved}
    query = "model.layers.0.self_attn.q_proj"
    adapter = halves(query, weights[f"{query}.weight"], 4, 0)
    settings = {"target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]}
    folder = write_adapter(tmp_path / "adapter", adapter | whole, **settings)
    with caplog.at_level(logging.WARNING):
        assert_merged("llama", folder, by_hand(weights | whole, adapter, 1.5))
    (line,) = (text for text in caplog.messages if str(folder) in text)
    assert line.endswith(f"merged into the weights, where they stay: {HEAD}.weight, {EMBED}.weight, model.norm.weight")
    for change, message in (
        ({"modules_to_save": ["embed_tokens", "score"]}, "has no tensor of 'score', which modules_to_save name"),
        ({"score.weight": np.ones((1, 2), np.float32)}, "'score.weight' cannot be merged: the model's files have no"),
        ({"model.norm.weight": np.ones(3, np.float32)}, r"norm.weight' has shape \(3,\), but the model's has \(64,\)"),
    ):
        tensors = {key: x for key, x in change.items() if isinstance(x, np.ndarray)}
        own = settings | {key: x for key, x in change.items() if isinstance(x, list)}
        with pytest.raises(InputError, match=message) as caught:
            load_policy(VECTORS / "llama", adapter=write_adapter(folder, adapter | whole | tensors, **own))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["head", "embedding", "both", "tying", "adapter"])
def test_tied_embeddings_of_which_one_is_changed(kind: str, tmp_path: Path) -> None:
    """PEFT copies a module that it saves: the other stays as it was, unless it is told to tie them."""
    name = "llama_tied"
    weights, rng = load_file(VECTORS / name / "model.safetensors"), np.random.default_rng(1)
    embed = weights[f"{EMBED}.weight"]
    one, two = (rng.normal(size=embed.shape).astype(np.float32) for _ in range(2))
    first, second = f"{EMBED}.weight", f"{HEAD}.weight"
    saved, adapter, expected = {
        "head": ({second: two}, {}, {first: embed, second: two}),
        "embedding": ({first: one}, {}, {first: one, second: embed}),
        "both": ({first: one, second: two}, {}, {first: one, second: two}),
        "tying": ({first: one}, {}, {first: one}),
        "adapter": ({}, halves(HEAD, embed, 4, 0), {}),
    }[kind]
    expected = weights | expected
    if adapter:
        expected |= by_hand({**weights, second: embed}, adapter, 1.5)
    modules = [key.removesuffix(".weight").removeprefix("model.") for key in saved]
    settings: dict[str, Any] = {"modules_to_save": modules, "target_modules": ["lm_head"] if adapter else []}
    folder = write_adapter(tmp_path / "a", saved | adapter, ensure_weight_tying=kind == "tying", **settings)
    policy, _ = assert_merged(name, folder, expected)
    assert policy.config.tie_embeddings == (kind == "tying")


def test_names_of_a_model_with_towers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, adapter = load_file(VECTORS / "qwen3_5" / "model.safetensors"), dict[str, np.ndarray]()
    for key, value in weights.items():
        if key.endswith(("up_proj.weight", "in_proj_qkv.weight")):
            adapter |= halves(key.removesuffix(".weight"), value, 4, len(adapter))
    named = {key.replace("model.layers", "model.language_model.layers"): x for key, x in adapter.items()}
    tower = halves("model.visual.blocks.0.qkv", np.ones((4, 4)), 4, 0)
    folder = write_adapter(
        tmp_path / "a", named | tower, target_modules=r"^(?!.*visual).*\.(up_proj|in_proj_qkv)|.*visual.*"
    )
    with caplog.at_level(logging.WARNING):
        assert_merged("qwen3_5", folder, by_hand(weights, adapter, 1.5))
    assert f"{folder}: 2 tensors are not read (model.visual: 2)" in caplog.messages


def test_in_bfloat16_what_is_merged_is_rounded_once(tmp_path: Path) -> None:
    weights = load_file(VECTORS / "mixtral" / "model.safetensors")
    router = "model.layers.0.block_sparse_moe.gate"
    adapter = halves(router, weights[f"{router}.weight"], 4, 0)
    folder = write_adapter(tmp_path / "a", adapter, target_modules=["layers.0.block_sparse_moe.gate"])
    expected = by_hand(weights, adapter, 1.5)
    assert_merged("mixtral", folder, expected, "bfloat16")
    _, params, _ = load_policy(VECTORS / "mixtral", adapter=folder, dtype="bfloat16")
    exact = expected[f"{router}.weight"].T
    np.testing.assert_allclose(np.asarray(params["layers"]["router"][0], np.float64), exact, rtol=2**-8, atol=1e-7)


@pytest.mark.heavy
def test_a_gguf_file_takes_an_adapter(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    policy, _, _ = load_policy("smollm2-135m")
    shape = (policy.config.hidden_size, policy.config.hidden_size)
    adapter = halves("model.layers.3.self_attn.q_proj", np.zeros(shape), 4, 0)
    folder = write_adapter(tmp_path / "a", adapter, target_modules=["layers.3.self_attn.q_proj"])
    _, found, _ = load_policy("smollm2-135m", adapter=folder)
    layers = found["layers"]
    assert layers["query_lora_in"].shape == (policy.config.num_layers, shape[0], 4)
    np.testing.assert_array_equal(
        layers["query_lora_in"][3], adapter["model.layers.3.self_attn.q_proj.lora_A.weight"].T
    )
    assert not np.any(layers["query_lora_out"][2])


CASES: list[tuple[dict[str, Any], str, bool]] = [
    ({"target_modules": ["q_proj"]}, "model.layers.0.self_attn.q_proj", True),
    ({"target_modules": ["q_proj"]}, "model.layers.0.self_attn.eq_proj", False),
    ({"target_modules": ["self_attn.q_proj"]}, "model.layers.0.self_attn.q_proj", True),
    ({"target_modules": "q_proj"}, "model.layers.0.self_attn.q_proj", False),
    ({"target_modules": r".*\.q_proj"}, "model.layers.0.self_attn.q_proj", True),
    ({"target_modules": r".*\.q"}, "model.layers.0.self_attn.q_proj", False),
    ({"target_modules": "ALL-linear"}, "model.layers.0.mlp.down_proj", True),
    ({"target_modules": "all-linear"}, "lm_head", False),
    ({"target_modules": "all-linear"}, "model.embed_tokens", False),
    (
        {"target_modules": ["q_proj"], "exclude_modules": ["0.self_attn.q_proj"]},
        "model.layers.0.self_attn.q_proj",
        False,
    ),
    ({"target_modules": ["q_proj"], "exclude_modules": ".*0.*"}, "model.layers.0.self_attn.q_proj", False),
    ({"target_modules": ["q_proj"], "exclude_modules": ".*0"}, "model.layers.0.self_attn.q_proj", True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]}, "model.layers.0.self_attn.q_proj", False),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "model.layers.0.self_attn.q_proj", False),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0, 3]}, "model.layers.3.self_attn.q_proj", True),
    ({"target_modules": ["w1"], "layers_to_transform": [0]}, "model.layers.1.experts.0.w1", False),
    (
        {"target_modules": ["w1"], "layers_to_transform": [0], "layers_pattern": "experts"},
        "m.layers.1.experts.0.w1",
        True,
    ),
]


@pytest.mark.parametrize(("settings", "module", "expected"), CASES)
def test_which_modules_are_meant(settings: dict[str, Any], module: str, expected: bool, tmp_path: Path) -> None:
    """As PEFT's check_target_module_exists has it."""
    assert read_adapter_config(write_adapter(tmp_path / "a", {}, **settings)).is_target(module) is expected


def test_scales_of_patterns(tmp_path: Path) -> None:
    """A pattern is a regular expression of the end of a name; the first that matches counts."""
    config: AdapterConfig = read_adapter_config(
        write_adapter(tmp_path / "a", {}, rank_pattern={"a.*": 2, "b": 3}, alpha_pattern={r"layers\.1\..*": 9})
    )
    assert config.rank_of("x.b") == 3
    assert config.rank_of("x.ab") == 2
    assert config.rank_of("x.cb") == 4
    assert config.scale_of("model.layers.1.b") == 3
    assert config.scale_of("model.layers.11.b") == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True, which is not supported"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is .1."),
    ({"layer_replication": [[0, 1]]}, "layer_replication is"),
    (
        {"target_modules": [], "target_parameters": ["up_proj.weight"]},
        "lacks the adapter of .*0.mlp.up_proj.weight, which target_parameters",
    ),
    (
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
        "has no adapter of .experts.down_proj., which",
    ),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
    ({"something_new": {"a": 1}}, "something_new is"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the model's weights"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3', but must be one of LORA"),
    ({"r": 0}, "r is 0, but must be a whole number"),
    ({"lora_alpha": "x"}, "lora_alpha is 'x', but must be"),
    ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern is .*, but must be an object of names, each a whole number"),
    ({"target_modules": "(q"}, "'.q' is no regular expression"),
    ({"alpha_pattern": {"[": 2}}, "'.' is no regular expression"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_other_settings_are_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_policy(VECTORS / "llama", adapter=write_adapter(tmp_path / "a", {}, **settings))
    assert "\n" not in str(caught.value)


def test_settings_that_change_nothing_are_read(tmp_path: Path) -> None:
    """What PEFT 0.21 writes of a plain adapter."""
    folder = write_adapter(
        tmp_path / "a", {}, alora_invocation_tokens=None, alpha_pattern={}, arrow_config=None, auto_mapping=None,
        base_model_name_or_path="x", bias="none", corda_config=None, ensure_weight_tying=False, eva_config=None,
        exclude_modules=None, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, layer_replication=None,
        layers_pattern=None, layers_to_transform=None, loftq_config={}, lora_bias=False, lora_dropout=0.1,
        megatron_config=None, megatron_core="megatron.core", modules_to_save=None, peft_version="0.21.2",
        qalora_group_size=16, rank_pattern={}, revision=None, target_parameters=None, trainable_token_indices=None,
        use_bdlora=None, use_dora=False, use_qalora=False, use_rslora=False,
    )  # fmt: skip
    assert read_adapter_config(folder).rank == 4


def test_damaged_folders(tmp_path: Path) -> None:
    weights = load_file(VECTORS / "llama" / "model.safetensors")
    query, key = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1))
    good = halves(query, weights[f"{query}.weight"], 4, 0) | halves(key, weights[f"{query}.weight"], 4, 1)
    a, b = f"{query}.lora_A.weight", f"{query}.lora_B.weight"
    targets = {"target_modules": ["q_proj"]}
    for tensors, settings, message in (
        ({n: x for n, x in good.items() if n != b}, targets, "q_proj.weight' has no A or no B: the file is incomplete"),
        ({n: x for n, x in good.items() if key not in n}, targets, "lacks the adapter of model.layers.1.self_attn.q_p"),
        (
            good,
            {"target_modules": ["v_proj"]},
            "self_attn.q_proj' has an adapter, but target_modules of .* do not name",
        ),
        (
            good | {a: np.ones((4, 3), np.float32)},
            targets,
            r"A \(4, 3\) and B \(64, 4\) .* no adapter of a matrix \(64,",
        ),
        (good | {a: np.full((4, 64), np.nan, np.float32)}, targets, "holds NaN or infinity: the weights are damaged"),
        (good | {a: np.ones((4, 64), np.int32)}, targets, "holds numbers of type I32"),
        (
            good | {n.replace("q_proj", "z"): x for n, x in good.items()},
            {"target_modules": r".*\.[qz](_proj)?"},
            "z.weight' is no tensor",
        ),
    ):
        folder = write_adapter(tmp_path / "a", tensors, **settings)
        with pytest.raises(InputError, match=message) as caught:
            load_policy(VECTORS / "llama", adapter=folder)
        assert "\n" not in str(caught.value)
    save_file(good, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"is none of PEFT's, whose names begin with base_model\.model\."):
        load_policy(VECTORS / "llama", adapter=folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no adapter_model.safetensors: save or download"):
        load_policy(VECTORS / "llama", adapter=folder)
    with pytest.raises(InputError, match=r"there is no file .*adapter_config.json"):
        load_policy(VECTORS / "llama", adapter=tmp_path)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    policy, params, _ = load_policy(VECTORS / "llama")
    with pytest.raises(InputError, match="the parameters have no adapters"):
        save_adapter(tmp_path / "a", policy, params)
    broken = jax.tree.map(lambda x: x * jnp.nan, lora.init(KEY, policy.config, 2, ["query"]))
    with pytest.raises(InputError, match=r"the adapter of model.layers.0.self_attn.q_proj holds NaN"):
        save_adapter(tmp_path / "a", policy, combine(params, broken))
    assert not (tmp_path / "a").exists()


def test_splitting_is_the_inverse_of_combining(vectors: Any) -> None:
    model = vectors("llama_tied")
    adapters = lora.init(KEY, model.policy.config, 2)
    frozen = lora.scaled(model.params, 2, 3.0)
    found = lora.split(combine(frozen, adapters))
    assert jax.tree.structure(found) == jax.tree.structure((frozen, adapters))
    assert jax.tree.structure(lora.scaled_like(model.params, frozen)) == jax.tree.structure(frozen)
