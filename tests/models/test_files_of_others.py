"""Files that another tool wrote: a head that is not tied, names of wrappers, fused experts, further heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.utils.errors import InputError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, np.ndarray]


def written(vectors: Any, family: str, folder: Path, change: Callable[[Tensors], Tensors], **settings: Any) -> Path:
    """The family's folder with other tensors and settings."""
    from safetensors.numpy import load_file, save_file

    for file in vectors(family).folder.iterdir():
        if file.name != "vectors.npz":
            shutil.copyfile(file, folder / file.name)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | settings))
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_that_differs_from_the_embedding_is_not_tied(vectors: Any, tmp_path: Path) -> None:
    folder = written(vectors, "llama_tied", tmp_path, lambda all: {**all, HEAD: 2 * all[EMBED]})
    policy, params, _ = load_policy(folder)
    assert not policy.config.tie_embeddings
    model = vectors("llama_tied")
    tokens = np.asarray([[5, 6, 7]])
    once = model.policy.logits(model.params, tokens)
    np.testing.assert_allclose(policy.logits(params, tokens), 2 * once, rtol=1e-5, atol=1e-5)
    again, kept, _ = load_policy(save_policy(tmp_path / "saved", policy, params, model.tokenizer))
    np.testing.assert_array_equal(again.logits(kept, tokens), policy.logits(params, tokens))


def test_a_head_that_is_stored_twice_is_tied(vectors: Any, tmp_path: Path) -> None:
    folder = written(vectors, "llama_tied", tmp_path, lambda all: {**all, HEAD: all[EMBED].copy()})
    policy, params, _ = load_policy(folder)
    assert policy.config.tie_embeddings
    assert "unembed" not in params


def _fused(all: Tensors) -> Tensors:
    """Experts of a layer as one tensor, of gate and up together."""
    out = {name.replace("block_sparse_moe.gate", "mlp.gate"): x for name, x in all.items() if ".experts." not in name}
    for layer in range(2):
        found = [
            {
                name.split(".")[-2]: x
                for name, x in all.items()
                if f"layers.{layer}." in name and f".experts.{e}." in name
            }
            for e in range(4)
        ]
        gate, up, down = ("w1", "w3", "w2") if "w1" in found[0] else ("gate_proj", "up_proj", "down_proj")
        prefix = f"model.layers.{layer}.mlp.experts"
        out[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate([x[gate], x[up]]) for x in found])
        out[f"{prefix}.down_proj"] = np.stack([x[down] for x in found])
    return out


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", lambda all: {f"language_model.{name}": x for name, x in all.items()}, "begin with 'language_model.'"),
        ("llama", lambda all: {f"base_model.model.{name}": x for name, x in all.items()}, "begin with 'base_model.mod"),
        ("llama", lambda all: {n.removeprefix("model."): x for n, x in all.items()}, "of a model without a head"),
        ("llama", lambda all: {**all, "score.weight": np.ones((1, 4), np.float32)}, "score.weight of a head that is"),
        ("llama", lambda all: {**all, "v_head.weight": np.ones((1, 4), np.float32)}, "v_head.weight of a head that is"),
        (
            "llama",
            lambda all: {n: x for n, x in all.items() if n != HEAD},
            "lm_head.weight., which config.json implies: the files",
        ),
    ],
)
def test_the_line_says_what_is_there_instead(
    family: str, change: Callable[[Tensors], Tensors], message: str, vectors: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_policy(written(vectors, family, tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_are_read(family: str, vectors: Any, tmp_path: Path) -> None:
    """As transformers 5 saves them: gate and up together, all experts in one tensor."""
    model = vectors(family)
    again, params, _ = load_policy(written(vectors, family, tmp_path, _fused))
    assert again.config == model.policy.config
    jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_exports_name_what_older_readers_know(vectors: Any, tmp_path: Path) -> None:
    for family in ("llama31_rope", "gemma3", "qwen2"):
        model = vectors(family)
        folder = save_policy(tmp_path / family, model.policy, model.params, model.tokenizer)
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        assert tokenizer["tokenizer_class"] == ("Qwen2Tokenizer" if family == "qwen2" else "PreTrainedTokenizerFast")
        raw = json.loads((folder / "config.json").read_text())
        assert raw["dtype"] == raw["torch_dtype"] == "float32"
        assert raw["head_dim"] == model.policy.config.head_dim
        ropes = model.policy.config.ropes
        assert raw["rope_theta"] == ropes[0].theta
        if family == "llama31_rope":
            assert raw["rope_scaling"]["factor"] == ropes[0].factor
            assert "rope_theta" not in raw["rope_scaling"]
        if family == "gemma3":
            assert raw["rope_local_base_freq"] == ropes[1].theta
            assert raw["hidden_act"] == raw["hidden_activation"]
        if family == "qwen2":
            assert raw["max_window_layers"] == model.policy.config.num_layers
        _, again, _ = load_policy(folder)
        assert jnp.array_equal(again["embed"], model.params["embed"])
