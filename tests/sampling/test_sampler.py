"""`sample`: what ends a completion, what a prompt becomes, settings that are refused, and the demo model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sample
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.sampling import completion_ids, completion_texts, sampler
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import compiles, count_compiles

KEY = jax.random.key(0)
EOS = 256
CONTEXT = 128
NEVER = -1  # no token; two ending tokens in each test, for one shape
GREEDY = Path(__file__).parent.parent / "data" / "greedy_smollm2.json"
PROMPTS = [[5, 9, 200], [7, EOS, 1, 60, 61, 62], [80, 81, 82, 83]]


def draw(model: Any, prompts: Any = PROMPTS, key: jax.Array = KEY, **settings: Any) -> Any:
    """Two samples of each prompt with one shape for all tests: up to 20 tokens."""
    settings = {"group_size": 2, "max_new_tokens": 20, "stop_token_ids": [NEVER, NEVER]} | settings
    return sample(model.policy, model.params, prompts, key, **settings)


@pytest.fixture(scope="module")
def model(vectors: Any) -> Any:
    return vectors("llama")


@pytest.fixture(scope="module")
def endless(model: Any) -> Any:
    """Six completions of 20 tokens that nothing ended."""
    return draw(model)


def test_what_comes_back(model: Any, endless: Any) -> None:
    assert endless.tokens.shape == (6, 28)  # 6 + 20, and the next size
    tokens, action, real = (np.asarray(x) for x in (endless.tokens, endless.action_mask, endless.token_mask))
    for row in range(6):
        prompt = PROMPTS[row // 2]
        end = len(prompt) + 20
        assert tokens[row, : len(prompt)].tolist() == prompt
        assert np.flatnonzero(action[row]).tolist() == list(range(len(prompt), end))
        assert np.flatnonzero(real[row]).tolist() == list(range(end))
        assert not tokens[row, end:].any()
    logp, entropy = np.asarray(endless.behaviour_logp), np.asarray(endless.entropy)
    assert (logp[action] < 0).all()
    assert (entropy[action] > 0).all()
    assert (entropy[action] < np.log(257)).all()
    assert not logp[~action].any()
    assert not entropy[~action].any()
    assert np.asarray(endless.turn).tolist() == np.where(action, 0, -1).tolist()
    assert endless.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert endless.prompt_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert endless.truncated.tolist() == [True] * 6
    assert endless.temperature.tolist() == [1.0] * 6
    assert endless.support_floor is None
    assert completion_ids(endless) == [row[len(PROMPTS[i // 2]) :][:20].tolist() for i, row in enumerate(tokens)]
    assert len({tuple(ids) for ids in completion_ids(endless)}) == 6  # temperature 1 samples


def test_settings_are_written_down(model: Any, rollouts: Any) -> None:
    found = draw(model, temperature=0.5, policy_step=7, prompt_ids=[30, 10, 20])
    assert found.temperature.tolist() == [0.5] * 6
    assert found.prompt_id.tolist() == [30, 30, 10, 10, 20, 20]
    assert found.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert (np.asarray(found.policy_step) == 7).all()
    assert found.support_floor is None
    filtered = rollouts("llama", "top_k")
    floor, action = np.asarray(filtered.support_floor), np.asarray(filtered.action_mask)
    assert (floor[~action] == -np.inf).all()
    assert np.isfinite(floor[action]).all()
    assert (np.asarray(filtered.entropy) < np.log(5)).all()  # of five tokens at most


def test_the_ending_token_is_an_action_and_the_last(model: Any, endless: Any) -> None:
    """The same draws as without an end, cut after the first ending token."""
    before = completion_ids(endless)
    # Tokens that come early in one row and nowhere in another.
    end, other = before[0][4], before[3][11]
    found = draw(model, stop_token_ids=[end, other])
    expected, truncated = [], []
    for ids in before:
        cut = next((i + 1 for i, token in enumerate(ids) if token in (end, other)), None)
        expected.append(ids if cut is None else ids[:cut])
        truncated.append(cut is None)
    assert completion_ids(found) == expected
    assert found.truncated.tolist() == truncated
    assert not truncated[0]
    assert any(truncated)
    tokens, action, real = (np.asarray(x) for x in (found.tokens, found.action_mask, found.token_mask))
    last = len(PROMPTS[0]) + len(expected[0]) - 1
    assert tokens[0, last] in (end, other)
    assert action[0, last]
    assert not action[0, last + 1 :].any()
    assert not real[0, last + 1 :].any()
    assert not np.asarray(found.behaviour_logp)[0, last + 1 :].any()
    np.testing.assert_array_equal(
        np.asarray(found.behaviour_logp)[0, : last + 1], np.asarray(endless.behaviour_logp)[0, : last + 1]
    )


def test_an_end_on_the_last_token_is_no_truncation(model: Any, endless: Any) -> None:
    before = completion_ids(endless)
    row = next(i for i, ids in enumerate(before) if ids[-1] not in ids[:-1])
    found = draw(model, stop_token_ids=[NEVER, before[row][-1]])
    assert completion_ids(found)[row] == before[row]
    assert not found.truncated[row]


def test_the_models_own_end(model: Any, endless: Any) -> None:
    """By default the tokens of the configuration end a completion."""
    before = completion_ids(endless)
    end = before[0][4]
    own = dataclasses.replace(model.policy, config=dataclasses.replace(model.policy.config, eos_token_ids=(EOS, end)))
    found = draw(model._replace(policy=own), stop_token_ids=None)
    assert completion_ids(found)[0] == before[0][: before[0].index(end) + 1]
    # Where that is the end-of-sequence token itself, texts come without it.
    assert completion_texts(model.tokenizer, endless)[0] == bytes(t for t in before[0] if t != EOS).decode(
        errors="replace"
    )


def test_logits_of_prompts_with_end_tokens_inside(model: Any) -> None:
    """An end-of-sequence token in the prompt is a token like others, though padding has the same id."""
    prompt = PROMPTS[1]
    found = draw(model, [prompt, [t for t in prompt if t != EOS], [1]], temperature=0.0)
    continued = completion_ids(found)
    # Four rows of 24 tokens, as other tests have them.
    tokens = np.asarray([(prompt + continued[0])[:24]] * 4)
    logits = np.asarray(model.policy.logits(model.params, tokens))[0]
    assert continued[0][: 24 - 6] == logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
    assert continued[2] != continued[0]


def printable(ids: list[int]) -> str:
    """A character for each token, the same as in the text where it is ASCII."""
    return bytes(t for t in ids if t < 256).decode("latin-1")


@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_stop_strings(chunk: int, model: Any, endless: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion ends with the token that completes the string, wherever the loop looks."""
    monkeypatch.setattr(sampler, "CHUNK", chunk)
    before = completion_ids(endless)
    # Two ASCII tokens in a row make a string of two tokens; another is of one.
    stop, expected = [], []
    for ids in before:
        pair = next((i for i in range(19) if ids[i] < 128 and ids[i + 1] < 128), None)
        if pair is not None and len(stop) < 2:
            stop.append(chr(ids[pair]) + chr(ids[pair + 1]))
    assert len(stop) == 2
    for ids in before:
        ends = [n for n in range(1, 21) if any(s in printable(ids[:n]) for s in stop)]
        expected.append(ids[: ends[0]] if ends else ids)
    found = draw(model, stop=stop)
    assert completion_ids(found) == expected
    assert found.truncated.tolist() == [not any(s in printable(ids) for s in stop) for ids in expected]
    assert sum(len(ids) < 20 for ids in expected) >= 2
    assert any(found.truncated)


def test_a_stop_string_and_an_end_token(model: Any, endless: Any) -> None:
    ids = completion_ids(endless)[0]
    found = draw(model, stop=["never to be seen"], stop_token_ids=[NEVER, ids[4]])
    assert completion_ids(found)[0] == ids[: ids.index(ids[4]) + 1]


def test_texts_go_through_the_tokenizer(model: Any) -> None:
    """This model has no chat template: a string is plain text, and a byte a token."""
    prompts = ["ab", "hello\n", "x y "]
    found = draw(model, prompts)
    same = draw(model, [list(text.encode()) for text in prompts])
    np.testing.assert_array_equal(found.tokens, same.tokens)
    assert np.asarray(found.tokens)[0, :2].tolist() == [97, 98]


def test_chat_templates(model: Any) -> None:
    import copy

    chat = copy.deepcopy(model.tokenizer)
    chat.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    talking = model._replace(policy=dataclasses.replace(model.policy, tokenizer=chat))
    found = draw(talking, ["hi", "ho", "hu"])
    assert bytes(np.asarray(found.tokens)[0, :6].tolist()).decode() == "u:hi;a"
    message = [{"role": "user", "content": "hi"}]
    ids = chat.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert np.asarray(found.tokens)[0, : len(ids)].tolist() == ids
    # Messages, and a system prompt in front of them; token ids stay as they are.
    mixed = draw(talking, [[{"role": "user", "content": ""}], [72, 105], ""], system_prompt="s")
    rows, starts = np.asarray(mixed.tokens), np.asarray(mixed.action_mask).argmax(axis=1)
    assert starts.tolist() == [8, 8, 2, 2, 8, 8]
    assert bytes(rows[0, :8].tolist()).decode() == "s:s;u:;a"
    assert bytes(rows[4, :8].tolist()).decode() == "s:s;u:;a"
    assert rows[2, :2].tolist() == [72, 105]


def test_sampled_ids_are_kept(model: Any, endless: Any) -> None:
    """Bytes that are no text would not survive a way through text; the ids are not sent there."""
    lost = 0
    for ids in completion_ids(endless):
        text = model.tokenizer.decode(ids)
        lost += model.tokenizer.encode(text) != ids
    assert lost > 0


def test_the_best_token_by_greedy(model: Any, endless: Any) -> None:
    greedy = draw(model, temperature=0.0)
    ids = completion_ids(greedy)
    assert ids[0] == ids[1]
    assert completion_ids(draw(model, temperature=0.0, key=jax.random.key(9), top_k=3, top_p=0.5)) == ids
    assert greedy.temperature.tolist() == [1.0] * 6
    assert greedy.support_floor is None


def test_lengths_of_one_bucket_share_programs(model: Any, endless: Any) -> None:
    count_compiles()
    before = compiles()[0]
    other = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10]]
    draw(model, other, jax.random.key(4), temperature=0.8)
    assert compiles()[0] == before
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3)).block_until_ready()  # the count does count
    assert compiles()[0] > before


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"group_size": 0}, "group_size is 0, but must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be at least 1"),
        ({"temperature": -0.1}, r"temperature is -0.1, but must be 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0, but must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": -0.5}, "min_p is -0.5, but must be at least 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"slots": -2}, "slots is -2"),
        ({"slots": 1.5}, "slots is 1.5"),
        ({"group_size": 1.5}, "group_size is 1.5, but must be a whole number"),
        ({"max_new_tokens": 2**40}, "max_new_tokens is 1099511627776, but must be at least 1 and at most 16777216"),
        ({"temperature": 1e-45}, "temperature is 1e-45"),
        ({"temperature": 1e39}, "temperature is 1e.39, but must be a finite number"),
        ({"top_p": 1e-45}, "top_p is 1e-45, but must be at least 1e-30"),
        ({"top_k": 2**31}, "top_k is 2147483648, but must be at least 0 and at most 2147483647"),
        ({"top_k": "5"}, "top_k is '5', but must be a whole number"),
        ({"stop_token_ids": "</s>"}, "stop_token_ids is '</s>'"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids contains '</s>'"),
        ({"stop_token_ids": [257]}, "stop_token_ids contains 257, but must be whole numbers from -1 to 256"),
        ({"prompt_ids": [0, 1, 2**31]}, "prompt_ids contains 2147483648"),
        ({"prompt_ids": [0, -1, 2]}, "prompt_ids contains -1"),
        ({"prompt_ids": [0, 1.0, 2]}, "prompt_ids contains 1.0"),
        ({"allowed": [1.5]}, "allowed contains 1.5"),
        ({"allowed": [257]}, "allowed contains 257"),
        ({"allowed": [True, False]}, r"allowed must be token ids or bool\[257\], found bool\[2\]"),
        ({"stop": [1]}, "stop must be a list of strings.*1"),
        ({"policy_step": -1}, "policy_step is -1"),
        ({"cache_dtype": "float31"}, "cache_dtype is 'float31', but must be floating"),
        ({"cache_dtype": jnp.int32}, "cache_dtype is int32"),
        ({"mesh": "data"}, "mesh is of the type str"),
        ({"stats": {}}, "stats is of the type dict"),
        ({"on_completion": "print"}, "on_completion is of the type str"),
        ({"prompts": None}, "prompts must be a list with at least one prompt, but is None"),
        ({"prompts": [[1], None]}, "a prompt is a string"),
        ({"prompt_ids": [1, 2]}, "2 prompt_ids for 3 prompts"),
        ({"stop": "text"}, "stop must be a list of strings"),
        ({"stop": ["a", ""]}, "stop must be a list of strings, none of them empty"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": "hello"}, "must be a list"),
        ({"prompts": [[1], []]}, "empty prompt"),
        ({"prompts": [""]}, "empty prompt"),
        ({"prompts": [3.5]}, "a prompt is a string"),
        ({"prompts": [[1], [1, 257]]}, "prompt 1 contains token id 257, but the model's vocabulary has 257"),
        ({"prompts": [[1], [2] * 109]}, "prompt 1 has 109 tokens and max_new_tokens is 20.*context is 128"),
        ({"max_new_tokens": 123}, "prompt 1 has 6 tokens and max_new_tokens is 123"),
        ({"system_prompt": "s", "prompts": ["a"]}, "needs a chat template"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str, model: Any) -> None:
    settings = dict(settings)
    prompts = settings.pop("prompts", PROMPTS)
    with pytest.raises(InputError, match=message) as caught:
        draw(model, prompts, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.heavy
def test_wide_numbers_elsewhere_change_no_token(model: Any, endless: Any) -> None:
    with jax.enable_x64(True):
        assert completion_ids(draw(model)) == completion_ids(endless)
        wide = model._replace(policy=dataclasses.replace(model.policy, dtype=jnp.float64))
        with pytest.raises(InputError, match="tokens are not drawn in float64"):
            draw(wide)


def test_a_policy_without_a_tokenizer(model: Any, endless: Any) -> None:
    bare = model._replace(policy=dataclasses.replace(model.policy, tokenizer=None))
    np.testing.assert_array_equal(draw(bare).tokens, endless.tokens)
    with pytest.raises(InputError, match="text prompts need a tokenizer"):
        draw(bare, ["hello"])
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        draw(bare, stop=["x"])


def test_a_full_context_is_used(model: Any) -> None:
    """8 + 20 tokens are as many as this model has positions for."""
    shorter = dataclasses.replace(model.policy.config, max_positions=28)
    tight = model._replace(policy=dataclasses.replace(model.policy, config=shorter))
    found = draw(tight, [[2] * 8], group_size=1)
    assert np.asarray(found.token_mask).sum() == 28
    assert np.isfinite(np.asarray(found.behaviour_logp)).all()
    with pytest.raises(InputError, match="context is 28"):
        draw(tight, [[2] * 9], group_size=1)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What transformers answers to 20 prompts, greedily; tests/data/greedy_smollm2.json says with which versions."""
    loaded: dict[str, Any] = json.loads(GREEDY.read_text())
    return loaded


@pytest.fixture(scope="module")
def answers(smollm2: Any, reference: dict[str, Any]) -> Any:
    policy, params, _ = smollm2
    prompts = [case["prompt"] for case in reference["cases"]]
    return sample(policy, params, prompts, KEY, max_new_tokens=24, temperature=0.0)


@pytest.mark.heavy
def test_demo_model_tokenises_as_transformers(answers: Any, reference: dict[str, Any]) -> None:
    assert len(reference["cases"]) == 20
    for row, case in enumerate(reference["cases"]):
        ids = case["prompt_ids"]
        assert np.asarray(answers.tokens)[row, : len(ids)].tolist() == ids
        assert np.flatnonzero(np.asarray(answers.action_mask)[row])[0] == len(ids)


@pytest.mark.heavy
def test_demo_model_answers_as_transformers(answers: Any, reference: dict[str, Any]) -> None:
    found = completion_ids(answers)
    for ids, case in zip(found, reference["cases"], strict=True):
        assert ids == case["output_ids"], case["prompt"]
    ended = [ids[-1] == 2 for ids in found]
    assert answers.truncated.tolist() == [not e for e in ended]
    assert any(ended)
    assert not all(ended)


@pytest.mark.heavy
def test_demo_model_recomputes_what_it_sampled(smollm2: Any, reference: dict[str, Any]) -> None:
    policy, params, _ = smollm2
    prompts = [case["prompt_ids"] for case in reference["cases"][:2]]
    batch = sample(
        policy, params, prompts, jax.random.key(1), group_size=2, max_new_tokens=16, temperature=0.9, top_p=0.95
    )
    found = jax.jit(policy_outputs, static_argnums=0)(policy, params, batch)
    action = batch.action_mask
    assert jnp.abs(found.logp - batch.behaviour_logp)[action].max() < 1e-4
    assert jnp.abs(found.entropy - batch.entropy)[action].max() < 1e-4
    assert len(set(map(tuple, completion_ids(batch)))) == 4
