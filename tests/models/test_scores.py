"""Reward models: scores, gradients and files are those of transformers."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import load_policy, load_reward_model, save_policy
from jaxrl_llm.models.config import ScoreHead
from jaxrl_llm.models.families import from_hf, score_head, to_hf
from jaxrl_llm.models.io.huggingface import to_tensors
from jaxrl_llm.models.scores import init_reward_model, pooled_states, score_place, token_scores
from jaxrl_llm.objectives.functional import bradley_terry_loss, class_loss
from jaxrl_llm.utils.errors import InputError

FOLDER = Path(__file__).parents[1] / "reward_models"
FOLDERS = ("llama_1", "gemma2_1", "qwen3_3", "gemma3_3")


class Fixture(NamedTuple):
    """A reward model as transformers saved it, and what transformers computed with it."""

    folder: Path
    model: Any
    params: Any
    tokenizer: Any
    arrays: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def reward() -> Callable[[str], Fixture]:
    known: dict[str, Fixture] = {}

    def load(name: str) -> Fixture:
        if name not in known:
            folder = FOLDER / name
            with np.load(folder / "vectors.npz") as file:
                known[name] = Fixture(folder, *load_reward_model(folder), {key: file[key] for key in file.files})
        return known[name]

    return load


@pytest.mark.parametrize("name", FOLDERS)
def test_scores(name: str, reward: Any, quickly: None) -> None:
    model = reward(name)
    arrays = model.arrays
    expected, theirs = arrays["right/logits"], np.abs(arrays["right/logits_f32"] - arrays["right/logits"]).max()
    for side in ("right", "left"):
        found = np.asarray(model.model.scores(model.params, arrays[f"{side}/ids"], arrays[f"{side}/mask"] > 0))
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() < 3 * theirs


@pytest.mark.parametrize("name", FOLDERS)
def test_the_place_of_the_score(name: str, reward: Any) -> None:
    model = reward(name)
    for side in ("right", "left"):
        ids, mask = model.arrays[f"{side}/ids"], model.arrays[f"{side}/mask"] > 0
        found = score_place(model.model, jnp.asarray(ids), jnp.asarray(mask))
        np.testing.assert_array_equal(found, model.arrays[f"{side}/score_index"])


def test_scores_of_every_token(reward: Any, quickly: None) -> None:
    model = reward("qwen3_3")
    for side in ("right", "left"):
        ids, mask = model.arrays[f"{side}/ids"], model.arrays[f"{side}/mask"] > 0
        found = np.asarray(token_scores(model.model, model.params, ids, mask))
        np.testing.assert_allclose(found, model.arrays[f"{side}/token_scores"], atol=1e-5)


def test_the_place_without_an_id_of_padding(reward: Any) -> None:
    model = reward("llama_1").model
    unpadded = dataclasses.replace(model, config=dataclasses.replace(model.config, score=ScoreHead(("x",), None)))
    tokens, mask = jnp.asarray([[1, 256, 256], [3, 4, 5]]), jnp.asarray([[True, True, False], [True, True, True]])
    assert score_place(unpadded, tokens, mask).tolist() == [1, 2]
    assert score_place(model, tokens, mask).tolist() == [0, 2]


def test_padding_and_gaps_change_nothing(reward: Any, quickly: None) -> None:
    model = reward("gemma2_1")
    ids, mask = model.arrays["right/ids"], model.arrays["right/mask"] > 0
    expected = np.asarray(model.model.scores(model.params, ids, mask))
    rng = np.random.default_rng(0)
    spread, real = np.full((6, 32), 77, np.int32), np.zeros((6, 32), bool)
    for row in range(6):
        places = np.sort(rng.choice(32, mask[row].sum(), replace=False))
        spread[row, places], real[row, places] = ids[row, mask[row]], True
    np.testing.assert_allclose(model.model.scores(model.params, spread, real), expected, atol=3e-6)
    alone = model.model.scores(model.params, ids[2:3, :1])
    np.testing.assert_allclose(alone, expected[2:3], atol=3e-6)


@pytest.mark.parametrize("name", ["llama_1", "qwen3_3"])
def test_gradients(name: str, reward: Any, quickly: None) -> None:
    model = reward(name)
    arrays = model.arrays

    def pairs(params: Any) -> jax.Array:
        scores = model.model.scores(params, arrays["bt/ids"], arrays["bt/mask"] > 0)[:, 0]
        margin = jnp.asarray(arrays["bt/margin"], jnp.float32)
        return jnp.mean(bradley_terry_loss(scores[:4], scores[4:], margin, centring=0.1))

    def classes(params: Any) -> jax.Array:
        scores = model.model.scores(params, arrays["right/ids"], arrays["right/mask"] > 0)
        return jnp.mean(class_loss(scores, arrays["classes/labels"]))

    case, loss = ("bt/margin_center0.1", pairs) if name == "llama_1" else ("classes", classes)
    value, gradient = jax.jit(jax.value_and_grad(loss))(model.params)
    assert float(value) == pytest.approx(float(arrays[f"{case}/loss"]), rel=1e-6)
    found = to_tensors(gradient, model.model.config)
    expected = {key.removeprefix(f"{case}/grad/"): x for key, x in arrays.items() if key.startswith(f"{case}/grad/")}
    assert found.keys() == expected.keys()
    for key, reference in expected.items():
        if key == "model.embed_tokens.weight":  # of which torch holds the row of padding
            found[key] = np.where(
                np.arange(len(reference))[:, None] == model.model.config.score.pad_token_id, 0, found[key]
            )
        assert np.abs(found[key] - reference).max() < 1e-5 * np.abs(reference).max(), key


@pytest.mark.parametrize("name", FOLDERS)
def test_saved_again(name: str, reward: Any, tmp_path: Path) -> None:
    model = reward(name)
    save_policy(tmp_path / "copy", model.model, model.params, model.tokenizer)
    before, after = (load_file(folder / "model.safetensors") for folder in (model.folder, tmp_path / "copy"))
    assert before.keys() == after.keys()
    for key, x in before.items():
        np.testing.assert_array_equal(after[key], x)
    raw, written = (json.loads((folder / "config.json").read_text()) for folder in (model.folder, tmp_path / "copy"))
    for setting in ("architectures", "model_type", "id2label", "label2id", "pad_token_id", "vocab_size"):
        assert written[setting] == raw[setting]
    assert load_reward_model(tmp_path / "copy")[0] == model.model


def test_a_head_on_each_family(family: str, vectors: Any, quickly: None) -> None:
    model = vectors(family)
    check_head(model)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "gemma4_e2b"])
def test_a_head_on_layers_of_several_kinds(name: str, vectors: Any, quickly: None) -> None:
    check_head(vectors(name))


def test_a_reward_model_starts_as_its_policy(vectors: Any, tmp_path: Path, quickly: None) -> None:
    language = vectors("llama")
    model, params = init_reward_model(jax.random.key(1), language.policy, language.params, ("good", "bad"))
    assert model.config.score == ScoreHead(("good", "bad"), language.tokenizer.pad_token_id)
    assert params["embed"] is language.params["embed"]
    assert float(jnp.std(params["score"])) == pytest.approx(0.02, rel=0.3)
    save_policy(tmp_path / "model", model, params, language.tokenizer)
    again, read, _ = load_reward_model(tmp_path / "model")
    assert again == model
    assert jax.tree.all(jax.tree.map(np.array_equal, read, params))
    unpadded = dataclasses.replace(language.policy, tokenizer=None)
    assert init_reward_model(jax.random.key(1), unpadded, language.params)[0].config.score.pad_token_id == 256
    for labels in ((), "x", (1,)):
        with pytest.raises(InputError, match="label"):
            init_reward_model(jax.random.key(1), language.policy, language.params, labels)


def check_head(model: Any) -> None:
    """Scores are the head at the states of the forward pass over whole rows, as its logits are."""
    config = dataclasses.replace(model.policy.config, score=ScoreHead(("a", "b"), 0))
    scoring = dataclasses.replace(model.policy, config=config)
    weight = jax.random.normal(jax.random.key(1), (config.hidden_size, 2))
    params = {name: x for name, x in model.params.items() if name != "unembed"} | {"score": weight}
    ids = np.maximum(model.arrays["ids"], 1).astype(np.int32)
    mask = np.ones_like(ids, bool)
    mask[1, 9:] = False
    segments = jnp.asarray(mask, jnp.int32)
    states, _ = model.policy.forward(model.params, jnp.asarray(ids), jnp.cumsum(segments, axis=1) - 1, segments)
    expected = np.stack([states[0, -1], states[1, 8]]) @ np.asarray(weight)
    np.testing.assert_allclose(scoring.scores(params, ids, mask), expected, rtol=2e-4, atol=2e-4)
    assert score_head(to_hf(config)) == config.score
    assert dataclasses.replace(from_hf(to_hf(config)), score=config.score) == dataclasses.replace(config, num_tokens=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (("LABEL_0",), 256)),
        ({"id2label": None}, (("LABEL_0", "LABEL_1"), 256)),
        ({"id2label": None, "num_labels": 3}, (("LABEL_0", "LABEL_1", "LABEL_2"), 256)),
        ({"id2label": {"1": "good", "0": "bad"}}, (("bad", "good"), 256)),
        ({"pad_token_id": None}, (("LABEL_0",), None)),
    ],
)
def test_labels(changes: dict[str, Any], expected: Any) -> None:
    raw = json.loads((FOLDER / "llama_1/config.json").read_text())
    assert score_head(raw | changes) == ScoreHead(*expected)


def test_the_usual_padding_of_a_family() -> None:
    raw = json.loads((FOLDER / "gemma2_1/config.json").read_text())
    del raw["pad_token_id"]
    assert score_head(raw).pad_token_id == 0


def _edit(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "must number its labels from 0 on"),
        ({"id2label": {"0": "a", "1": "b"}}, r"'score.weight' has shape \(1, 32\), but config.json implies \(2, 32\)"),
        ({"num_labels": 0}, "num_labels is 0, but must be"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x', but must be"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "llama_1", tmp_path / "model")
    _edit(tmp_path / "model", **changes)
    with pytest.raises(InputError, match=message) as caught:
        load_reward_model(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_what_is_no_reward_model(reward: Any, vectors: Any) -> None:
    with pytest.raises(InputError, match=r"no score\.weight \(architecture 'LlamaForCausalLM'\)"):
        load_reward_model(vectors("llama").folder)
    with pytest.raises(InputError, match=r"smollm2-135m is a language model"):
        load_reward_model("smollm2-135m")
    with pytest.raises(InputError, match="it is a reward model, which load_reward_model"):
        load_policy(reward("llama_1").folder)
    language, tokens = vectors("llama"), np.ones((1, 3), np.int32)
    with pytest.raises(InputError, match="a language model, which has no scores"):
        language.policy.scores(language.params, tokens)
    model = reward("gemma2_1")
    with pytest.raises(InputError, match="a reward model, which has no logits"):
        model.model.logits(model.params, tokens)
    with pytest.raises(InputError, match=r"token 300 .* is not in the vocabulary"):
        model.model.scores(model.params, 300 * tokens)
    with pytest.raises(InputError, match="lack score"):
        model.model.scores({name: x for name, x in model.params.items() if name != "score"}, tokens)


def test_padding_that_is_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_reward_model(FOLDER / "llama_1")
        assert [line.getMessage().partition(": ")[2] for line in caplog.records] == [
            "pad_token_id 256 is an end token: where a row ends with it, the token before it is scored"
        ]
        caplog.clear()
        load_reward_model(FOLDER / "qwen3_3")
        assert not caplog.records


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_pooled_states_are_means_over_the_tokens_of_each_piece(vectors: Any, family: str, pieces: int) -> None:
    """Rows alone, without padding; padding on either side changes nothing, and a row of two tokens has three pieces."""
    found = vectors(family)
    policy, params = found.policy, found.params
    random = np.random.default_rng(0)
    rows = [random.integers(1, 200, size).tolist() for size in (7, 2, 11)]
    tokens, mask = np.zeros((4, 12), np.int32), np.zeros((4, 12), bool)
    for number, row in enumerate(rows):
        start = 12 - len(row) if number % 2 else 0
        tokens[number, start : start + len(row)], mask[number, start : start + len(row)] = row, True
    out = pooled_states(policy, params, tokens, mask, pieces)
    assert out.shape == (4, pieces, policy.config.hidden_size)
    for number, row in enumerate(rows):
        one = np.asarray([row], np.int32)
        states = np.asarray(policy.forward(params, one, np.arange(len(row))[None], np.ones_like(one))[0][0], float)
        for piece in range(pieces):
            first, last = len(row) * piece // pieces, -(-len(row) * (piece + 1) // pieces)
            own = [states[t] for t in range(len(row)) if first <= t < last]
            assert own
            np.testing.assert_allclose(out[number, piece], np.mean(own, axis=0), rtol=1e-4, atol=1e-5)
    assert not np.asarray(out[3]).any(), "a row without a token"
