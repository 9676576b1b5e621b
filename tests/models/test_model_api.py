"""Odd arguments of the models' Python functions: each is refused in one line that says what it must be."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.models import init_params, lora
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.io import load
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import parameter_count
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError

KEY = jax.random.key(0)


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", [None, 3, "", b"x", ["a"], object(), "a\0b", Path("tests") / ("x" * 5000)])
def test_no_path(name: Any, vectors: Any) -> None:
    refused("the model is .*must be a path|no folder, .gguf file", lambda: load_policy(name))
    if not isinstance(name, Path):
        model = vectors("llama")
        refused("must be a path", lambda: save_policy(name, model.policy, model.params))


def test_a_tokenizer_model_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refused(r"tokenizer\.model .*pip install 'jaxrl_llm\[sentencepiece\]'", lambda: load._tokenizer(tmp_path))


def test_paths_that_are_not_folders(vectors: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused("is a file, but not a .gguf file", lambda: load_policy(tmp_path / "file"))
    os.mkfifo(tmp_path / "pipe.gguf")
    refused("cannot read .*pipe.gguf: it is no file", lambda: load_policy(tmp_path / "pipe.gguf"))
    policy, _, _ = load_policy(os.fspath(vectors("llama").folder))
    assert policy == load_policy(vectors("llama").folder)[0]


@pytest.mark.parametrize("dtype", ["int8", "", object(), object, [1], {}, 3, "float16", b"x", None])
def test_dtypes(dtype: Any, vectors: Any) -> None:
    refused("choose float32 or bfloat16", lambda: load_policy(vectors("llama").folder, dtype=dtype))
    if dtype is not None:
        refused("param_dtype .* choose float32", lambda: load_policy(vectors("llama").folder, param_dtype=dtype))


def test_remat(vectors: Any) -> None:
    refused("remat is 'yes', but must be True", lambda: load_policy(vectors("llama").folder, remat="yes"))


@pytest.mark.parametrize("size", [0, -1, "1", 1.5, None, True, float("nan")])
def test_sizes_of_shards(size: Any, vectors: Any, tmp_path: Path) -> None:
    model = vectors("llama")
    refused("shard_bytes is", lambda: save_policy(tmp_path / "m", model.policy, model.params, shard_bytes=size))
    assert not list(tmp_path.iterdir())


def without(params: Any, *path: str) -> Any:
    if len(path) == 1:
        return {name: x for name, x in params.items() if name != path[0]}
    return {**params, path[0]: without(params[path[0]], *path[1:])}


def changed(params: Any, value: Any, *path: str) -> Any:
    return {**params, path[0]: value if len(path) == 1 else changed(params[path[0]], value, *path[1:])}


def test_parameters_of_another_policy_are_named(vectors: Any, tmp_path: Path) -> None:
    policy, params, _ = load_policy(vectors("llama").folder)
    query = params["layers"]["query"]
    adapted = combine(params, lora.init(KEY, policy.config, 3))
    cases: list[tuple[str, Any]] = [
        ("the parameters are None, but must be a dictionary", None),
        ("the parameters are 3, but", 3),
        ("the parameters are a list, but", [params]),
        ("the parameters lack embed", {}),
        ("the parameters lack layers", without(params, "layers")),
        ("the parameters lack layers/query", without(params, "layers", "query")),
        ("the parameter layers/extra is not part", changed(params, query, "layers", "extra")),
        ("the parameter head is not part", changed(params, query, "head")),
        (r"layers/query has shape \(1, 64", changed(params, query[:1], "layers", "query")),
        ("layers/query is of int32, but", changed(params, query.astype(jnp.int32), "layers", "query")),
        ("layers/query is None, but must be an array", changed(params, None, "layers", "query")),
        ("layers/query is a list, but", changed(params, [1.0], "layers", "query")),
        ("the parameter layers is 3, but", changed(params, 3, "layers")),
        ("1 layers, but the policy has 2", changed(params, unstack(params, policy.config)["layers"][:1], "layers")),
        (r"layers/1 is 5, but", changed(params, (unstack(params, policy.config)["layers"][0], 5), "layers")),
        ("embed has shape", changed(params, params["embed"][:-1], "embed")),
        ("the parameters lack unembed", load_policy(vectors("llama_tied").folder)[1]),
        (
            "the parameter layers/query_bias is not part",
            load_policy(vectors("qwen2").folder)[1] | {"unembed": params["unembed"]},
        ),
        (
            "the parameters lack layers/query_lora_out",
            without(adapted, "layers", "query_lora_out"),
        ),
    ]
    for message, bad in cases:
        refused(message, lambda bad=bad: check_params(policy, bad))
        refused(message, lambda bad=bad: policy.logits(bad, [[1]]))
        refused(message, lambda bad=bad: save_policy(tmp_path / "m", policy, bad))
        refused(message, lambda bad=bad: init_critic(KEY, policy, bad, Critic()))
    assert not list(tmp_path.iterdir())
    refused("the policy is 3, but must be a Policy", lambda: check_params(3, params))
    refused("the policy is None", lambda: save_policy(tmp_path / "m", None, params))


def test_every_form_of_parameters_is_taken(family: str, vectors: Any) -> None:
    policy, params = vectors(family).policy, vectors(family).params
    adapted = combine(lora.scaled(params, 3, 6.0), lora.init(KEY, policy.config, 3))
    both = dataclasses.replace(policy, critic=Critic("tower", 2, 5))
    with_critic = init_critic(KEY, both, params, both.critic)
    for each in (params, adapted, with_critic):
        check_params(policy, each)
        check_params(both, each)
        check_params(policy, unstack(each, policy.config))
        check_params(policy, jax.tree.map(np.asarray, each))
        check_params(policy, jax.eval_shape(lambda x: x, each))
        jax.jit(lambda x: check_params(policy, x))(each)
    check_params(both, with_critic, needs_critic=True)
    refused("the parameters lack critic", lambda: check_params(both, params, needs_critic=True))
    shorter = changed(with_critic, jnp.zeros((3, 2)), "critic", "head", "weight")
    refused(r"critic/head/weight has shape \(3, 2\)", lambda: check_params(both, shorter))
    refused("lack critic/tower/embed", lambda: check_params(both, without(with_critic, "critic", "tower", "embed")))


def test_a_trained_model_is_checked_while_it_is_traced(vectors: Any) -> None:
    policy, params = vectors("llama").policy, vectors("llama_tied").params
    refused("the parameters lack unembed", lambda: jax.jit(lambda p: check_params(policy, p))(params))


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([1, 2], r"\[2\], but must be whole numbers \[rows, length\]"),
        ([], "must be whole numbers"),
        ([[]], "neither of them 0"),
        (np.zeros((0, 3), int), "neither of them 0"),
        (3, "must be whole numbers"),
        (None, "must be whole numbers"),
        ("text", "must be whole numbers"),
        ([[1.0, 2.0]], "float64"),
        ([[1], [2, 3]], "different lengths"),
        ([[[1]]], r"\[1, 1, 1\]"),
        ([[True]], "bool"),
        ([[1, 257]], r"token 257 \(row 0, column 1\) is not in the vocabulary of 257 tokens"),
        ([[1], [-1]], r"token -1 \(row 1, column 0\)"),
        (np.array([[2**40]]), "token 1099511627776"),
    ],
)
def test_tokens(tokens: Any, message: str, vectors: Any) -> None:
    model = vectors("llama")
    refused(message, lambda: model.policy.logits(model.params, tokens))


@pytest.mark.parametrize("mask", [[True], [[True]], [["x", "y"]], [[True, True, True]], 1, np.ones((1, 2, 1))])
def test_masks(mask: Any, vectors: Any) -> None:
    model = vectors("llama")
    refused(r"mask is .*, but must be bool\[1, 2\]", lambda: model.policy.logits(model.params, [[1, 2]], mask))


def test_padding_may_be_any_number(vectors: Any) -> None:
    model = vectors("llama")
    given = model.policy.logits(model.params, [[1, 2, -1]], [[True, True, False]])
    np.testing.assert_array_equal(given[:, :2], model.policy.logits(model.params, [[1, 2, 0]], [[1, 1, 0]])[:, :2])


@pytest.mark.parametrize("key", [None, 0, "x", [0, 0], np.zeros(2), np.zeros(3, np.uint32), jax.random.split(KEY, 2)])
def test_keys(key: Any, vectors: Any) -> None:
    model = vectors("llama")
    refused("must be one random key", lambda: init_params(key, model.policy.config))
    refused("must be one random key", lambda: init_critic(key, model.policy, model.params, Critic()))
    refused("must be one random key", lambda: lora.init(key, model.policy.config, 2))


def test_older_keys_are_keys(vectors: Any) -> None:
    config = vectors("llama").policy.config
    jax.tree.map(np.testing.assert_array_equal, init_params(jax.random.PRNGKey(0), config), init_params(KEY, config))


def test_arguments_of_new_parameters(vectors: Any) -> None:
    config = vectors("llama").policy.config
    refused("must be a ModelConfig", lambda: init_params(KEY, {"vocab_size": 3}))
    for dtype in ("int32", None, object(), "x", jnp.int8):
        refused("must be of floats", lambda dtype=dtype: init_params(KEY, config, dtype))
    for scale in ("x", None, float("nan"), -1.0, [1.0]):
        refused("the scale of parameters", lambda scale=scale: init_params(KEY, config, scale=scale))


def test_arguments_of_adapters(vectors: Any) -> None:
    config, params = vectors("llama").policy.config, vectors("llama").params
    for rank in (0, -1, 1.5, "4", None, True, float("nan"), 2**40):
        refused("the LoRA rank is", lambda rank=rank: lora.init(KEY, config, rank))
        refused("the LoRA rank is", lambda rank=rank: lora.scaled(params, rank, 1.0))
    for alpha in (0, -1.0, "4", None, True, float("inf"), [1]):
        refused("LoRA's alpha is", lambda alpha=alpha: lora.scaled(params, 4, alpha))
    for targets in ("query", 3, None, [3], [["query"]], ["quary"]):
        refused("LoRA target", lambda targets=targets: lora.init(KEY, config, 2, targets))
    for bad in (None, {}, 3, {"layers": 3}):
        refused("hold no 'layers'", lambda bad=bad: lora.merge(bad))
        refused("hold no 'layers'", lambda bad=bad: lora.scaled(bad, 2, 1.0))
    lora.init(KEY, config, np.int64(2))  # a whole number of numpy is one


def test_arguments_of_critics(vectors: Any) -> None:
    model = vectors("llama")
    for heads in (0, -1, 1.5, "2", None, True):
        refused("critic heads", lambda heads=heads: Critic(heads=heads))
    for hidden in (-1, 1.5, "2", None, True):
        refused("critic hidden", lambda hidden=hidden: Critic(hidden=hidden))
    refused("critic detach", lambda: Critic(detach="no"))
    refused("critic kind", lambda: Critic(kind=["tower"]))
    refused("must be a Critic", lambda: init_critic(KEY, model.policy, model.params, "tower"))


def test_a_policy_prints_in_one_line(vectors: Any) -> None:
    model = vectors("llama")
    count = f"{parameter_count(model.params):,}"
    layers, vocabulary = model.policy.config.num_layers, f"{model.policy.config.vocab_size:,}"
    plain = dataclasses.replace(model.policy, dtype=jnp.float32, remat=True)
    assert repr(plain) == f"Policy(llama: {count} parameters in {layers} layers, {vocabulary} tokens, float32)"
    changed = dataclasses.replace(plain, dtype=jnp.bfloat16, remat=False)
    assert repr(changed).endswith("tokens, bfloat16, remat=False)")
