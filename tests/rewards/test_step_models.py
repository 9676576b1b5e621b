"""Process reward models as rewards: pieces, worths, where a reward is earned, and what is refused."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.data.step_labels import NO_LABEL, encode_steps
from jaxrl_llm.models import load_reward_model
from jaxrl_llm.models.scores import init_reward_model, token_scores
from jaxrl_llm.rewards import get_reward, score
from jaxrl_llm.rewards.models.steps import StepReward
from jaxrl_llm.rewards.specs import PIECES, model_name
from jaxrl_llm.rewards.workers.loading import declared
from jaxrl_llm.utils.errors import InputError

VECTORS = Path(__file__).parents[1] / "vectors" / "llama"
SUM = "1 + 2 = 3\n\n3 + 4 = 8\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Folders of process reward models of two and of three classes, whose heads are large enough to prefer some."""
    policy, params, tokenizer = load_policy(VECTORS)
    folder, found = tmp_path_factory.mktemp("step_models"), {}
    for classes in (1, 2, 3):
        names = tuple(f"LABEL_{n}" for n in range(classes))
        model, weights = init_reward_model(jax.random.key(classes), policy, params, names)
        found[classes] = str(folder / f"judge_{classes}")
        save_policy(found[classes], model, {**weights, "score": weights["score"] * 5}, tokenizer)
    return found


def worths_by_loop(reward: StepReward, prompt: str, steps: list[str], worths: tuple[float, ...]) -> list[float]:
    """What the steps are worth, each from a sequence that ends after it."""
    scorer, out = reward.model.ready, []
    for last in range(1, len(steps) + 1):
        row = encode_steps(reward.model.tokenizer, prompt, steps[:last], [0] * last, separator=reward.separator)
        assert row.labels[-1] != NO_LABEL
        scores = np.asarray(token_scores(scorer.model, scorer.params, np.asarray([row.tokens])))[0, -1]
        odds = np.exp(scores - scores.max())
        out.append(float((odds / odds.sum()) @ np.asarray(worths)))
    return out


def test_steps_earn_what_they_are_worth_where_they_end(models: dict[int, str], quickly: None) -> None:
    reward = get_reward(f"steps:{models[2]}*0.5")
    assert (reward.name, reward.weight, type(reward.function)) == ("judge_2", 0.5, StepReward)
    texts = [SUM, "", "5"]
    found = score([reward], texts, {"prompts": ["1 + 2 + 4?", [{"role": "user", "content": "2?"}], "3?"]})
    expected = worths_by_loop(reward.function, "1 + 2 + 4?", ["1 + 2 = 3", "3 + 4 = 8"], (0, 1))
    assert abs(expected[0] - expected[1]) > 1e-3
    spans = found.entries["spans"]
    assert [[first, last] for first, last, _ in spans[0]] == [[0, 9], [11, 20]]
    np.testing.assert_allclose([value for *_, value in spans[0]], np.multiply(0.5, expected), atol=2e-5)
    assert spans[1] == []
    assert len(spans[2]) == 1
    assert found.total.tolist() == [0.0, 0.0, 0.0]  # so that nothing is counted twice


def test_the_separator_is_the_models_own(models: dict[int, str], quickly: None, tmp_path: Path) -> None:
    usual = get_reward(f"steps:{models[2]}").function
    shutil.copytree(models[2], tmp_path / "own")
    path = tmp_path / "own" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step_separator": " ok?"}))
    own = get_reward(f"steps:{tmp_path / 'own'}").function
    assert (usual.separator, own.separator) == ("\n", " ok?")
    found = [[value for *_, value in one(["2?"], [SUM])["spans"][0]] for one in (usual, own)]
    steps = ["1 + 2 = 3", "3 + 4 = 8"]
    np.testing.assert_allclose(found[1], worths_by_loop(own, "2?", steps, (0, 1)), atol=2e-5)
    assert np.abs(np.subtract(*found)).max() > 1e-3
    save_policy(tmp_path / "again", *load_reward_model(tmp_path / "own"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["step_separator"] == " ok?"


def test_three_classes_of_sentences(models: dict[int, str], quickly: None) -> None:
    reward = get_reward(f"sentences(0,1,-1):{models[3]}")
    text = "A dog, at 3.5 m, runs. Two cats?!\nBirds"
    found = score([reward], [text], {"prompts": ["What?"]}).entries["spans"][0]
    parts = ["A dog,", "at 3.5 m,", "runs.", "Two cats?!", "Birds"]
    assert [text[first:last] for first, last, _ in found] == parts
    expected = worths_by_loop(reward.function, "What?", parts, (0, 1, -1))
    np.testing.assert_allclose([value for *_, value in found], expected, atol=2e-5)
    assert len({round(x, 4) for x in expected}) > 1


def test_the_worst_step(models: dict[int, str], quickly: None) -> None:
    reward = get_reward(f"worst_step(-1,1):{models[2]}")
    found = score([reward], [SUM, " \n"], {"prompts": ["1 + 2 + 4?", "?"]})
    expected = worths_by_loop(reward.function, "1 + 2 + 4?", ["1 + 2 = 3", "3 + 4 = 8"], (-1, 1))
    np.testing.assert_allclose(found.total, [min(expected), -1.0], atol=2e-5)
    assert "spans" not in found.entries


def test_a_reply_that_the_prompt_begins(models: dict[int, str], quickly: None) -> None:
    """Its steps are those of the whole reply, and none is earned before the completion."""
    function = get_reward(f"steps:{models[2]}").function
    whole = function(["2?"], ["1 + 2 = 3\n3 + 4 = 8\n5"])["spans"][0]
    begun = function(["2?"], [" 2 = 3\n3 + 4 = 8\n5"], ["1 +"])["spans"][0]
    assert [value for *_, value in begun] == [value for *_, value in whole]
    assert [[first, last] for first, last, _ in begun] == [[0, 6], [7, 16], [17, 18]]
    done = function(["2?"], ["3 + 4 = 8\n5"], ["1 + 2 = 3\n"])["spans"][0]
    assert [value for *_, value in done] == [value for *_, value in whole[1:]]


def test_what_is_too_long_is_not_scored(models: dict[int, str], quickly: None, caplog: Any) -> None:
    function = get_reward(f"steps:{models[2]}").function
    context = function.model.ready.model.config.max_positions
    found = function(["?", "?"], ["one\n" * context, "two"])
    assert found["reward"] == [None, 0.0]
    assert [len(one) for one in found["spans"]] == [0, 1]
    assert "1 conversation longer than its context" in caplog.text


@given(st.text("ab .,\n?!3", max_size=40))
def test_pieces_hold_all_that_is_no_space(text: str) -> None:
    for pattern in PIECES.values():
        found = [(one.start(), one.end()) for one in pattern.finditer(text)]
        assert all(text[first:last].strip() for first, last in found)
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        inside = {place for first, last in found for place in range(first, last)}
        assert all(place in inside for place, sign in enumerate(text) if not sign.isspace())


@pytest.mark.parametrize("text", [" " * 10**5, "." * 10**5, ". " * 10**5, "a." * 10**5, "\n " * 10**5])
def test_pieces_of_a_long_text_take_no_longer_than_it(text: str) -> None:
    """A search that went back would take hours."""
    found = {kind: sum(1 for _ in pattern.finditer(text)) for kind, pattern in PIECES.items()}
    assert found["steps"] == int(bool(text.strip()))
    assert found["sentences"] == (10**5 if text[:2] == ". " else int(bool(text.strip())))


def test_names() -> None:
    assert model_name("steps:judge") is None  # a function of a module of that name
    assert model_name("number_match") is None
    assert declared("steps:a/judge") == declared("sentences(0,1,2):a/judge") == {"spans"}
    assert declared("worst_step:a/judge") == declared("model:a/judge") == frozenset()
    for wrong in ("steps(1):a/b", "steps():a/b", "steps(0,x):a/b", "model(0,1):a/b", "steps(0,nan):a/b"):
        with pytest.raises(InputError, match="the worths of two classes or more are wanted"):
            get_reward(wrong)


def test_what_is_refused(models: dict[int, str]) -> None:
    for spec, message in [
        (f"steps:{models[1]}", "scores whole completions, not steps: write model:"),
        (f"steps:{models[3]}", r"has 3 labels .* worths of 2: write steps\(0,1,2\):"),
        (f"model:{models[2]}", "where a reward wants one: steps:"),
        (f"steps:{VECTORS}", r"has no score\.weight"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            get_reward(spec)
        assert "\n" not in str(caught.value)
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "3"}]
    with pytest.raises(InputError, match="prompts that are texts or one message"):
        get_reward(f"steps:{models[2]}").function([talk], ["4"])
