"""Whatever a config.json holds, it is read, or refused in one line that names the file: every setting, every type."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.models import from_hf, to_hf
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.rope import frequencies
from jaxrl_llm.models.io.huggingface import from_tensors, open_folder
from jaxrl_llm.utils.errors import InputError

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 10**18, 10**400, 0.0, 0.5, -2.5, 64.0, 1e308, float("nan"), float("inf"),
    float("-inf"), "", "64", "x\ny", "\ud800", [], [0], ["x"], [[1]], [None] * 3, {}, {"a": 1}, {"factor": "x"},
    {"rope_type": ["linear"]}, {"full_attention": 3}, {"sliding_attention": {"rope_theta": 1e4}}, {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 0}, {"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 1.0},
]  # fmt: skip
# What some files hold and others do not.
MORE = {
    "layer_types": ["full_attention"] * 2,
    "sliding_window_pattern": 2,
    "use_sliding_window": False,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "original_max_position_embeddings": 32},
    "rope_local_base_freq": 1e4,
    "mlp_bias": False,
    "num_experts": 4,
}


def paths(raw: Any, start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where settings are, those inside sections too."""
    for name, value in raw.items():
        yield (*start, name)
        if isinstance(value, dict):
            yield from paths(value, (*start, name))


def mutations(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every setting left out, and with each of VALUES in its place."""
    full = MORE | raw
    for older in (False, True):
        base = {k: v for k, v in full.items() if k != ("rope_parameters" if older else "rope_scaling")}
        for path in paths(base):
            if older and path[0] != "rope_scaling":
                continue
            for number, value in enumerate([*VALUES, ...]):
                changed = copy.deepcopy(base)
                section = changed
                for name in path[:-1]:
                    section = section[name]
                if value is ...:
                    del section[path[-1]]
                else:
                    section[path[-1]] = copy.deepcopy(value)
                yield f"{'.'.join(path)}[{number}]", changed


def assert_usable(config: ModelConfig) -> None:
    """What is taken is whole: it has frequencies, can be written and read back, and is hashable."""
    for rope in config.ropes:
        rates, scale = frequencies(rope, config.head_dim)
        assert rates.shape == (config.head_dim // 2,)
        assert np.isfinite(rates).all()
        assert np.isfinite(scale).all()
    assert len(config.rope_of_layer) == len(config.window_of_layer) == config.num_layers
    assert max(config.rope_of_layer) < len(config.ropes)
    assert from_hf(json.loads(json.dumps(to_hf(config), allow_nan=False))) == config
    hash(config)


def refusal(read: Callable[[], None], what: str) -> str | None:
    """The message of an InputError, which is a short line; None without one. Any other exception fails."""
    try:
        read()
    except InputError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    else:
        return None
    assert "\n" not in said, what
    assert len(said) < 400, what
    return said


def test_every_setting_of_every_type(family: str, vectors: Any) -> None:
    raw = json.loads((vectors(family).folder / "config.json").read_text())
    taken, refused = 0, 0
    for name, changed in mutations(raw):
        said = refusal(lambda changed=changed: assert_usable(from_hf(changed, where="there/config.json")), name)
        assert said is None or said.startswith("there/config.json"), (name, said)
        taken, refused = taken + (said is None), refused + (said is not None)
    assert refused > 300
    assert taken > 100  # settings that no model reads, and values that are as good as others


def test_what_is_taken_is_in_the_weights_or_refused(family: str, vectors: Any) -> None:
    """A configuration that is read gives parameters, or one line: before memory is taken for what the file lacks."""
    folder = vectors(family).folder
    raw, tensors = json.loads((folder / "config.json").read_text()), open_folder(folder)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    for name in [*sizes, "num_key_value_heads", "num_local_experts", "moe_intermediate_size", "tie_word_embeddings"]:
        for value in (1, 2, 6, 64, 112, 10_000, 2**24, 2**31 - 1, True, False):

            def read(changed: dict[str, Any] = raw | {name: value}) -> None:
                from_tensors(tensors, from_hf(changed), np.float32, "there")

            refusal(read, f"{name} {value}")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but must be a whole number from 1"),
        ({"hidden_size": "64"}, "hidden_size is '64', but must be a whole number"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"head_dim": None, "num_attention_heads": 6}, "hidden_size 64 is no multiple of num_attention_heads 6"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 2"),
        ({"layer_types": ["full", "full"]}, "layer_types is .* each one of full_attention, sliding_attention"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "but sliding_window is not given"),
        ({"rope_parameters": [1]}, "rope_parameters is .1., but must be an object of settings"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta is '1e4', but must be a finite"),
        ({"rope_parameters": {"rope_type": "linear"}}, "of type linear lacks 'factor'"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            "no rope_parameters by kind of layer",
        ),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [[1]]}, "eos_token_id is"),
        ({"eos_token_id": 257}, "eos_token_id 257 is not in the vocabulary of 257 tokens"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, but must be a finite number above 0"),
        ({"model_type": ["llama"]}, "the architecture 'LlamaForCausalLM' is not supported"),
    ],
)
def test_messages(change: dict[str, Any], message: str, vectors: Any) -> None:
    raw = json.loads((vectors("llama").folder / "config.json").read_text())
    with pytest.raises(InputError, match=message):
        from_hf(raw | change)


@pytest.mark.parametrize("raw", [None, [], "x", 3])
def test_no_dictionary(raw: Any) -> None:
    with pytest.raises(InputError, match="must be an object of settings"):
        from_hf(raw)


BYTES = {
    "deep list": b'{"model_type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "no UTF-8": b'{"model_type": "\xff\xfe"}',
    "digits": b'{"vocab_size": ' + b"1" * 10_000 + b"}",
    "empty": b"",
    "zeros": b"\0" * 100,
    "surrogate": b'{"model_type": "\\ud800"}',
    "text": b'"llama"',
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_files_that_are_no_settings(content: bytes, name: str, vectors: Any, tmp_path: Path) -> None:
    for file in vectors("llama").folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").symlink_to(vectors("llama").folder / "model.safetensors")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name) as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("ends", ["x", -1, [[3]], [3, None], 257, 1.5, True, {"a": 1}])
def test_ends_of_a_generation_config(ends: Any, vectors: Any, tmp_path: Path) -> None:
    for file in vectors("llama").folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(
        InputError, match=r"generation_config\.json: eos_token_id (is .*, but must be a token|257 is not in)"
    ):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    "family, change, lacking",
    [
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "kinds linear and full, but none of its 4 is linear"),
        ("glm4_moe", {"first_k_dense_replace": 4}, "kinds dense and experts, but none of its 4 is experts"),
    ],
)
def test_a_kind_of_layer_that_no_layer_has(family: str, change: dict[str, Any], lacking: str, vectors: Any) -> None:
    raw = json.loads((vectors(family).folder / "config.json").read_text())
    with pytest.raises(InputError, match=lacking):
        from_hf(raw | change)
